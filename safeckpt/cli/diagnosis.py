"""`doctor`: what holds in a directory, or in a store, of what checkpoints rest on."""

from __future__ import annotations

import secrets
from pathlib import Path

from safeckpt.cli.screen import BAD, GOOD, Screen
from safeckpt.remote import Mirror, is_url
from safeckpt.remote.client import open_client
from safeckpt.store.trials import FAILS, HOLDS, WEAKER, Trial, try_directory

__all__ = ["diagnose"]

_COLOURS = {HOLDS: GOOD, WEAKER: "yellow", FAILS: BAD}


def diagnose(screen: Screen, place: str) -> int:
    """Print what holds in a place and what not; return 1 when something fails."""
    with screen.status(f"trying {place}"):
        found = _try_store(place) if is_url(place) else try_directory(Path(place))
    failed, weaker = ([one.name for one in found if one.verdict == verdict] for verdict in (FAILS, WEAKER))
    if screen.as_json:
        trials = [{"name": one.name, "verdict": one.verdict, "text": one.text} for one in found]
        screen.json({"place": place, "good": not failed, "trials": trials})
    else:
        screen.table(
            ("tried", "", "found"), [(one.name, (one.verdict, _COLOURS[one.verdict]), one.text) for one in found]
        )
        known = f"; good to know: {', '.join(weaker)}" if weaker else ""
        verdict = f"not safe ({', '.join(failed)})" if failed else f"checkpoints are safe here{known}"
        screen.line(f"{place}: {verdict}", BAD if failed else GOOD)
    return 1 if failed else 0


def _try_store(url: str) -> list[Trial]:
    """Try what a mirror needs of a store, with one small object that is deleted again.

    Raises:
        MirrorError: The store does not answer.
    """
    client = open_client(Mirror(url, lock=False))  # whether there can be one is tried here
    key, data = f"safeckpt-doctor-{secrets.token_hex(4)}", secrets.token_bytes(1000)
    try:
        client.put(key, data)
        back = bytes(client.read(key)) == data
        seen = any(one.key == key for one in client.listing())
        refused = client.is_conditional and not client.create(key, b"another")
        kept = bytes(client.read(key)) == data
    finally:
        client.delete([key])
    return [
        Trial("writing, reading back", *((HOLDS, "the same bytes came back") if back else (FAILS, "others came back"))),
        Trial("listing", *((HOLDS, "a new object is listed") if seen else (FAILS, "a new object is not listed"))),
        Trial("conditional writes", *((HOLDS, "an object that is there is not overwritten") if refused and kept
              else (FAILS, "two writers cannot be kept apart: Mirror(lock=False) says that there is only one"))),
    ]  # fmt: skip
