"""`isolation="snapshot"`: nothing that this session looked at is overwritten unseen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from storage_engine import ConcurrentWriteError, Session
from storage_engine.model import spec_of
from storage_engine.query import count
from storage_engine.repository.protocol import Snapshot
from storage_engine.runtime.core import ReadSet
from tests.runtime.support import names
from tests.shop import Customer, Product, Subscription

ANN = Customer(id="c1", name="Ann", age=0)
BEN = Customer(id="c2", name="Ben")


@pytest.fixture
def pair(uri: str) -> Iterator[tuple[Session, Session]]:
    """Two sessions of a storage that has Ann and Ben, as commit 1."""
    with Session(uri) as first:
        first.ensure([ANN, BEN, Product(sku="p1", price=1.0)])
        first.ensure(Subscription(left_key="c1", right_key="p1", seats=1))
    mine, theirs = Session(uri), Session(uri)
    yield mine, theirs
    mine.close()
    theirs.close()


def rename(session: Session, customer: Customer, name: str, **terms: Any) -> int | None:
    session.ensure(customer.replace(name=name))
    return session.commit(**terms)


def ann(session: Session) -> Customer:
    found = session.query().entities(Customer).where(Customer.id == "c1").first()
    assert found is not None
    return found


def refused(session: Session, *identities: object) -> None:
    with pytest.raises(ConcurrentWriteError) as caught:
        session.commit(isolation="snapshot")
    assert caught.value.identities == list(identities)


READS: dict[str, Callable[[Session], object]] = {
    "first": ann,
    "collect": lambda s: s.query().entities(Customer).collect(),
    "objects": lambda s: list(s.query().entities(Customer).objects()),
    "to_arrow": lambda s: s.query().entities(Customer).to_arrow(),
    "batches": lambda s: list(s.query().entities(Customer).batches()),
    "count": lambda s: s.query().entities(Customer).count(),
    "another row": lambda s: s.query().entities(Customer).where(Customer.id == "c2").collect(),
    "no row": lambda s: s.query().entities(Customer).where(Customer.id == "c9").collect(),
    "groups": lambda s: s.query().entities(Customer).group_by(Customer.name).agg(n=count()),
    "sql": lambda s: s.sql("select count(*) from Customer").collect(),
    "traversal": lambda s: s.query().entities(Customer).via(Subscription).collect(),
    "endpoint": lambda s: s.query().relations(Subscription).collect()[0].left,
    "another type": lambda s: s.query().entities(Product).collect(),
    "the snapshot": lambda s: s.snapshot,
}


@pytest.mark.parametrize("read", list(READS))
def test_the_first_read_sets_the_base(pair: tuple[Session, Session], read: str) -> None:
    mine, theirs = pair
    READS[read](mine)
    rename(theirs, ANN, "theirs")

    mine.ensure(ANN.replace(name="mine"))
    refused(mine, "c1")
    assert mine.snapshot == 1


@pytest.mark.parametrize("bulk", [False, True])
def test_an_own_unrelated_commit_does_not_hide_what_others_changed(
    uri: str, pair: tuple[Session, Session], bulk: bool
) -> None:
    mine, theirs = pair
    before = ann(mine)
    rename(theirs, ANN, "theirs")
    assert rename(mine, BEN, "mine", isolation="snapshot") == 3
    assert mine.snapshot == 3

    changed = before.replace(name=f"{before.name} and mine")
    if bulk:
        row = {"id": "c1", "name": changed.name, "tier": changed.tier, "age": changed.age}
        mine.ingest(Customer, pa.Table.from_pylist([row]))
    else:
        mine.ensure(changed)
    refused(mine, "c1")
    assert names(uri)["c1"] == "theirs"


def test_what_was_counted_or_missing_stays_known_over_own_commits(
    pair: tuple[Session, Session],
) -> None:
    mine, theirs = pair
    assert mine.query().entities(Customer).where(Customer.id == "c3").first() is None
    theirs.ensure(Customer(id="c3", name="theirs"))
    theirs.commit()
    mine.ensure(Product(sku="p2", price=2.0))
    assert mine.commit(isolation="snapshot") == 3

    mine.ensure(Customer(id="c3", name="mine"))
    refused(mine, "c3")


def test_what_is_read_again_in_the_next_unit_counts_from_there(
    uri: str, pair: tuple[Session, Session]
) -> None:
    mine, theirs = pair
    for turn in range(3):
        rename(theirs, ANN, f"theirs {turn}")
        current = ann(mine)
        assert current.name == f"theirs {turn}"
        assert rename(mine, current, f"mine {turn}", isolation="snapshot") is not None
    assert names(uri)["c1"] == "mine 2"


def test_a_second_read_in_one_unit_does_not_hide_a_change(pair: tuple[Session, Session]) -> None:
    mine, theirs = pair
    old = ann(mine)
    rename(theirs, ANN, "theirs")
    assert mine.query().entities(Customer).to_arrow().num_rows == 2  # a look at all of them

    mine.ensure(old.replace(name="mine"))
    refused(mine, "c1")


@pytest.mark.parametrize("discard", [False, True])
def test_after_a_refusal_read_again_and_commit(
    uri: str, pair: tuple[Session, Session], discard: bool
) -> None:
    mine, theirs = pair
    old = ann(mine)
    rename(theirs, ANN, "theirs")
    mine.ensure(old.replace(name="mine"))
    refused(mine, "c1")
    refused(mine, "c1")  # to ask again changes nothing
    if discard:
        mine.discard()

    rename(mine, ann(mine), "both", isolation="snapshot")
    assert names(uri)["c1"] == "both"


def test_discard_begins_anew_for_what_was_never_read(
    uri: str, pair: tuple[Session, Session]
) -> None:
    mine, theirs = pair
    mine.ensure(ANN.replace(name="mine"))
    rename(theirs, ANN, "theirs")
    refused(mine, "c1")

    mine.discard()
    assert rename(mine, ANN, "mine", isolation="snapshot") == 3
    assert names(uri)["c1"] == "mine"


def test_own_commits_are_no_conflict_whatever_was_read_before(
    pair: tuple[Session, Session],
) -> None:
    mine, _ = pair
    old = ann(mine)
    mine.query().entities(Customer).count()
    mine.sql("select * from Customer").collect()
    rows = [{"id": f"c{n}", "name": "bulk", "tier": "x", "age": 1} for n in range(5)]
    mine.ingest(Customer, pa.Table.from_pylist(rows))
    assert mine.commit(isolation="snapshot") == 2
    assert rename(mine, old, "mine", isolation="snapshot") == 3
    mine.ingest(Customer, pa.Table.from_pylist(rows))
    assert mine.commit(isolation="snapshot") == 4


def test_reads_of_the_past_are_no_base(uri: str, pair: tuple[Session, Session]) -> None:
    mine, theirs = pair
    rename(theirs, ANN, "theirs")
    mine.query().entities(Customer).as_of(1).collect()
    mine.query().entities(Customer).with_history().collect()
    mine.at(1).query().entities(Customer).collect()
    assert mine.snapshot == 2
    assert rename(mine, ANN, "mine", isolation="snapshot") == 3


def test_types_and_identities_that_nobody_changed_pass(pair: tuple[Session, Session]) -> None:
    mine, theirs = pair
    mine.query().entities(Customer).collect()
    rename(theirs, ANN, "theirs")
    mine.ensure([BEN.replace(name="mine"), Product(sku="p1", price=9.0)])
    assert mine.commit(isolation="snapshot") == 3


def test_without_isolation_reads_refuse_nothing(uri: str, pair: tuple[Session, Session]) -> None:
    mine, theirs = pair
    old = ann(mine)
    rename(theirs, ANN, "theirs")
    assert rename(mine, old, "mine") == 3
    assert names(uri)["c1"] == "mine"


def test_an_unread_stream_sets_the_base_too(pair: tuple[Session, Session]) -> None:
    mine, theirs = pair
    batches = mine.query().entities(Customer).batches()
    rename(theirs, ANN, "theirs")
    mine.ensure(ANN.replace(name="mine"))
    refused(mine, "c1")
    del batches


# --- the read set -------------------------------------------------------------------------------

CUSTOMER = spec_of(Customer)


def keys(*ids: str) -> pa.Table:
    return pa.table({"entity_key": list(ids)})


def test_more_rows_than_are_remembered_count_by_the_first_read_of_their_type() -> None:
    reads = ReadSet(rows_remembered=10)
    reads.add_type(CUSTOMER.ref, 3)
    reads.add_rows(CUSTOMER, 3, keys("a"))
    reads.next_unit()
    reads.add_rows(CUSTOMER, 7, keys("a"))
    assert reads.snapshot(9).of_identity(CUSTOMER.ref, ("a",)) == 7
    reads.add_rows(CUSTOMER, 8, keys(*(f"k{n}" for n in range(20))))
    assert reads.snapshot(9).of_identity(CUSTOMER.ref, ("a",)) == 3
    assert reads.snapshot(9).rows(CUSTOMER.ref) == {}


def test_a_row_that_was_forgotten_is_not_known_anew_in_the_same_unit() -> None:
    """Its first read counts, and whoever forgot it cannot tell that this is another."""
    reads = ReadSet(rows_remembered=10)
    ref, many = CUSTOMER.ref, pa.table({"entity_key": [f"k{n}" for n in range(50)]})
    reads.add_type(ref, 5)
    reads.add_rows(CUSTOMER, 5, many)
    reads.add_rows(CUSTOMER, 6, many.slice(0, 1))
    assert reads.snapshot(9).of_identity(ref, ("k0",)) == 5
    reads.next_unit()
    reads.add_rows(CUSTOMER, 7, many.slice(0, 1))
    assert reads.snapshot(9).of_identity(ref, ("k0",)) == 7


def test_the_same_rows_again_and_again_are_remembered_once() -> None:
    reads = ReadSet(rows_remembered=100)
    reads.add_type(CUSTOMER.ref, 1)
    for head in range(1, 200):
        reads.add_rows(CUSTOMER, head, keys(*(f"k{n}" for n in range(10))))
        reads.next_unit()
    assert reads.snapshot(0).rows(CUSTOMER.ref) == {(f"k{n}",): 199 for n in range(10)}


def test_own_commits_are_kept_as_ranges() -> None:
    reads = ReadSet()
    for commit_id in (1, 2, 3, 7, 8, 20):
        reads.add_own(commit_id)
    snapshot = reads.snapshot(0)
    assert snapshot.own == ((1, 3), (7, 8), (20, 20))
    for commit_id in (1, 3, 8, 20):
        snapshot.check(CUSTOMER.ref, [(("a",), commit_id)])
    with pytest.raises(ConcurrentWriteError):
        snapshot.check(CUSTOMER.ref, [(("a",), 9)])


def test_a_snapshot_by_itself_is_one_commit_for_all() -> None:
    snapshot = Snapshot(5)
    assert (snapshot.since(CUSTOMER.ref), snapshot.of_identity(CUSTOMER.ref, ("a",))) == (5, 5)


# --- against a model ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_no_increment_is_lost(uri: str, seed: int) -> None:
    """Sessions that read, wait and write by turns: each commit that is accepted counts."""
    turns = random.Random(seed)
    with Session(uri) as first:
        first.ensure([Customer(id=f"c{n}", name="x", age=0) for n in range(3)])
    sessions = [Session(uri) for _ in range(3)]
    held: list[dict[str, Customer]] = [{} for _ in sessions]
    counted = dict.fromkeys((f"c{n}" for n in range(3)), 0)
    for _ in range(60):
        who = turns.randrange(3)
        session, mine = sessions[who], held[who]
        key = f"c{turns.randrange(3)}"
        action = turns.choice(["read", "read", "write", "write", "unrelated", "glance"])
        if action == "read" and key not in mine:
            found = session.query().entities(Customer).where(Customer.id == key).first()
            assert found is not None
            mine[key] = found
        elif action == "glance":
            session.query().entities(Customer).sum(Customer.age)
        elif action == "unrelated":
            session.ensure(Product(sku=f"s{turns.randrange(100)}", price=turns.random()))
            session.commit(isolation="snapshot" if turns.random() < 0.5 else None)
        elif action == "write" and key in mine:
            old = mine.pop(key)
            session.ensure(old.replace(age=(old.age or 0) + 1))
            try:
                session.commit(isolation="snapshot")
                counted[key] += 1
            except ConcurrentWriteError:
                session.discard()
                mine.clear()
    with Session(uri) as last:
        ages = {c.id: c.age for c in last.query().entities(Customer).collect()}
    for session in sessions:
        session.close()
    assert ages == counted
    assert sum(counted.values()) > 3
