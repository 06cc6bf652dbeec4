"""What the commits of one session came to: light, as every session has one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from storage_engine.repository.protocol import CommitResult


@dataclass(slots=True)
class CommitCounters:
    """What one session's commits came to. Safe to use from several threads."""

    commits: int = 0
    empty: int = 0  # nothing differed, or the unit of work had been applied
    failed: int = 0
    attempts: int = 0
    lock_wait_ms: float = 0.0
    rows_inserted: int = 0
    rows_updated: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def succeeded(self, result: CommitResult | None) -> None:
        with self._lock:
            if result is None or result.already_applied:
                self.empty += 1
                return
            self.commits += 1
            self.attempts += result.attempts
            self.lock_wait_ms += result.lock_wait_ms
            self.rows_inserted += sum(change.inserted for change in result.changes)
            self.rows_updated += sum(change.updated for change in result.changes)

    def failure(self) -> None:
        with self._lock:
            self.failed += 1

    def as_dict(self) -> dict[str, int | float]:
        with self._lock:
            return {
                "commits": self.commits,
                "empty": self.empty,
                "failed": self.failed,
                "attempts": self.attempts,
                "lock_wait_ms": self.lock_wait_ms,
                "rows_inserted": self.rows_inserted,
                "rows_updated": self.rows_updated,
            }
