"""A migration from start to end: latest rows of old versions rewritten for new ones, and published
with the new versions as one commit.

Rows are streamed, rewritten and encoded before the lock is taken (engine v2 stages them too), so
that others go on writing meanwhile. What they changed is rewritten again and takes the place of
what it overtakes: once before the lock, so that little is left to do under it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.json_object import Documents
from storage_engine.commitlog.records import CommitFile, Head, TypeHead, TypeRef
from storage_engine.commitlog.schema_log import SchemaRecords
from storage_engine.commitlog.series import Draft, Upload
from storage_engine.commitlog.swap import Base, PublishedCommit
from storage_engine.errors import CommitStateUnknownError, ConfigurationError, OntologiaError
from storage_engine.model.canonical import canonical_json
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.repository.duck import Stream
from storage_engine.repository.object.read.executor import ObjectExecutor
from storage_engine.repository.object.stored_schema import stored_state
from storage_engine.repository.object.write.bulk import chunks
from storage_engine.repository.object.write.commit import Parts
from storage_engine.repository.object.write.rewritten_rows import (
    LocalRows,
    RewrittenRows,
    StagedRows,
)
from storage_engine.repository.object.write.staged_write import Staging
from storage_engine.schema.history import SchemaVersion
from storage_engine.schema.migration import (
    MigrationOutcome,
    MigrationRequest,
    TypeDrop,
    TypeMigration,
    drop_record,
    metadata_of,
)

log = logging.getLogger(__name__)


class _TypeRewrite:
    """The rows of one type on their way."""

    def __init__(
        self, parts: Parts, migration: TypeMigration, rows: RewrittenRows, head: Head
    ) -> None:
        assert migration.source is not None
        self.migration = migration
        self.rows = rows
        self._parts = parts
        self._source: TypeSpec = migration.source.spec
        self._source_version = migration.source.version
        self._rewrite = migration.rewrite()
        self._upto = head.commit_id  # what was written until then is in `rows`

    def begin(self, executor: ObjectExecutor, head: Head, told: Callable[[int], None]) -> None:
        """All latest rows as of the head."""
        self._add(executor.latest(self._source, head), told)

    def catch_up(self, head: Head, told: Callable[[int], None]) -> None:
        """What others have written to the old version since."""
        top = self._parts.chain.type_heads_at(head).get(self.migration.source_ref)
        since, self._upto = self._upto, head.commit_id
        if top is None or top.commit_id <= since:
            return
        fresh = state.entries(
            self._parts.chain, head, self.migration.source_ref, top=top, above=since
        )
        gone = self.rows.overtaken(fresh, since=since)
        keys = ", ".join(quoted(name) for name in self._source.identity)
        with self._parts.versions.scan(self._source, fresh) as cursor:
            stream = Stream(
                self._parts.duck,
                cursor,
                f"FROM versions SEMI JOIN (SELECT {keys}, max(commit_id) AS commit_id "
                f"FROM versions WHERE commit_id > {since:d} GROUP BY {keys}) "
                f"USING ({keys}, commit_id)",
            )
            self._add(stream.batches(), lambda count: told(max(0, count - gone)))

    def _add(self, batches: Iterable[pa.RecordBatch], told: Callable[[int], None]) -> None:
        workers = max(2, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers, thread_name_prefix="onto-migrate") as pool:
            running: list[Future[None]] = []
            for chunk in chunks(self._rewritten(batches), self._parts.config.target_part_bytes):
                if len(running) >= workers:
                    running.pop(0).result()
                running.append(pool.submit(self.rows.add, chunk))
                told(chunk.num_rows)
                del chunk
            for future in running:
                future.result()

    def _rewritten(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from self._rewrite(pa.Table.from_batches([batch])).to_batches()


class MigrationRun:
    """Carries out one request. Use once; leaving it stops what works in the background."""

    def __init__(
        self,
        parts: Parts,
        documents: Documents,
        executor: ObjectExecutor,
        request: MigrationRequest,
    ) -> None:
        self._parts = parts
        self._chain = parts.chain
        self._documents = documents
        self._executor = executor
        self._request = request
        self._staging: Staging | None = None
        self._rewrites: list[_TypeRewrite] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._staging is not None:
            self._staging.leave()

    def run(self) -> MigrationOutcome:
        published: PublishedCommit | None = None
        settled = True  # False while what is staged may have been published
        try:
            head = self._chain.read_head().head
            self._check(head)
            self._rewrite_rows(head)
            if self._rewrites:
                self._catch_up(self._chain.read_head().head)
            settled = False
            published = self._parts.publisher.publish(self._draft)
            settled = True
            assert published is not None
            self._forget_residents()
            return MigrationOutcome(
                published.manifest.commit_id,
                self._row_counts(),
                attempts=published.attempts,
                lock_wait_ms=published.lock_wait_ms,
            )
        except OntologiaError as error:
            settled = not isinstance(error, CommitStateUnknownError)
            raise
        finally:
            self._clean_up(published, outcome_known=settled)

    # -- before the lock ----------------------------------------------------------------------

    def _check(self, head: Head) -> None:
        self._parts.check_log(head)
        if self._chain.incarnation and any(drop.purge for drop in self._drops):
            raise ConfigurationError(
                f"rows are not purged on branch {self._chain.branch!r}, which shares them with its "
                "parent: drop the type here, and purge on main"
            )
        self._request.check_unmoved(stored_state(self._chain, self._documents, head))

    def _rewrite_rows(self, head: Head) -> None:
        sources = [m for m in self._request.migrations if m.source is not None]
        heads = self._chain.type_heads_at(head)
        sources = [m for m in sources if not heads[m.source_ref].empty]
        if not sources:
            return
        if self._parts.engine_version == "v2":
            self._staging = Staging(
                self._chain.store,
                schema_versions={m.ref: m.version for m in sources},
                beat_s=self._parts.config.s3_lease_ttl_ms / 3000,
                attempt=layout.on_chain(layout.new_id(), self._chain.incarnation),
            )
            stager = self._request.stager
            self._staging.begin(self._request.holder, stager.cancel if stager else None)
        for migration in sources:
            rows: RewrittenRows
            elsewhere = False
            if self._staging is not None:
                rows = staged = StagedRows(self._parts.versions, self._staging, migration)
                elsewhere = self._stage_elsewhere(migration, staged, head)
            else:
                rows = LocalRows(self._parts.versions, migration)
            rewriting = _TypeRewrite(self._parts, migration, rows, head)
            self._rewrites.append(rewriting)
            if not elsewhere:
                rewriting.begin(self._executor, head, self._told(migration))

    def _stage_elsewhere(self, migration: TypeMigration, rows: StagedRows, head: Head) -> bool:
        """Whether others have rewritten the rows of a type."""
        stager = self._request.stager
        if stager is None:
            return False
        folder = rows.folder(self._chain.store.uri, self._parts.config)
        parts = stager.stage(migration, folder, head.commit_id)
        if parts is None:
            return False
        rows.add_described(parts)
        self._told(migration)(rows.count)
        return True

    def _catch_up(self, head: Head) -> None:
        self._check(head)
        for rewriting in self._rewrites:
            rewriting.catch_up(head, self._told(rewriting.migration))

    def _told(self, migration: TypeMigration) -> Callable[[int], None]:
        progress = self._request.progress
        return lambda rows: progress(migration.spec.name, rows) if progress and rows else None

    # -- under the lock -----------------------------------------------------------------------

    def _draft(self, base: Base) -> Draft:
        self._check(base.head)
        records = state.schema_records(
            self._chain, base.head, [m.source_ref for m in self._request.migrations]
        )
        heads = self._chain.type_heads_at(base.head)
        files: list[CommitFile] = []
        uploads: list[Upload] = []
        for rewriting in self._rewrites:
            rewriting.catch_up(base.head, self._told(rewriting.migration))
            for file, upload in rewriting.rows.placed(base):
                files.append(file)
                uploads += [upload] if upload is not None else []
        if self._staging is not None and files:
            self._staging.check(files)
        written = {file.ref for file in files}
        after = {
            m.ref: _activated(m, heads.get(m.ref), base.commit_id, written=m.ref in written)
            for m in self._request.migrations
        }
        ended = {drop.ref: _ended(drop, heads[drop.ref], base.commit_id) for drop in self._drops}
        return Draft(
            files=files,
            uploads=uploads,
            touched={ref: top for ref, top in after.items() if ref in written},
            amended=ended | {ref: top for ref, top in after.items() if ref not in written},
            metadata=self._metadata(),
            kind=self._request.kind,
            schema=self._schema(records),
            purged=[drop.ref for drop in self._drops if drop.purge],
        )

    @property
    def _drops(self) -> Sequence[TypeDrop]:
        return self._request.drops

    def _metadata(self) -> dict[str, str]:
        metadata = dict(self._request.metadata)
        if self._request.migrations:
            metadata |= metadata_of(self._request.migrations, self._row_counts())
        else:
            dropped = [{"type_kind": d.kind, "type_name": d.type_name} for d in self._drops]
            metadata |= {"kind": self._request.kind, "dropped_types": canonical_json(dropped)}
        return metadata

    def _row_counts(self) -> Mapping[TypeRef, int]:
        counts = {m.ref: 0 for m in self._request.migrations}
        return counts | {r.migration.ref: r.rows.count for r in self._rewrites}

    def _schema(self, records: SchemaRecords) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        registered = []
        for migration in self._request.migrations:
            source, recorded = migration.source, records.get(migration.source_ref, {})
            if source is not None and source.version not in recorded:
                registered.append(_source_record(migration, source))
            registered.append(_record(migration))
        if registered:
            changes["registered"] = registered
        if self._drops:
            changes["dropped"] = [
                drop_record(d.ref, renamed_to=d.renamed_to, purge=d.purge) for d in self._drops
            ]
        return changes

    # -- after the CAS ------------------------------------------------------------------------

    def _forget_residents(self) -> None:
        for ref in [*(m.ref for m in self._request.migrations), *(d.ref for d in self._drops)]:
            self._parts.resident.drop(ref)

    def _clean_up(self, published: PublishedCommit | None, *, outcome_known: bool) -> None:
        for rewriting in self._rewrites:
            rewriting.rows.close()
        if self._staging is None:
            return
        if outcome_known:
            files = published.manifest.files if published else ()
            self._staging.end(files, listed=self._request.stager is not None)
        else:
            self._staging.leave()


def _activated(
    migration: TypeMigration, before: TypeHead | None, commit_id: int, *, written: bool
) -> TypeHead:
    """A type's head with its new version. Where rows are written, commit and path are the
    publisher's."""
    spec = migration.spec
    began_anew = before is None or before.is_dropped
    base = before if before is not None else TypeHead(commit_id, "", empty=True)
    return replace(
        base,
        schema_version_id=migration.version,
        schema_sha256=spec.schema_sha256,
        activation_commit_id=commit_id,
        layout_sha256=spec.layout_sha256,
        manifest_sha256="" if written else base.manifest_sha256,
        empty=base.empty and not written,
        dropped_commit_id=None,
        renamed_to=None,
        first_version_id=migration.version if began_anew else base.first_version_id,
        past_versions=before.succeeded(commit_id) if before is not None else (),
    )


def _ended(drop: TypeDrop, before: TypeHead, commit_id: int) -> TypeHead:
    after = before
    if not before.is_dropped:
        after = replace(before, dropped_commit_id=commit_id, renamed_to=drop.renamed_to)
    if drop.purge and not before.empty:
        # As if no row had ever been written; the publisher names this commit in it.
        after = replace(
            after, commit_id=commit_id, manifest_path="", manifest_sha256="", empty=True
        )
    return after


def _source_record(migration: TypeMigration, source: SchemaVersion) -> dict[str, Any]:
    """Of a type of another implementation, whose schema the log does not record: what its rows
    were must be known for ever."""
    kind, name = migration.source_ref
    return {
        "kind": kind,
        "type_name": name,
        "schema_version_id": source.version,
        "schema_sha256": source.schema_sha256,
        "schema": source.spec.schema_dict(),
        "activation_commit_id": source.activation_commit_id,
    }


def _record(migration: TypeMigration) -> dict[str, Any]:
    record = {
        "kind": migration.spec.kind,
        "type_name": migration.spec.name,
        "schema_version_id": migration.version,
        "schema_sha256": migration.spec.schema_sha256,
        "schema": migration.spec.schema_dict(),
    }
    if migration.rename is not None:
        record["renamed_from"] = migration.rename[1]
    return record
