"""An announced compaction: while its heartbeat stands, garbage collection leaves its outputs alone.

Whoever wants to collect the outputs of a silent attempt deletes the heartbeat first, then fences
head; the attempt checks its heartbeat under the lock right before it publishes. So either the
collector sees the outputs published, or the attempt sees that it was given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.heartbeat import GivenUp, Heartbeat
from storage_engine.errors import LeaseExpiredError
from storage_engine.objectstore.port import ObjectStore


class Attempt:
    """One announced attempt; use as a context manager."""

    def __init__(self, store: ObjectStore, *, holder: Mapping[str, Any], beat_s: float) -> None:
        self.id = layout.new_id()
        self._heartbeat = Heartbeat(store, self.id, holder=holder, beat_s=beat_s)

    def __enter__(self) -> Attempt:
        self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.end()

    def check(self) -> None:
        """Renew now; raises LeaseExpiredError when somebody has given the attempt up."""
        try:
            self._heartbeat.beat()
        except GivenUp as error:
            raise self._expired() from error

    def check_known(self) -> None:
        """The same as far as the last beat could tell, without a request."""
        if self._heartbeat.given_up:
            raise self._expired()

    def _expired(self) -> LeaseExpiredError:
        return LeaseExpiredError(
            f"compaction attempt {self.id} was silent for too long and its files were given "
            "up to garbage collection; nothing was published, compact again"
        )
