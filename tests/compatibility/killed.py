"""Processes that are killed in the middle of their work, for what they leave behind.

As a module of handlers for `onto events run` it is a worker that dies while it handles a parcel;
`python -m tests.compatibility.killed FOLDER` is a bulk load that dies when its first part is up.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from storage_engine import OntologiaConfig, Session
from tests.compatibility.shop import Staff, Unwritten

PART_BYTES = 64 * 1024
_PATIENCE_S = 240
_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


[send_parcel] = Staff(on_parcel=die).handlers(only=["shop/send parcel"])


def _batches(folder: Path) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([["lost"], ["lost " * PART_BYTES]], schema=_SCHEMA)
    deadline = time.monotonic() + _PATIENCE_S
    while not any(folder.glob("staged/*/entities/Unwritten/*/*.parquet")):
        if time.monotonic() > deadline:
            raise TimeoutError("no part was staged")
        time.sleep(0.01)
    die()


def main() -> None:
    folder = Path(sys.argv[1])
    config = OntologiaConfig(runtime_id="killed", target_part_bytes=PART_BYTES)
    with Session(folder, config=config) as session:
        reader = pa.RecordBatchReader.from_batches(_SCHEMA, _batches(folder))
        session.ingest(Unwritten, reader)
        session.commit()


if __name__ == "__main__":
    main()
