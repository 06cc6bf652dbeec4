"""A writer that others have overtaken: what it reads of their commits, and what it needs."""

from __future__ import annotations

import random

import pytest

from storage_engine.commitlog import layout
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from tests.campaigns import examples
from tests.commitlog.support import Writer, at, made_world
from tests.engines import CUSTOMER, customer, rows_of

PART = "entities/Customer"


def reads(writer: Writer) -> list[str]:
    """What is read from here on."""
    seen: list[str] = []
    writer.store.on_request(lambda kind, key: seen.append(key) if kind == "GET" else None)
    return seen


def test_of_many_commits_of_others_one_index_is_read_and_no_part_that_cannot_matter() -> None:
    with made_world("v2") as world:
        ours, other = world.open("ours"), world.open("other")
        ours.put(customer("a", age=1))
        for n in range(6):
            other.put(customer(f"m{n}", age=n))
        seen = reads(ours)
        assert ours.put(customer("b", age=1)).commit_id == 8
        assert [key for key in seen if PART in key and key.startswith("commits/")] == []
        assert seen.count(layout.index(*CUSTOMER.ref)) == 1
        assert len([key for key in seen if layout.is_manifest(key)]) == 1, "head's alone"


def test_one_commit_of_another_is_known_from_heads_manifest() -> None:
    with made_world("v2") as world:
        ours, other = world.open("ours"), world.open("other")
        for n in range(3):
            ours.put(customer("a", age=n))
            other.put(customer("z", age=n))
        seen = reads(ours)
        at(ours.store, "PUT_IF", layout.HEAD, lambda: before.extend(seen))
        before: list[str] = []
        ours.put(customer("a", age=9))
        assert layout.index(*CUSTOMER.ref) not in before


def test_what_was_left_unread_is_read_when_its_keys_come() -> None:
    with made_world("v2") as world:
        ours, other = world.open("ours"), world.open("other")
        ours.put(customer("a", age=1))
        for n in range(4):
            other.put(customer("m", age=n), customer("p", age=n))
        ours.put(customer("b", age=1))  # passes them by
        other.put(customer("m", age=7))
        seen = reads(ours)
        assert ours.commit(rows_of(CUSTOMER, customer("m", age=7))) is None, "it is so already"
        assert len([key for key in seen if PART in key and key.startswith("commits/")]) == 5
        assert ours.put(customer("m", age=3), customer("p", age=3)).commit_id == 8
        assert world.open().ages() == {"a": 1, "b": 1, "m": 3, "p": 3}
        assert ours.history()[-1] == (8, "m", 3), "only the one that changed"


def test_files_that_were_merged_and_deleted_meanwhile_are_not_missed() -> None:
    with made_world("v2") as world:
        ours, other = world.open("ours"), world.open("other")
        ours.put(customer("a", age=1))
        for n in range(4):
            other.put(customer("m", age=n))
        ours.put(customer("b", age=1))
        assert compact(other.repo, CompactionPolicy(min_entries=2)).runs
        world.backend.remove([key for key in world.stored_keys("commits/") if PART in key])
        assert ours.commit(rows_of(CUSTOMER, customer("m", age=3))) is None, "it is so already"
        assert ours.put(customer("m", age=5)).commit_id == 7


@pytest.mark.parametrize("seed", range(examples(3)))
def test_writers_that_pass_each_other_by_agree_with_one_that_reads_all(seed: int) -> None:
    """Rows of random keys, some of which others have written: changed where they differ."""
    script = random.Random(seed)
    with made_world(script.choice(["v1", "v2"])) as world:
        writers = [world.open(f"w{n}") for n in range(3)]
        stored: dict[str, int] = {}
        for _ in range(25):
            writer = script.choice(writers)
            low = script.choice("abcdefgh")
            rows = {f"{low}{n}": script.randint(0, 2) for n in script.sample(range(3), 2)}
            if script.random() < 0.2:
                rows["z0"] = script.randint(0, 2)  # a wide range of keys
            changed = {key for key, age in rows.items() if stored.get(key) != age}
            made = [customer(key, age=age) for key, age in rows.items()]
            result = writer.commit(rows_of(CUSTOMER, *made))
            assert (result is None) == (not changed)
            if result is not None:
                assert sum(c.inserted + c.updated for c in result.changes) == len(changed)
            stored |= rows
        assert world.open().ages() == stored
