"""The files that a run merges, within reach, each checked against its hash.

Small ones are decoded at once, from what was hashed; larger ones that are remote are copied to a
scratch folder, a bounded number of bytes at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.config import KIB, MIB
from storage_engine.errors import IntegrityError
from storage_engine.model.columns import SYSTEM_FIELD_IDS
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore

CURRENT, SUPERSEDED = "current", "superseded"

# What compaction merges is of one type and version. (Not where another program says otherwise.)
_SAME = frozenset({"entity_type", "relation_type", "schema_version_id"})
_MANY_ROWS = 50_000
_IN_FLIGHT = 64 * MIB
_SMALL = 128 * KIB
_HELD = 8 * MIB  # of small files together: decoded they are several times as large
_HASH_CHUNK = 1 << 20
_READ_BUFFER = 256 * KIB  # of a column
_BATCH_ROWS = 256 * KIB


@dataclass(frozen=True, slots=True)
class Input:
    """A file on local disk, or what it has; and the commit of its rows where it does not say it."""

    content: Path | pa.Table
    key: str
    commit_id: int | None
    decoded_bytes: int  # about: a dictionary of few values may hide a lot
    metadata: pq.FileMetaData

    @property
    def rows(self) -> int:
        return int(self.metadata.num_rows)

    def batches(self, schema: pa.Schema, batch_bytes: int) -> Iterator[pa.RecordBatch]:
        """Its rows in these columns (`commit_id` may be one of them), of about so many bytes or
        less at a time."""
        stored = [name for name in schema.names if name != "commit_id" or self.commit_id is None]
        if isinstance(self.content, pa.Table):
            for batch in self.content.select(stored).to_batches():
                yield self._whole(batch, schema)
            return
        rows = batch_bytes * self.rows // max(1, self.decoded_bytes)
        with pq.ParquetFile(self.content, buffer_size=_READ_BUFFER) as opened:
            for batch in opened.iter_batches(max(1, min(rows, _BATCH_ROWS)), columns=stored):
                yield self._whole(batch, schema)

    def _whole(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        columns = batch.columns
        if self.commit_id is not None and "commit_id" in schema.names:
            given = pa.repeat(pa.scalar(self.commit_id, pa.int64()), batch.num_rows)
            columns.insert(schema.get_field_index("commit_id"), given)
        return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class Inputs:
    """All files of a run, from older to newer rows of each identity."""

    files: tuple[Input, ...]
    schema: pa.Schema  # with commit_id: of what is written

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Columns that have the same value in all rows, by what the files say of themselves. Of few
        rows it is not worth knowing."""
        if sum(file.rows for file in self.files) < _MANY_ROWS:
            return {}
        filled = [_constants(file.metadata) for file in self.files if file.rows]
        first = filled[0] if filled else {}
        return {
            name: value
            for name, value in first.items()
            if all(constants.get(name) == value for constants in filled)
        }

    @cached_property
    def varying(self) -> pa.Schema:
        """The other columns: what is to be read and sorted."""
        return pa.schema([field for field in self.schema if field.name not in self.constants])


def open_inputs(store: ObjectStore, entries: Sequence[Entry], folder: Path) -> Inputs:
    """Bring the files of these entries within reach. Raises IntegrityError when one is missing,
    has other content than the log says, or other columns than the rest."""
    files = [(entry, file) for entry in entries for file in _oldest_first(entry)]
    numbered = [(number, entry, file) for number, (entry, file) in enumerate(files)]
    held: set[int] = set()
    room = _HELD
    for number, (_, file) in enumerate(files):
        if file.bytes <= min(_SMALL, room):
            held.add(number)
            room -= file.bytes

    def bring(item: tuple[int, Entry, CommitFile]) -> tuple[Input, pa.Schema]:
        number, entry, file = item
        scratch = None if number in held else folder / f"in-{number:06d}.parquet"
        source = _reachable(store, file, scratch)
        given = entry.max_commit_id if file.commit_id_source != "column" else None
        return read_input(source, file.path, given)

    inputs: list[tuple[Input, pa.Schema]] = []
    for wave in _waves(numbered):
        if store.local_path(wave[0][2].path) is not None:
            inputs += map(bring, wave)  # nothing to wait for: threads would only change places
        else:
            inputs += store.parallel.map(bring, wave)
    return Inputs(tuple(file for file, _ in inputs), _common_schema(inputs))


def _oldest_first(entry: Entry) -> list[CommitFile]:
    """What is superseded in a snapshot is older than what is current."""
    return sorted(entry.files, key=lambda file: file.role == CURRENT)


def read_input(source: Path | bytes, key: str, commit_id: int | None) -> tuple[Input, pa.Schema]:
    try:
        with pq.ParquetFile(
            source if isinstance(source, Path) else pa.BufferReader(source)
        ) as opened:
            metadata = opened.metadata
            groups = range(metadata.num_row_groups)
            encoded = sum(metadata.row_group(number).total_byte_size for number in groups)
            made = Input(
                source if isinstance(source, Path) else opened.read(use_threads=False),
                key,
                commit_id,
                max(encoded, 8 * metadata.num_rows * metadata.num_columns),
                metadata,
            )
            return made, _with_commit(opened.schema_arrow, commit_id)
    except pa.ArrowInvalid as error:
        raise IntegrityError(f"{key} is no Parquet file: {error}", key=key) from error


def _constants(metadata: pq.FileMetaData) -> dict[str, Any]:
    schema = metadata.schema
    places = {schema.column(i).name: i for i in range(len(schema))}
    constants: dict[str, Any] = {}
    for name in _SAME & places.keys():
        groups = (metadata.row_group(n) for n in range(metadata.num_row_groups))
        stats = [group.column(places[name]).statistics for group in groups]
        if stats and all(s is not None and s.has_min_max and s.null_count == 0 for s in stats):
            values = {value for s in stats for value in (s.min, s.max)}
            if len(values) == 1:
                constants[name] = values.pop()
    return constants


def _waves(
    files: Sequence[tuple[int, Entry, CommitFile]],
) -> Iterator[list[tuple[int, Entry, CommitFile]]]:
    """Files that may be in memory together."""
    wave: list[tuple[int, Entry, CommitFile]] = []
    held = 0
    for item in files:
        if wave and held + item[2].bytes > _IN_FLIGHT:
            yield wave
            wave, held = [], 0
        wave.append(item)
        held += item[2].bytes
    if wave:
        yield wave


def _reachable(store: ObjectStore, file: CommitFile, scratch: Path | None) -> Path | bytes:
    """On disk, at `scratch` where it is not on a local one; in memory when there is none."""
    local = store.local_path(file.path)
    if local is not None:
        if not local.exists():
            raise _missing(store, file)
        if scratch is not None:
            _check(file, _hash_of(local))
            return local
        data = local.read_bytes()
    else:
        try:
            data = store.get(file.path).data
        except ObjectNotFound:
            raise _missing(store, file) from None
    _check(file, hashlib.sha256(data).hexdigest())
    if scratch is None:
        return data
    scratch.write_bytes(data)
    return scratch


def _missing(store: ObjectStore, file: CommitFile) -> IntegrityError:
    return IntegrityError(
        f"{file.path} is named by the log but missing from {store.uri}", key=file.path
    )


def _check(file: CommitFile, digest: str) -> None:
    if file.content_sha256 and file.content_sha256 != digest:
        raise IntegrityError(
            f"{file.path} has other content than its commit wrote; it is not compacted, so that "
            "the damage stays visible",
            key=file.path,
        )


def _hash_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _common_schema(files: Sequence[tuple[Input, pa.Schema]]) -> pa.Schema:
    """Files of one schema version have the same columns, in the same order, with the same ids."""
    first, common = files[0]
    for file, schema in files:
        if not schema.equals(common):
            raise IntegrityError(
                f"{file.key} has other columns than {first.key}, of the same schema version",
                key=file.key,
            )
    return common


def _with_commit(schema: pa.Schema, commit_id: int | None) -> pa.Schema:
    if commit_id is not None:
        field_id = str(SYSTEM_FIELD_IDS["commit_id"]).encode()
        given = pa.field(
            "commit_id", pa.int64(), nullable=False, metadata={b"PARQUET:field_id": field_id}
        )
        schema = schema.insert(0, given)
    return schema.remove_metadata()
