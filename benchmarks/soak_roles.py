"""Who takes part in a soak: writers, bulk writers, event workers, readers and those who look after
the storage. Each is a process of its own that may be killed or stopped at any moment.

A role writes into its journal what was acknowledged, in the order in which it happened, before it
goes on. A journal line is one `write` to a file, so it survives the process. A role that is started
again reads its journal and goes on where it was: a unit of work that was not acknowledged is done
again under the same idempotency key.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage_engine import (
    CompactionPolicy,
    Entity,
    Event,
    Field,
    HandlerContext,
    OntologiaConfig,
    OntologiaError,
    Session,
    on_event,
)
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.indices import repair_indices
from storage_engine.maintenance.restore import restore
from storage_engine.model import row_schema, spec_of
from storage_engine.repository import Idempotency
from storage_engine.runtime.core import internals

BULK_ROWS = 600
BULK_PARTS = 3
SHARED = 12


class Entry(Entity):
    """Written once, by one unit of work."""

    id: Field[str] = Field(primary_key=True)
    value: Field[int]


class Mirror(Entity):
    """The same identities as `Entry`, in the same commits: a reader sees both or neither."""

    id: Field[str] = Field(primary_key=True)
    value: Field[int]


class Shared(Entity):
    """What all writers change."""

    id: Field[str] = Field(primary_key=True)
    by: Field[str]
    unit: Field[int]


class Bulk(Entity):
    id: Field[str] = Field(primary_key=True)
    batch: Field[int]


class Handled(Entity):
    """One for each event; `run` is new each time its handler runs."""

    id: Field[str] = Field(primary_key=True)
    run: Field[str]


class Happened(Event):
    key: Field[str]


@on_event(Happened, id="soak.note")
def note(ctx: HandlerContext[Happened]) -> None:
    ctx.ensure(Handled(id=ctx.event.key, run=uuid.uuid4().hex))
    ctx.commit(meta={"handled": ctx.event.key})


@dataclass(frozen=True)
class Place:
    """Where it happens."""

    uri: str
    endpoint: str  # of the proxy
    region: str
    folder: str  # of journals and caches
    seed: int
    grace_s: float

    @property
    def stop(self) -> Path:
        """Roles end when it is there."""
        return Path(self.folder) / "stop"

    def config(self, name: str, **settings: Any) -> OntologiaConfig:
        return OntologiaConfig(
            **{
                "runtime_id": name,
                "s3_endpoint_url": self.endpoint,
                "s3_region": self.region,
                "s3_lease_ttl_ms": 6_000,
                "s3_lock_timeout_ms": 30_000,
                "s3_request_timeout_s": 5.0,
                "checkpoint_interval": 25,
                "event_lease_ms": 6_000,
                "event_poll_interval_ms": 200,
                "event_claim_limit": 10,
                "event_backoff_base_ms": 100,
                "event_backoff_max_ms": 1_000,
                "event_max_attempts": 100,
                "session_ttl_ms": 10_000,
                "cache_dir": str(Path(self.folder) / "cache"),
                **settings,
            }
        )


class Journal:
    """What one role knows to be so."""

    def __init__(self, place: Place, name: str) -> None:
        self.path = Path(place.folder) / f"{name}.jsonl"
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, kind: str, **facts: Any) -> None:
        line = json.dumps({"kind": kind, **facts}, default=str)
        os.write(self._file, f"{line}\n".encode())

    def lines(self, *kinds: str) -> Iterator[dict[str, Any]]:
        return read_journal(self.path, *kinds)


def read_journal(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Whole lines only: the last one may be on its way."""
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                if not kinds or entry["kind"] in kinds:
                    yield entry


@dataclass
class Role:
    """One process's part."""

    place: Place
    name: str
    journal: Journal
    random: random.Random
    session: Session

    @property
    def stopped(self) -> bool:
        return self.place.stop.exists()

    def rest(self, seconds: float) -> None:
        """About so long, or until it is over."""
        end = time.monotonic() + seconds * (0.5 + self.random.random())
        while time.monotonic() < end and not self.stopped:
            time.sleep(0.05)

    def insist(self, work: Callable[[], Any]) -> Any:
        """Until it succeeds: what fails on purpose here may be tried again."""
        while True:
            try:
                return work()
            except OntologiaError as error:
                self.journal.add("error", error=type(error).__name__, message=str(error)[:300])
                if self.stopped:
                    raise
                self.session.discard()
                self.rest(0.1)


# --- those who write ----------------------------------------------------------------------------


def write(role: Role) -> None:
    """Units of work, one after the other; some send an event with their commit, some after it."""
    unit = 1 + max((line["unit"] for line in role.journal.lines("commit")), default=0)
    while not role.stopped:
        _write_unit(role, unit)
        if role.random.random() < 0.3:
            key = f"{role.name}-{unit}-{uuid.uuid4().hex[:8]}"
            with suppress(OntologiaError):  # it may have arrived all the same: nobody counts on it
                role.session.emit(Happened(key=key))
                role.journal.add("emitted", key=key)
        unit += 1
        role.rest(0.05)


def _write_unit(role: Role, unit: int) -> None:
    drawn = random.Random(f"{role.name}/{unit}")  # the same when it is done again
    names = [f"{role.name}-{unit}-{n}" for n in range(drawn.randint(1, 4))]
    event = Happened(key=f"{role.name}-{unit}") if drawn.random() < 0.5 else None
    shared = Shared(id=f"s{drawn.randrange(SHARED)}", by=role.name, unit=unit)
    started = time.monotonic()

    def work() -> int | None:
        session = role.session
        session.ensure(Entry(id=name, value=unit) for name in names)
        session.ensure(Mirror(id=name, value=unit) for name in names)
        session.ensure(shared)
        return session.commit(
            event, meta={"unit": f"{role.name}/{unit}"}, idempotency=(role.name, unit)
        )

    commit_id = role.insist(work)
    role.journal.add(
        "commit",
        unit=unit,
        commit=commit_id,
        rows=names,
        event=event.key if event is not None else None,
        ms=(time.monotonic() - started) * 1000,
    )


def write_bulk(role: Role) -> None:
    """Parts staged before the lock is taken, as Spark's tasks stage them, published as one."""
    spec = spec_of(Bulk)
    repository = role.session.repository
    batch = 1 + max((line["unit"] for line in role.journal.lines("bulk")), default=0)
    while not role.stopped:
        keys = [f"{role.name}-{batch}-{n}" for n in range(BULK_ROWS)]
        table = pa.table(
            [keys, keys, [batch] * BULK_ROWS], schema=row_schema(spec)
        )  # entity_key, id, batch
        unit = Idempotency(role.name, batch)
        started = time.monotonic()

        def work(
            table: pa.Table = table, unit: Idempotency = unit, batch: int = batch
        ) -> int | None:
            applied = repository.applied(unit)
            if applied is not None:
                return applied.commit_id
            with repository.begin_staged(spec, idempotency=unit) as staged:
                size = BULK_ROWS // BULK_PARTS
                for start in range(0, BULK_ROWS, size):
                    part = table.slice(start, size)
                    staged.stage(part, inserted=part.num_rows)
                result = internals(role.session).commit_staged(
                    staged.as_input(),
                    meta={"unit": f"{role.name}/{batch}"},
                    idempotency=(role.name, batch),
                )
            return result.commit_id if result is not None else None

        commit_id = role.insist(work)
        role.journal.add(
            "bulk", unit=batch, commit=commit_id, ms=(time.monotonic() - started) * 1000
        )
        batch += 1
        role.rest(1.0)


# --- those who look after the storage -----------------------------------------------------------


def _again(role: Role, seconds: float, work: Callable[[], Mapping[str, Any]]) -> None:
    """Again and again; what fails is noted, and tried again with the next round."""
    while not role.stopped:
        try:
            role.journal.add("done", **work())
        except OntologiaError as error:
            role.journal.add("error", error=type(error).__name__, message=str(error)[:300])
        role.rest(seconds)


def compact(role: Role) -> None:
    def work() -> dict[str, Any]:
        report = role.session.compact(CompactionPolicy(min_entries=4))
        return {"runs": len(report.runs), "rows": report.rows_rewritten}

    _again(role, 1.0, work)


def collect_garbage(role: Role) -> None:
    objects = role.session.repository.objects
    assert objects is not None

    def work() -> dict[str, Any]:
        plan = plan_gc(objects, grace=timedelta(seconds=role.place.grace_s), purge_compacted=True)
        report = sweep(objects, plan)
        return {"deleted": report.objects}

    _again(role, 2.0, work)


def repair(role: Role) -> None:
    """Indices are projections: now and then one is lost."""
    objects = role.session.repository.objects
    assert objects is not None

    def work() -> dict[str, Any]:
        lost = 0
        if role.random.random() < 0.3:
            keys = [info.key for info in objects.store.list("meta/indices/")]
            if keys:
                objects.store.delete_many([role.random.choice(keys)])
                lost = 1
        done = repair_indices(objects, apply=True)
        return {"repaired": len(done.types), "lost": lost}

    _again(role, 1.5, work)


def tag(role: Role) -> None:
    repository = role.session.repository

    def work() -> dict[str, Any]:
        head = repository.head_commit_id()
        if head:
            name = f"{role.name}-{uuid.uuid4().hex[:10]}"
            made = repository.create_tag(name, head)
            role.journal.add("tag", name=name, commit=made.commit_id)
        known = {line["name"] for line in role.journal.lines("tag")}
        known -= {line["name"] for line in role.journal.lines("untag")}
        if len(known) > 5:
            name = role.random.choice(sorted(known))
            role.journal.add("untag", name=name)  # from now on nobody counts on it
            repository.delete_tag(name)
        return {}

    _again(role, 1.0, work)


def go_back(role: Role) -> None:
    repository = role.session.repository

    def work() -> dict[str, Any]:
        head = repository.head_commit_id()
        if head < 5:
            return {}
        made = restore(repository, max(1, head - role.random.randint(1, 20)), apply=True)
        return {"restored": made.restored}

    _again(role, 6.0, work)


# --- those who handle events, and those who read ------------------------------------------------


def handle(role: Role) -> None:
    def work() -> dict[str, Any]:
        totals = role.session.run([note], max_iterations=10)
        return {"handled": totals.handled, "failed": totals.failed}

    _again(role, 0.05, work)


def read(role: Role) -> None:
    """What was acknowledged before a look is seen by it; a commit is seen whole or not at all."""
    session = role.session
    folder = Path(role.place.folder)
    least = 0

    def work() -> dict[str, Any]:
        nonlocal least
        journals = sorted(folder.glob("writer-*.jsonl"))
        acknowledged = [
            line for path in journals for line in read_journal(path, "commit") if line["commit"]
        ][-200:]
        started = time.monotonic()
        head = session.repository.head_commit_id()
        if head < least:
            role.journal.add("violation", what=f"head went back from {least} to {head}")
        least = max(least, head)
        view = session.at(head)
        entries = {e.id: e for e in view.query().entities(Entry).collect()}
        mirrors = {m.id for m in view.query().entities(Mirror).collect()}
        if set(entries) != mirrors:
            differ = sorted(set(entries) ^ mirrors)[:5]
            role.journal.add("violation", what=f"half a commit at {head}: {differ}")
        for line in acknowledged:
            missing = [name for name in line["rows"] if name not in entries]
            if line["commit"] > head or missing:
                what = f"commit {line['commit']} was acknowledged, head is {head}: {missing}"
                role.journal.add("violation", what=what)
        latest = session.query().entities(Shared).count()
        if latest > SHARED:
            role.journal.add("violation", what=f"{latest} shared rows")
        return {"ms": (time.monotonic() - started) * 1000, "rows": len(entries)}

    _again(role, 0.3, work)


ROLES: Mapping[str, Callable[[Role], None]] = {
    "writer": write,
    "bulk": write_bulk,
    "compactor": compact,
    "gc": collect_garbage,
    "repairer": repair,
    "tagger": tag,
    "restorer": go_back,
    "worker": handle,
    "reader": read,
}


def main(kind: str, name: str, place: Place, start: int) -> None:
    """The process of a role; `start` counts how often it was started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends us
    _end_with_parent()
    journal = Journal(place, name)
    journal.add("start", pid=os.getpid())
    drawn = random.Random(f"{place.seed}/{name}/{start}")
    while not place.stop.exists():
        try:
            with Session(place.uri, config=place.config(name)) as session:
                ROLES[kind](Role(place, name, journal, drawn, session))
                session.discard()
        except OntologiaError as error:  # while opening, or at the end
            journal.add("error", error=type(error).__name__, message=str(error)[:300])
            time.sleep(0.1)
        except BaseException as error:
            journal.add("crash", error=type(error).__name__, trace=traceback.format_exc()[-3000:])
            raise


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="soak-watch").start()


def errors_in(folder: Path) -> Counter[str]:
    return Counter(
        line["error"] for path in folder.glob("*.jsonl") for line in read_journal(path, "error")
    )
