"""The history of an object storage: told to another from the log alone, or taken over from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pyarrow as pa

from storage_engine.commitlog import layout, state, tags
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import (
    Entry,
    Manifest,
    TypeRef,
    UnitVersion,
    parse_timestamp,
    sha256,
)
from storage_engine.commitlog.replay import Replay
from storage_engine.commitlog.schema_log import purged_upto
from storage_engine.commitlog.series import Mark
from storage_engine.commitlog.tags import Tag
from storage_engine.errors import SchemaMetadataError
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.repository.duck import Stream
from storage_engine.repository.history import AdoptedRows, RecordedChange, RecordedCommit
from storage_engine.repository.object.read.files import MissingFileError, versioned_schema
from storage_engine.repository.object.read.latest import Versions
from storage_engine.repository.object.write.adopt import Adoption
from storage_engine.repository.protocol import Idempotency

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository


class ObjectHistory:
    """See `RecordedHistory`."""

    def __init__(self, repository: ObjectRepository) -> None:
        self._repository = repository
        self._chain = repository.chain

    # -- told ---------------------------------------------------------------------------------

    def identity(self) -> str:
        """One of another implementation is known by its first commit. A branch is a log of its
        own here: what follows its base is not what main has."""
        head = self._chain.read_head().head
        if head.log_id:
            return layout.on_chain(head.log_id, head.incarnation)
        first = self._chain.locate(head, 1)
        if first is None:
            return ""
        return f"log-{sha256(self._chain.manifest(first).to_bytes())[:32]}"

    def commits(self, since: int, upto: int) -> list[RecordedCommit]:
        head = self._chain.read_head().head
        top = self._chain.locate(head, min(upto, head.commit_id))
        stretch = self._chain.stretch(top, above=max(since, 0))
        purged = purged_upto(state.schema_records(self._chain, head))
        return [_recorded(manifest, purged) for _, manifest in reversed(stretch)]

    def schema(self, ref: TypeRef, schema_version_id: int) -> TypeSpec:
        head = self._chain.read_head().head
        record = state.schema_records(self._chain, head, [ref]).get(ref, {}).get(schema_version_id)
        if record is not None:
            return TypeSpec.from_schema_dict(record["schema"])
        # A log of another implementation: its catalogs say, or its files.
        specs = self._repository.stored_types([ref])
        if not specs:
            kind, name = ref
            raise SchemaMetadataError(
                f"nothing in {self._repository.uri} says what the {kind} {name} looks like in its "
                f"schema version {schema_version_id}: `onto verify` tells more"
            )
        return specs[0]

    def rows(
        self, spec: TypeSpec, schema_version_id: int, *, since: int, upto: int
    ) -> Iterator[pa.RecordBatch]:
        """Files of purged types may be gone, or will be."""
        head = self._chain.read_head().head
        purged = purged_upto(state.schema_records(self._chain, head, [spec.ref]))
        floor = max(since, purged.get(spec.ref, 0))
        if floor >= upto:
            return iter(())
        versions = self._repository.versions
        return _rows(self._chain, versions, spec, schema_version_id, since=floor, upto=upto)

    def units(self) -> Mapping[str, UnitVersion]:
        head = self._chain.read_head().head
        units = state.current_checkpoint(self._chain, head).idempotency
        return {app: unit["version"] for app, unit in units.items() if unit["commit_id"] is None}

    # -- taken over ---------------------------------------------------------------------------

    def origin(self) -> str:
        manifest = self._chain.head_manifest(self._chain.read_head().head)
        return manifest.origin if manifest is not None else ""

    def adopt(
        self, commits: Sequence[RecordedCommit], rows: Sequence[AdoptedRows], *, origin: str
    ) -> None:
        repository = self._repository
        repository.prepare_writing()
        adoption = Adoption(
            engine_version=repository.engine_version,
            part_bytes=repository.config.target_part_bytes,
        )
        replay = Replay(
            self._chain,
            repository.lock,
            runtime_id=repository.config.runtime_id,
            checkpoint_interval=repository.config.checkpoint_interval,
        )
        try:
            replay.publish(adoption.prepare(commits, rows), origin)
        finally:
            adoption.close()

    def adopt_tag(self, tag: Tag) -> None:
        tags.adopt_tag(self._chain, tag)

    def adopt_units(self, units: Mapping[str, UnitVersion]) -> None:
        for app_id, version in units.items():
            if self._repository.applied(Idempotency(app_id, version)) is None:
                mark = Mark(app_id, version)
                self._repository.publisher.publish(lambda _base, mark=mark: mark)  # type: ignore[misc]
        self._repository.publisher.flush()


def _recorded(manifest: Manifest, purged: Mapping[TypeRef, int]) -> RecordedCommit:
    mark = manifest.idempotency
    return RecordedCommit(
        id=manifest.commit_id,
        created_at=parse_timestamp(manifest.created_at),
        runtime_id=manifest.runtime_id,
        kind=manifest.kind,
        metadata=manifest.metadata,
        changes=tuple(_change(manifest, ref, purged.get(ref, 0)) for ref in manifest.touched()),
        schema=manifest.schema,
        idempotency=Idempotency(mark["app_id"], mark["version"]) if mark is not None else None,
        marks=manifest.marks,
        merged_marks=manifest.merged_marks,
    )


def _change(manifest: Manifest, ref: TypeRef, purged_upto: int) -> RecordedChange:
    files = manifest.files_of(ref)
    counts = [file.row_count for file in files]
    inserted = [file.inserted for file in files if file.inserted is not None]
    return RecordedChange(
        *ref,
        schema_version_id=files[0].schema_version_id,
        rows=sum(counts) if min(counts) >= 0 else None,
        inserted=sum(inserted) if len(inserted) == len(files) else None,
        bytes=sum(file.bytes for file in files),
        purged=manifest.commit_id <= purged_upto,
    )


def _rows(
    chain: Chain,
    versions: Versions,
    spec: TypeSpec,
    schema_version_id: int,
    *,
    since: int,
    upto: int,
) -> Iterator[pa.RecordBatch]:
    """In the order of commits and identities."""
    schema = versioned_schema(spec)
    names = ", ".join(map(quoted, schema.names))
    order = ", ".join(map(quoted, ("commit_id", *spec.identity)))
    with ExitStack() as opened:
        cursor = None
        for last_try in (False, True):
            entries = _entries(chain, spec.ref, schema_version_id, since, upto)
            try:
                cursor = opened.enter_context(versions.scan(spec, entries))
                break
            except MissingFileError:  # a purge went by: the log, which moved on, says what is now
                if last_try:
                    raise
        assert cursor is not None
        sql = (
            f"SELECT {names} FROM versions WHERE commit_id > $since AND commit_id <= $upto "
            f"ORDER BY {order}"
        )
        window = {"since": since, "upto": upto}
        stream = Stream(versions.duck, cursor, sql, window, columns=len(schema))
        for batch in stream.batches():
            yield batch.cast(schema)


def _entries(
    chain: Chain, ref: TypeRef, schema_version_id: int, since: int, upto: int
) -> list[Entry]:
    head = chain.read_head().head
    top = chain.type_heads_at(head).get(ref)
    entries = state.entries(chain, head, ref, top=top, above=since)
    entries = [entry for entry in entries if entry.min_commit_id <= upto]
    if top is None or not top.past_versions:
        return entries  # of one version; another implementation may number it in its own way
    return [entry for entry in entries if entry.schema_version_id == schema_version_id]
