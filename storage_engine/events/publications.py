"""Commits of handlers that have ended, on their way while the next handlers run.

They are settled in the order in which the handlers ended, by a thread; where time does not pass by
itself, by who waits for them. Whoever wants to see what they write waits for them first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from storage_engine.events.outcomes import HandlerOutcome, Publishing
from storage_engine.events.records import Claim

MOST = 256  # commits on their way; then handlers wait
MOST_BYTES = 64 * 1024 * 1024  # of their rows

Settle = Callable[[Claim, HandlerOutcome], None]


class _Publication:
    """One of them. Whoever asks first waits for its end, the others for who asked."""

    def __init__(self, claim: Claim, publishing: Publishing) -> None:
        self.claim = claim
        self.size = publishing.size
        self.withdraw = publishing.withdraw
        self._publishing = publishing
        self._outcome: HandlerOutcome | None = None
        self._mutex = threading.Lock()

    def outcome(self) -> HandlerOutcome:
        with self._mutex:
            if self._outcome is None:
                self._outcome = self._publishing.wait()
            return self._outcome


class Publications:
    """Of one worker. Safe for use from several threads."""

    def __init__(
        self,
        settle: Settle,
        *,
        threaded: bool,
        settled: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`settle` is told how each ended, one at a time. In the thread, `settled` is called when
        there is none left, and `failed` with what one of the two raises."""
        self._settle = settle
        self._settled = settled
        self._failed = failed
        self._threaded = threaded
        self._thread: threading.Thread | None = None
        self._added: SimpleQueue[bool] = SimpleQueue()  # False: it ends
        self._publications: deque[_Publication] = deque()
        self._bytes = 0
        self._mutex = threading.Lock()  # of the two above
        self._turn = threading.RLock()  # of who settles

    def __len__(self) -> int:
        return len(self._publications)

    @property
    def claims(self) -> list[Claim]:
        """Of those whose end is not settled."""
        return [publication.claim for publication in self._copied()]

    def add(self, claim: Claim, publishing: Publishing) -> None:
        publication = _Publication(claim, publishing)
        with self._mutex:
            self._publications.append(publication)
            self._bytes += publication.size
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="onto-publications", daemon=True
                )
                self._thread.start()
        self._added.put(True)

    def catch_up(self) -> None:
        """Wait until all that were added so far have ended, so that a read sees them."""
        for publication in self._copied():
            publication.outcome()

    def make_room(self) -> None:
        """Wait until another one may be added."""
        self._settle_while(lambda: len(self) >= MOST or self._bytes >= MOST_BYTES)

    def flush(self) -> None:
        """Settle all of them."""
        self._settle_while(lambda: len(self) > 0)
        with self._turn:
            pass  # the last one may be with another thread

    def stop(self) -> None:
        """End the thread. What is not settled stays so, and is not begun with any more."""
        self._threaded = False
        self._added.put(False)
        for publication in self._copied():
            publication.withdraw()
        if self._thread is not None and not self._publications:
            self._thread.join()  # else it ends with the commit that it waits for

    def _copied(self) -> list[_Publication]:
        with self._mutex:
            return list(self._publications)

    def _settle_while(self, needed: Callable[[], bool]) -> None:
        """Settle the oldest ones; who waits for the end of one keeps nobody from settling."""
        while needed() and (first := next(iter(self._copied()), None)) is not None:
            outcome = first.outcome()
            with self._turn:
                if self._took(first):
                    self._settle(first.claim, outcome)

    def _took(self, publication: _Publication) -> bool:
        """If so, it is no longer among them: it is settled once."""
        with self._mutex:
            if not self._publications or self._publications[0] is not publication:
                return False
            self._publications.popleft()
            self._bytes -= publication.size
            return True

    def _loop(self) -> None:
        try:
            while self._added.get():
                self._settle_while(lambda: self._threaded and len(self) > 0)
                self._settled()
        except BaseException as error:  # noqa: BLE001 - raised again by the worker
            self._failed(error)
