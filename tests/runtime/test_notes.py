"""`session.last_commit.notes`: what may surprise whoever made a commit, on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa

from storage_engine import Entity, Field, Session
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


def test_of_two_writers_the_later_one_counts_and_both_stay_in_history(
    uri: str, session: Session
) -> None:
    session.ensure(Customer(id="c1", name="mine"))
    with Session(uri) as other:
        other.ensure(Customer(id="c1", name="theirs"))
    assert session.commit() == 2
    history = session.query().entities(Customer).with_history().collect()
    assert [c.name for c in history] == ["theirs", "mine"]
