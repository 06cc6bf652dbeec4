"""Filtered queries of the latest rows, on the same rows as raw DuckDB and other table formats.

- `large`: 2,000,000 rows in one file on SeaweedFS, beside `read_parquet` of that very file with
  the same columns, filter and DuckDB settings. It shows what the log and the query layer cost.
- `small`: 200 commits of 100 rows behind S3's latency (`latency_proxy`), beside other table
  formats that hold the same history. It shows what a reader waits for.

Every answer is compared with the right one, which no store has computed; another answer voids
the run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401 (imports are nobody's to be measured, and a session's is late)
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.harness import Report, measure, seaweedfs, timed
from benchmarks.ingest import Reading, make_data, onto_ingest
from benchmarks.latency_proxy import LATENCY_MS, Counts, LatencyProxy, latency_proxy
from benchmarks.peers import PEERS, peer
from benchmarks.peers.content import Place, fingerprint, history, latest
from storage_engine import OntologiaConfig, Session
from storage_engine.model import spec_of
from storage_engine.model.arrow import row_schema
from storage_engine.repository.duck import Duck, quoted
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, S3Server

COMMITS = 200
BATCH = 100
TIER = "Gold"
SENSOR = "s7"
RUNS = 5
FIELDS = ["id", "sensor", "value", "n", "ok"]

Read = Callable[[], pa.Table]


def run() -> Report:
    report = Report("queries")
    with tempfile.TemporaryDirectory() as folder, seaweedfs() as (server, bucket):
        large(report, server, bucket, Path(folder))
        small(report, server, bucket, Path(folder), COMMITS)
    return report


# --- one large file -------------------------------------------------------------------------------


def large(report: Report, server: S3Server, bucket: str, folder: Path) -> None:
    source, _, _ = make_data(folder)
    uri = f"s3://{bucket}/large"
    measure("fill", onto_ingest, server.endpoint, uri, source, True)
    listed = server.client().list_objects_v2(Bucket=bucket, Prefix="large/")["Contents"]
    (file,) = (item["Key"] for item in listed if item["Size"] > 1 << 20)
    rows = pq.read_table(source)
    right = fingerprint(rows.filter(pc.equal(rows.column("sensor"), SENSOR)), FIELDS)
    for name, opened in {
        "raw DuckDB": partial(duckdb_large, server.endpoint, f"s3://{bucket}/{file}"),
        "ontologia": partial(onto_large, server.endpoint, uri),
    }.items():
        for state in ("cold", "warm"):
            step = f"large, {state}: {name}"
            report.steps.append(measure(step, timed_read, opened, right, state, None, runs=RUNS))
    for state in ("cold", "warm"):
        ours = report.seconds(f"large, {state}: ontologia")
        raw = report.seconds(f"large, {state}: raw DuckDB")
        report.verdicts[f"large file, {state}, within 1.5x of raw DuckDB"] = f"{ours / raw:.2f}x"


def _config(endpoint: str, cache: str) -> OntologiaConfig:
    return OntologiaConfig(s3_endpoint_url=endpoint, s3_region=REGION, cache_dir=Path(cache))


@contextmanager
def onto_large(endpoint: str, uri: str) -> Iterator[Read]:
    with tempfile.TemporaryDirectory() as cache:
        config = _config(endpoint, cache)
        with Session(uri, entity_types=[Reading], config=config) as session:
            query = session.query().entities(Reading).where(Reading.sensor == SENSOR)
            yield query.to_arrow


@contextmanager
def duckdb_large(endpoint: str, file: str) -> Iterator[Read]:
    """On the connection that a session would open, so that settings are the same."""
    config = _config(endpoint, "unused")
    secret = {
        "KEY_ID": ACCESS_KEY,
        "SECRET": SECRET_KEY,
        "REGION": REGION,
        "ENDPOINT": endpoint.removeprefix("http://"),
        "URL_STYLE": "path",
        "USE_SSL": "false",
    }
    columns = ", ".join(quoted(name) for name in row_schema(spec_of(Reading)).names)
    statement = f"SELECT {columns} FROM read_parquet('{file}') WHERE sensor = '{SENSOR}'"
    duck = Duck(uri=file, memory_limit=config.s3_duckdb_memory_limit, secret=lambda: secret)
    yield lambda: duck.cursor().execute(statement).to_arrow_table()
    duck.close()


# --- many small commits ---------------------------------------------------------------------------


def small(report: Report, server: S3Server, bucket: str, folder: Path, commits: int) -> None:
    right = fingerprint(latest(commits, BATCH, TIER))
    no_latency = dict.fromkeys(LATENCY_MS, 0.0)
    with (
        latency_proxy(server.endpoint, no_latency) as counter,
        latency_proxy(server.endpoint) as slow,
    ):
        for name in PEERS:
            place = Place(counter.endpoint, bucket, name, folder / name)
            place.folder.mkdir()
            report.steps.append(
                measure(
                    f"small, fill, no latency: {name}", timed_fill, name, place, commits, counter
                )
            )
            reader = replace(place, endpoint=slow.endpoint)
            variants = {"cold": ("cold", reader), "warm": ("warm", reader)}
            if name == "ontologia":
                kept = replace(reader, kept_cache=folder / "kept")
                measure("fill the cache", read_small, name, kept, right, "cold", slow)
                variants["new process, files cached"] = ("cold", kept)
            for label, (state, where) in variants.items():
                step = f"small, {label}: {name}"
                report.steps.append(
                    measure(step, read_small, name, where, right, state, slow, runs=RUNS)
                )
    for state in ("cold", "warm"):
        ours = report.seconds(f"small, {state}: ontologia")
        report.verdicts[f"small commits, {state}, of the time of"] = ", ".join(
            f"{name} {ours / report.seconds(f'small, {state}: {name}'):.2f}x"
            for name in PEERS
            if name != "ontologia"
        )


def timed_fill(name: str, place: Place, commits: int, proxy: LatencyProxy) -> dict[str, Any]:
    batches = list(history(commits, BATCH))
    store = peer(name)
    outcome: dict[str, Any] = {}
    proxy.reset()
    with timed(outcome):
        store.fill(place, batches)
    return outcome | _facts(proxy.counts())


def read_small(
    name: str, place: Place, right: str, state: str, proxy: LatencyProxy
) -> dict[str, Any]:
    store = peer(name)  # imported here, before time is taken

    @contextmanager
    def opened() -> Iterator[Read]:
        with store.open_latest(place) as read:
            yield partial(read, TIER)

    return timed_read(opened, right, state, proxy)


# --- both -----------------------------------------------------------------------------------------


def timed_read(
    opened: Callable[[], AbstractContextManager[Read]],
    right: str,
    state: str,
    proxy: LatencyProxy | None = None,
) -> dict[str, Any]:
    """Cold: open and read. Warm: read again, the median of some."""
    seconds = []
    if proxy is not None:
        proxy.reset()
    started = time.perf_counter()
    with opened() as read:
        rows = read()
        seconds.append(time.perf_counter() - started)
        _check(rows, right)
        if state == "warm":
            seconds = []
            for _ in range(RUNS):
                if proxy is not None:
                    proxy.reset()
                started = time.perf_counter()
                rows = read()
                seconds.append(time.perf_counter() - started)
                _check(rows, right)
        facts = _facts(proxy.counts()) if proxy is not None else {}
    return {"seconds": statistics.median(seconds), "rows": rows.num_rows, **facts}


def _check(rows: pa.Table, right: str) -> None:
    columns = FIELDS if "sensor" in rows.column_names else None
    if (found := fingerprint(rows, columns)) != right:
        raise AssertionError(f"void: these are not the right rows ({found}, not {right})")


def _facts(counts: Counts) -> dict[str, Any]:
    kinds = " ".join(f"{kind} {n}" for kind, n in sorted(counts.requests.items()))
    sent, received = counts.sent.total() // 1024, counts.received.total() // 1024
    return {"requests": counts.total, "of which": kinds, "KiB sent": sent, "received": received}
