"""Agreement between the processes of a run: what one of them cannot do, none of them does.

What several processes do together is cut into sections. In a section each rank does its own part and gives an answer;
at its end all of them learn how it went: either every rank goes on, or every rank raises::

    with group.section("counting", decide=sum) as section:
        section.answer = 1  # what this rank has to say; an exception in the body is an answer, too
    assert section.result == group.size  # what was decided from all answers, the same on every rank
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from safeckpt import errors
from safeckpt.errors import GroupDestroyedError, RankFailedError, RankLostError, RanksDisagreeError, SafeckptError

__all__ = ["Group", "RankGroup", "Section", "first_answer", "group_of_this_process", "in_group", "refuse_differences"]

D = TypeVar("D")

# Rank 0 notices a lost rank within the timeout; the others wait this much longer to hear about it.
_NEWS_SECONDS = 5.0
_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_FRONT, _BACK = 7101, 7102  # tags of the messages of the training loop and of the thread that writes


class Section(Generic[D]):
    """One part of something that all ranks do.

    Attributes:
        answer: What this rank has to say; set in the body of the `with` statement.
        result: What was decided from all answers; there after the `with` statement.
        answers: Those of all ranks, in their order; there after the `with` statement, on rank 0 alone.
    """

    result: D
    answers: list[Any]

    def __init__(self) -> None:
        self.answer: Any = None


def first_answer(answers: list[Any]) -> Any:
    """Decide for what rank 0 says."""
    return answers[0]


class Group:
    """One process by itself. Nothing of torch.distributed is touched.

    Attributes:
        rank: Number of this process.
        size: How many there are.
    """

    rank = 0
    size = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that writes what is written once."""
        return self.rank == 0

    @property
    def process_group(self) -> Any:
        """For the collectives of torch: a group for objects in host memory; None when there is one process only."""
        return None

    @contextlib.contextmanager
    def section(self, what: str, decide: Callable[[list[Any]], D] = first_answer) -> Iterator[Section[D]]:
        """Do a part of something on every rank, and agree on the outcome.

        Args:
            what: The part, for the error text, such as "saving step 3"; the same on every rank.
            decide: Makes the result of all answers, in the order of the ranks; called on rank 0.

        Raises:
            BaseException: What the body on this rank raised; or, when that of another rank did, an error of the same
                class that names the rank, if it is one of the library, of the system or of an argument.
            RankFailedError: Another rank failed with something else.
            RanksDisagreeError: Another rank is doing something else.
            RankLostError: A rank is gone or hangs. This group is of no further use.
            GroupDestroyedError: This process has destroyed the process group.
        """
        section: Section[D] = Section()
        yield section
        section.answers = [section.answer]
        section.result = decide(section.answers)

    def for_background(self) -> Group:
        """Return this group for a second thread, whose messages do not mix with those of the first."""
        return self

    @property
    def current(self) -> bool:
        """Whether this is the group that this process belongs to now."""
        return not in_group()

    def close(self) -> None:
        """Give back what the group holds."""


class RankGroup(Group):
    """The processes of the default process group of torch.distributed, over a gloo group of their own.

    All answers go to rank 0 and one reply goes to each: two small messages a rank and part. Only so it is known who
    is missing.

    Args:
        timeout_seconds: How long a rank is waited for.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        self._timeout_seconds = timeout_seconds
        self._tag = _FRONT
        self._number = 0  # of the agreement: both sides count, so that they cannot talk of different ones
        self._broken: str | None = None
        self._world = torch.distributed.group.WORLD
        try:
            self._group = torch.distributed.new_group(
                backend="gloo", timeout=dt.timedelta(seconds=timeout_seconds + 2 * _NEWS_SECONDS)
            )
        except RuntimeError as error:
            why = ""
            if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and _SHARED_STORE not in os.environ:
                why = (
                    "; torchrun restarted this group in the store of the one before, where its addresses still are "
                    f"(pytorch issue 135712): set {_SHARED_STORE}=1 for torchrun"
                )
            raise self._lost("the ranks were meeting for the first time", None, error, why) from error

    @property
    def process_group(self) -> Any:
        """See `Group`."""
        return self._group

    @property
    def current(self) -> bool:
        """See `Group`."""
        return in_group() and self._world is torch.distributed.group.WORLD

    def close(self) -> None:
        """See `Group`: connections, descriptors and threads."""
        if self.current:
            torch.distributed.destroy_process_group(self._group)

    def for_background(self) -> Group:
        """See `Group`."""
        other = object.__new__(RankGroup)
        other.__dict__.update(self.__dict__)
        other._tag, other._number = _BACK, 0
        return other

    @contextlib.contextmanager
    def section(self, what: str, decide: Callable[[list[Any]], D] = first_answer) -> Iterator[Section[D]]:
        """See `Group`."""
        if not self.current:
            raise GroupDestroyedError(what=what)
        if self._broken is not None:
            raise RankLostError(what=what, lost=None, timeout_seconds=self._timeout_seconds, reason=self._broken)
        section: Section[D] = Section()
        raised: BaseException | None = None
        try:
            yield section
        except BaseException as error:  # noqa: BLE001 - raised again below, when every rank knows
            raised = error
        self._number += 1
        try:
            failure = self._exchange(what, section, raised, decide)
        except BaseException as error:
            self._broken = f"an earlier agreement was cut short ({str(error).partition(chr(10))[0]})"
            if raised is not None and type(raised) is not RuntimeError:  # which a collective inside the part ended with
                raise raised from error
            raise error from raised
        if raised is not None:
            if isinstance(raised, SafeckptError) and raised.rank is None:
                raised.rank = self.rank
            raise raised
        if failure is not None:
            raise failure

    def _exchange(
        self, what: str, section: Section[D], raised: BaseException | None, decide: Callable[[list[Any]], D]
    ) -> BaseException | None:
        """Exchange the answers, set the result, and return the failure of another rank."""
        packed = None if raised is None else _packed(raised)
        answer = _Answer(self._number, what, None if raised is not None else section.answer, packed)
        if not self.is_rank_zero:
            self._send(what, 0, answer)
            reply = self._receive(what, 0, self._timeout_seconds + _NEWS_SECONDS)
            section.result = reply.decision
            return None if reply.failure is None else _unpacked(what, reply.rank, reply.failure)
        end = time.monotonic() + self._timeout_seconds
        others = (self._receive(what, rank, max(0.001, end - time.monotonic())) for rank in range(1, self.size))
        answers = [answer, *others]
        reply, failure = _decided(answers, decide)
        section.answers, section.result = [one.value for one in answers], reply.decision
        for rank in range(1, self.size):
            self._send(what, rank, reply)
        return failure

    def _send(self, what: str, rank: int, message: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        size = torch.tensor([data.numel()], device="cpu")  # a default device may be set
        wait = dt.timedelta(seconds=self._timeout_seconds)
        try:
            for tensor in (size, data):
                work = torch.distributed.isend(tensor, rank, group=self._group, tag=self._tag)
                _wait(work, wait)
        except (RuntimeError, ValueError) as error:  # the latter of a group that is no longer there
            raise self._lost(what, rank, error) from error

    def _receive(self, what: str, rank: int, seconds: float) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        wait = dt.timedelta(seconds=seconds)
        try:
            _wait(torch.distributed.irecv(size, rank, group=self._group, tag=self._tag), wait)
            data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
            _wait(torch.distributed.irecv(data, rank, group=self._group, tag=self._tag), wait)
        except (RuntimeError, ValueError) as error:  # the latter of a group that is no longer there
            raise self._lost(what, rank, error) from error
        return pickle.loads(data.numpy().tobytes())  # from a process of this very job

    def _lost(self, what: str, rank: int | None, error: Exception, why: str = "") -> RankLostError:
        """Return the error for a connection that failed, and let the others know who was on its other end.

        gloo closes all connections when one times out, so that the news cannot go the same way.
        """
        if not self.current:
            raise GroupDestroyedError(what=what) from error
        reason = str(error).partition("\n")[0].partition(". This is typically")[0]  # gloo's guesses
        reason = reason[reason.find("] ") + 1 :].strip().rstrip(".") + why
        key = f"safeckpt/lost/{self._tag}/{self._number}"
        with contextlib.suppress(RuntimeError):
            store = torch.distributed.distributed_c10d._get_default_store()  # has no public name
            key = f"{getattr(getattr(self, '_group', None), 'group_name', '')}/{key}"
            if self.is_rank_zero:
                store.set(key, json.dumps([rank, reason]))
            elif rank is not None:
                store.wait([key], dt.timedelta(seconds=_NEWS_SECONDS))
                rank, reason = json.loads(store.get(key))
        late = "imed out waiting" in reason or "ait timeout" in reason  # of gloo, which has no class for it
        return RankLostError(what=what, lost=rank, timeout_seconds=self._timeout_seconds, reason=reason, late=late)


def _wait(work: Any, timeout: dt.timedelta) -> None:
    work.wait(timeout)


class _Answer(NamedTuple):
    """What one rank says at the end of a section.

    Attributes:
        number: Of the section, counted on every rank.
        what: Its name.
        value: What it has to say.
        failure: What was raised in its body.
    """

    number: int
    what: str
    value: Any
    failure: _Packed | None


class _Reply(NamedTuple):
    """What rank 0 says to the others.

    Attributes:
        rank: The rank that failed; None when the decision itself did.
        failure: What was raised there.
        decision: What was decided.
    """

    rank: int | None
    failure: _Packed | None
    decision: Any


def _decided(answers: list[_Answer], decide: Callable[[list[Any]], Any]) -> tuple[_Reply, BaseException | None]:
    """Return the reply to the other ranks, and the error to raise on rank 0 unless its own body raised one."""
    first = answers[0]
    for rank, answer in enumerate(answers):
        if (answer.number, answer.what) != (first.number, first.what):
            error: BaseException = RanksDisagreeError(rank=rank, first=first.what, other=answer.what)
            return _Reply(None, _packed(error), None), error
    for rank, answer in enumerate(answers):
        if answer.failure is not None:
            reply = _Reply(rank, answer.failure, None)
            return reply, None if rank == 0 else _unpacked(first.what, rank, answer.failure)
    try:
        return _Reply(None, None, decide([answer.value for answer in answers])), None
    except BaseException as raised:  # noqa: BLE001 - raised again when every rank knows
        return _Reply(None, _packed(raised), None), raised


def refuse_differences(answers: list[Mapping[str, Any]]) -> None:
    """Refuse what ranks were asked for when it differs.

    Raises:
        RanksDisagreeError: Naming the first difference.
    """
    for rank, answer in enumerate(answers):
        for name, value in answers[0].items():
            if answer[name] != value:
                raise RanksDisagreeError(rank=rank, first=f"{name}={value!r}", other=f"{name}={answer[name]!r}")


def group_of_this_process(timeout_seconds: float) -> Group:
    """Return the processes that this one belongs to: all those of the default process group, or only itself."""
    return RankGroup(timeout_seconds) if in_group() else Group()


def in_group() -> bool:
    """Return whether there is a default process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_Packed = tuple[str, str, bytes | None]


def _packed(error: BaseException) -> _Packed:
    """Return an error as (class, text, pickle); the last only when the class is known wherever safeckpt is."""
    data = None
    kind = type(error)
    if getattr(errors, kind.__name__, None) is kind or kind.__module__ == "builtins":
        with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
            data = pickle.dumps(error)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."), str(error), data


def _unpacked(what: str, rank: int | None, packed: _Packed) -> BaseException:
    """Return an error of another rank as one of this rank, which names the other in its text."""
    type_name, text, data = packed
    other = RankFailedError(what=what, rank=0 if rank is None else rank, type_name=type_name, reason=text or "no text")
    if data is not None:
        try:
            error: BaseException = pickle.loads(data)  # from a process of this very job
        except (TypeError, AttributeError, ValueError, LookupError, pickle.UnpicklingError):
            return other  # made from other arguments than it keeps
        if rank is None:
            return error
        prefix = f"On rank {rank}: "
        if isinstance(error, SafeckptError):
            error.args = (prefix + text,)
            error.rank = rank
            return error
        if isinstance(error, OSError) and error.errno is not None:
            error.strerror = prefix + str(error.strerror)
            error.args = (error.errno, error.strerror)
            return error
        if type(error) in (ValueError, TypeError) or isinstance(error, errors.SafeckptWarning):
            return type(error)(prefix + text)
    return other
