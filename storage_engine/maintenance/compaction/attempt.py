"""The heartbeat of a compaction: while it stands, garbage collection leaves its outputs alone.

`meta/attempts/{attempt}.json` is created once and renewed conditionally. Whoever wants to collect
the outputs of a silent attempt deletes the heartbeat first, then fences head; the attempt checks
its heartbeat under the lock right before it publishes. So either the collector sees the outputs
published, or the attempt sees that it was given up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.conditional import Won, write_conditionally
from storage_engine.commitlog.records import timestamp, to_json
from storage_engine.errors import LeaseExpiredError, StorageBackendError
from storage_engine.objectstore.port import ObjectStore, ObjectStoreError

log = logging.getLogger(__name__)


class Attempt:
    """One announced attempt; use as a context manager."""

    def __init__(self, store: ObjectStore, *, holder: Mapping[str, Any], beat_s: float) -> None:
        self.id = layout.new_id()
        self._store = store
        self._holder = dict(holder)
        self._beat_s = beat_s
        self._started_at = timestamp(store.now())
        self._etag: str | None = None
        self._lost = False
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None

    def __enter__(self) -> Attempt:
        self.check()
        if self._store.kind != "memory":  # the simulated store's time does not pass by itself
            self._keeper = threading.Thread(
                target=self._keep_beating, name="onto-attempt", daemon=True
            )
            self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._keeper is not None:
            self._keeper.join()
        if self._lost or self._etag is None:
            return
        try:
            self._store.delete_if_match(layout.attempt_heartbeat(self.id), self._etag)
        except (ObjectStoreError, StorageBackendError) as error:
            log.info("heartbeat of attempt %s stays for garbage collection: %s", self.id, error)

    def check(self) -> None:
        """Renew now; raises LeaseExpiredError when somebody has given the attempt up."""
        with self._mutex:
            if not self._lost:
                write_id = layout.new_write_id()
                outcome = write_conditionally(
                    self._store,
                    layout.attempt_heartbeat(self.id),
                    self._payload(write_id),
                    write_id=write_id,
                    etag=self._etag,
                )
                if isinstance(outcome, Won):
                    self._etag = outcome.etag
                    return
                self._lost = True
            raise LeaseExpiredError(
                f"compaction attempt {self.id} was silent for too long and its files were given "
                "up to garbage collection; nothing was published, compact again"
            )

    def _payload(self, write_id: str) -> bytes:
        return to_json(
            {
                "attempt": self.id,
                "holder": self._holder,
                "started_at": self._started_at,
                "heartbeat_at": timestamp(self._store.now()),
                "write_id": write_id,
            }
        )

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._beat_s):
            try:
                self.check()
            except LeaseExpiredError:
                return  # the publish finds out
            except StorageBackendError as error:
                log.warning("heartbeat of compaction attempt %s failed: %s", self.id, error)
