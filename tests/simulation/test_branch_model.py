"""Branches against a model of dictionaries: the same rows on every branch, in every mode.

Random trees of forks, commits, updates and merges by each policy, deletions and re-creations, tags,
compactions, purges and collections with zero grace, from sessions that are opened anew and from
others that live through all of it. `ONTOLOGIA_LONG=1` tries many more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from storage_engine.errors import MergeConflictError
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository import ReadWindow
from tests.campaigns import examples
from tests.commitlog.support import HISTORY, Writer, new_world
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of, stream_of

Row = tuple[str, int]  # name and age of a customer; "" and price of a product
Rows = dict[tuple[str, str], Row]  # by type name and key
KEYS = ("a", "b", "c", "d")
NAMES = ("main", "x", "y", "x/z")
POLICIES = ("fail", "ours", "theirs", "fields")


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

    def append(self, written: Rows) -> None:
        self.commits.append({**self.rows, **written})
        self.own[self.head] = {*written}


@dataclass
class Outcome:
    written: Rows
    conflicts: set[tuple[str, str]]
    resolved: bool


def three_way(
    candidates: set[tuple[str, str]], theirs: Rows, ours: Rows, known: list[Rows], policy: str
) -> Outcome:
    """The plain meaning of a merge, row by row."""
    outcome = Outcome({}, set(), False)
    for key in candidates:
        their, our = theirs[key], ours.get(key)
        before = [rows.get(key) for rows in known]
        if their == our or their in before:
            continue
        if our in before:
            outcome.written[key] = their
            continue
        base = next((row for row in reversed(before) if row is not None), None)
        decided: Row | None = None
        if policy == "ours":
            decided = our
        elif policy == "theirs":
            decided = their
        elif policy == "fields":
            decided = combined(base, our, their)
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

    @initialize(rows=ROWS)
    def begin(self, rows: Rows) -> None:
        self.commit("main", rows, fresh=True, bulk=False)

    # -- what is done ---------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES), rows=ROWS, fresh=st.booleans(), bulk=st.sampled_from([0, 0, 1])
    )
    def commit(self, name: str, rows: Rows, fresh: bool, bulk: bool) -> None:
        if name not in self.model:
            return
        rows = {key: row if key[0] == "Customer" else ("", row[1]) for key, row in rows.items()}
        customers = [customer(k, *row) for (t, k), row in rows.items() if t == "Customer"]
        products = [product(k, float(row[1])) for (t, k), row in rows.items() if t == "Product"]
        inputs = []
        if customers:
            made = stream_of(CUSTOMER, customers) if bulk else rows_of(CUSTOMER, *customers)
            inputs.append(made)
        if products:
            inputs.append(rows_of(PRODUCT, *products))
        self.writer(name, fresh).commit(*inputs)
        self.model[name].commit(rows)

    @rule(name=st.sampled_from(NAMES[1:]), parent=st.sampled_from(NAMES), back=st.integers(0, 2))
    def fork(self, name: str, parent: str, back: int) -> None:
        if name in self.model or parent not in self.model:
            return
        of = self.model[parent]
        at = max(of.base, of.head - back)
        self.writer(parent).repo.branches.create(name, at=at)
        self.model[name] = ModelBranch(parent, at, of.commits[: at + 1], updated=at)

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
        outcome = three_way(candidates, branch.rows, parent.rows, self.known(branch), policy)
        target = self.writer(branch.parent, fresh)
        if not self.done(lambda: target.repo.branches.merge(name, {None: policy}), outcome):  # type: ignore[dict-item]
            return
        parent.append(outcome.written)
        branch.merged = branch.head

    @rule(name=st.sampled_from(NAMES[1:]), policy=st.sampled_from(POLICIES), fresh=st.booleans())
    def update(self, name: str, policy: str, fresh: bool) -> None:
        branch = self.model.get(name)
        if branch is None or branch.parent is None:
            return
        parent = self.model[branch.parent]
        candidates = self.changed(parent, branch.updated, own=False)
        outcome = three_way(candidates, parent.rows, branch.rows, self.known(branch), policy)
        target = self.writer(name, fresh)
        if not self.done(lambda: target.repo.branches.update({None: policy}), outcome):  # type: ignore[dict-item]
            return
        branch.append(outcome.written)
        branch.updates.add(branch.head)
        branch.updated = parent.head

    @rule()
    def compact(self) -> None:
        compact(self.writer("main").repo, CompactionPolicy(min_entries=2))

    @rule(purge=st.booleans())
    def collect(self, purge: bool) -> None:
        repo = self.writer("main", fresh=True).repo
        sweep(repo, plan_gc(repo, grace=timedelta(), purge_compacted=purge))

    # -- what the model says of it --------------------------------------------------------------

    def changed(self, branch: ModelBranch, since: int, *, own: bool) -> set[tuple[str, str]]:
        commits = [n for n in range(since + 1, branch.head + 1) if n in branch.own]
        if own:
            commits = [n for n in commits if n not in branch.updates]
        return {key for number in commits for key in branch.own[number]}

    def known(self, branch: ModelBranch) -> list[Rows]:
        assert branch.parent is not None
        known = [self.model[branch.parent].commits[branch.updated]]
        if branch.merged is not None:
            known.append(branch.commits[branch.merged])
        return known

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
        expected = bool(outcome.written) or outcome.resolved
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
        for name, branch in self.model.items():
            writer = self.writer(name)
            assert writer.repo.head_commit_id() == branch.head, name
            assert rows_at(writer) == branch.rows, name

    @precondition(lambda self: self.model)
    @rule()
    def everything_agrees(self) -> None:
        """Every commit of every branch, read by somebody who opens it now."""
        for name, branch in self.model.items():
            reader = self.world.open(branch=name)
            for commit_id, rows in enumerate(branch.commits):
                assert rows_at(reader, ReadWindow(as_of=commit_id)) == rows, (name, commit_id)
            history = [r["commit_id"] for r in reader.rows(window=HISTORY)]
            assert history == sorted(history)

    def teardown(self) -> None:
        self.everything_agrees()
        assert verify_storage(self.world.open().repo).findings == []
        self.world.close()


def rows_at(writer: Writer, window: ReadWindow | None = None) -> Rows:
    customers = {
        ("Customer", r["entity_key"]): (r["name"], r["age"]) for r in writer.rows(window=window)
    }
    products = {
        ("Product", r["entity_key"]): ("", int(r["price"])) for r in writer.rows(PRODUCT, window)
    }
    return {**customers, **products}


TestBranches = BranchMachine.TestCase
TestBranches.settings = settings(
    max_examples=examples(12),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
