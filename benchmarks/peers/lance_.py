"""Lance: `merge_insert` on the key; read with a filter, refreshed with `checkout_latest`.

(Not lance.py, which would read as the package itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import lance
import pyarrow as pa

from benchmarks.peers.content import SCHEMA, Place
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY


def options(place: Place) -> dict[str, str]:
    return {
        "aws_endpoint": place.endpoint,
        "allow_http": "true",
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
        "aws_region": REGION,
    }


def fill(place: Place, batches: Iterable[pa.Table]) -> None:
    table = lance.write_dataset(SCHEMA.empty_table(), place.uri, storage_options=options(place))
    for batch in batches:
        (
            table.merge_insert("id")
            .when_matched_update_all()
            .when_not_matched_insert_all()
            .execute(batch)
        )


@contextmanager
def open_latest(place: Place) -> Iterator[Callable[[str], pa.Table]]:
    table = lance.dataset(place.uri, storage_options=options(place))
    fresh = True

    def read(tier: str) -> pa.Table:
        nonlocal fresh
        if not fresh:
            table.checkout_latest()  # type: ignore[no-untyped-call]
        fresh = False
        return table.to_table(filter=f"tier = '{tier}'")

    yield read
