"""Commits, compaction, damage and repair, purge, tags and restore in any order: reads never differ
from a plain model of the history, and what a tag names stays readable.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.maintenance.restore import restore
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository import ReadWindow
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import HISTORY, World, made_world
from tests.engines import CUSTOMER, customer, rows_of, stream_of
from tests.index.support import index_of, spoil
from tests.maintenance.support import DAY_S
from tests.maintenance.test_gc import check

pytestmark = pytest.mark.simulation
KEYS = "abcdef"


@dataclass
class Model:
    """Versions by commit: key -> age."""

    commits: list[dict[str, int]] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)

    def state(self, upto: int) -> dict[str, int]:
        merged: dict[str, int] = {}
        for versions in self.commits[:upto]:
            merged |= versions
        return merged

    def write(self, rows: dict[str, int]) -> bool:
        now = self.state(len(self.commits))
        changed = {key: age for key, age in rows.items() if now.get(key) != age}
        if changed:
            self.commits.append(changed)
        return bool(changed)


class Run:
    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.model = Model()
        self.random = random.Random(seed)
        self.done: list[str] = []

    def step(self) -> None:
        actions = [
            *[self.write] * 6,
            self.bulk,
            self.crash,
            *[self.compact] * 2,
            self.damage,
            self.repair,
            *[self.collect] * 2,
            self.tag,
            self.untag,
            self.restore,
            self.sleep,
        ]
        action = self.random.choice(actions)
        self.done.append(action.__name__)
        action()

    def rows(self) -> dict[str, int]:
        chosen = self.random.sample(KEYS, self.random.randint(1, 3))
        return {key: self.random.randint(1, 4) for key in chosen}

    def opened(self, name: str) -> Any:
        return self.world.open(name, checkpoint_interval=self.random.choice([2, 5, 1000]))

    def write(self) -> None:
        rows = self.rows()
        made = [customer(key, age=age) for key, age in rows.items()]
        result = self.opened("writer").commit(rows_of(CUSTOMER, *made))
        assert (result is not None) == self.model.write(rows)

    def bulk(self) -> None:
        rows = self.rows()
        made = [customer(key, age=age) for key, age in rows.items()]
        result = self.opened("loader").commit(stream_of(CUSTOMER, made))
        assert (result is not None) == self.model.write(rows)

    def crash(self) -> None:
        """A commit or load that dies before its CAS."""
        doomed = self.opened("doomed")
        doomed.fail(FaultKind.CRASH_BEFORE, "PUT_IF", layout.HEAD)
        made = [customer("z", age=self.random.randint(1, 10**6))]
        source = (
            rows_of(CUSTOMER, *made) if self.random.random() < 0.5 else stream_of(CUSTOMER, made)
        )
        with pytest.raises(SimulatedCrash):
            doomed.commit(source)
        self.world.pass_lease()

    def compact(self) -> None:
        ratio = self.random.choice([1.5, 100.0])
        compact(self.opened("compactor").repo, CompactionPolicy(min_entries=2, ratio=ratio))

    def damage(self) -> None:
        """An index that lags, or is lost."""
        if not self.model.commits:
            return
        if self.random.random() < 0.5:
            self.world.backend.remove([layout.index(*CUSTOMER.ref)])
            return
        if layout.index(*CUSTOMER.ref) not in self.world.backend.objects():
            return
        document = index_of(self.world)
        behind = self.random.randint(0, document["max_indexed_commit"])
        kept = [e for e in document["entries"] if e["max_commit_id"] <= behind]
        spoil(self.world, {**document, "entries": kept, "max_indexed_commit": behind})

    def repair(self) -> None:
        repo = self.opened("repairer").repo
        repair_indices(repo, apply=True)
        assert verify_indices(repo).ok

    def collect(self) -> None:
        repo = self.opened("collector").repo
        sweep(repo, plan_gc(repo, purge_compacted=self.random.random() < 0.7))
        check(self.world)

    def tag(self) -> None:
        if self.model.commits:
            commit_id = self.random.randint(1, len(self.model.commits))
            name = f"t{len(self.done)}"
            self.opened("tagger").repo.create_tag(name, commit_id)
            self.model.tags[name] = commit_id

    def untag(self) -> None:
        if self.model.tags:
            name = self.random.choice(sorted(self.model.tags))
            self.opened("tagger").repo.delete_tag(name)
            del self.model.tags[name]

    def restore(self) -> None:
        if not self.model.commits:
            return
        reference: int | str = self.random.randint(1, len(self.model.commits))
        if self.model.tags and self.random.random() < 0.5:
            reference = self.random.choice(sorted(self.model.tags))
        commit_id = self.model.tags[reference] if isinstance(reference, str) else reference
        done = restore(self.opened("restorer").repo, reference, apply=True)
        assert (done.new_commit_id is not None) == self.model.write(self.model.state(commit_id))

    def sleep(self) -> None:
        self.world.backend.clock.sleep(self.random.choice([1, 8]) * DAY_S)

    # -- checking -----------------------------------------------------------------------------

    def compare(self) -> None:
        reader = self.world.open("reader")
        head = len(self.model.commits)
        assert reader.repo.head_commit_id() == head
        expected = [
            (number, key, versions[key])
            for number, versions in enumerate(self.model.commits, start=1)
            for key in sorted(versions)
        ]
        assert reader.history() == expected
        for upto in {head, head - 1, *self.model.tags.values()}:
            rows = reader.rows(window=ReadWindow(as_of=upto))
            found = {row["entity_key"]: row["age"] for row in rows}
            assert found == self.model.state(max(0, upto)), upto
        assert {t.name: t.commit_id for t in reader.repo.list_tags()} == self.model.tags
        for name, commit_id in self.model.tags.items():
            assert reader.repo.resolve_tag(name).commit_id == commit_id
        assert [r.id for r in reader.repo.list_commits(head + 1)] == list(range(head, 0, -1))
        assert reader.rows(window=HISTORY) is not None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_reads_stay_the_same_whatever_is_done(engine_version: str, seed: int) -> None:
    with made_world(engine_version) as world:
        run = Run(world, seed)
        for _ in range(22):
            try:
                run.step()
                run.compare()
            except BaseException as error:
                error.add_note(f"after {', '.join(run.done)}")
                raise
        run.repair()
        report = verify_storage(world.open("auditor").repo, deep=True)
        assert report.findings == [], run.done
