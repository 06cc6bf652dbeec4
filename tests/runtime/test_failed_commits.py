"""What a commit that fails says, and what is left after it."""

from __future__ import annotations

import pytest

from storage_engine import (
    BatchSizeExceededError,
    CommitMetadataTooLargeError,
    ConcurrentWriteError,
    ExpectedVersionMismatchError,
    OntologiaConfig,
    Session,
)
from tests.runtime.support import head, names
from tests.shop import Customer, Product

ANN = Customer(id="c1", name="Ann")
PENDING = r"what was stated of Customer is still pending: commit\(\) again, or discard\(\) it$"


# --- metadata -----------------------------------------------------------------------------------


def test_metadata_is_limited(uri: str) -> None:
    with Session(uri) as session:
        session.ensure(ANN)
        with pytest.raises(CommitMetadataTooLargeError) as caught:
            session.commit(meta={"run": "7", "log": "x" * 65_536})
        assert (caught.value.size, caught.value.limit) == (65_556, 65_536)
        assert caught.value.largest == "log"
        text = str(caught.value)
        assert "commit metadata of 65,556 bytes, limit 65,536 (the largest is 'log')" in text
        assert "raise max_commit_metadata_bytes" in text
        assert head(uri) == 0
        assert session.commit(meta={"log": "x" * 65_000}) == 1


def test_the_limit_is_a_setting_and_counts_what_is_stored(uri: str) -> None:
    config = OntologiaConfig(max_commit_metadata_bytes=20)
    with Session(uri, config=config) as session:
        session.add_commit_meta("a", "12345")
        session.ensure(ANN)
        assert session.commit() == 1
        session.add_commit_meta("a", "12345")
        session.ensure(ANN.replace(name="other"))
        with pytest.raises(CommitMetadataTooLargeError, match="24 bytes, limit 20"):
            session.commit(meta={"b": "1234"})
        session.discard()
        session.ensure(ANN.replace(name="other"))
        with pytest.raises(CommitMetadataTooLargeError):
            session.commit(meta={"b": "ü" * 7})  # 7 characters, 14 bytes
        session.discard()
        assert names(uri) == {"c1": "Ann"}


def test_metadata_of_a_commit_of_events_alone_is_limited(uri: str) -> None:
    from tests.runtime.support import OrderPlaced

    with Session(uri) as session:
        with pytest.raises(CommitMetadataTooLargeError) as caught:
            session.commit(OrderPlaced(order_id="o"), meta={"x": "y" * 100_000})
        assert "pending" not in str(caught.value)
        session.discard()


# --- pending intents ----------------------------------------------------------------------------


def test_the_error_says_what_is_pending_and_how_to_drop_it(uri: str, session: Session) -> None:
    session.ensure(ANN)
    with pytest.raises(ExpectedVersionMismatchError, match=PENDING) as caught:
        session.commit(expect={Product: 3})
    assert (caught.value.type, caught.value.actual) == ("Product", 0)
    with pytest.raises(ExpectedVersionMismatchError) as again:
        session.commit(expect={Product: 3})
    assert str(again.value) == str(caught.value), "said once"

    session.discard()
    assert session.commit() is None
    assert head(uri) == 0


def test_too_many_objects_are_pending_too(uri: str) -> None:
    with Session(uri, config=OntologiaConfig(max_batch_size=1)) as session:
        session.ensure([ANN, Customer(id="c2", name="Ben")])
        with pytest.raises(BatchSizeExceededError, match=PENDING):
            session.commit()
        session.discard()
    assert head(uri) == 0


def test_a_conflict_says_it_too(uri: str) -> None:
    with Session(uri) as mine, Session(uri) as theirs:
        mine.ensure(ANN)
        theirs.ensure(ANN.replace(name="theirs"))
        theirs.commit()
        with pytest.raises(ConcurrentWriteError, match=f"decide anew; {PENDING}"):
            mine.commit(isolation="snapshot")
        mine.discard()


def test_at_the_end_of_the_block_nothing_is_pending(uri: str) -> None:
    config = OntologiaConfig(max_batch_size=1)
    with pytest.raises(BatchSizeExceededError) as caught, Session(uri, config=config) as session:
        session.ensure([ANN, Customer(id="c2", name="Ben")])
    assert "pending" not in str(caught.value)
