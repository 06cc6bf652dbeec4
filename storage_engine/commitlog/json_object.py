"""Small shared JSON documents, changed by read-modify-write under a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.conditional import StillUnknown, Won, write_conditionally
from storage_engine.commitlog.records import from_json, to_json
from storage_engine.errors import IntegrityError, SchemaMetadataError, StorageBackendError
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore

_ATTEMPTS = 4

Document = dict[str, Any]


class Documents:
    """Catalog documents with the version last seen of each."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._seen: dict[str, tuple[Document, str]] = {}

    def read(self, key: str) -> Document | None:
        """The document now, None when there is none; SchemaMetadataError when malformed."""
        seen = self._seen.get(key)
        try:
            if seen is not None:
                changed = self._store.get_if_changed(key, seen[1])
                if changed is None:
                    return seen[0]
                stored = changed
            else:
                stored = self._store.get(key)
        except ObjectNotFound:
            self._seen.pop(key, None)
            return None
        try:
            document = from_json(stored.data, key=key)
        except IntegrityError as error:
            raise SchemaMetadataError(str(error), key=key) from error
        self._seen[key] = (document, stored.etag)
        return document

    def update(
        self,
        key: str,
        change: Callable[[Document | None], Document | None],
        *,
        expect_absent: bool = False,
    ) -> None:
        """Apply `change` (None: leave it) to the current version; `expect_absent` saves a read."""
        if key not in self._seen and not expect_absent:
            self.read(key)
        for _ in range(_ATTEMPTS):
            current, etag = self._seen.get(key, (None, None))
            changed = change(current)
            if changed is None:
                return
            write_id = layout.new_write_id()
            changed = {**changed, "write_id": write_id}
            try:
                outcome = write_conditionally(
                    self._store, key, to_json(changed), write_id=write_id, etag=etag, attempts=3
                )
            except StillUnknown:
                self._seen.pop(key, None)
                raise StorageBackendError(
                    f"{key} may not have been written", operation="catalog", key=key
                ) from None
            if isinstance(outcome, Won):
                self._seen[key] = (changed, outcome.etag)
                return
            self.read(key)
        raise StorageBackendError(
            f"{key} is being changed by other writers", operation="catalog", key=key, retryable=True
        )
