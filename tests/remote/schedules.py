"""Runs a few actors in every possible order of their requests: each is a thread that moves when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

_YIELDS = ("listing", "top", "create", "put", "delete")  # what is read by key was written once and never changes


class Actor:
    """One writer, that stops before each of its requests.

    Attributes:
        error: What it ended with; None when it came to its end.
    """

    def __init__(self, name: str, work: Callable[[Actor], None]) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.is_over = False
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._is_free = False
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    def hook(self, kind: str, key: str) -> None:
        """Stop before a request that may meet another actor's."""
        if kind in _YIELDS and key != "probe.json" and not self._is_free:
            self._stopped.release()
            self._go.acquire()

    def begin(self) -> None:
        self._thread.start()
        self._stopped.acquire()

    def step(self) -> None:
        """Do one request and what follows it."""
        self._go.release()
        self._stopped.acquire()

    def finish(self) -> None:
        """Run to the end, whatever it does: so that no thread is left."""
        self._is_free = True
        if not self.is_over:
            self._go.release()
        self._thread.join()

    def _run(self, work: Callable[[Actor], None]) -> None:
        try:
            work(self)
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._stopped.release()


def every_order(begin: Callable[[], tuple[list[Actor], Callable[[], None]]]) -> Iterator[list[str]]:
    """Yield every order in which the requests of some actors can follow each other, after it was carried out.

    Args:
        begin: Returns new actors and a check, which is called after each request.
    """
    choices: list[int] = []
    while True:
        actors, check = begin()
        for actor in actors:
            actor.begin()
        order: list[str] = []
        widths: list[int] = []
        try:
            while movable := [actor for actor in actors if not actor.is_over]:
                place = len(order)
                choice = choices[place] if place < len(choices) else 0
                widths.append(len(movable))
                movable[choice].step()
                order.append(movable[choice].name)
                choices = [*choices[:place], choice, *choices[place + 1 :]]
                check()
        finally:
            for actor in actors:
                actor.finish()
        yield order
        while choices and choices[-1] + 1 >= widths[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1


Anything = Any
