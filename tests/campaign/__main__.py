"""`python -m tests.campaign [class ...]`: run the classes of faults, print the table, write the report."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from tests.campaign.outcome import CLASSES, Outcome, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("classes", nargs="*", metavar="class", help=f"which ones; all when none is named: {CLASSES}")
    parser.add_argument("--fast", action="store_true", help="as few as the test run tries")
    parser.add_argument("--seed", type=int, help="repeats a campaign; chosen and printed when not given")
    parser.add_argument("--report", type=Path, help="also write the outcomes here, as JSON")
    asked = parser.parse_args()
    unknown = sorted(set(asked.classes) - set(CLASSES))
    if unknown:
        parser.error(f"no class {', '.join(unknown)}; there are {', '.join(CLASSES)}")
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    print(f"seed {seed}")
    outcomes: dict[str, Outcome] = {}
    for name in asked.classes or CLASSES:
        began = time.monotonic()
        outcome = outcomes[name] = run(name, "fast" if asked.fast else "full", seed)
        outcome.figures["seconds"] = round(time.monotonic() - began, 1)
        print(
            f"{name:14} tried {outcome.tried:8,}   lost {len(outcome.lost):3}   undetected {len(outcome.undetected):3}"
            f"   {outcome.skipped or outcome.figures}",
            flush=True,
        )
        for line in (*outcome.lost[:20], *outcome.undetected[:20]):
            print(f"    {line}")
    if asked.report:
        report = {"seed": seed, "outcomes": {name: outcome.as_json() for name, outcome in outcomes.items()}}
        asked.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(outcome.clean for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
