"""Parts uploaded before the lock, under `staged/{attempt}/`, kept alive by a heartbeat.

A long load holds the lock for the publish only. Until a manifest names them the parts are
invisible; the heartbeat tells garbage collection that their writer lives.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import CommitFile, timestamp, to_json
from storage_engine.errors import StorageBackendError
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.port import ObjectStore, ObjectStoreError
from storage_engine.repository.object.bulk import BulkPart

log = logging.getLogger(__name__)


class Staging:
    """The staged parts of one write attempt."""

    def __init__(
        self, store: ObjectStore, *, schema_versions: Mapping[tuple[str, str], int], beat_s: float
    ) -> None:
        self._store = store
        self._schema_versions = schema_versions
        self._beat_s = beat_s
        self.attempt = layout.new_id()
        self._numbers = itertools.count()
        self._sizes: dict[str, int] = {}
        self._started_at = timestamp(store.now())
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None

    def begin(self, holder: Mapping[str, Any]) -> None:
        """Announce the attempt and keep it announced until `end`."""
        self._beat(holder)
        if self._store.kind != "memory":  # the simulated store's time does not pass by itself
            self._keeper = threading.Thread(
                target=self._keep_beating, args=(holder,), name="onto-attempt", daemon=True
            )
            self._keeper.start()

    def stage(self, spec: TypeSpec, part: BulkPart) -> CommitFile:
        """Upload one part; safe to call from several threads."""
        version = self._schema_versions[spec.ref]
        number = next(self._numbers)
        key = layout.data_file(
            layout.staged_prefix(self.attempt), spec.kind, spec.name, "v2", version, number
        )
        assert isinstance(part.encoded.content, Path)
        self._store.put_file(key, part.encoded.content)
        self._sizes[key] = part.encoded.size
        return part.encoded.describe(
            spec,
            key,
            schema_version_id=version,
            part=number,
            inserted=part.inserted,
            commit_id_source="manifest",
        )

    def check(self, files: Iterable[CommitFile]) -> None:
        """Under the lock, before the CAS: all parts are still there, whole."""
        present = {info.key: info.size for info in self._store.list(f"staged/{self.attempt}/")}
        for file in files:
            if present.get(file.path) != file.bytes:
                raise StorageBackendError(
                    f"staged part {file.path} is gone or changed; nothing was published, "
                    "ingest the data again",
                    operation="publish",
                    key=file.path,
                    retryable=True,
                )

    def end(self, published: Iterable[CommitFile]) -> None:
        """Withdraw the announcement and whatever was staged but not published."""
        self.leave()
        kept = {file.path for file in published}
        doomed = [key for key in self._sizes if key not in kept]
        try:
            self._store.delete_many([*doomed, layout.attempt_heartbeat(self.attempt)])
        except (ObjectStoreError, StorageBackendError) as error:
            log.info("staged leftovers stay for garbage collection: %s", error)

    def leave(self) -> None:
        """Stop the heartbeat and touch nothing: the outcome of the publish is unknown."""
        self._stop.set()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None

    def _keep_beating(self, holder: Mapping[str, Any]) -> None:
        while not self._stop.wait(self._beat_s):
            try:
                self._beat(holder)
            except (ObjectStoreError, StorageBackendError) as error:
                # Not fatal by itself: `check` finds out whether the parts were collected.
                log.warning("heartbeat of staging attempt %s failed: %s", self.attempt, error)

    def _beat(self, holder: Mapping[str, Any]) -> None:
        self._store.put(
            layout.attempt_heartbeat(self.attempt),
            to_json(
                {
                    "attempt": self.attempt,
                    "holder": dict(holder),
                    "started_at": self._started_at,
                    "heartbeat_at": timestamp(self._store.now()),
                }
            ),
        )
