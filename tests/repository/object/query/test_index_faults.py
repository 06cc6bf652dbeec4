"""Indices that are missing, behind, wrong or cut off by a crash: the same rows, one warning, and
no more requests than planned."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import IntegrityError
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.query.spec import QuerySpec, When
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer
from tests.engines import CUSTOMER, customer, rows_of
from tests.index.support import index_of, lag_behind, resealed, spoil
from tests.repository.object.costs import measure

COMMITS = 6
LATEST = When()
EXPECTED = [(5, "a", 4), (6, "b", 5)]
HISTORY = [(n + 1, "ab"[n % 2], n) for n in range(COMMITS)]


def fill(world: World) -> None:
    writer = world.open("writer")
    for n in range(COMMITS):
        writer.put(customer("ab"[n % 2], age=n))


def ask(reader: Writer, when: When = LATEST) -> list[tuple[int, str, int]]:
    rows = reader.repo.executor().rows(QuerySpec(CUSTOMER, when=when))
    found = [row for batch in rows.batches for row in batch.to_pylist()]
    return [(row["commit_id"], row["entity_key"], row["age"]) for row in found]


def missing(world: World) -> None:
    world.backend.remove([layout.index(*CUSTOMER.ref)])


def lagging(world: World) -> None:
    lag_behind(world, COMMITS - 2)


def wrong_head_path(world: World) -> None:
    document = index_of(world)
    document["entries"][-1]["path"] = "commits/6-deadbeef/entities/Customer.parquet"
    spoil(world, document)


def without_head_entry(world: World) -> None:
    document = index_of(world)
    spoil(world, {**document, "entries": document["entries"][:-1]})


def unreadable(world: World) -> None:
    world.backend.write(layout.index(*CUSTOMER.ref), b"{")


# What is asked for beside head, head manifest, index and the six files: the manifests that the
# index does not cover (the head's own is at hand).
DAMAGE: dict[str, tuple[Callable[[World], None], int]] = {
    "missing": (missing, COMMITS - 1),
    "lagging": (lagging, 1),
    "wrong head path": (wrong_head_path, COMMITS - 1),  # its hash is another: none of it counts
    "without head entry": (without_head_entry, COMMITS - 1),
    "unreadable": (unreadable, COMMITS - 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_rfc0004_16_a_damaged_index_changes_no_row(
    either_world: World, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = either_world
    fill(world)
    harm, manifests = DAMAGE[damage]
    harm(world)
    reader = world.open("reader")
    found: list[list[tuple[int, str, int]]] = []
    with caplog.at_level(logging.WARNING):
        cost = measure(reader.repo, lambda: found.append(ask(reader)))
    assert found == [EXPECTED]
    assert cost.requests == {"GET": 3 + manifests + COMMITS}
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "Customer" in warnings[0]
    assert reader.warning() is not None
    assert ask(reader, When(history=True)) == HISTORY
    assert ask(reader, When(as_of=3)) == [(3, "a", 2), (2, "b", 1)]


def test_an_index_that_names_missing_files_is_not_believed(
    either_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Any of its entries, not the head's alone: a purge may have removed what it names."""
    world = either_world
    fill(world)
    document = index_of(world)
    document["entries"][1]["path"] = "commits/2-deadbeef/entities/Customer.parquet"
    world.backend.write(layout.index(*CUSTOMER.ref), resealed(document))
    reader = world.open("reader")
    with caplog.at_level(logging.WARNING):
        assert ask(reader) == EXPECTED
    assert [r.getMessage() for r in caplog.records if "are missing" in r.getMessage()]
    assert ask(reader, When(history=True)) == HISTORY
    assert reader.ages() == {"a": 4, "b": 5}
    assert reader.commit(rows_of(CUSTOMER, customer("a", age=4))) is None  # nothing to change


def test_a_file_that_the_log_itself_names_must_be_there(either_world: World) -> None:
    world = either_world
    fill(world)
    (path,) = [k for k in world.stored_keys("commits/2-") if k.endswith(".parquet")]
    world.backend.remove([path])
    with pytest.raises(IntegrityError, match="named by the log but missing"):
        ask(world.open("reader"))


def test_a_healthy_index_gives_no_warning(
    either_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    fill(either_world)
    reader = either_world.open("reader")
    with caplog.at_level(logging.WARNING):
        cost = measure(reader.repo, lambda: ask(reader))
    assert cost.requests == {"GET": 3 + COMMITS}
    assert caplog.records == []
    assert reader.warning() is None


def test_rfc0004_10_a_crash_between_cas_and_index_is_bridged_by_the_chain(
    either_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world = either_world
    fill(world)
    doomed = world.open("doomed")
    doomed.fail(FaultKind.CRASH_AFTER, "PUT_IF", layout.HEAD)
    with pytest.raises(SimulatedCrash):
        doomed.put(customer("a", age=99))
    reader = world.open("reader")
    with caplog.at_level(logging.WARNING):
        cost = measure(reader.repo, lambda: ask(reader))
    assert ask(reader) == [(7, "a", 99), (6, "b", 5)]
    # The head manifest, which names the commit's file, is at hand: nothing else to walk.
    assert cost.requests == {"GET": 3 + COMMITS + 1}
    assert any("index of Customer is at commit 6" in r.getMessage() for r in caplog.records)


def test_rfc0004_04_an_index_ahead_of_head_shows_nothing_that_is_not_committed(
    either_world: World,
) -> None:
    """A reader may read head, then an index that a later commit has written."""
    world = either_world
    fill(world)
    reader = world.open("reader")
    old_head = reader.repo.chain.read_head()
    world.open("writer 2").put(customer("c", age=7))
    reader.repo.chain.read_head = lambda: old_head  # type: ignore[method-assign]
    assert ask(reader) == EXPECTED
    assert ask(reader, When(history=True)) == HISTORY


def test_plans_tell_how_the_files_were_found(world: World) -> None:
    fill(world)
    missing(world)
    reader = world.open("reader")
    plan = reader.repo.executor().explain(QuerySpec(CUSTOMER))
    assert plan.facts["types"][0]["fallback"] is True
    assert "from the commit chain" in plan.text
    assert "warning: index of Customer is at commit 0" in plan.text
