"""The files that a run merges, where DuckDB can open them, each checked against its hash.

Remote files are copied to a scratch folder, a bounded number of bytes at a time: a merge reads
each of them more than once, and what was hashed is then what is merged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.config import MIB
from storage_engine.errors import IntegrityError
from storage_engine.model.columns import SYSTEM_FIELD_IDS
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.repository.duck import literal, quoted
from storage_engine.repository.object.read.files import parquet

_IN_FLIGHT = 64 * MIB
_GLOB = re.compile(r"[*?\[]")  # DuckDB would take such a path for a pattern
_HASH_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Input:
    """A local file, and the commit of its rows where the file does not say it."""

    path: str
    key: str
    commit_id: int | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """All files of a run as one relation."""

    files: tuple[Input, ...]
    schema: pa.Schema  # with commit_id: of what is written

    @property
    def names(self) -> list[str]:
        return list(self.schema.names)

    def sql(self) -> str:
        """A query for all rows, in the columns of `schema`."""
        own = [file.path for file in self.files if file.commit_id is None]
        given = [(file.path, file.commit_id) for file in self.files if file.commit_id is not None]
        columns = [quoted(name) for name in self.schema.names]
        parts = []
        if own:
            parts.append(f"SELECT {', '.join(columns)} FROM {parquet(own)}")
        if given:
            values = ", ".join(f"({literal(path)}, {commit}::BIGINT)" for path, commit in given)
            prefixed = ", ".join(f"m.{c}" if c == '"commit_id"' else f"f.{c}" for c in columns)
            scan = parquet([path for path, _ in given], "filename = true")
            parts.append(
                f"SELECT {prefixed} FROM {scan} f "
                f"JOIN (VALUES {values}) m(filename, commit_id) USING (filename)"
            )
        return " UNION ALL ".join(parts)


def open_inputs(store: ObjectStore, entries: Sequence[Entry], folder: Path) -> Inputs:
    """Bring the files of these entries within reach. Raises IntegrityError when one is missing,
    has other content than the log says, or other columns than the rest."""
    numbered = [
        (number, entry, file)
        for number, (entry, file) in enumerate((e, f) for e in entries for f in e.files)
    ]

    def bring(item: tuple[int, Entry, CommitFile]) -> Input:
        number, entry, file = item
        path = _reachable(store, file, folder / f"in-{number:06d}.parquet")
        given = entry.max_commit_id if file.commit_id_source != "column" else None
        return Input(str(path), file.path, given)

    inputs: list[Input] = []
    for wave in _waves(numbered):
        inputs += store.parallel.map(bring, wave)
    return Inputs(tuple(inputs), _common_schema(inputs))


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


def _reachable(store: ObjectStore, file: CommitFile, scratch: Path) -> Path:
    local = store.local_path(file.path)
    if local is not None:
        if not local.exists():
            raise _missing(store, file)
        _check(file, _hash_of(local))
        if _GLOB.search(str(local)):
            scratch.symlink_to(local)
            return scratch
        return local
    try:
        data = store.get(file.path).data
    except ObjectNotFound:
        raise _missing(store, file) from None
    _check(file, hashlib.sha256(data).hexdigest())
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


def _common_schema(files: Sequence[Input]) -> pa.Schema:
    """Files of one schema version have the same columns, in the same order, with the same ids."""
    first: pa.Schema | None = None
    for file in files:
        schema = _whole(pq.read_schema(file.path), file)
        if first is None:
            first = schema
        elif not schema.equals(first):
            raise IntegrityError(
                f"{file.key} has other columns than {files[0].key}, of the same schema version",
                key=file.key,
            )
    assert first is not None
    return first


def _whole(schema: pa.Schema, file: Input) -> pa.Schema:
    if file.commit_id is not None:
        field_id = str(SYSTEM_FIELD_IDS["commit_id"]).encode()
        commit_id = pa.field(
            "commit_id", pa.int64(), nullable=False, metadata={b"PARQUET:field_id": field_id}
        )
        schema = schema.insert(0, commit_id)
    return schema.remove_metadata()
