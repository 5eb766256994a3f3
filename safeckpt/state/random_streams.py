"""Random numbers: the process's own streams, and private generators given as components.

NumPy objects cannot be read back under `weights_only=True`, so every state is written as tensors of integers with a few
plain numbers beside them. The tensors are signed, with the bits of the unsigned words: Python's pickle cannot read back
a tensor of torch.uint32 (torch 2.13), and states travel between ranks, and in a loader's `state_dict`, in such pickles.
They are positions in a sequence, not data: they stay on the CPU and no `map_location` applies.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, cast

import numpy as np
import torch

from safeckpt.state.component import Captured, Component, class_name
from safeckpt.state.guard import Guard

# Where a Mersenne Twister stands that was drawn from for more than a port or a name; it begins at 623 or 624, its end.
_DRAWN = range(17, 623)

__all__ = [
    "GeneratorComponent",
    "RngStreams",
    "drawn_streams",
    "packed_numpy",
    "packed_python",
    "unpacked_numpy",
    "unpacked_python",
]


def packed_numpy(value: Any) -> Any:
    """Return a NumPy state with its arrays as tensors of the same bits, and scalars as Python numbers."""
    if isinstance(value, dict):
        return {key: packed_numpy(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _signed(value)
    return value.item() if isinstance(value, np.generic) else value


def unpacked_numpy(value: Any) -> Any:
    """Return what `packed_numpy` was given."""
    if isinstance(value, dict):
        return {key: unpacked_numpy(item) for key, item in value.items()}
    return _unsigned(value) if isinstance(value, torch.Tensor) else value


def _signed(words: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(words.copy().view(f"i{words.itemsize}"))


def _unsigned(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy().view(f"u{tensor.itemsize}")


def packed_python(state: tuple[Any, ...]) -> dict[str, Any]:
    """Return a state of `random.Random` with its words as one tensor: 624 integers are slow to write."""
    version, (*words, position), gauss = state
    return {
        "version": version,
        "state": {"key": _signed(np.array(words, dtype=np.uint32)), "pos": position},
        "gauss": gauss,
    }


def unpacked_python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what `packed_python` was given."""
    return state["version"], (*_unsigned(state["state"]["key"]).tolist(), state["state"]["pos"]), state["gauss"]


class GeneratorComponent(Component):
    """A `torch.Generator`, `numpy.random.Generator`, `RandomState`, bit generator, or `random.Random`."""

    kind = "generator"
    loads_by_own_code = False
    types = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)

    def capture(self) -> Captured:
        """Return the position in its sequence. Draws nothing."""
        record = {"class": class_name(self.obj), "algorithm": self._algorithm()}
        if isinstance(self.obj, torch.Generator):
            return Captured({"state": self.obj.get_state()}, record)
        if isinstance(self.obj, random.Random):
            return Captured({"state": packed_python(self.obj.getstate())}, record)
        if isinstance(self.obj, np.random.RandomState):
            return Captured({"state": packed_numpy(self.obj.get_state(legacy=False))}, record)
        return Captured({"state": packed_numpy(self._bits().state)}, record)

    def _bits(self) -> np.random.BitGenerator:
        return cast("np.random.BitGenerator", getattr(self.obj, "bit_generator", self.obj))

    def _algorithm(self) -> str:
        if isinstance(self.obj, torch.Generator):
            return f"torch {self.obj.device.type}"
        if isinstance(self.obj, random.Random):
            return "Mersenne Twister"
        if isinstance(self.obj, np.random.RandomState):
            return str(self.obj.get_state(legacy=False)["bit_generator"])
        return class_name(self._bits())

    def check(self, captured: Captured) -> list[str]:
        """Compare the class and the algorithm: the state of one means nothing to another."""
        found = super().check(captured)
        saved, live = captured.record.get("algorithm"), self._algorithm()
        if not found and saved != live:
            found.append(f"{self.name}: saved algorithm {saved}, live algorithm {live}")
        return found

    def apply(self, captured: Captured) -> None:
        """Set the position."""
        state = captured.state["state"]
        if isinstance(self.obj, torch.Generator):
            self.obj.set_state(state.cpu())
        elif isinstance(self.obj, random.Random):
            self.obj.setstate(unpacked_python(state))
        elif isinstance(self.obj, np.random.RandomState):
            self.obj.set_state(unpacked_numpy(state))
        else:
            self._bits().state = unpacked_numpy(state)

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing."""
        yield from ()


class RngStreams:
    """The process's own streams: Python, NumPy, torch on the CPU and on every accelerator device."""

    @staticmethod
    def capture() -> dict[str, Any]:
        """Return all states. Draws nothing."""
        return {
            "python": packed_python(random.getstate()),
            "numpy": packed_numpy(np.random.get_state(legacy=False)),  # noqa: NPY002 - the process-wide stream is the point
            "torch": torch.get_rng_state(),
            "devices": _device_states(),
        }

    @classmethod
    @contextmanager
    def untouched(cls) -> Iterator[dict[str, Any]]:
        """Leave every stream as it was, whatever the block draws (a user's `state_dict` may); yield the states."""
        before = cls.capture()
        try:
            yield before
        finally:
            cls.apply(before)

    @staticmethod
    def check(state: dict[str, Any]) -> list[str]:
        """Return what keeps `state` from being set here: other kinds or numbers of devices, another algorithm."""
        found = []
        live = {kind: len(states) for kind, states in _device_states().items()}
        saved = {kind: len(states) for kind, states in state["devices"].items()}
        if live != saved:
            found.append(
                f"rng: saved with devices {saved or 'none'}, this process has {live or 'none'}; leave the streams out "
                "with restore(only=(...,)) if bit-equality may be given up"
            )
        algorithm = np.random.get_state(legacy=False)["bit_generator"]  # noqa: NPY002
        if state["numpy"]["bit_generator"] != algorithm:
            found.append(f"rng: NumPy's stream was {state['numpy']['bit_generator']}, now it is {algorithm}")
        return found

    @staticmethod
    def apply(state: dict[str, Any]) -> None:
        """Set every stream. Comes last in a restore, so that nothing draws afterwards."""
        random.setstate(unpacked_python(state["python"]))
        np.random.set_state(unpacked_numpy(state["numpy"]))  # noqa: NPY002
        torch.set_rng_state(state["torch"].cpu())
        for kind, states in state["devices"].items():
            for index, one in enumerate(states):
                getattr(torch, kind).set_rng_state(one.cpu(), index) if kind != "mps" else torch.mps.set_rng_state(one)


def drawn_streams() -> dict[str, str]:
    """Return from where each stream was drawn, by its name; without those that nobody has drawn from.

    It is the same for the same seed: of torch, which remembers its seed, whatever was drawn; of the two others where
    about as much was drawn, since their words change every 624 draws. A few draws of these, up to 16 words, do not
    count: they cannot be told from a port or a name, which may be another at every start.
    """
    found = {}
    seed = torch.initial_seed()
    if not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state()):
        found["torch"] = str(seed)
    numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    if numpy.get("pos") in _DRAWN and "key" in numpy:
        found["numpy"] = sha256(numpy["key"].tobytes()).hexdigest()[:16]
    _, (*python, at), _ = random.getstate()
    if at in _DRAWN:
        found["python"] = sha256(repr(python).encode()).hexdigest()[:16]
    return found


def _device_states() -> dict[str, list[torch.Tensor]]:
    """Return the state of each device of the accelerator, by its torch module; empty without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {}
    kind = accelerator.type
    if kind == "mps":
        return {kind: [torch.mps.get_rng_state()]}
    count = torch.accelerator.device_count()
    return {kind: [getattr(torch, kind).get_rng_state(index) for index in range(count)]}
