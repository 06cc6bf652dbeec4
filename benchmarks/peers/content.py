"""The rows that every store gets, and how it is told that it gave the right ones back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

SEED = 20_261_116
TIERS = ("Bronze", "Silver", "Gold", "Standard", "Trial")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("tier", pa.string()),
        pa.field("age", pa.int64()),
        pa.field("score", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Place:
    """Where a store is kept. The folder is local: for catalogs that are a database.

    `kept_cache`: where the reader keeps local copies, if another may have left some.
    `postgres`: how to connect to one, for a catalog that may be there.
    """

    endpoint: str
    bucket: str
    prefix: str
    folder: Path
    kept_cache: Path | None = None
    postgres: str | None = None

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def host(self) -> str:
        return self.endpoint.removeprefix("http://")


def history(commits: int, rows: int) -> Iterator[pa.Table]:
    """One batch a commit. After the first, half of its rows are new and half change old ones."""
    chance = random.Random(SEED)
    known = 0
    for commit in range(commits):
        changed = chance.sample(range(known), rows // 2) if known else []
        new = range(known, known + rows - len(changed))
        known += len(new)
        yield pa.Table.from_pylist(
            [
                {
                    "id": f"c{number:07d}",
                    "name": f"Customer {number}",
                    "tier": chance.choice(TIERS),
                    "age": commit,  # so that a change always changes something
                    "score": chance.random(),
                }
                for number in sorted([*changed, *new])
            ],
            schema=SCHEMA,
        )


def latest(commits: int, rows: int, tier: str) -> pa.Table:
    """What is right, worked out by no store at all."""
    state = {row["id"]: row for batch in history(commits, rows) for row in batch.to_pylist()}
    wanted = [row for row in state.values() if row["tier"] == tier]
    return pa.Table.from_pylist(wanted, schema=SCHEMA)


def fingerprint(table: pa.Table, columns: list[str] | None = None) -> str:
    """The number of rows and a hash of them that knows no order."""
    chosen = table.select(columns or SCHEMA.names)
    digests = sorted(
        repr(row) for row in zip(*(c.to_pylist() for c in chosen.columns), strict=True)
    )
    return f"{len(digests)}:{hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]}"
