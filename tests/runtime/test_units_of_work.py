"""`commit(idempotency=...)`: what was applied is not applied again, changed something or not."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pyarrow as pa
import pytest

from storage_engine import ConcurrentWriteError, ExpectedVersionMismatchError, Session
from storage_engine.repository.protocol import Idempotency
from tests.runtime.support import head, make_storage, names
from tests.shop import Customer, Product

ANN = Customer(id="c1", name="Ann")


def apply(session: Session, name: str, version: int | str, app: str = "load") -> int | None:
    session.ensure(ANN.replace(name=name))
    return session.commit(idempotency=(app, version))


def test_a_repeated_unit_that_changed_nothing_answers_none_and_makes_no_commit(
    uri: str, session: Session
) -> None:
    assert apply(session, "Ann", 1) == 1
    assert apply(session, "Ann", 2) is None
    assert session.repository.applied(Idempotency("load", 2)) is not None
    with Session(uri) as other:
        other.ensure(ANN.replace(name="theirs"))
        assert other.commit() == 2

    assert apply(session, "Ann", 2) is None, "a retry does not write old values over new ones"
    assert apply(session, "older", 1) is None, "nor does a late older unit"
    assert names(uri) == {"c1": "theirs"}
    assert head(uri) == 2
    assert apply(session, "next", 3) == 3


def test_a_retry_of_bulk_that_changed_nothing_reads_no_source(uri: str, session: Session) -> None:
    table = pa.table({"id": ["c1"], "name": ["Ann"], "tier": ["x"]})
    session.ingest(Customer, table)
    assert session.commit(idempotency=("load", "monday")) == 1
    session.ingest(Customer, table)
    assert session.commit(idempotency=("load", "tuesday")) is None
    with Session(uri) as other:
        other.ensure(ANN.replace(name="theirs"))

    def unreadable():  # type: ignore[no-untyped-def]
        yield from [pytest.fail("the source was read")]

    session.ingest(Customer, pa.RecordBatchReader.from_batches(table.schema, unreadable()))
    assert session.commit(idempotency=("load", "tuesday")) is None
    assert names(uri) == {"c1": "theirs"}


def test_a_unit_of_nothing_at_all_is_recorded(session: Session) -> None:
    assert session.commit(idempotency=("load", 5)) is None
    assert session.repository.applied(Idempotency("load", 5)) is not None
    assert apply(session, "late", 4) is None
    assert apply(session, "next", 6) == 1


def test_the_newest_record_of_an_application_decides(session: Session) -> None:
    assert apply(session, "a", 1) == 1
    assert apply(session, "b", 2) == 2
    assert apply(session, "c", 3) == 3
    repository = session.repository
    for version in (1, 2, 3):
        applied = repository.applied(Idempotency("load", version))
        assert applied is not None
        assert applied.commit_id == 3
    assert apply(session, "x", 1) == 3
    assert session.last_commit is not None
    assert session.last_commit.already_applied
    assert apply(session, "c", 4) is None
    applied = repository.applied(Idempotency("load", 2))
    assert applied is not None
    assert applied.commit_id is None
    assert apply(session, "d", 5) == 4
    applied = repository.applied(Idempotency("load", 4))
    assert applied is not None
    assert applied.commit_id == 4


def test_texts_count_when_they_equal_the_last_one(session: Session) -> None:
    assert apply(session, "a", "x") == 1
    assert apply(session, "a", "y") is None
    assert apply(session, "b", "y") is None, "applied"
    assert apply(session, "b", "x") == 2, "no longer the last one"


def test_applications_do_not_mix(session: Session) -> None:
    assert apply(session, "a", 7, app="one") == 1
    assert apply(session, "a", 7, app="two") is None
    assert apply(session, "b", 1, app="three") == 2
    assert apply(session, "c", 7, app="two") is None


def test_a_refused_unit_is_not_recorded(uri: str, session: Session) -> None:
    assert apply(session, "a", 1) == 1
    session.ensure(ANN.replace(name="a"))
    with pytest.raises(ExpectedVersionMismatchError):
        session.commit(idempotency=("load", 2), expect={Product: 9})
    session.discard()
    session.query().entities(Customer).collect()
    with Session(uri) as other:
        other.ensure(ANN.replace(name="theirs"))
    session.ensure(ANN.replace(name="b"))
    with pytest.raises(ConcurrentWriteError):
        session.commit(idempotency=("load", 2), isolation="snapshot")
    assert session.repository.applied(Idempotency("load", 2)) is None
    session.discard()
    assert apply(session, "b", 2) == 3


@pytest.mark.parametrize("engine", ["sqlite-v1", "sqlite-v2"])
def test_a_file_of_format_1_is_read_and_brought_forward(tmp_path: Path, engine: str) -> None:
    uri = make_storage(tmp_path, engine)
    with Session(uri) as session:
        assert apply(session, "a", 1) == 1
    connection = sqlite3.connect(uri.removeprefix("sqlite:///"))
    connection.execute("DROP TABLE applied_units")
    connection.execute("UPDATE storage_meta SET value = '1' WHERE key = 'format'")
    connection.commit()
    connection.close()
    with Session(uri) as session:
        assert session.repository.applied(Idempotency("load", 1)) is not None
        assert session.storage_info()["format"] == 1
        assert apply(session, "a", 2) is None
        assert session.storage_info()["format"] == 3
        assert apply(session, "late", 2) is None
        assert names(uri) == {"c1": "a"}
