"""`session.last_commit.notes`: what may surprise whoever made a commit, on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa

from storage_engine import Entity, Field, Session
from storage_engine.runtime.core import ReadSet
from tests.shop import Customer, Product, Subscription


class Visit(Entity):
    id: Field[str] = Field(primary_key=True)
    at: Field[datetime]


def notes(session: Session) -> Sequence[str]:
    assert session.last_commit is not None
    return list(session.last_commit.notes)


def customers(*rows: tuple[str, str]) -> pa.Table:
    return pa.table({"id": [key for key, _ in rows], "name": [name for _, name in rows]})


def test_an_ordinary_commit_has_no_notes(session: Session) -> None:
    session.ensure(Customer(id="c1", name="Ann"))
    session.commit()
    assert notes(session) == []
    session.ingest(Customer, customers(("c1", "Ben"), ("c2", "Cyd")))
    session.commit()
    assert notes(session) == []


def test_times_without_a_zone_are_utc(session: Session) -> None:
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    naive = pa.table(
        {"id": ["v1"], "at": pa.array([moment.replace(tzinfo=None)], pa.timestamp("us"))}
    )
    session.ingest(Visit, naive)
    session.commit()
    assert notes(session) == ["Visit.at: times without a zone were read as UTC"]
    (visit,) = session.query().entities(Visit).collect()
    assert visit.at == moment

    zoned = pa.table({"id": ["v2"], "at": pa.array([moment], pa.timestamp("us", "UTC"))})
    session.ingest(Visit, zoned)
    session.commit()
    assert notes(session) == []


def test_repeated_rows_of_one_ingest(session: Session) -> None:
    session.ingest(Customer, customers(("c1", "a"), ("c2", "b"), ("c1", "c"), ("c1", "d")))
    session.commit()
    assert notes(session) == [
        "Customer: 2 rows repeat an identity that was stated before in the same commit; "
        "the last statement counts"
    ]
    named = {c.id: c.name for c in session.query().entities(Customer).collect()}
    assert named == {"c1": "d", "c2": "b"}
    session.ingest(Customer, customers(("c3", "a"), ("c3", "b")))
    session.commit()
    (note,) = notes(session)
    assert note.startswith("Customer: 1 row repeats")


def test_relations_whose_ends_are_of_types_without_rows(session: Session) -> None:
    edge = Subscription(left_key="c1", right_key="p1", seats=1)
    session.ensure([edge, Customer(id="c1", name="Ann")])
    session.commit()
    assert notes(session) == [
        "Subscription: its relations point to Product, of which nothing is stored yet"
    ]
    session.ensure([Product(sku="p1", price=1.0), edge.replace(seats=2)])
    session.commit()
    assert notes(session) == []
    session.ensure(Subscription(left_key="c9", right_key="p9", seats=1))
    session.commit()
    assert notes(session) == [], "ends may come later"


REFUSED = (
    "after this session had looked; what is stated last counts, the history has both, and "
    'commit(isolation="snapshot") refuses instead'
)


def test_of_two_writers_the_later_one_counts_and_both_stay_in_history(
    uri: str, session: Session
) -> None:
    session.ensure(Customer(id="c1", name="mine"))
    with Session(uri) as other:
        other.ensure(Customer(id="c1", name="theirs"))
    assert session.commit() == 2
    history = session.query().entities(Customer).with_history().collect()
    assert [c.name for c in history] == ["theirs", "mine"]
    assert notes(session) == [f"Customer: 'c1' was changed by another commit (1) {REFUSED}"]


def commit_elsewhere(uri: str, *objects: object) -> None:
    with Session(uri) as other:
        other.ensure(objects)


def test_what_others_changed_since_it_was_read_is_noted(uri: str, session: Session) -> None:
    """By identity, as snapshot isolation has it: also over own commits, and warm and cold."""
    commit_elsewhere(uri, *(Customer(id=f"c{n}", name="0") for n in range(6)))
    read = {c.id: c for c in session.query().entities(Customer).collect()}
    commit_elsewhere(uri, *(Customer(id=f"c{n}", name="theirs") for n in range(4)))
    session.ensure(read["c5"].replace(name="mine"))
    session.commit()
    assert notes(session) == [], "nobody touched it"
    session.ensure([read[f"c{n}"].replace(name="mine") for n in (0, 1, 2, 3, 4)])
    session.commit()
    assert notes(session) == [
        f"Customer: 4 identities ('c0', 'c1', 'c2', ...) were changed by other commits {REFUSED}"
    ]
    session.ensure([read[f"c{n}"].replace(name="again") for n in range(6)])
    session.commit()
    assert notes(session) == [], "own commits are no surprise"


def test_what_others_made_equal_is_no_surprise(uri: str, session: Session) -> None:
    commit_elsewhere(uri, Customer(id="c1", name="0"), Customer(id="c2", name="0"))
    session.query().entities(Customer).collect()
    commit_elsewhere(uri, Customer(id="c1", name="same"))
    session.ensure([Customer(id="c1", name="same"), Customer(id="c2", name="mine")])
    session.commit()
    assert notes(session) == []
    session.discard()
    commit_elsewhere(uri, Customer(id="c1", name="theirs"))
    assert [c.name for c in session.query().entities(Customer).collect()] == ["theirs", "mine"]
    session.ensure(Customer(id="c1", name="mine"))
    session.commit()
    assert notes(session) == [], "it was read anew"


def test_a_relation_that_others_changed_is_noted(uri: str, session: Session) -> None:
    edge = Subscription(left_key="c1", right_key="p1", seats=1)
    commit_elsewhere(uri, edge, Customer(id="c1", name="Ann"), Product(sku="p1", price=1.0))
    session.query().relations(Subscription).collect()
    commit_elsewhere(uri, edge.replace(seats=2))
    session.ensure(edge.replace(seats=3))
    session.commit()
    (note,) = notes(session)
    assert note.startswith("Subscription: ('c1', 'p1', ''")
    assert "was changed by another commit (2)" in note


def test_two_writers_in_turn_remember_a_bounded_number_of_own_commits() -> None:
    reads = ReadSet()
    reads.add_type(("entity", "Customer"), 10)
    for commit_id in range(1, 100_000, 2):
        reads.add_own(commit_id)
    own = reads.snapshot(0).own
    assert len(own) <= 1_000
    assert own[-1] == (99_999, 99_999)
    assert [*own] == sorted(own)
    nothing_read = ReadSet()
    for commit_id in range(1, 100_000, 2):
        nothing_read.add_own(commit_id)
    assert len(nothing_read.snapshot(0).own) <= 1_000
