"""What of a captured state has to be finite, and which infinities were there from the start."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from safeckpt.errors import NonFiniteTensor
from safeckpt.state.component import Captured, Component
from safeckpt.state.guard import Guard, matcher
from safeckpt.state.module import ModuleComponent
from safeckpt.state.nonfinite import masks, nonfinite
from safeckpt.state.random_streams import RngStreams
from safeckpt.state.run_state import RESERVED_KEY

__all__ = ["Baseline", "GuardResult", "guard_from_record", "guarded_in", "is_mask"]

_EXCUSED_KINDS = frozenset({"module", "counters", "stateful"})
# That a layer computes: an infinite one was ruined before, and every output is with it.
_STATISTICS = frozenset({"running_mean", "running_var"})


class GuardResult(NamedTuple):
    """Result of the guard over a captured state.

    Attributes:
        bad: Tensors that are refused.
        excused: Names of tensors that hold only the infinities they always held, and of masks.
    """

    bad: list[NonFiniteTensor]
    excused: list[str]

    def record(self, guard: Guard) -> dict[str, Any]:
        """Return what the guard let pass on purpose: with it the file can be judged alike later."""
        return {
            "optimizer": guard.optimizer,
            "buffers": guard.buffers,
            "allow_nonfinite": list(guard.allow_nonfinite),
            "infinite": self.excused,
        }


def guard_from_record(record: Mapping[str, Any]) -> Guard:
    """Return the guard that a file passed when it was saved."""
    return Guard(
        optimizer=bool(record["optimizer"]),
        buffers=bool(record["buffers"]),
        allow_nonfinite=[*record["allow_nonfinite"], *map(glob.escape, record["infinite"])],
    )


def _guarded(pairs: Iterable[tuple[Component, Captured]], guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
    allowed = matcher(tuple(guard.allow_nonfinite))
    for component, captured in pairs:
        for name, tensor in component.guarded(captured, guard):
            if allowed is None or not allowed(name):
                yield name, tensor


def guarded_in(
    payload: Mapping[str, Any], components: Mapping[str, Component], record: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of what has to be finite in a payload, as it is about to be written.

    Args:
        payload: The state of each component, by name, with the library's own.
        components: The live objects.
        record: The guard that it has passed, see `GuardResult.record`.
    """
    own, guard = payload[RESERVED_KEY], guard_from_record(record)
    pairs = [(components[name], Captured(payload[name], dict(record))) for name, record in own["components"].items()]
    found = list(_guarded(pairs, guard))
    # Under a gradient scaler gradients may overflow, see `Gradients.check`.
    if not any(component.kind == "scaler" and component.obj.is_enabled() for component in components.values()):
        allowed = matcher(tuple(guard.allow_nonfinite))
        held = own["gradients"].items()
        gradients = ((f"{name}.grad", one) for name, one in held if isinstance(one, torch.Tensor))  # no placeholder
        found += [entry for entry in gradients if allowed is None or not allowed(entry[0])]
    return found


class Baseline:
    """Where tensors held Inf when training began, as attention masks, observers and forbidden transitions do.

    Args:
        components: The components as they are now; none when nothing is to be excused.
    """

    def __init__(self, components: Mapping[str, Component]) -> None:
        self._infinite: dict[str, torch.Tensor] = {}
        with RngStreams.untouched():  # a user's state_dict may draw
            for component in components.values():
                if component.kind in _EXCUSED_KINDS:
                    self._note(component)

    def _note(self, component: Component) -> None:
        for report, tensor in nonfinite(component.guarded(Captured(component.state()), Guard())):
            if tensor.layout is torch.strided and report.name.rpartition(".")[2] not in _STATISTICS:
                self._infinite[report.name] = masks(tensor)[1].cpu()

    def check(
        self,
        pairs: Iterable[tuple[Component, Captured]],
        guard: Guard,
        release: Callable[[torch.Tensor], None] | None = None,
    ) -> GuardResult:
        """Return what is not finite: one pass over everything guarded, one synchronisation per device and dtype.

        Args:
            pairs: The captured state.
            guard: What has to be finite.
            release: See `nonfinite`.
        """
        pairs = list(pairs)
        result = GuardResult([], [])
        for report, tensor in nonfinite(_guarded(pairs, guard), release):
            if self._is_old(report, tensor) or (
                not report.nan_count and _is_buffer(report.name, pairs) and is_mask(tensor)
            ):
                result.excused.append(report.name)
            else:
                result.bad.append(report)
        return result

    def _is_old(self, report: NonFiniteTensor, tensor: torch.Tensor) -> bool:
        before = self._infinite.get(report.name)
        if before is None or report.nan_count or tensor.size() != before.size():
            return False
        return not bool((masks(tensor)[1].cpu() & ~before).any())


def _is_buffer(name: str, pairs: Iterable[tuple[Component, Captured]]) -> bool:
    owner, _, key = name.partition(".")
    for component, captured in pairs:
        if component.name == owner and component.kind == ModuleComponent.kind:
            return key in captured.state and key not in captured.record["requires_grad"]
    return False


def is_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a mask to be added: nothing but zeros and minus infinity, and some of both."""
    if tensor.layout is not torch.strided or not tensor.is_floating_point():
        return False
    zeros, infinities = int((tensor == 0).sum()), int((tensor == -torch.inf).sum())
    return bool(zeros and infinities and zeros + infinities == tensor.numel())
