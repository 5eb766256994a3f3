"""Random numbers that a script draws before its manager is built: a split, a permutation, data that are made up.

What was made of them is in no checkpoint. A script that is seeded makes the same at every start; one that is not goes
on with other data, and no loss shows it where the kill fell on a save. So the first start of a run notes from where
its streams were drawn, and every later start is compared with it. A few numbers of Python or NumPy are not compared:
they may be a port or a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safeckpt.errors import UncapturedStateWarning
from safeckpt.state.random_streams import drawn_streams
from safeckpt.system.warn import warn_caller

__all__ = ["FirstDraws"]

_KEY = "drawn_streams"  # of a header
_known: list[dict[str, str]] = []  # where managers of this process have begun: what they drew is still there


class FirstDraws:
    """The streams that were drawn from when a manager was built, and at the first start of its run."""

    def __init__(self) -> None:
        self._own = self._first = drawn_streams()
        _known.append(self._own)

    @property
    def noted(self) -> dict[str, Any]:
        """What the header of a checkpoint says of the first start."""
        return {_KEY: self._first}

    def adopt(self, header: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Args:
            header: Of that checkpoint; an older one says nothing of the first start.

        Warns:
            UncapturedStateWarning: Streams that were drawn from at both starts were seeded differently, or another
                number of times.
        """
        first = header.get(_KEY)
        if not isinstance(first, dict):
            return
        self._first = first
        differing = [name for name, stream in self._own.items() if first.get(name, stream) != stream]
        if not differing or first in _known:
            return
        _known.append(first)
        warn_caller(
            f"Drawn before the manager was built: random numbers of {' and '.join(differing)}, from another seed, or "
            "another number of them, than at the first start of this run. What components were made of them is "
            "restored. Anything else (a split, a permutation, data) may be another one than in the run that saved, and "
            "nothing more would tell.\n"
            "Next: in a script without a seed call torch.manual_seed(...), and that of each stream that is named, at "
            "its head; or give what was drawn as a component, {'data': {'indices': indices}}, and begin the run anew. "
            "Where only components are made of them, or later starts read from a file what the first has drawn, "
            "warnings.filterwarnings('ignore', 'Drawn before the manager') says so.",
            UncapturedStateWarning,
        )
