"""The command line. `safeckpt demo` needs the core packages only; every other command the extra `cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_MISSING = """\
safeckpt {command} needs the packages click and rich.
Next: pip install "safeckpt[cli]"
      `safeckpt demo` works without them.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: The arguments, without the program's name; None for those of this process.

    Returns:
        0: done, and where something is asked the answer is yes. 1: the answer is no: no good checkpoint, not all of
        them good, different, not exact, not safe. 2: there is no answer: wrong usage, no such file, a damaged file that
        had to be read, a directory that another process holds, a missing package.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from safeckpt.demo import main as demo  # noqa: PLC0415 - must not need the packages below

        return demo(arguments[1:])
    try:
        from safeckpt.cli.commands import run  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"click", "rich"}:
            raise
        sys.stderr.write(_MISSING.format(command=" ".join(arguments[:1]) or "--help"))
        return 2
    return run(arguments)
