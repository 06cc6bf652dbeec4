"""Reads and writes index objects, remembering the version last seen of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from storage_engine.commitlog import layout
from storage_engine.commitlog.conditional import StillUnknown, Won, write_conditionally
from storage_engine.commitlog.records import TypeRef
from storage_engine.errors import IntegrityError, StorageBackendError
from storage_engine.index.record import EntryEncoder, TypeIndex
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore

_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class IndexVersion:
    """An index as stored; `etag` None means that there is no object yet.

    An object that could not be parsed is read as empty, and replaced by the next writer.
    """

    index: TypeIndex
    etag: str | None


def _of_log(version: IndexVersion, log_id: str) -> IndexVersion:
    """An index of an erased log counts as empty, too."""
    index = version.index
    if index.log_id and log_id and index.log_id != log_id:
        return IndexVersion(TypeIndex(index.type_name, log_id=log_id), version.etag)
    return version


class IndexObjects:
    """The index objects of one storage."""

    def __init__(self, store: ObjectStore, *, engine_version: str) -> None:
        self._store = store
        self._encoder = EntryEncoder(engine_version)
        self._seen: dict[TypeRef, IndexVersion] = {}
        self._mutex = threading.Lock()

    def known(self, ref: TypeRef) -> IndexVersion | None:
        return self._seen.get(ref)

    def read(self, ref: TypeRef, *, log_id: str) -> IndexVersion:
        """The index now: one request, short while it has not changed."""
        key = layout.index(*ref)
        seen = self._seen.get(ref)
        try:
            if seen is not None and seen.etag is not None:
                changed = self._store.get_if_changed(key, seen.etag)
                if changed is None:
                    return _of_log(seen, log_id)
                stored = changed
            else:
                stored = self._store.get(key)
        except ObjectNotFound:
            return self._remember(ref, IndexVersion(TypeIndex(ref[1], log_id=log_id), None))
        try:
            index = TypeIndex.parse(stored.data, ref, key=key)
        except IntegrityError:
            index = TypeIndex(ref[1], log_id="unreadable")
        return _of_log(self._remember(ref, IndexVersion(index, stored.etag)), log_id)

    def update(
        self,
        ref: TypeRef,
        *,
        log_id: str,
        change: Callable[[TypeIndex], TypeIndex | None],
        is_new: bool = False,
    ) -> None:
        """Read, change, write if nobody else did; again on the newer version if somebody did.

        `change` returns None when the version it is given needs no change. `is_new`: the type was
        just registered, so there is nothing to read.
        """
        if (seen := self._seen.get(ref)) is not None:
            version = _of_log(seen, log_id)
        elif is_new:
            version = IndexVersion(TypeIndex(ref[1], log_id=log_id), None)
        else:
            version = self.read(ref, log_id=log_id)
        for _ in range(_ATTEMPTS):
            changed = change(version.index)
            if changed is None:
                return
            write_id = layout.new_write_id()
            try:
                outcome = write_conditionally(
                    self._store,
                    layout.index(*ref),
                    changed.to_bytes(write_id, self._encoder),
                    write_id=write_id,
                    etag=version.etag,
                    attempts=3,
                )
            except StillUnknown as error:
                self._forget(ref)
                raise StorageBackendError(
                    f"index of {ref[1]} may not have been written",
                    operation="index",
                    key=str(error),
                ) from None
            if isinstance(outcome, Won):
                self._remember(ref, IndexVersion(changed, outcome.etag))
                return
            self._forget(ref)
            version = self.read(ref, log_id=log_id)
        raise StorageBackendError(
            f"index of {ref[1]} is being changed by other writers; the next commit repairs it",
            operation="index",
            key=layout.index(*ref),
            retryable=True,
        )

    def _remember(self, ref: TypeRef, version: IndexVersion) -> IndexVersion:
        with self._mutex:
            self._seen[ref] = version
        return version

    def _forget(self, ref: TypeRef) -> None:
        with self._mutex:
            self._seen.pop(ref, None)
