"""Small commits: 10,000 objects at once, and 20 objects on a type that has 100,000 rows."""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarks.harness import Report, measure, seaweedfs, sized, timed
from storage_engine import Entity, Field, OntologiaConfig, Session, initialize_storage
from tests.servers import REGION

STORED = sized(100_000, 2_000)
BATCH = sized(10_000, 500)
SMALL = 20
RUNS = sized(5, 1)


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    tier: Field[str] = Field(default="Standard")
    age: Field[int]
    tags: Field[list[str]] = Field(default_factory=list)


def run() -> Report:
    report = Report("commits")
    with tempfile.TemporaryDirectory() as folder, seaweedfs() as (server, bucket):
        for place, uri, endpoint in (
            ("directory", f"{folder}/onto", None),
            ("seaweedfs", f"s3://{bucket}/onto", server.endpoint),
        ):
            initialize_storage(uri, config=config(endpoint))
            report.steps += [
                measure(f"ensure {BATCH:,} objects, {place}", ensure_batch, uri, endpoint),
                measure(f"ingest to {STORED:,} rows, {place}", fill, uri, endpoint),
                measure(
                    f"ensure {SMALL} of {STORED:,}, new session, {place}",
                    ensure_small,
                    uri,
                    endpoint,
                    0,
                ),
                measure(
                    f"ensure {SMALL} of {STORED:,}, warm session, {place}",
                    ensure_small,
                    uri,
                    endpoint,
                    RUNS,
                ),
            ]
    return report


def config(endpoint: str | None) -> OntologiaConfig:
    return OntologiaConfig(s3_endpoint_url=endpoint, s3_region=REGION)


def customer(number: int, age: int) -> Customer:
    return Customer(id=f"c{number:07d}", name=f"Name {number}", age=age, tags=["a", "b"])


def ensure_batch(uri: str, endpoint: str | None) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    objects = [customer(number, 1) for number in range(BATCH)]
    with Session(uri, config=config(endpoint)) as session:
        with timed(outcome):
            session.ensure(objects)
            assert session.commit() is not None
            session.flush()
        outcome["requests"] = session.storage_info()["requests"]["total"]
    return outcome


def fill(uri: str, endpoint: str | None) -> dict[str, Any]:
    import pyarrow as pa

    numbers = range(STORED)
    table = pa.table(
        {
            "id": [f"c{n:07d}" for n in numbers],
            "name": [f"Name {n}" for n in numbers],
            "tier": ["Standard"] * STORED,
            "age": [1] * STORED,
            "tags": [["a", "b"]] * STORED,
        }
    )
    outcome: dict[str, Any] = {}
    with Session(uri, config=config(endpoint)) as session, timed(outcome):
        session.ingest(Customer, table)
        assert session.commit() is not None
        session.flush()
    return outcome


def ensure_small(uri: str, endpoint: str | None, before: int) -> dict[str, Any]:
    """`before` commits of the same session come first; the last one is measured."""
    import random
    import time

    age = time.time_ns() % 1_000_000_000
    outcome: dict[str, Any] = {}
    with Session(uri, config=config(endpoint)) as session:
        for turn in range(before + 1):
            chosen = random.sample(range(STORED), SMALL)
            session.ensure(customer(number, age + turn) for number in chosen)
            requests = session.storage_info()["requests"]["total"]
            with timed(outcome):
                assert session.commit() is not None
            session.flush()
            outcome["requests"] = session.storage_info()["requests"]["total"] - requests - 1
    return outcome
