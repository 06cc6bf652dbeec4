"""Branches against a model of dictionaries: the same rows on every branch, in every mode.

Random trees of forks, commits, updates and merges by each policy, deletions and re-creations, tags,
restores, migrations, compactions, purges and collections with zero grace, from sessions that are
opened anew and from others that live through all of it. 300 each time; `ONTOLOGIA_LONG=1` tries
twenty times as many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from storage_engine.errors import MergeConflictError
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.maintenance.restore import restore
from storage_engine.model import Entity, Field, TypeSpec, spec_of
from storage_engine.repository import ReadWindow
from storage_engine.repository.object.merge import MergeTerms
from tests.campaigns import examples
from tests.commitlog.support import HISTORY, Writer, new_world
from tests.conformance.test_rfc0009_migration import migrate
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of, stream_of

Row = tuple[str, int]  # name and age of a customer; "" and price of a product
Rows = dict[tuple[str, str], Row]  # by type name and key
KEYS = ("a", "b", "c", "d")
NAMES = ("main", "x", "y", "x/z")
POLICIES = ("fail", "ours", "theirs", "fields", "greater")


@dataclass
class ModelBranch:
    """What a branch says as of each of its commits, and what it and its parent know of each
    other."""

    parent: str | None = None
    base: int = 0
    commits: list[Rows] = field(default_factory=lambda: [{}])
    own: dict[int, set[tuple[str, str]]] = field(default_factory=dict)  # changed, by commit
    updates: set[int] = field(default_factory=set)
    updated: int = 0  # the parent's commit of the last update
    merged: int | None = None  # its own commit of the last merge
    agreed: Rows = field(default_factory=dict)  # what both sides knew at the last merge or update
    versions: list[int] = field(default_factory=lambda: [1])  # of customers, as of each commit

    @property
    def head(self) -> int:
        return len(self.commits) - 1

    @property
    def rows(self) -> Rows:
        return self.commits[-1]

    def commit(self, changes: Rows) -> None:
        written = {key: row for key, row in changes.items() if self.rows.get(key) != row}
        if written:
            self.append(written)

    def append(self, written: Rows, version: int | None = None) -> None:
        self.commits.append({**self.rows, **written})
        self.versions.append(version or self.version)
        self.own[self.head] = {*written}

    @property
    def version(self) -> int:
        return self.versions[-1]

    @property
    def has_customers(self) -> bool:
        return any(key[0] == "Customer" for key in self.rows)


@dataclass
class Outcome:
    written: Rows
    conflicts: set[tuple[str, str]]
    resolved: bool
    migrated: bool = False


def three_way(
    candidates: set[tuple[str, str]], theirs: Rows, ours: Rows, agreed: Rows, policy: str
) -> Outcome:
    """The plain meaning of a merge, row by row."""
    outcome = Outcome({}, set(), False)
    for key in candidates:
        their, our = theirs[key], ours.get(key)
        base = agreed.get(key)
        if their in (our, base):
            continue
        if our == base:
            outcome.written[key] = their
            continue
        decided: Row | None = None
        if policy == "ours":
            decided = our
        elif policy == "theirs":
            decided = their
        elif policy == "fields":
            decided = combined(base, our, their)
        elif policy == "greater":
            assert our is not None
            decided = max(our, their)
        if decided is None:
            outcome.conflicts.add(key)
            continue
        outcome.resolved = True
        if decided != our:
            outcome.written[key] = decided
    return outcome


def combined(base: Row | None, our: Row | None, their: Row) -> Row | None:
    assert our is not None
    made: list[Any] = []
    for number in range(2):
        b = base[number] if base is not None else None
        o, t = our[number], their[number]
        if o == t or (base is not None and o == b):
            made.append(t)
        elif base is not None and t == b:
            made.append(o)
        else:
            return None
    return made[0], made[1]


def greater(_base: Any, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """The same as a function that is given with a merge."""

    def values(row: dict[str, Any]) -> Row:
        return ("", row["price"]) if "price" in row else (row["name"], row["age"])

    return max(ours, theirs, key=values)


def terms(policy: str) -> MergeTerms:
    return MergeTerms({None: greater if policy == "greater" else policy})  # type: ignore[dict-item]


ROWS = st.dictionaries(
    st.one_of(
        st.tuples(st.just("Customer"), st.sampled_from(KEYS)),
        st.tuples(st.just("Product"), st.sampled_from(KEYS[:2])),
    ),
    st.tuples(st.sampled_from(("Ann", "Bo")), st.integers(0, 3)),
    min_size=1,
    max_size=3,
)


class BranchMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = new_world()
        self.model: dict[str, ModelBranch] = {"main": ModelBranch()}
        self.living: dict[str, Writer] = {}
        self.tags: dict[str, tuple[ModelBranch, int]] = {}
        self.touched: set[str] = set()  # by the last step

    @initialize(rows=ROWS)
    def begin(self, rows: Rows) -> None:
        self.commit("main", rows, fresh=True, bulk=False)

    # -- what is done ---------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES), rows=ROWS, fresh=st.booleans(), bulk=st.sampled_from([0, 0, 1])
    )
    def commit(self, name: str, rows: Rows, fresh: bool, bulk: bool) -> None:
        branch = self.model.get(name)
        if branch is None:
            return
        rows = {key: row if key[0] == "Customer" else ("", row[1]) for key, row in rows.items()}
        spec = CUSTOMERS[branch.version]
        customers = [stored(spec, k, row) for (t, k), row in rows.items() if t == "Customer"]
        products = [product(k, float(row[1])) for (t, k), row in rows.items() if t == "Product"]
        inputs = []
        if customers:
            inputs.append(stream_of(spec, customers) if bulk else rows_of(spec, *customers))
        if products:
            inputs.append(rows_of(PRODUCT, *products))
        self.writer(name, fresh).commit(*inputs)
        branch.commit(rows)
        self.touched.add(name)

    @rule(name=st.sampled_from(NAMES[1:]), parent=st.sampled_from(NAMES), back=st.integers(0, 2))
    def fork(self, name: str, parent: str, back: int) -> None:
        if name in self.model or parent not in self.model:
            return
        of = self.model[parent]
        at = max(of.base, of.head - back)
        self.writer(parent).repo.branches.create(name, at=at)
        self.model[name] = ModelBranch(
            parent,
            at,
            of.commits[: at + 1],
            updated=at,
            agreed=of.commits[at],
            versions=of.versions[: at + 1],
        )
        self.touched.add(name)

    @rule(name=st.sampled_from(NAMES[1:]))
    def delete(self, name: str) -> None:
        if name not in self.model or any(b.parent == name for b in self.model.values()):
            return
        self.writer("main").repo.branches.delete(name)
        del self.model[name]
        self.living.pop(name, None)

    @rule(name=st.sampled_from(NAMES[1:]), policy=st.sampled_from(POLICIES), fresh=st.booleans())
    def merge(self, name: str, policy: str, fresh: bool) -> None:
        branch = self.model.get(name)
        if branch is None or branch.parent is None:
            return
        parent = self.model[branch.parent]
        since = max(branch.base, branch.merged or 0)
        candidates = self.changed(branch, since, own=True)
        outcome = three_way(candidates, branch.rows, parent.rows, branch.agreed, policy)
        outcome.migrated = branch.version > parent.version
        target = self.writer(branch.parent, fresh)
        if not self.done(lambda: target.repo.branches.merge(name, terms(policy)), outcome):
            return
        parent.append(outcome.written, max(branch.version, parent.version))
        branch.merged, branch.agreed = branch.head, branch.rows
        self.touched.add(branch.parent)

    @rule(name=st.sampled_from(NAMES[1:]), policy=st.sampled_from(POLICIES), fresh=st.booleans())
    def update(self, name: str, policy: str, fresh: bool) -> None:
        branch = self.model.get(name)
        if branch is None or branch.parent is None:
            return
        parent = self.model[branch.parent]
        candidates = self.changed(parent, branch.updated, own=False)
        outcome = three_way(candidates, parent.rows, branch.rows, branch.agreed, policy)
        outcome.migrated = parent.version > branch.version
        target = self.writer(name, fresh)
        if not self.done(lambda: target.repo.branches.update(terms(policy)), outcome):
            return
        branch.append(outcome.written, max(branch.version, parent.version))
        branch.updates.add(branch.head)
        branch.updated, branch.agreed = parent.head, parent.rows
        self.touched.add(name)

    @rule(name=st.sampled_from(NAMES))
    def migrate(self, name: str) -> None:
        branch = self.model.get(name)
        if branch is None or branch.version == 2 or not branch.has_customers:
            return
        migrate(self.writer(name).repo, CUSTOMERS[2])
        branch.append({}, 2)
        self.touched.add(name)

    @rule(name=st.sampled_from(NAMES), back=st.integers(1, 4))
    def restore(self, name: str, back: int) -> None:
        branch = self.model.get(name)
        if branch is None or not branch.head:
            return
        at = max(1, branch.head - back)
        if branch.versions[at] != branch.version:
            return  # refused: it is of another version
        restore(self.writer(name).repo, at, apply=True)
        branch.commit(branch.commits[at])
        self.touched.add(name)

    @rule(name=st.sampled_from(NAMES), tag=st.sampled_from(("t1", "t2")))
    def tag(self, name: str, tag: str) -> None:
        branch = self.model.get(name)
        if branch is None or tag in self.tags or not branch.head:
            return
        self.writer(name).repo.create_tag(tag)
        self.tags[tag] = branch, branch.head

    @rule()
    def compact(self) -> None:
        compact(self.writer("main").repo, CompactionPolicy(min_entries=2))
        self.touched |= {*self.model}

    @rule(purge=st.booleans())
    def collect(self, purge: bool) -> None:
        repo = self.writer("main", fresh=True).repo
        sweep(repo, plan_gc(repo, grace=timedelta(), purge_compacted=purge))
        self.touched |= {*self.model}

    # -- what the model says of it --------------------------------------------------------------

    def changed(self, branch: ModelBranch, since: int, *, own: bool) -> set[tuple[str, str]]:
        commits = [n for n in range(since + 1, branch.head + 1) if n in branch.own]
        if own:
            commits = [n for n in commits if n not in branch.updates]
        return {key for number in commits for key in branch.own[number]}

    def done(self, work: Callable[[], Any], outcome: Outcome) -> bool:
        """Whether it made a commit, as the model says."""
        if outcome.conflicts:
            try:
                work()
            except MergeConflictError as error:
                told = {(c["type_name"], c["identity"][0]) for c in error.conflicts}
                assert told == outcome.conflicts
                return False
            raise AssertionError(f"{outcome.conflicts} are in conflict")
        report = work()
        expected = bool(outcome.written) or outcome.resolved or outcome.migrated
        assert (report.commit_id is not None) == expected
        return expected

    def writer(self, name: str, fresh: bool = False) -> Writer:
        if fresh:
            return self.world.open(branch=name)
        if name not in self.living:
            self.living[name] = self.world.open(branch=name)
        return self.living[name]

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def latest_rows_agree(self) -> None:
        """Of the branches that the last step can have changed."""
        for name in self.touched & {*self.model}:
            branch, writer = self.model[name], self.writer(name)
            assert writer.repo.head_commit_id() == branch.head, name
            assert rows_at(writer, branch.version) == branch.rows, name
        self.touched.clear()

    def everything_agrees(self) -> None:
        """Every commit of every branch, read by somebody who opens it now: from its history, and
        one of them as of that commit."""
        for name, branch in self.model.items():
            reader = self.world.open(branch=name)
            assert reader.repo.head_commit_id() == branch.head, name
            states = states_of(reader, branch)
            for commit_id, rows in states.items():
                assert rows == branch.commits[commit_id], (name, commit_id)
            at = max(states) // 2 + 1
            if branch.versions[min(at, branch.head)] == branch.version:
                window = ReadWindow(as_of=at)
                expected = branch.commits[min(at, branch.head)]
                assert rows_at(reader, branch.version, window) == expected, (name, at)
            for tag, (tagged, commit_id) in self.tags.items():
                if tagged is branch:
                    assert reader.repo.resolve_tag(tag).commit_id == commit_id

    def teardown(self) -> None:
        self.everything_agrees()
        assert verify_storage(self.world.open().repo).findings == []
        self.world.close()


def _with_tier() -> TypeSpec:
    class Customer(Entity):
        id: Field[str] = Field(primary_key=True)
        name: Field[str]
        age: Field[int | None] = Field(default=None)
        tier: Field[str] = Field(default="basic")

    return spec_of(Customer)


CUSTOMERS = {1: CUSTOMER, 2: _with_tier()}  # in the second version all have the default


def stored(spec: TypeSpec, key: str, row: Row) -> dict[str, Any]:
    made = customer(key, *row)
    return made if spec is CUSTOMER else {**made, "tier": "basic"}


def rows_at(writer: Writer, version: int, window: ReadWindow | None = None) -> Rows:
    customers = {
        ("Customer", r["entity_key"]): (r["name"], r["age"])
        for r in writer.rows(CUSTOMERS[version], window)
    }
    products = {
        ("Product", r["entity_key"]): ("", int(r["price"])) for r in writer.rows(PRODUCT, window)
    }
    return {**customers, **products}


def states_of(reader: Writer, branch: ModelBranch) -> dict[int, Rows]:
    """What its history says of each commit; of customers, since they had their version."""
    first = branch.versions.index(branch.version)
    changes: dict[int, Rows] = {}
    for r in reader.rows(CUSTOMERS[branch.version], HISTORY):
        changes.setdefault(r["commit_id"], {})["Customer", r["entity_key"]] = r["name"], r["age"]
    for r in reader.rows(PRODUCT, HISTORY):
        changes.setdefault(r["commit_id"], {})["Product", r["entity_key"]] = "", int(r["price"])
    states: dict[int, Rows] = {}
    rows: Rows = {}
    for commit_id in range(branch.head + 1):
        rows = {**rows, **changes.get(commit_id, {})}
        if commit_id >= first:
            states[commit_id] = rows
    return states


@pytest.mark.simulation
def test_branches_against_the_model() -> None:
    """Not in the main thread, where each query has a thread of its own for the sake of Ctrl-C."""
    chosen = settings(
        max_examples=examples(300),
        stateful_step_count=20,
        deadline=None,
        derandomize=not os.environ.get("ONTOLOGIA_LONG"),
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(run_state_machine_as_test, BranchMachine, settings=chosen).result()
