"""Making an empty object storage, and erasing one.

Head is what makes a storage exist, and its log id says with which engine it is written (see
`stamp`): whoever writes head has made or erased the storage, whatever becomes of the rest. The
stamp is written before the first head; it is replaced and never deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage_engine.commitlog import layout
from storage_engine.commitlog.json_object import Won, write_conditionally
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock
from storage_engine.commitlog.records import Head, timestamp, to_json
from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    AlreadyInitializedError,
    LeaseExpiredError,
    MigrationTokenError,
    StorageBackendError,
)
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore, StoredObject
from storage_engine.repository.object.stamp import (
    engine_of,
    is_stamped,
    new_log_id,
    stamp_bytes,
)
from storage_engine.schema.catalogs import empty_types

_RUNTIME = "onto-init"
_REPLACE_ATTEMPTS = 8
_BATCH = 1000  # keys that are deleted between two looks at the lease

# From a write id to the bytes of a new version of an object.
_Document = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What lies at the place of a storage, read before anything is written."""

    stamp_etag: str | None
    types_etag: str | None
    head: StoredObject | None


def look(store: ObjectStore) -> Leftovers:
    """Head is read last: while it is missing, a stamp that is as it was read is nobody's yet."""
    stamp, types = _read(store, layout.ENGINE), _read(store, layout.TYPES)
    return Leftovers(
        stamp.etag if stamp is not None else None,
        types.etag if types is not None else None,
        _read(store, layout.HEAD),
    )


def create(store: ObjectStore, engine_version: str, leftovers: Leftovers) -> None:
    """Stamp first, head last. What an init that did not end has left is replaced.

    Two at once replace what the other has written, or fail; the one that writes head has made the
    storage, and the stamp is made to say so.
    """
    for key, document, etag in (
        (layout.ENGINE, _stamp(store, engine_version), leftovers.stamp_etag),
        (layout.TYPES, _no_types(store), leftovers.types_etag),
    ):
        write_id = layout.new_write_id()
        data = document(write_id)
        if not isinstance(write_conditionally(store, key, data, write_id=write_id, etag=etag), Won):
            _leave_to_others(store)
            raise StorageBackendError(
                f"another process is initialising {store.uri}: see with `onto info` what it made, "
                "and try again if there is nothing",
                operation="init",
                key=key,
                retryable=True,
            )
    head = _empty_head(store, engine_version)
    outcome = write_conditionally(
        store, layout.HEAD, head.to_bytes(), write_id=head.write_id, etag=None
    )
    if isinstance(outcome, Won):
        _restamp(store, engine_version)
        return
    current = _leave_to_others(store) or head
    raise AlreadyInitializedError(store.uri, current.commit_id)


def _leave_to_others(store: ObjectStore) -> Head | None:
    """The head of those who were faster, if it is there; the stamp that stands may be ours."""
    stored = _read(store, layout.HEAD)
    if stored is None:
        return None
    head = Head.parse(stored.data, key=layout.HEAD)
    if (engine_version := engine_of(head.log_id)) is not None:
        _restamp(store, engine_version)
    return head


def erase(
    store: ObjectStore, engine_version: str, config: OntologiaConfig, *, head_etag: str
) -> None:
    """Under the write lock: note what is there, swing head from the version `head_etag` to an
    empty log, then delete what was noted.

    So nothing goes that was written on the new head. Staged parts could be: they are written
    before the lock and published on whatever head there is then. But not without a heartbeat, and
    those go first.
    """
    lock = WriteLock(
        store,
        owner_id=_RUNTIME,
        lease_ttl_ms=config.s3_lease_ttl_ms,
        timeout_ms=config.s3_lock_timeout_ms,
    )
    with Tenure() as tenure, tenure:
        lease = lock.acquire(tenure)
        kept = {layout.HEAD, layout.LOCK, layout.ENGINE, layout.TYPES}
        doomed = [info.key for info in store.list("") if info.key not in kept]
        # Listed after the parts, as a writer makes its heartbeat before its first part.
        heartbeats = [info.key for info in store.list(layout.ATTEMPTS)]
        head = _empty_head(store, engine_version)
        lease.guard()
        lease.note_head(None)
        outcome = write_conditionally(
            store, layout.HEAD, head.to_bytes(), write_id=head.write_id, etag=head_etag
        )
        if not isinstance(outcome, Won):
            raise MigrationTokenError(
                f"{store.uri} changed since the preview: nothing was erased, look at a new preview"
            )
        _restamp(store, engine_version)
        _replace(store, layout.TYPES, _no_types(store))
        _delete(store, lease, [*heartbeats, *doomed])


def _delete(store: ObjectStore, lease: Lease, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), _BATCH):
        try:
            lease.guard()
        except LeaseExpiredError as error:
            raise LeaseExpiredError(
                f"{store.uri} was erased and is empty now, but the write lease ran out before "
                f"{len(keys) - start} of {len(keys)} old objects were deleted: run `onto init "
                "--force` again before anything is committed, or let `onto gc` collect what it can",
                expires_at=error.expires_at,
            ) from error
        store.delete_many(keys[start : start + _BATCH])


def _restamp(store: ObjectStore, engine_version: str) -> None:
    """Make the stamp say what head says, unless it does."""
    stored = _read(store, layout.ENGINE)
    if stored is None or not is_stamped(stored.data, engine_version):
        _replace(store, layout.ENGINE, _stamp(store, engine_version))


def _replace(store: ObjectStore, key: str, document: _Document) -> None:
    """Put a new version in the place of whatever version stands there."""
    for _ in range(_REPLACE_ATTEMPTS):
        stored = _read(store, key)
        etag = stored.etag if stored is not None else None
        write_id = layout.new_write_id()
        data = document(write_id)
        if isinstance(write_conditionally(store, key, data, write_id=write_id, etag=etag), Won):
            return
    raise StorageBackendError(
        f"{key} of {store.uri} is written by others all the time: try again",
        operation="init",
        key=key,
        retryable=True,
    )


def _read(store: ObjectStore, key: str) -> StoredObject | None:
    try:
        return store.get(key)
    except ObjectNotFound:
        return None


def _stamp(store: ObjectStore, engine_version: str) -> _Document:
    return lambda write_id: stamp_bytes(store, engine_version, write_id)


def _no_types(store: ObjectStore) -> _Document:
    return lambda write_id: to_json({**empty_types(store.now()), "write_id": write_id})


def _empty_head(store: ObjectStore, engine_version: str) -> Head:
    return Head(
        commit_id=0,
        manifest_path=None,
        updated_at=timestamp(store.now()),
        runtime_id=_RUNTIME,
        log_id=new_log_id(engine_version),
        write_id=layout.new_write_id(),
    )
