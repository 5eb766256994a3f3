"""Small records are copied without a turn for other threads: each could be a wait for a trainer busy in Python."""

import sys
import threading

import numpy as np
import pytest
import torch

from safeckpt.file import encode, prepare
from safeckpt.run.writing_process import _SharedBytes
from safeckpt.system.host_memory import copy_small


def _numbers(nbytes):
    return torch.arange(nbytes).to(torch.uint8)


def _of_a_tensor(nbytes):
    contents = prepare(encode({"x": _numbers(nbytes)})).contents
    return next(one for one in contents if not isinstance(one, bytes))


def _of_shared_memory(nbytes):
    return _SharedBytes(bytes(_numbers(nbytes).numpy()), 0, nbytes, None, None)


@pytest.mark.parametrize("make", [_of_a_tensor, _of_shared_memory])
@pytest.mark.parametrize("nbytes", [1, 40_000, 262_143])
def test_copy_gives_no_other_thread_a_turn(make, nbytes):
    """A thread that wants to run gets to it only after all copies, where nothing takes the lock from who has it."""
    content, target = make(nbytes), np.zeros(nbytes, np.uint8)
    address, may_run, has_run = target.ctypes.data, threading.Lock(), []
    may_run.acquire()

    def wait_and_run():
        with may_run:
            has_run.append(True)

    other = threading.Thread(target=wait_and_run)
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # seconds
    try:
        may_run.release()
        for _ in range(2000):
            content.copy_to(address)
        ran = list(has_run)
    finally:
        sys.setswitchinterval(interval)
    other.join()
    assert not ran
    assert has_run
    assert np.array_equal(target, _numbers(nbytes).numpy())


def test_only_the_bytes_asked_for_are_copied():
    """What stands before and behind them stays."""
    origin, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    copy_small(target.ctypes.data + 2, origin.ctypes.data + 1, 3)
    copy_small(target.ctypes.data, origin.ctypes.data, 0)
    assert target.tolist() == [0, 0, 1, 2, 3, 0, 0, 0]
