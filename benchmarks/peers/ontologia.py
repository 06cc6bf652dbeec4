"""Ontologia, under the same rules as its peers: `ensure` a batch, `commit`, query the latest.

Its cache of immutable files is empty at each opening, as on a machine that never saw the storage,
unless the place names one to keep.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from benchmarks.peers.content import Place
from storage_engine import Entity, Field, OntologiaConfig, Session, initialize_storage
from tests.servers import REGION


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    tier: Field[str]
    age: Field[int]
    score: Field[float]


def config(place: Place, cache: Path) -> OntologiaConfig:
    return OntologiaConfig(s3_endpoint_url=place.endpoint, s3_region=REGION, cache_dir=cache)


def fill(place: Place, batches: Iterable[pa.Table]) -> None:
    settings = config(place, place.folder / "writer")
    initialize_storage(place.uri, config=settings)
    with Session(place.uri, entity_types=[Customer], config=settings) as session:
        for batch in batches:
            session.ensure(Customer(**row) for row in batch.to_pylist())
            session.commit()


@contextmanager
def open_latest(place: Place) -> Iterator[Callable[[str], pa.Table]]:
    with tempfile.TemporaryDirectory() as empty:
        settings = config(place, place.kept_cache or Path(empty))
        with Session(place.uri, entity_types=[Customer], config=settings) as session:
            yield (
                lambda tier: (
                    session.query().entities(Customer).where(Customer.tier == tier).to_arrow()
                )
            )
