"""Copies in threads give the values that a plain copy gives, whatever the tensors are like."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from safeckpt.state import transfer
from safeckpt.state.transfer import Transfer, fresh
from safeckpt.state.tree import copy_tree
from safeckpt.system import threads
from tests.comparing import bits

LARGE = (1 << 20) + 3  # elements: several pieces and a rest, more than one of them for every dtype
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have helpers on a machine with one core as well."""
    monkeypatch.setattr(threads, "worker_count", lambda: 3)


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 255, (numel * dtype.itemsize,), dtype=torch.uint8).clamp(0, 1).view(dtype) if (
        dtype is torch.bool
    ) else torch.arange(numel).remainder(251).to(dtype)  # fmt: skip


def layouts(values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same values seen in different ways."""
    even = values[: len(values) // 4 * 4]
    yield "flat", values
    yield "a scalar", values[0]
    yield "small", values[:7]
    yield "nothing", values[:0]
    yield "with an offset", values[5:]
    yield "two dimensions", even.view(4, -1)
    yield "transposed", even.view(4, -1).t()
    yield "with gaps", values[::2]
    yield "one of two columns", even.view(-1, 2)[:, 0]
    yield "broadcast", values[:1].expand(1000)
    if values.is_complex():
        yield "conjugated", values.conj()
        yield "negated", values.conj().imag


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_has_the_values_whatever_the_layout(dtype: torch.dtype) -> None:
    """A contiguous target gets the values of any source, and one of the source's own strides as well."""
    for name, source in layouts(numbers(LARGE, dtype)):
        targets = [torch.zeros(source.size(), dtype=source.dtype)]
        if 0 not in source.stride():
            targets.append(torch.empty_strided(source.size(), source.stride(), dtype=source.dtype).zero_())
        for target in targets:
            Transfer().copy([(target, source)])
            assert torch.equal(target, source), name


def test_copy_leaves_what_is_between_the_elements_alone() -> None:
    """A target with gaps is written element by element: its neighbours keep their values."""
    memory = torch.full((2 * LARGE,), -1.0)
    source = torch.arange(float(LARGE)).repeat_interleave(2)[::2]
    Transfer().copy([(memory[::2], source)])
    assert torch.equal(memory[::2], source)
    assert bool((memory[1::2] == -1).all())


def test_copy_into_a_parameter_that_requires_grad_needs_no_mode() -> None:
    """Leaf tensors are filled without a history, large and small ones."""
    model = torch.nn.Linear(1024, 1024)
    Transfer().copy([(parameter.detach(), torch.ones_like(parameter)) for parameter in model.parameters()])
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    assert all(parameter.requires_grad and parameter.grad_fn is None for parameter in model.parameters())


def test_many_tensors_of_all_sizes_are_copied_each_to_its_own() -> None:
    """Among hundreds of pairs none is left out and none goes to another."""
    sources = [torch.full((size,), float(size)) for size in (1, 100, 65_536, 70_000, 2_000_000) for _ in range(20)]
    targets = [torch.zeros_like(source) for source in sources]
    Transfer().copy(zip(targets, sources, strict=True))
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_reader_fills_what_it_knows_and_memory_the_rest() -> None:
    """The reader is asked for the address of every piece; where it declines, the values come from memory."""
    source = torch.arange(float(LARGE))
    start = source.data_ptr()
    asked = []

    def read(address: int, into: memoryview) -> bool:
        asked.append((address - start, len(into)))
        if address != start:
            return False
        into[:] = b"\1" * len(into)
        return True

    target = torch.zeros_like(source)
    Transfer(read).copy([(target, source)])
    asked.sort()
    ends = [low + length for low, length in asked]
    assert [low for low, _ in asked] == [0, *ends[:-1]]
    assert ends[-1] == source.nbytes
    piece = asked[0][1] // 4
    assert bool((target[:piece].view(torch.uint8) == 1).all())
    assert torch.equal(target[piece:], source[piece:])


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_error_in_any_thread_is_raised_when_all_have_stopped(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """What a reader raises comes out of the copy, and no thread writes into the target afterwards."""
    caller = threading.current_thread()
    raised = threading.Event()

    def read(address: int, into: memoryview) -> bool:
        if (threading.current_thread() is caller) == (where == "caller"):
            raised.set()
            raise OSError(5, "Input/output error")
        assert raised.wait(60)
        return False

    source = torch.arange(float(20 * LARGE))
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="Input/output"):
        Transfer(read).copy([(torch.zeros_like(source), source)])
    assert not set(threading.enumerate()) - before


def test_no_thread_to_be_had_copies_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the exit of the interpreter, or at the limit of threads, the caller does it all."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    source = torch.arange(float(LARGE))
    target = torch.zeros_like(source)
    Transfer().copy([(target, source)])
    assert torch.equal(target, source)


@pytest.mark.parametrize("numel", [0, 1, 1000, LARGE, 4 << 20])
def test_fresh_memory_is_an_ordinary_tensor(numel: int) -> None:
    """It can be filled, resized, shared and saved like any other."""
    tensor = fresh((numel,), (1,), torch.float32)
    tensor.fill_(2)
    assert bool((tensor == 2).all())
    tensor.resize_(numel + 1).share_memory_()
    assert tensor.is_shared()


def test_fresh_memory_needs_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without them, or one that refuses, gives the same memory."""
    for system in (None, lambda *_: -1):
        monkeypatch.setattr(transfer, "_madvise", system)
        assert bool((fresh((LARGE,), (1,), torch.float32).fill_(1) == 1).all())


def test_copy_of_a_tree_uses_the_targets_that_it_is_given() -> None:
    """A tensor with a target becomes it; one that overlaps another does not, since its neighbour must follow it."""
    alone, memory = torch.arange(4.0), torch.arange(8.0)
    tree = {"alone": alone, "low": memory[:6], "high": memory[2:]}
    targets = {id(tree[name]): torch.zeros_like(tree[name]) for name in tree}
    made = copy_tree(tree, targets=targets)
    assert made["alone"] is targets[id(alone)]
    assert bits(made) == bits(tree)
    assert made["low"] is not targets[id(tree["low"])]
    made["low"][2] = 50
    assert made["high"][0] == 50


def test_copy_of_a_tree_reads_through_its_transfer() -> None:
    """Large values of a tree come from the reader that the transfer has."""
    read: Callable[[int, memoryview], bool] = lambda _, into: bool(np.frombuffer(into, np.uint8).fill(0) or True)  # noqa: E731
    tree: dict[str, Any] = {"large": torch.ones(LARGE), "small": torch.ones(3)}
    made = copy_tree(tree, Transfer(read))
    assert bool((made["large"] == 0).all())
    assert bool((made["small"] == 1).all())
