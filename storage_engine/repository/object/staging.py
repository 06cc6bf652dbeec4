"""Parts uploaded before the lock, under `staged/{attempt}/`, kept alive by a heartbeat.

A long load holds the lock for the publish only. Until a manifest names them the parts are
invisible; the heartbeat tells garbage collection that their writer lives, and keeps the writer
from publishing parts that were given up.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.heartbeat import Heartbeat
from storage_engine.commitlog.records import CommitFile
from storage_engine.errors import StorageBackendError
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.port import ObjectStore, ObjectStoreError
from storage_engine.repository.object.bulk import BulkPart

log = logging.getLogger(__name__)


class Staging:
    """The staged parts of one write attempt."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        schema_versions: Mapping[tuple[str, str], int],
        beat_s: float,
        attempt: str | None = None,
    ) -> None:
        """`attempt`: one under which others have staged already; a new one when left out."""
        self._store = store
        self._schema_versions = schema_versions
        self._beat_s = beat_s
        self.attempt = attempt or layout.new_id()
        self._numbers = itertools.count()
        self._sizes: dict[str, int] = {}
        self._heartbeat: Heartbeat | None = None

    def begin(self, holder: Mapping[str, Any], on_lost: Callable[[], None] | None = None) -> None:
        """Announce the attempt and keep it announced until `end`."""
        self._heartbeat = Heartbeat(
            self._store, self.attempt, holder=holder, beat_s=self._beat_s, on_lost=on_lost
        )
        self._heartbeat.start()

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
        """Under the lock, before the CAS: all parts are still ours, and there, whole."""
        assert self._heartbeat is not None
        present, _ = self._store.parallel.both(self._present, self._heartbeat.beat)
        for file in files:
            if present.get(file.path) != file.bytes:
                raise StorageBackendError(
                    f"staged part {file.path} is gone or changed; nothing was published, "
                    "ingest the data again",
                    operation="publish",
                    key=file.path,
                    retryable=True,
                )

    def _present(self) -> dict[str, int]:
        return {info.key: info.size for info in self._store.list(f"staged/{self.attempt}/")}

    def end(self, published: Iterable[CommitFile], *, listed: bool = False) -> None:
        """Withdraw the announcement and whatever was staged but not published.

        `listed`: others staged under this attempt too, so look what is there.
        """
        self.leave()
        kept = {file.path for file in published}
        try:
            staged = self._present() if listed else self._sizes
            doomed = [key for key in staged if key not in kept]
            self._store.delete_many([*doomed, layout.attempt_heartbeat(self.attempt)])
        except (ObjectStoreError, StorageBackendError) as error:
            log.info("staged leftovers stay for garbage collection: %s", error)

    def leave(self) -> None:
        """Stop the heartbeat and touch nothing: the outcome of the publish is unknown."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
