"""delta-rs: MERGE on the key, checkpoints as it writes them by itself (every 100 commits).

Read with `scan` (its own engine, DataFusion), refreshed with `update_incremental`. QueryBuilder
takes the same time; `to_pyarrow_dataset` of 1.6.6 cannot compare strings with pyarrow 26.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
from deltalake import DeltaTable

from benchmarks.peers.content import SCHEMA, Place
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY


def options(place: Place) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": place.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "aws_conditional_put": "etag",
    }


def fill(place: Place, batches: Iterable[pa.Table]) -> None:
    table = DeltaTable.create(place.uri, SCHEMA, storage_options=options(place))
    for batch in batches:
        (
            table.merge(batch, "t.id = s.id", source_alias="s", target_alias="t")
            .when_matched_update_all()
            .when_not_matched_insert_all()
            .execute()
        )


@contextmanager
def open_latest(place: Place) -> Iterator[Callable[[str], pa.Table]]:
    table = DeltaTable(place.uri, storage_options=options(place))
    fresh = True

    def read(tier: str) -> pa.Table:
        nonlocal fresh
        if not fresh:
            table.update_incremental()
        fresh = False
        return pa.table(table.scan(predicate=f"tier = '{tier}'"))

    yield read
