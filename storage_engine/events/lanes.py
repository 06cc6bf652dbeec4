"""Handlers that run beside one another, each in a thread of its own.

With one lane there is no thread: the handler runs where it is started, as most are written for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from storage_engine.events.records import Claim


class Lanes:
    """So many handlers at once. One thread starts them and waits for them."""

    def __init__(self, count: int, run: Callable[[Claim], None]) -> None:
        """`run` handles a claim, and raises nothing where there are threads."""
        self._count = count
        self._run = run
        self._work: SimpleQueue[Claim | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: dict[int, Claim] = {}
        self._mutex = threading.Lock()
        self._wakes: SimpleQueue[None] = SimpleQueue()  # safe in signal handlers, unlike an Event

    @property
    def running(self) -> list[Claim]:
        """Claims whose handlers run in threads."""
        with self._mutex:
            return list(self._running.values())

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def full(self) -> bool:
        return len(self._running) >= self._count

    def start(self, claim: Claim) -> None:
        """Handle a claim, where one is free."""
        if self._count == 1:
            self._run(claim)
            return
        with self._mutex:
            self._running[id(claim)] = claim
        if len(self._threads) < len(self._running):
            number = len(self._threads) + 1
            # A daemon, so that a handler that hangs does not keep the process from ending.
            thread = threading.Thread(target=self._loop, name=f"onto-handler-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._work.put(claim)

    def wake(self) -> None:
        """Let whoever waits look again. Safe in a signal handler."""
        self._wakes.put(None)

    def wait(self, seconds: float) -> None:
        """For a handler to end, for `wake`, or for so long; perhaps not so long."""
        try:
            self._wakes.get(timeout=seconds)
        except Empty:
            return

    def rest(self, seconds: float, awake: Callable[[], bool]) -> None:
        """For so long, unless something happens from now on; not at all if `awake`."""
        try:
            while True:
                self._wakes.get_nowait()
        except Empty:
            pass
        if not awake():
            self.wait(seconds)

    def wait_for_all(self, seconds: float) -> None:
        """For all handlers to end, or for so long."""
        deadline = time.monotonic() + seconds
        while self.busy and (left := deadline - time.monotonic()) > 0:
            self.wait(left)

    def close(self) -> None:
        """No more are started; those that run end when they end."""
        for _ in self._threads:
            self._work.put(None)

    def _loop(self) -> None:
        while (claim := self._work.get()) is not None:
            try:
                self._run(claim)
            finally:
                with self._mutex:
                    del self._running[id(claim)]
                self.wake()
