"""Takes over commits of another storage: their rows as files of this one's engine, their records
as manifests (`commitlog.replay`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import CommitFile, TypeRef, timestamp
from storage_engine.commitlog.replay import ActivatedVersion, ReplayedCommit
from storage_engine.commitlog.series import Upload
from storage_engine.model.columns import EngineVersion, row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.history import (
    AdoptedRows,
    RecordedChange,
    RecordedCommit,
    registrations,
)
from storage_engine.repository.object.write.parquet import (
    EncodedPart,
    encode_bytes,
    encode_file,
    scratch_folder,
    stored_table,
)

Place = tuple[int, TypeRef]  # a type in a commit


@dataclass(slots=True)
class _FilesOfType:
    """The files of one type in one commit. More than a part's worth of rows goes to disk."""

    spec: TypeSpec
    schema_version_id: int
    commit_id: int
    engine_version: EngineVersion
    part_bytes: int
    folder: Path
    done: list[EncodedPart] = field(default_factory=list)
    _held: list[pa.Table] = field(default_factory=list)
    _held_bytes: int = 0

    def add(self, rows: pa.Table) -> None:
        step = max(1, rows.num_rows * self.part_bytes // max(rows.nbytes, 1))
        for start in range(0, rows.num_rows, step):
            self._hold(rows.slice(start, step))

    def _hold(self, rows: pa.Table) -> None:
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= self.part_bytes:
            name = f"{self.commit_id}-{self.spec.kind}-{self.spec.name}-{len(self.done)}.parquet"
            self.done.append(encode_file(self.spec, self._table(), self.folder / name))

    def end(self) -> list[EncodedPart]:
        if self._held or not self.done:
            self.done.append(encode_bytes(self.spec, self._table()))
        return self.done

    def _table(self) -> pa.Table:
        schema = row_schema(self.spec)
        rows = pa.concat_tables([schema.empty_table(), *(t.cast(schema) for t in self._held)])
        self._held, self._held_bytes = [], 0
        return stored_table(
            self.spec,
            rows,
            engine_version=self.engine_version,
            schema_version_id=self.schema_version_id,
            commit_id=self.commit_id,
        )


class Adoption:
    """Commits with their files, ready to be published. Files on disk go when it is left."""

    def __init__(self, *, engine_version: EngineVersion, part_bytes: int) -> None:
        self._engine_version = engine_version
        self._part_bytes = part_bytes
        self._scratch = scratch_folder("ontologia-copy-")

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def prepare(
        self, commits: Sequence[RecordedCommit], rows: Sequence[AdoptedRows]
    ) -> list[ReplayedCommit]:
        """IntegrityError when the rows are not those that the commits say."""
        attempts = {commit.id: layout.new_commit_attempt() for commit in commits}
        changes = {(c.id, change.ref): change for c in commits for change in c.changes}
        placed: dict[Place, list[tuple[CommitFile, Upload]]] = {}
        for given in rows:
            for commit_id, parts in self._encoded(given, changes):
                place = commit_id, given.spec.ref
                change = changes[place]
                placed[place] = self._place(given, attempts[commit_id], commit_id, parts, change)
        for place, change in changes.items():
            if place not in placed:
                change.check(place[0], 0)
        return [self._replayed(commit, attempts[commit.id], placed) for commit in commits]

    def _encoded(
        self, given: AdoptedRows, changes: Mapping[Place, RecordedChange]
    ) -> Iterator[tuple[int, list[EncodedPart]]]:
        parts: _FilesOfType | None = None
        seen: set[int] = set()
        for commit_id, piece in given.by_commit():
            if parts is None or parts.commit_id != commit_id:
                if parts is not None:
                    yield parts.commit_id, parts.end()
                if (commit_id, given.spec.ref) not in changes:
                    nothing = RecordedChange(*given.spec.ref, given.schema_version_id, rows=0)
                    nothing.check(commit_id, piece.num_rows)
                parts = self._parts(given, commit_id)
                seen.add(commit_id)
            parts.add(piece)
        if parts is not None:
            yield parts.commit_id, parts.end()
        for (commit_id, ref), change in changes.items():
            left_out = ref == given.spec.ref and commit_id not in seen
            if (
                left_out
                and (change.purged or not change.rows)
                and change.schema_version_id == given.schema_version_id
            ):
                yield commit_id, self._parts(given, commit_id).end()

    def _parts(self, given: AdoptedRows, commit_id: int) -> _FilesOfType:
        return _FilesOfType(
            given.spec,
            given.schema_version_id,
            commit_id,
            self._engine_version,
            self._part_bytes,
            self._scratch,
        )

    def _place(
        self,
        given: AdoptedRows,
        attempt: str,
        commit_id: int,
        parts: Sequence[EncodedPart],
        change: RecordedChange,
    ) -> list[tuple[CommitFile, Upload]]:
        spec, version = given.spec, given.schema_version_id
        change.check(commit_id, sum(part.rows for part in parts))
        left = change.inserted or 0
        placed = []
        for number, part in enumerate(parts):
            key = layout.data_file(
                layout.attempt_prefix(commit_id, attempt),
                spec.kind,
                spec.name,
                self._engine_version,
                version,
                number if len(parts) > 1 else None,
            )
            inserted = min(left, part.rows)
            left -= inserted
            file = part.describe(
                spec,
                key,
                schema_version_id=version,
                part=number if len(parts) > 1 else None,
                inserted=inserted,
            )
            if change.inserted is None:
                file = replace(file, inserted=None, updated=None)
            placed.append((file, Upload(key, part.content)))
        return placed

    def _replayed(
        self,
        commit: RecordedCommit,
        attempt: str,
        placed: Mapping[Place, Sequence[tuple[CommitFile, Upload]]],
    ) -> ReplayedCommit:
        files = [item for change in commit.changes for item in placed[commit.id, change.ref]]
        unit = commit.idempotency
        return ReplayedCommit(
            commit_id=commit.id,
            attempt=attempt,
            created_at=timestamp(commit.created_at),
            runtime_id=commit.runtime_id,
            kind=commit.kind,
            metadata=commit.metadata,
            files=[file for file, _ in files],
            uploads=[upload for _, upload in files],
            versions=_activated(commit),
            schema=commit.schema,
            idempotency={"app_id": unit.app_id, "version": unit.version} if unit else None,
            marks=commit.marks,
            merged_marks=commit.merged_marks,
        )


def _activated(commit: RecordedCommit) -> dict[TypeRef, ActivatedVersion]:
    """The schema versions that begin with a commit."""
    versions: dict[TypeRef, ActivatedVersion] = {}
    for record in registrations(commit):
        spec = TypeSpec.from_schema_dict(record["schema"])
        versions[spec.ref] = ActivatedVersion(
            record["schema_version_id"],
            record.get("schema_sha256") or spec.schema_sha256,
            spec.layout_sha256,
        )
    return versions
