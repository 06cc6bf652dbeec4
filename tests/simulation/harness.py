"""What a history must look like whatever went wrong, and the runs that try to break it.

A `Ledger` notes what each commit intended and how it ended for its caller. `verify` compares the
storage with it: acknowledged <=> in the chain exactly once, ids without gaps, nothing reachable
missing or changed, and every read equal to a plain Python model that replays the chain's order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import Manifest
from storage_engine.errors import CommitStateUnknownError, OntologiaError
from storage_engine.model import TypeSpec
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository import CommitRequest, ReadWindow, TypeInput
from tests.commitlog.support import LEASE_TTL_MS, World, Writer
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of, stream_of

SPECS: Mapping[str, TypeSpec] = {"Customer": CUSTOMER, "Product": PRODUCT}
_VALUE = {"Customer": "age", "Product": "price"}

Intent = Mapping[str, Mapping[str, int]]  # type name -> key -> value


class InvariantViolated(AssertionError):
    """The storage does not say what it must."""


def demand(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolated(message)


def inputs(intent: Intent, *, bulk: bool = False) -> list[TypeInput]:
    found = []
    for name, rows in intent.items():
        if name == "Customer":
            made = [customer(key, age=value) for key, value in rows.items()]
        else:
            made = [product(key, float(value)) for key, value in rows.items()]
        spec = SPECS[name]
        found.append(stream_of(spec, made) if bulk else rows_of(spec, *made))
    return found


@dataclass
class Ledger:
    """What was asked of the storage, and what it answered."""

    intents: dict[str, Intent] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)  # mark -> commit id
    refused: set[str] = field(default_factory=set)  # said not to be published
    unknown: set[str] = field(default_factory=set)

    def commit(
        self, writer: Writer, mark: str, intent: Intent, *, bulk: bool = False
    ) -> BaseException | None:
        """Commit and note the outcome; returns what was raised. A crash ends the writer."""
        self.intents[mark] = intent
        try:
            result = writer.commit(*inputs(intent, bulk=bulk), metadata={"mark": mark})
            writer.repo.publisher.flush()
        except SimulatedCrash as crash:
            # Like any dead process it may have published, and nobody was told.
            self.unknown.add(mark)
            return crash
        except CommitStateUnknownError as error:
            self.unknown.add(mark)
            return error
        except OntologiaError as error:
            self.refused.add(mark)
            return error
        if result is None:
            self.refused.add(mark)
        else:
            self.acknowledged[mark] = result.commit_id
        return None

    def commit_together(
        self, writer: Writer, together: Mapping[str, Intent]
    ) -> BaseException | None:
        """The same for several by one swap of head; what the first one raised."""
        self.intents |= together
        first: BaseException | None = None
        pending = {}
        try:
            for mark, intent in together.items():
                request = CommitRequest(inputs(intent), metadata={"mark": mark})
                pending[mark] = writer.repo.submit(request)
            writer.repo.flush()
        except SimulatedCrash as crash:
            first = crash
        for mark, commit in pending.items():
            try:
                if first is not None and not commit.done:
                    raise first
                result = commit.result()
            except (SimulatedCrash, CommitStateUnknownError) as error:
                self.unknown.add(mark)
                first = first or error
            except OntologiaError as error:
                self.refused.add(mark)
                first = first or error
            else:
                if result is None:
                    self.refused.add(mark)
                else:
                    self.acknowledged[mark] = result.commit_id
        return first


# -- the model ------------------------------------------------------------------------------------

Version = tuple[int, str, float]  # commit id, key, value


def replay(marks: Sequence[str], intents: Mapping[str, Intent]) -> dict[str, list[Version]]:
    """The history per type that these commits make, in this order."""
    history: dict[str, list[Version]] = {name: [] for name in SPECS}
    latest: dict[tuple[str, str], float] = {}
    for commit_id, mark in enumerate(marks, start=1):
        changed = 0
        for name, rows in intents[mark].items():
            for key in sorted(rows):
                if latest.get((name, key)) != rows[key]:
                    latest[name, key] = rows[key]
                    history[name].append((commit_id, key, rows[key]))
                    changed += 1
        demand(changed > 0, f"commit {commit_id} ({mark}) changes nothing and was published")
    return history


def latest_of(history: Iterable[Version], upto: int) -> list[Version]:
    found: dict[str, Version] = {}
    for version in history:
        if version[0] <= upto:
            found[version[1]] = version
    return [found[key] for key in sorted(found)]


def stored_versions(reader: Writer, name: str, window: ReadWindow) -> list[Version]:
    """As a query gives them."""
    return _versions(name, reader.rows(SPECS[name], window))


def resolved_versions(reader: Writer, name: str) -> list[Version]:
    """From the files that a query would open, without the cost of one."""
    versions, spec = reader.repo._versions, SPECS[name]
    entries = versions.resolve(spec, reader.repo.chain.read_head().head).entries
    table = versions._scanner.table(spec, entries)
    return sorted(_versions(name, table.to_pylist()))


def _versions(name: str, rows: Iterable[Mapping[str, Any]]) -> list[Version]:
    return [(r["commit_id"], r["entity_key"], r[_VALUE[name]]) for r in rows]


# -- the invariants -------------------------------------------------------------------------------


def verify(world: World, ledger: Ledger, *, queries: bool = False) -> None:
    """Raise InvariantViolated unless the storage and the ledger tell the same story.

    `queries`: also run queries in every temporal mode, which takes ten times as long.
    """
    chain = committed(world)
    marks = [manifest.metadata["mark"] for manifest in chain]
    check_exactly_once(marks, ledger)
    check_reachable(world, chain)
    check_reads(world, replay(marks, ledger.intents), len(chain), queries=queries)


def committed(world: World) -> list[Manifest]:
    """The chain by parent links; ids must count up from 1."""
    objects = world.backend.objects()
    head = world.head()
    path, found = head.manifest_path, []
    while path is not None:
        demand(path in objects, f"manifest {path} is named by the log and missing")
        found.append(Manifest.parse(objects[path], key=path))
        path = found[-1].parent_manifest_path
    found.reverse()
    ids = [manifest.commit_id for manifest in found]
    demand(ids == list(range(1, len(ids) + 1)), f"ids have gaps: {ids}")
    demand(head.commit_id == len(ids), f"head says {head.commit_id}, the chain has {len(ids)}")
    times = [manifest.created_at for manifest in found]
    demand(times == sorted(times), f"created_at goes back: {times}")
    return found


def check_exactly_once(marks: Sequence[str], ledger: Ledger) -> None:
    twice = [mark for mark, count in Counter(marks).items() if count > 1]
    demand(not twice, f"published more than once: {twice}")
    for mark, commit_id in ledger.acknowledged.items():
        at = marks.index(mark) + 1 if mark in marks else None
        demand(at == commit_id, f"{mark} was acknowledged as {commit_id} and is at {at}")
    denied = ledger.refused & set(marks)
    demand(not denied, f"said not to be published, and published: {sorted(denied)}")
    strangers = set(marks) - set(ledger.acknowledged) - ledger.unknown
    demand(not strangers, f"nobody asked for {sorted(strangers)}")


def check_reachable(world: World, chain: Sequence[Manifest]) -> None:
    """Every file that a committed manifest names is there, with the content it was given."""
    objects = world.backend.objects()
    for manifest in chain:
        for file in manifest.files:
            demand(file.path in objects, f"{file.path} of commit {manifest.commit_id} is missing")
            digest = hashlib.sha256(objects[file.path]).hexdigest()
            demand(digest == file.content_sha256, f"{file.path} has changed")
    head = world.head()
    if head.checkpoint is not None:
        demand(head.checkpoint.path in objects, f"{head.checkpoint.path} is missing")
        digest = hashlib.sha256(objects[head.checkpoint.path]).hexdigest()
        demand(digest == head.checkpoint.sha256, f"{head.checkpoint.path} has changed")


def check_reads(
    world: World, history: Mapping[str, Sequence[Version]], head: int, *, queries: bool
) -> None:
    """A fresh reader sees what the model says."""
    reader = world.open("reader")
    try:
        demand(reader.repo.head_commit_id() == head, "head differs for a reader")
        ids = [record.id for record in reader.repo.list_commits(limit=head + 1)]
        demand(ids == list(range(head, 0, -1)), f"list_commits says {ids}")
        for name, versions in history.items():
            resolved = resolved_versions(reader, name)
            demand(resolved == list(versions), f"{name}: {resolved}, should be {versions}")
            if not queries:
                continue
            for window, expected in [
                (ReadWindow(history=True), list(versions)),
                (ReadWindow(), latest_of(versions, head)),
                (ReadWindow(as_of=head - 1), latest_of(versions, head - 1)),
            ]:
                found = stored_versions(reader, name, window)
                demand(found == expected, f"{name} {window}: {found}, should be {expected}")
    except OntologiaError as error:
        raise InvariantViolated(f"a reader failed: {error}") from error
    finally:
        reader.close()
        world.writers.remove(reader)


def recover(
    world: World, ledger: Ledger, mark: str, intent: Intent, *, queries: bool = False
) -> None:
    """After a crash: leases run out, a fresh process opens, reads rightly, and commits."""
    world.pass_lease()
    verify(world, ledger, queries=queries)
    go_on(world, ledger, mark, intent)
    verify(world, ledger, queries=queries)


def go_on(world: World, ledger: Ledger, mark: str, intent: Intent) -> None:
    """A fresh process makes the next commit, past the leases of those before it."""
    world.pass_lease()
    before = world.head().commit_id
    fresh = world.open("fresh", s3_lock_timeout_ms=2 * LEASE_TTL_MS)  # a clock may have been off
    failure = ledger.commit(fresh, mark, intent)
    demand(failure is None, f"the next commit failed: {failure}")
    demand(ledger.acknowledged.get(mark) == before + 1, "the next commit did not get the next id")


def index_problems(world: World) -> list[str]:
    reader = world.open("reader")
    try:
        return reader.repo.index_warnings()
    finally:
        reader.close()
        world.writers.remove(reader)


def leftovers(world: World) -> list[str]:
    """Objects that only a dead or failed writer can have left."""
    return [*world.orphans(), *(k for k in world.stored_keys() if k == layout.LOCK)]
