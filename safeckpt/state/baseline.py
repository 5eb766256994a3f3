"""What of a captured state has to be finite, and which infinities were there from the start."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from safeckpt.errors import NonFiniteTensor
from safeckpt.state.component import Captured, Component
from safeckpt.state.guard import Guard, matcher
from safeckpt.state.module import ModuleComponent
from safeckpt.state.nonfinite import masks, nonfinite
from safeckpt.state.random_streams import RngStreams
from safeckpt.state.tree import join

__all__ = ["Baseline", "GuardResult", "guard_from_record"]


@dataclass(frozen=True)
class GuardResult:
    """Result of the guard over a captured state.

    Attributes:
        bad: Tensors that are refused.
        excused: Names of buffers that hold only the infinities they always held.
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


def _guarded(parts: Iterable[tuple[Component, Captured]], guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
    allowed = matcher(tuple(guard.allow_nonfinite))
    for component, captured in parts:
        for name, tensor in component.guarded(captured, guard):
            if allowed is None or not allowed(name):
                yield name, tensor


class Baseline:
    """Where buffers held Inf when training began: attention masks and observers are made that way.

    Args:
        components: The components as they are now; none when nothing is to be excused.
    """

    def __init__(self, components: Mapping[str, Component]) -> None:
        self._infinite: dict[str, torch.Tensor] = {}
        with RngStreams.untouched():  # a user's state_dict may draw
            for component in components.values():
                if isinstance(component, ModuleComponent):
                    self._note(component)

    def _note(self, module: ModuleComponent) -> None:
        captured = module.capture()
        parameters = {join(module.name, key) for key in captured.record["requires_grad"]}
        buffers = (entry for entry in module.guarded(captured, Guard()) if entry[0] not in parameters)
        for report, tensor in nonfinite(buffers):
            if tensor.layout is torch.strided:
                self._infinite[report.name] = masks(tensor)[1].cpu()

    def check(
        self,
        parts: Iterable[tuple[Component, Captured]],
        guard: Guard,
        release: Callable[[torch.Tensor], None] | None = None,
    ) -> GuardResult:
        """Return what is not finite: one pass over everything guarded, one synchronisation per device and dtype.

        Args:
            parts: The captured state.
            guard: What has to be finite.
            release: See `nonfinite`.
        """
        result = GuardResult([], [])
        for report, tensor in nonfinite(_guarded(parts, guard), release):
            if self._is_old(report, tensor):
                result.excused.append(report.name)
            else:
                result.bad.append(report)
        return result

    def _is_old(self, report: NonFiniteTensor, tensor: torch.Tensor) -> bool:
        before = self._infinite.get(report.name)
        if before is None or report.nan_count or tensor.size() != before.size():
            return False
        return not bool((masks(tensor)[1].cpu() & ~before).any())
