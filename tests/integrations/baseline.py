"""The matrix on the checkpoints of the trainers themselves: `python -m tests.integrations.baseline [TRAINER...]`.

The small run of each trainer's matrix is killed with SIGKILL and resumed with what the trainer offers, as its
documentation says. Printed is how many losses behind the resume differ from those of the run that nothing stopped, of
how many, and how many steps were trained by neither. With safeckpt the matrix asserts that none does. A kill during a
save is left out: it is counted in safeckpt's writes.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.integrations import harness


class Case(NamedTuple):
    """A trainer with its own checkpoints.

    Attributes:
        module: Where the function is that trains.
        function: Its name.
        options: Its options.
        places: Where it is killed.
    """

    module: str
    function: str
    options: dict[str, Any]
    places: dict[str, harness.Place]


SHORT = harness.PLACES_OF_SHORT_VALIDATIONS
CASES = {
    "Lightning": Case("lightning_runs", "train_stock", {}, harness.PLACES),
    "Hugging Face": Case("transformers_runs", "train", {"stock": True, "arguments": {"save_strategy": "steps"}}, SHORT),
    "Accelerate": Case("test_accelerate_matrix", "train_without", {}, SHORT),
    "Ignite": Case("test_ignite_matrix", "train", {"stock": "engine"}, harness.PLACES),
}


def compare(case: Case, place: harness.Place, path: Path) -> harness.Comparison:
    """Return a run, the same one killed at a place, and its rest."""
    train = getattr(importlib.import_module(f"tests.integrations.{case.module}"), case.function)
    (comparison,) = harness.compare(train, path, place, straight=path.parent / "straight", **case.options)
    return comparison


def main(names: list[str]) -> None:
    """Print the table."""
    print("| trainer | killed | losses wrong | steps never trained |\n|---|---|---|---|")
    for trainer in names or CASES:
        case = CASES[trainer]
        with tempfile.TemporaryDirectory() as folder:
            for name, place in case.places.items():
                if place.event != "write":
                    found = compare(case, place, Path(folder, name))
                    wrong = f"{found.wrong} of {found.compared}"
                    print(f"| {trainer} | {name} | {wrong} | {found.never_trained} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
