"""How far a job is, on stderr: a bar at a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from storage_engine.cli.progress import Advance
from storage_engine.cli.progress import progress as bar

Tell = Callable[[str, int, int | None], None]  # stage, done, of all (None: not known)

_EVERY_S = 5.0


@contextmanager
def progress(what: str, log: Callable[[str], None]) -> Iterator[Tell]:
    """`log` hears of each new stage as well."""
    with bar(what) as advance:
        yield _Telling(what, advance, log).tell


class _Telling:
    def __init__(self, what: str, advance: Advance, log: Callable[[str], None]) -> None:
        self._what = what
        self._advance = advance
        self._log = log
        self._stage = ""
        self._said_at = 0.0
        self._plain = not sys.stderr.isatty()

    def tell(self, stage: str, done: int, total: int | None) -> None:
        self._advance(done, total)
        is_new = stage != self._stage
        if is_new:
            self._stage = stage
            self._log(f"{self._what}: {stage}")
        if self._plain and (is_new or time.monotonic() - self._said_at >= _EVERY_S):
            self._said_at = time.monotonic()
            of = f" of {total}" if total is not None else ""
            sys.stderr.write(f"{self._what}: {stage} {done}{of}\n")
