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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.harness import Measured, Report, measure, seaweedfs, sized, timed
from benchmarks.ingest import Reading, make_data
from benchmarks.latency_proxy import LATENCY_MS, Counts, LatencyProxy, latency_proxy
from benchmarks.peers import PEERS, peer
from benchmarks.peers.content import Place, fingerprint, history, latest
from benchmarks.peers.postgres import postgres
from storage_engine import OntologiaConfig, Session, initialize_storage
from storage_engine.model import spec_of
from storage_engine.model.arrow import row_schema
from storage_engine.query.dialects import quoted
from storage_engine.repository.duck import Duck
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, S3Server

COMMITS = sized(200, 10)
BATCH = 100
TIER = "Gold"
SENSOR = "s7"
ROUNDS = sized(5, 1)
READS = sized(5, 2)  # in a warm process
STATES = ("cold", "warm")
KEPT = "ontologia, files cached by another process"
FIELDS = ["id", "sensor", "value", "n", "ok"]

# Imports are nobody's to be measured, and these come late: Ontologia's engine with the first
# session, pandas when DuckDB is first given a parameter or a table.
LATE_IMPORTS = ("storage_engine.repository.object.engine", "duckdb", "pandas", "obstore")

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
    measure("fill", fill_large, server.endpoint, uri, source)
    listed = server.client().list_objects_v2(Bucket=bucket, Prefix="large/")["Contents"]
    file = max(listed, key=lambda item: item["Size"])["Key"]
    rows = pq.read_table(source)
    right = fingerprint(rows.filter(pc.equal(rows.column("sensor"), SENSOR)), FIELDS)
    readers = {
        "raw DuckDB": partial(duckdb_large, server.endpoint, f"s3://{bucket}/{file}"),
        "ontologia": partial(onto_large, server.endpoint, uri),
    }
    report.steps += in_rounds("large", {n: (timed_read, r, right) for n, r in readers.items()})
    for state in STATES:
        ours = report.seconds(f"large, {state}: ontologia")
        raw = report.seconds(f"large, {state}: raw DuckDB")
        report.verdicts[f"large file, {state}, within 1.5x of raw DuckDB"] = f"{ours / raw:.2f}x"


def _config(endpoint: str, **settings: Any) -> OntologiaConfig:
    return OntologiaConfig(s3_endpoint_url=endpoint, s3_region=REGION, **settings)


def fill_large(endpoint: str, uri: str, source: Path) -> dict[str, Any]:
    config = _config(endpoint, target_part_bytes=1 << 30)  # so that one file takes all
    initialize_storage(uri, config=config)
    outcome: dict[str, Any] = {}
    with Session(uri, entity_types=[Reading], config=config) as session, timed(outcome):
        session.ingest(Reading, source)
        session.commit()
    return outcome


@contextmanager
def onto_large(endpoint: str, uri: str) -> Iterator[Read]:
    with tempfile.TemporaryDirectory() as cache:
        config = _config(endpoint, cache_dir=Path(cache))
        with Session(uri, entity_types=[Reading], config=config) as session:
            query = session.query().entities(Reading).where(Reading.sensor == SENSOR)
            yield query.to_arrow


@contextmanager
def duckdb_large(endpoint: str, file: str) -> Iterator[Read]:
    """On the connection that a session would open, so that settings are the same."""
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
    duck = Duck(
        uri=file, memory_limit=_config(endpoint).s3_duckdb_memory_limit, secret=lambda: secret
    )
    duck.reach_s3()
    yield lambda: duck.cursor().execute(statement).to_arrow_table()
    duck.close()


# --- many small commits ---------------------------------------------------------------------------


def small(report: Report, server: S3Server, bucket: str, folder: Path, commits: int) -> None:
    right = fingerprint(latest(commits, BATCH, TIER))
    no_latency = dict.fromkeys(LATENCY_MS, 0.0)
    with (
        latency_proxy(server.endpoint, no_latency) as counter,
        latency_proxy(server.endpoint) as slow,
        postgres() as catalog,
    ):
        readers: dict[str, Any] = {}
        for name in PEERS:
            place = Place(counter.endpoint, bucket, name, folder / name, postgres=catalog)
            place.folder.mkdir()
            report.steps.append(
                measure(
                    f"small, fill, no latency: {name}", timed_fill, name, place, commits, counter
                )
            )
            readers[name] = (read_small, name, replace(place, endpoint=slow.endpoint), right, slow)
        _, name, place, *rest = readers["ontologia"]
        kept = (read_small, name, replace(place, kept_cache=folder / "kept"), *rest)
        measure("fill the cache", *kept)
        report.steps += in_rounds("small", readers | {KEPT: kept})
    for state in STATES:
        ours = report.seconds(f"small, {state}: ontologia")
        report.verdicts[f"small commits, {state}: share of the time of"] = ", ".join(
            f"{name} {ours / report.seconds(f'small, {state}: {name}'):.2f}"
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


def read_small(name: str, place: Place, right: str, proxy: LatencyProxy) -> dict[str, Any]:
    store = peer(name)  # imported here, before time is taken

    @contextmanager
    def opened() -> Iterator[Read]:
        with store.open_latest(place) as read:
            yield partial(read, TIER)

    return timed_read(opened, right, proxy)


# --- both -----------------------------------------------------------------------------------------


def in_rounds(workload: str, readers: Mapping[str, Sequence[Any]]) -> list[Measured]:
    """All readers in turn, several times, so that a noisy minute of the machine hits all."""
    found: dict[str, list[Measured]] = {name: [] for name in readers}
    for _ in range(ROUNDS):
        for name, (step, *arguments) in readers.items():
            found[name].append(measure(name, step, *arguments))
    merged = []
    for state in STATES:
        for name, rounds in found.items():
            reads = [read for each in rounds for read in each.facts[state]]
            seconds = [round(read["seconds"], 4) for read in reads]
            cpu = statistics.median(read["cpu"] for read in reads)
            facts = {k: v for k, v in reads[-1].items() if k != "seconds"}
            merged.append(
                Measured(
                    f"{workload}, {state}: {name}",
                    statistics.median(seconds),
                    seconds,
                    max(each.peak_mib for each in rounds),
                    facts | {"cpu": round(cpu, 3)},
                )
            )
    return merged


def timed_read(
    opened: Callable[[], AbstractContextManager[Read]],
    right: str,
    proxy: LatencyProxy | None = None,
) -> dict[str, Any]:
    """Cold: open and read. Warm: read again, several times, each time what is the latest then."""
    for name in LATE_IMPORTS:
        import_module(name)
    with ExitStack() as stack:
        reads: list[Read] = []

        def open_and_read() -> pa.Table:
            reads.append(stack.enter_context(opened()))
            return reads[0]()

        cold = [_observed(open_and_read, right, proxy)]
        warm = [_observed(reads[0], right, proxy) for _ in range(READS)]
    return {"seconds": cold[0]["seconds"], "cold": cold, "warm": warm}


def _observed(read: Read, right: str, proxy: LatencyProxy | None) -> dict[str, Any]:
    if proxy is not None:
        proxy.reset()
    outcome: dict[str, Any] = {}
    cpu = time.process_time()
    with timed(outcome):
        rows = read()
    outcome |= {"cpu": time.process_time() - cpu, "rows": rows.num_rows}
    if proxy is not None:
        outcome |= _facts(proxy.counts())
    columns = FIELDS if "sensor" in rows.column_names else None
    if (found := fingerprint(rows, columns)) != right:
        raise AssertionError(f"void: these are not the right rows ({found}, not {right})")
    return outcome


def _facts(counts: Counts) -> dict[str, Any]:
    kinds = " ".join(f"{kind} {n}" for kind, n in sorted(counts.requests.items()))
    sent, received = counts.sent.total() // 1024, counts.received.total() // 1024
    return {"requests": counts.total, "of which": kinds, "KiB sent": sent, "received": received}
