"""Rows that were made for a new schema version, before they are part of a commit.

Engine v2 stages them as parts; v1, which has no staging, keeps them in local files and uploads
them under the lock, with the commit id and the payloads that its files have.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.commitlog.series import Upload
from storage_engine.commitlog.swap import Base
from storage_engine.config import OntologiaConfig
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.repository.object.read.latest import Versions
from storage_engine.repository.object.write.bulk import encode_part
from storage_engine.repository.object.write.parquet import (
    encode_file,
    scratch_folder,
    stored_table,
)
from storage_engine.repository.object.write.staged_conflicts import overtaken, without
from storage_engine.repository.object.write.staged_write import PartFolder, Staging
from storage_engine.schema.migration import TypeMigration


class RewrittenRows(Protocol):
    """Of one type, each identity once."""

    @property
    def count(self) -> int: ...

    def add(self, rows: pa.Table) -> None:
        """Take in rows of other identities (in the row schema), of about a part's size. Safe to
        call from several threads."""

    def overtaken(self, fresh: Sequence[Entry], *, since: int) -> int:
        """Leave out the identities that these entries have a row of beyond a commit; how many."""

    def placed(self, base: Base) -> Iterator[tuple[CommitFile, Upload | None]]:
        """The files for a commit, with what is still to be uploaded."""

    def close(self) -> None: ...


def _identities(spec: TypeSpec) -> TypeSpec:
    """The type as far as rows of all its versions are alike."""
    return TypeSpec(spec.kind, spec.name, ())


class StagedRows:
    """In the store, under the attempt of a `Staging`."""

    def __init__(self, versions: Versions, staging: Staging, migration: TypeMigration) -> None:
        self._versions = versions
        self._staging = staging
        self._spec = migration.spec
        self._version = migration.version
        self._files: list[CommitFile] = []
        self._mutex = threading.Lock()

    @property
    def count(self) -> int:
        return sum(file.row_count for file in self._files)

    def add(self, rows: pa.Table) -> None:
        with tempfile.TemporaryDirectory(prefix="ontologia-migrate-") as folder:
            part = encode_part(
                self._spec,
                rows,
                Path(folder) / "part.parquet",
                schema_version_id=self._version,
                inserted=0,
            )
            file = self._staging.stage(self._spec, part)
        with self._mutex:
            self._files.append(file)

    def folder(self, uri: str, config: OntologiaConfig) -> PartFolder:
        """Where others stage parts, for `add_described`."""
        spec = replace(self._spec, python_class=None)
        return PartFolder(uri, config, self._staging.attempt, spec, self._version)

    def add_described(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """Take in what others have staged in `folder`."""
        self._files += [CommitFile.parse(dict(part)) for part in parts]

    def overtaken(self, fresh: Sequence[Entry], *, since: int) -> int:
        bare = _identities(self._spec)
        newer = overtaken(self._versions, bare, self._files, fresh, since=since, order_by=None)
        if not newer:
            return 0
        before = self.count
        files = list(self._files)
        for number in newer.parts():
            lost = newer.losing(number)
            if lost.num_rows == files[number].row_count:
                files[number] = replace(files[number], row_count=0)
                continue
            with without(self._versions, self._spec, files[number], lost) as part:
                files[number] = self._staging.stage(self._spec, part)
        self._files = [file for file in files if file.row_count]
        return before - self.count

    def placed(self, base: Base) -> Iterator[tuple[CommitFile, Upload | None]]:
        return ((replace(f, part=number), None) for number, f in enumerate(self._files))

    def close(self) -> None:
        """What was staged and not published is the staging's to withdraw."""


class LocalRows:
    """In files of this machine."""

    def __init__(self, versions: Versions, migration: TypeMigration) -> None:
        self._versions = versions
        self._spec = migration.spec
        self._version = migration.version
        self._folder = scratch_folder("ontologia-migrate-")
        self._numbers = itertools.count()
        self._parts: list[tuple[Path, int]] = []  # with their rows
        self._mutex = threading.Lock()

    @property
    def count(self) -> int:
        return sum(rows for _, rows in self._parts)

    def add(self, rows: pa.Table) -> None:
        with self._mutex:
            path = self._folder / f"{next(self._numbers):06d}.parquet"
        pq.write_table(rows, path, compression="zstd", compression_level=1)
        with self._mutex:
            self._parts.append((path, rows.num_rows))

    def overtaken(self, fresh: Sequence[Entry], *, since: int) -> int:
        keys = ", ".join(quoted(name) for name in self._spec.identity)
        with self._versions.scan(_identities(self._spec), fresh) as cursor:
            gone = cursor.execute(
                f"SELECT DISTINCT {keys} FROM versions WHERE commit_id > ?", [since]
            ).to_arrow_table()
        before = self.count
        schema = row_schema(self._spec)
        for number, (path, _) in enumerate(self._parts):
            rows = pq.read_table(path).cast(schema)
            kept = rows.join(gone, list(self._spec.identity), join_type="left anti")
            if kept.num_rows < rows.num_rows:
                pq.write_table(kept.select(schema.names).cast(schema), path, compression="zstd")
                self._parts[number] = path, kept.num_rows
        return before - self.count

    def placed(self, base: Base) -> Iterator[tuple[CommitFile, Upload | None]]:
        parts = [path for path, rows in self._parts if rows]
        prefix = layout.attempt_prefix(base.commit_id, base.attempt)
        for number, path in enumerate(parts):
            rows = pq.read_table(path).cast(row_schema(self._spec))
            table = stored_table(
                self._spec,
                rows,
                engine_version="v1",
                schema_version_id=self._version,
                commit_id=base.commit_id,
            )
            encoded = encode_file(
                self._spec, table, self._folder / f"{base.attempt}-{number}.parquet"
            )
            position = number if len(parts) > 1 else None
            key = layout.data_file(
                prefix, self._spec.kind, self._spec.name, "v1", self._version, position
            )
            file = encoded.describe(
                self._spec, key, schema_version_id=self._version, part=position, inserted=0
            )
            yield file, Upload(key, encoded.content)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
