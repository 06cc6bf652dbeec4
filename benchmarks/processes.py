"""Eight processes that commit to one storage at the same time, behind S3's latency.

Each makes commits of 20 rows of its own as fast as it can. Beside it delta-rs, which appends such
rows to one table. What counts is how many commits all of them make in a second, how long one takes,
what it costs in requests, and whether anybody is passed over: a commit that was asked for later and
stood earlier, although neither had to be tried again.

`BENCH_PROCESSES` and `BENCH_PROCESS_COMMITS` make it shorter.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.harness import Measured, Report, seaweedfs
from benchmarks.latency_proxy import LatencyProxy, latency_proxy
from benchmarks.peers.content import SCHEMA, Place
from storage_engine import Session, initialize_storage

PROCESSES = int(os.environ.get("BENCH_PROCESSES", "8"))
COMMITS = int(os.environ.get("BENCH_PROCESS_COMMITS", "50"))
ROWS = 20
WARM_UP = 99_999  # the number of a commit that is not measured
PATIENCE_MS = 120_000
_START_S = 300.0


@dataclass(frozen=True)
class Done:
    """One commit as its process saw it, by the machine's clock."""

    process: int
    asked: float
    stood: float
    attempts: int = 1

    @property
    def seconds(self) -> float:
        return self.stood - self.asked


def run() -> Report:
    report = Report("processes")
    with (
        tempfile.TemporaryDirectory() as folder,
        seaweedfs() as (server, bucket),
        latency_proxy(server.endpoint) as proxy,
    ):
        for name, make, write, count in (
            ("ontologia", make_ontologia, write_ontologia, count_ontologia),
            ("delta-rs, append", make_delta, write_delta, count_delta),
        ):
            place = Place(proxy.endpoint, bucket, name.split(",")[0], Path(folder) / name)
            place.folder.mkdir()
            make(place)
            report.steps.append(contend(name, place, proxy, write))
            rows, expected = count(place), PROCESSES * COMMITS * ROWS
            if rows != expected:
                raise AssertionError(f"void: {name} has {rows} rows, not {expected}")
    ours, delta = (step.facts for step in report.steps)
    report.verdicts = {
        "commits a second, at least 4.5 and more than delta-rs": (
            f"{ours['commits/s']}, {delta['commits/s']}"
        ),
        "p95 of a commit, at most 2.3 s": f"{ours['p95']} s",
        "requests a commit, at most 16": f"{ours['requests a commit']}",
        "longest wait, at most 3x the median": f"{ours['longest / median']}x",
    }
    return report


def contend(
    name: str, place: Place, proxy: LatencyProxy, write: Callable[..., list[Done]]
) -> Measured:
    """All processes at once; they begin when the last one has imported and opened everything."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(PROCESSES + 1)
    answers: Any = context.Queue()
    children = [
        context.Process(target=_work, args=(write, place, number, ready, answers))
        for number in range(PROCESSES)
    ]
    for child in children:
        child.start()
    ready.wait(_START_S)
    proxy.reset()
    started = time.monotonic()
    done = [one for _ in children for one in answers.get(timeout=600)]
    seconds = time.monotonic() - started
    for child in children:
        child.join()
    counts = proxy.counts()
    kinds = {k: round(n / len(done), 1) for k, n in sorted(counts.requests.items())}
    return Measured(
        name,
        seconds,
        [seconds],
        0,
        {
            **spread(done, seconds),
            "requests a commit": round(counts.total / len(done), 1),
            "of which": kinds,
            "load": round(os.getloadavg()[0], 1),
        },
    )


def _work(
    write: Callable[..., list[Done]], place: Place, number: int, ready: Any, answers: Any
) -> None:
    answers.put(write(place, number, lambda: ready.wait(_START_S)))


def spread(done: Sequence[Done], seconds: float) -> dict[str, Any]:
    """How the commits of all came about."""
    waits = sorted(one.seconds for one in done)
    median = statistics.median(waits)
    return {
        "commits/s": round(len(done) / seconds, 2),
        "median": round(median, 2),
        "p95": round(waits[int(len(waits) * 0.95)], 2),
        "longest": round(waits[-1], 2),
        "longest / median": round(waits[-1] / median, 2),
        "attempts a commit": round(sum(one.attempts for one in done) / len(done), 3),
        "passed over": sum(passed_over(one, done) for one in done),
    }


def passed_over(one: Done, done: Sequence[Done]) -> bool:
    """Whether somebody who asked half a second later was served half a second earlier."""
    return any(
        other.asked > one.asked + 0.5 and other.stood < one.stood - 0.5
        for other in done
        if other.process != one.process
    )


def rows_of(number: int, commit: int) -> pa.Table:
    ids = [f"p{number}-{commit:05d}-{row:03d}" for row in range(ROWS)]
    return pa.table(
        {
            "id": ids,
            "name": [f"Customer {i}" for i in ids],
            "tier": ["Gold"] * ROWS,
            "age": list(range(ROWS)),
            "score": [0.5] * ROWS,
        },
        schema=SCHEMA,
    )


# --- Ontologia ------------------------------------------------------------------------------------


def make_ontologia(place: Place) -> None:
    from benchmarks.peers.ontologia import Customer, config

    settings = config(place, place.folder / "first")
    initialize_storage(place.uri, config=settings)
    with Session(place.uri, entity_types=[Customer], config=settings) as session:
        session.ensure(Customer(**row) for row in rows_of(PROCESSES, 0).to_pylist())
        session.commit()


def write_ontologia(place: Place, number: int, begin: Callable[[], object]) -> list[Done]:
    from benchmarks.peers.ontologia import Customer, config

    settings = config(place, place.folder / f"{number}").model_copy(
        update={"s3_lock_timeout_ms": PATIENCE_MS, "runtime_id": f"p{number}"}
    )
    done = []
    with Session(place.uri, entity_types=[Customer], config=settings) as session:
        session.ensure(Customer(**row) for row in rows_of(number, WARM_UP).to_pylist())
        session.commit()  # imports and connections are nobody's to be measured
        session.flush()
        begin()
        for commit in range(COMMITS):
            session.ensure(Customer(**row) for row in rows_of(number, commit).to_pylist())
            asked = time.monotonic()
            assert session.commit() is not None
            done.append(Done(number, asked, time.monotonic()))
    return done


def count_ontologia(place: Place) -> int:
    from benchmarks.peers.ontologia import Customer, config

    settings = config(place, place.folder / "last")
    with Session(place.uri, entity_types=[Customer], config=settings) as session:
        return int(session.query().entities(Customer).count()) - (PROCESSES + 1) * ROWS


# --- delta-rs -------------------------------------------------------------------------------------


def make_delta(place: Place) -> None:
    from deltalake import DeltaTable

    from benchmarks.peers.delta import options

    DeltaTable.create(place.uri, SCHEMA, storage_options=options(place))


def write_delta(place: Place, number: int, begin: Callable[[], object]) -> list[Done]:
    from deltalake import CommitProperties, DeltaTable, write_deltalake

    from benchmarks.peers.delta import options

    table = DeltaTable(place.uri, storage_options=options(place))
    write_deltalake(table, rows_of(number, WARM_UP), mode="append")
    done = []
    begin()
    for commit in range(COMMITS):
        asked = time.monotonic()
        write_deltalake(
            table,
            rows_of(number, commit),
            mode="append",
            commit_properties=CommitProperties(max_commit_retries=10_000),
        )
        done.append(Done(number, asked, time.monotonic()))
    return done


def count_delta(place: Place) -> int:
    from deltalake import DeltaTable

    from benchmarks.peers.delta import options

    table = DeltaTable(place.uri, storage_options=options(place))
    return int(pa.table(table.scan()).num_rows) - PROCESSES * ROWS
