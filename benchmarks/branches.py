"""Branches behind S3's latency: a fork, the publication of a run, a merge into a large type; and
eight processes that fork, write, update and merge on one storage.

`BENCH_BRANCH_ROWS` (10,000,000) is the size of the large type, `BENCH_BRANCH_SECONDS` (60) how long
the processes are at it, `BENCH_BRANCH_STEPS` which of `create,publish,merge,processes` to run. What
a run leaves is checked to the row: one that lost or doubled something is void.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from benchmarks.harness import RESULTS, Measured, Report, measure, seaweedfs, sized, timed
from benchmarks.latency_proxy import LatencyProxy, latency_proxy
from storage_engine import Entity, Field, OntologiaConfig, Session, initialize_storage
from storage_engine.maintenance.integrity import verify_storage
from tests.servers import REGION

ROWS = sized(10_000_000, 20_000, "BENCH_BRANCH_ROWS")
CHANGED = sized(10_000, 200)
TYPES = 10
RUN_ROWS = sized(100_000, 500)
PROCESSES = sized(8, 3)
SECONDS = sized(60, 5, "BENCH_BRANCH_SECONDS")
STEPS = os.environ.get("BENCH_BRANCH_STEPS", "create,publish,merge,processes").split(",")
_CHUNK = 1_000_000


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[int]


def _type(number: int) -> type[Entity]:
    body = {
        "__annotations__": {"id": Field[str], "n": Field[int]},
        "id": Field(primary_key=True),
        "__module__": __name__,
    }
    return type(f"Type{number}", (Entity,), body)


CLASSES = [_type(number) for number in range(TYPES)]


def run() -> Report:
    report = Report("branches", _kept())
    with seaweedfs() as (server, bucket), latency_proxy(server.endpoint) as proxy:
        uri = f"s3://{bucket}/onto"
        initialize_storage(uri, config=config(server.endpoint))
        if {"create", "merge"} & {*STEPS}:
            _note(report, measure(f"fill {ROWS:,} rows (not promised)", fill, uri, server.endpoint))
        if "create" in STEPS:
            step = measure("create", create, uri, proxy, runs=sized(5, 1))
            _note(report, step)
        if "merge" in STEPS:
            name = f"merge {CHANGED:,} changed rows, parent moved"
            _note(report, measure(name, merge, uri, server.endpoint, proxy, runs=sized(3, 1)))
        if "publish" in STEPS:
            runs = f"s3://{bucket}/runs"
            initialize_storage(runs, config=config(server.endpoint))
            name = f"publish {TYPES} types of {RUN_ROWS:,} rows"
            _note(report, measure(name, publish, runs, server.endpoint, proxy, runs=sized(3, 1)))
        if "processes" in STEPS:
            shared = f"s3://{bucket}/shared"
            initialize_storage(shared, config=config(server.endpoint))
            _note(report, contend(shared, server.endpoint))
    report.verdicts = dict(_verdicts(report))
    return report


def _kept() -> list[Measured]:
    """What was measured before of the steps that are not run now."""
    path = RESULTS / "branches.json"
    if not path.exists() or len(STEPS) == 4:
        return []
    return [Measured(**step) for step in json.loads(path.read_text(encoding="utf-8"))["steps"]]


def _note(report: Report, step: Measured) -> None:
    step.facts["load"] = round(os.getloadavg()[0], 1)
    kind = step.name.split()[0]
    report.steps = [other for other in report.steps if other.name.split()[0] != kind]
    report.steps.append(step)


def _verdicts(report: Report) -> Iterator[tuple[str, str]]:
    for step in report.steps:
        facts = step.facts
        match step.name.split()[0].rstrip(":"):
            case "create":
                yield (
                    "create, at most 150 ms and 3 requests",
                    f"{step.seconds * 1000:.0f} ms, {facts['requests']} requests",
                )
            case "publish":
                yield (
                    "publish, at most 5 hops, no data copied",
                    f"{facts['hops']} hops, {step.seconds:.2f} s, {facts['bytes sent']:,} bytes",
                )
            case "merge":
                yield "merge, at most 2 s", f"{step.seconds:.2f} s, {facts['requests']} requests"
            case "processes":
                yield (
                    "processes, nothing lost and nothing doubled",
                    f"{facts['merges']} merges, {facts['rows']:,} rows, "
                    f"{facts['lost']} lost, {facts['doubled']} doubled",
                )


def config(endpoint: str, **settings: Any) -> OntologiaConfig:
    return OntologiaConfig(s3_endpoint_url=endpoint, s3_region=REGION, **settings)


def rows(first: int, count: int, age: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "id": pa.array([f"c{n:09d}" for n in numbers]),
            "name": pa.array([f"Customer {n}" for n in numbers]),
            "age": pa.array([age] * count, pa.int64()),
        }
    )


def fill(uri: str, endpoint: str) -> dict[str, Any]:
    """The large type, and a history of small commits on it."""
    outcome: dict[str, Any] = {}
    with Session(uri, config=config(endpoint)) as session, timed(outcome):
        for first in range(0, ROWS, _CHUNK):
            session.ingest(Customer, rows(first, min(_CHUNK, ROWS - first), 1))
        session.commit()
        for number in range(sized(120, 5)):
            session.ensure(Customer(id=f"c{number * 7:09d}", name="small", age=number + 2))
            session.commit()
        session.create_branch("warm")  # raises the format of the storage, once
        session.flush()
    return outcome


def create(uri: str, proxy: LatencyProxy) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with Session(uri, config=config(proxy.endpoint)) as session:
        session.create_branch(f"connected/{time.time_ns()}")  # connections are nobody's
        proxy.reset()
        with timed(outcome):
            session.create_branch(f"run/{time.time_ns()}")
        outcome["requests"] = proxy.counts().total
    return outcome


def merge(uri: str, endpoint: str, proxy: LatencyProxy) -> dict[str, Any]:
    """The branch changes keys in a range, in several commits; main others, and some between."""
    name, age = f"merge/{time.time_ns()}", time.time_ns() % 1_000_000
    first = random.randrange(0, max(1, ROWS - 2 * CHANGED))
    with Session(uri, config=config(endpoint)) as main:
        main.create_branch(name)
        with Session(uri, config=config(endpoint), branch=name) as branch:
            for part in range(4):
                share = CHANGED // 4
                branch.ingest(Customer, rows(first + part * share, share, age + part))
                branch.commit()
        main.ingest(Customer, rows(first + CHANGED, 100, age))
        main.commit()
        main.ensure(Customer(id="c000000000", name="elsewhere", age=age))
        main.commit()
    outcome: dict[str, Any] = {}
    with Session(uri, config=config(proxy.endpoint)) as session:
        session.storage_info()  # connected, as a program is that works on
        proxy.reset()
        with timed(outcome):
            report = session.merge(name)
        counts = proxy.counts()
        outcome["requests"] = counts.total
        outcome["bytes received"] = counts.received.total()
        outcome["bytes sent"] = counts.sent.total()
        merged = report.types[0]
        if (merged.inserted, merged.updated) != (0, CHANGED):
            raise AssertionError(f"void: {merged}")
        found = session.query().entities(Customer).where(Customer.age >= age).count()
        outcome["rows"] = found
    return outcome


def publish(uri: str, endpoint: str, proxy: LatencyProxy) -> dict[str, Any]:
    """A run's bulk of ten types, in one commit, on main as it was."""
    from storage_engine.objectstore.metering import HopTrace, tracing

    name = f"run/{time.time_ns()}"
    with Session(uri, config=config(endpoint)) as main:
        main.create_branch(name)
    version = time.time_ns() % 1_000_000
    with Session(uri, config=config(endpoint), branch=name) as branch:
        table = pa.table(
            {
                "id": [f"k{n:07d}" for n in range(RUN_ROWS)],
                "n": pa.array([version] * RUN_ROWS, pa.int64()),
            }
        )
        for declared in CLASSES:
            branch.ingest(declared, table)
        branch.commit()
    outcome: dict[str, Any] = {}
    with Session(uri, config=config(proxy.endpoint)) as session:
        proxy.reset()
        with timed(outcome), tracing(HopTrace()) as trace:
            report = session.merge(name)
        outcome["hops"] = trace.depth
        session.flush()
        counts = proxy.counts()
        outcome["requests"] = counts.total
        outcome["bytes sent"] = counts.sent.total()
        if [merged.adopted for merged in report.types] != [True] * TYPES:
            raise AssertionError(f"void: {report}")
        session.delete_branch(name)
    return outcome


# --- eight processes ------------------------------------------------------------------------------


def contend(uri: str, endpoint: str) -> Measured:
    """Each forks, writes, updates and merges for a while; what all of them say that they merged
    must be there, each change once."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(PROCESSES + 1)
    answers: Any = context.Queue()
    children = [
        context.Process(target=_work, args=(uri, endpoint, number, ready, answers))
        for number in range(PROCESSES)
    ]
    for child in children:
        child.start()
    ready.wait(300)
    started = time.monotonic()
    told = [answers.get(timeout=SECONDS + 300) for _ in children]
    seconds = time.monotonic() - started
    for child in children:
        child.join()
    failed = [each["error"] for each in told if each["error"]]
    if failed:
        raise AssertionError(f"void: {failed}")
    with Session(uri, config=config(endpoint)) as session:
        stored = {c.id: c.age for c in session.query().entities(Customer).collect()}
        history = session.query().entities(Customer).with_history().count()
        findings = verify_storage(session.repository, deep=True).findings
        merges = [c for c in session.list_commits(100_000) if c["kind"] == "merge"]
    expected = {key: age for each in told for key, age in each["rows"].items()}
    lost = sum(stored.get(key) != age for key, age in expected.items())
    doubled = (len(stored) - len(expected)) + (history - sum(each["changes"] for each in told))
    if lost or doubled or findings or len(merges) != sum(each["merges"] for each in told):
        raise AssertionError(
            f"void: {lost} lost, {doubled} doubled, {len(merges)} merges, {findings[:3]}"
        )
    return Measured(
        f"processes: {PROCESSES} fork, write, update and merge",
        seconds,
        [round(seconds, 1)],
        0,
        {
            "merges": len(merges),
            "updates": sum(each["updates"] for each in told),
            "merges/s": round(len(merges) / seconds, 2),
            "rows": len(expected),
            "lost": lost,
            "doubled": doubled,
        },
    )


def _work(uri: str, endpoint: str, number: int, ready: Any, answers: Any) -> None:
    told: dict[str, Any] = {"rows": {}, "changes": 0, "merges": 0, "updates": 0, "error": ""}
    try:
        settings = config(endpoint, s3_lock_timeout_ms=120_000, runtime_id=f"p{number}")
        with Session(uri, config=settings) as main:
            main.list_branches()
            ready.wait(300)
            ends = time.monotonic() + SECONDS
            turn = 0
            while time.monotonic() < ends:
                _turn(main, uri, settings, number, turn, told)
                turn += 1
    except Exception as error:  # noqa: BLE001 - told to who waits
        told["error"] = repr(error)
    answers.put(told)


def _turn(
    main: Session,
    uri: str,
    settings: OntologiaConfig,
    number: int,
    turn: int,
    told: dict[str, Any],
) -> None:
    """A row of its own is changed at each turn, new ones come, and a branch of a branch now and
    then."""
    name = f"run/{number}/{turn}"
    main.create_branch(name)
    fresh = {f"p{number}-{turn}-{n}": turn for n in range(5)}
    written = {**fresh, f"p{number}": turn}
    with Session(uri, config=settings, branch=name) as branch:
        branch.ensure(Customer(id=key, name=key, age=age) for key, age in written.items())
        branch.commit()
        if turn % 3 == 0:
            branch.create_branch(f"{name}/child")
            with Session(uri, config=settings, branch=f"{name}/child") as child:
                key = f"p{number}-{turn}-child"
                child.ensure(Customer(id=key, name=key, age=turn))
                child.commit()
                written[key] = turn
            branch.merge(f"{name}/child")
            branch.delete_branch(f"{name}/child")
        if turn % 2 == 0:
            branch.update_branch()
            told["updates"] += 1
    main.merge(name)
    main.delete_branch(name)
    told["merges"] += 1
    told["changes"] += len(written)
    told["rows"] |= written
