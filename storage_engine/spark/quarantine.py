"""The side table of rows that were not written: the row as JSON text, why, and by which job.

Files are Parquet with one schema, whatever the type, so that the side table can be read as one.
They are complete before anything is published.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.config import OntologiaConfig
from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStoreError

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        pa.field("type_name", pa.string(), nullable=False),
        pa.field("row", pa.string(), nullable=False),
        pa.field("reasons", pa.list_(pa.string()), nullable=False),
        pa.field("attempt", pa.string(), nullable=False),
        pa.field("base_commit_id", pa.int64(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("job", pa.map_(pa.string(), pa.string()), nullable=False),
    ]
)


@dataclass(frozen=True)
class Quarantine:
    """Where bad rows go, and what is said of the job with each of them."""

    uri: str  # of a store
    prefix: str  # of keys in it, "" or ending in "/"
    type_name: str
    attempt: str
    base_commit_id: int
    started_at: str
    job: tuple[tuple[str, str], ...] = ()

    def key(self, label: str) -> str:
        return f"{self.prefix}{self.attempt}-{label}.parquet"


class QuarantineFile:
    """The bad rows of one task."""

    def __init__(
        self, quarantine: Quarantine, config: OntologiaConfig, label: str, folder: Path
    ) -> None:
        self._quarantine = quarantine
        self._config = config
        self._key = quarantine.key(label)
        self._path = folder / "quarantine.parquet"
        self._writer = pq.ParquetWriter(self._path, SCHEMA, compression="zstd")

    def write(self, rows: Sequence[str], reasons: Sequence[Sequence[str]]) -> None:
        facts = self._quarantine
        count = len(rows)
        table = pa.Table.from_arrays(
            [
                pa.repeat(facts.type_name, count),
                pa.array(rows, pa.string()),
                pa.array(reasons, pa.list_(pa.string())),
                pa.repeat(facts.attempt, count),
                pa.repeat(pa.scalar(facts.base_commit_id, pa.int64()), count),
                pa.array([facts.started_at] * count).cast(SCHEMA.field("started_at").type),
                pa.array([list(facts.job)] * count, SCHEMA.field("job").type),
            ],
            schema=SCHEMA,
        )
        self._writer.write_table(table)

    def close(self) -> str:
        """Upload; returns the key."""
        self._writer.close()
        store = open_store(self._quarantine.uri, self._config)
        try:
            store.put_file(self._key, self._path)
        finally:
            store.close()
        return self._key


def tidy(quarantine: Quarantine, config: OntologiaConfig, kept: Iterable[str]) -> None:
    """Delete what this write has set aside, except `kept`: task attempts that failed leave files
    too, and a write that fails has set nothing aside."""
    store = open_store(quarantine.uri, config)
    try:
        wanted = set(kept)
        keys = [info.key for info in store.list(quarantine.key("").removesuffix(".parquet"))]
        doomed = [key for key in keys if key not in wanted]
        if doomed:
            store.delete_many(doomed)
    except (ObjectStoreError, StorageBackendError) as error:
        log.warning("leftovers stay in the side table %s: %s", quarantine.uri, error)
    finally:
        store.close()
