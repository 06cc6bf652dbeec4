"""`meta/attempts/{attempt}.json`: says that the writer of objects nobody names yet is alive.

Each beat is conditional on the one before. A collector that wants the objects of a silent attempt
deletes the heartbeat first; from then on every beat fails, and as an attempt must beat under the
lock before it publishes, what was given up can never be published.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.json_object import Won, write_conditionally
from storage_engine.commitlog.records import timestamp, to_json
from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.protocol import ObjectStore, ObjectStoreError

log = logging.getLogger(__name__)


class GivenUp(StorageBackendError):
    """The attempt was silent for too long, and what it wrote was left to garbage collection."""

    def __init__(self, key: str) -> None:
        super().__init__(
            "this writer was silent for so long that its files were given up to garbage "
            "collection; nothing was published, do it again",
            operation="publish",
            key=key,
            retryable=True,
        )


class Heartbeat:
    """Of one attempt. Beats in the background from `start` to `stop`.

    Ctrl-C may come between any two instructions, also at the first of an end: who starts it in
    the main thread sees to it that it is ended or stopped twice. Doing so again does nothing.
    """

    def __init__(
        self,
        store: ObjectStore,
        attempt: str,
        *,
        holder: Mapping[str, Any],
        beat_s: float,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """`on_lost` is called, in the background, when a beat finds that we were given up."""
        self.key = layout.attempt_heartbeat(attempt)
        self._store = store
        self._facts = {
            "attempt": attempt,
            "holder": dict(holder),
            "started_at": timestamp(store.now()),
        }
        self._beat_s = beat_s
        self._on_lost = on_lost
        self._etag: str | None = None
        self._given_up = False
        self._mutex = threading.Lock()
        self._stopped = False
        self._wake: SimpleQueue[None] = SimpleQueue()  # an event's lock could stay taken by Ctrl-C
        self._keeper: threading.Thread | None = None

    def start(self) -> None:
        self.beat()
        if self._store.timers:
            self._keeper = threading.Thread(target=self._keep, name="onto-attempt", daemon=True)
            self._keeper.start()

    def beat(self) -> None:
        """Say that we live; raises GivenUp when somebody has stopped believing it."""
        with self._mutex:
            if self._given_up:
                raise GivenUp(self.key)
            write_id = layout.new_write_id()
            now = timestamp(self._store.now())
            data = to_json({**self._facts, "heartbeat_at": now, "write_id": write_id})
            outcome = write_conditionally(
                self._store, self.key, data, write_id=write_id, etag=self._etag
            )
            if not isinstance(outcome, Won):
                self._given_up = True
                raise GivenUp(self.key)
            self._etag = outcome.etag

    @property
    def given_up(self) -> bool:
        """Whether a beat has found so."""
        return self._given_up

    def stop(self) -> None:
        """Beat no more, and leave the object: it ages until a collector finds it."""
        self._stopped = True
        self._wake.put(None)
        if self._keeper is not None:
            with suppress(RuntimeError):  # Ctrl-C kept it from being started
                self._keeper.join()
            self._keeper = None

    def end(self) -> None:
        """Beat no more, and take the object away: nothing is left for a collector to judge."""
        self.stop()
        if self._given_up or self._etag is None:
            return
        etag, self._etag = self._etag, None
        try:
            self._store.delete_if_match(self.key, etag)
        except (ObjectStoreError, StorageBackendError) as error:
            log.info("%s stays for garbage collection: %s", self.key, error)

    def _keep(self) -> None:
        while not self._stopped:
            try:
                self._wake.get(timeout=self._beat_s)
                continue
            except Empty:
                pass
            try:
                self.beat()
            except GivenUp:  # the publish finds out, if not who waits for it before
                if self._on_lost is not None:
                    self._on_lost()
                return
            except (ObjectStoreError, StorageBackendError) as error:
                log.warning("heartbeat %s failed: %s", self.key, error)
