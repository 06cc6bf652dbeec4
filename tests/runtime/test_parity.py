"""The same operations mean the same on every engine, and every value comes back as it went in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_engine import Field, Relation, Session
from storage_engine.model import spec_of, table_to_objects
from storage_engine.repository.protocol import ReadWindow
from tests.runtime.support import ENGINES, Everything, OrderPlaced, make_storage
from tests.shop import Customer, Employment, Product, Subscription

TYPES = (Customer, Product, Subscription, Employment)

ANN = Customer(id="c1", name="Ann", age=30)
BEN = Customer(id="c2", name="Ben")
SEAT = Subscription(left_key="c1", right_key="p1", seats=1)
STINT = Employment(left_key="c1", right_key="p1", stint="2020", role="dev")


# --- RFC 0004, test matrix 1 --------------------------------------------------------------------


def work(session: Session) -> list[Any]:
    """A history with every kind of step; what each of them answered."""
    answers: list[Any] = []

    def commit(**options: Any) -> None:
        commit_id = session.commit(**options)
        done = session.last_commit if commit_id is not None else None
        counts = (
            sorted((c.kind, c.type_name, c.inserted, c.updated) for c in done.changes)
            if done
            else []
        )
        answers.append((commit_id, counts))

    session.ensure([ANN, BEN, Product(sku="p1", price=1.5)])
    commit(meta={"step": "first"})
    session.ensure([ANN, SEAT, STINT, STINT.replace(stint="2024")])
    commit()
    session.ensure([ANN, BEN, SEAT])
    commit()  # nothing to do
    session.ensure([ANN.replace(age=None), SEAT.replace(seats=2)])
    commit(idempotency=("work", 1))
    session.ensure(ANN.replace(name="never"))
    commit(idempotency=("work", 1))  # applied before
    session.ingest(
        Customer,
        pa.table({"id": ["c3", "c2", "c3"], "name": ["Cid", "Ben", "Cyd"], "age": [1, None, 2]}),
    )
    session.ingest(
        Employment,
        pa.table(
            {
                "left_key": ["c1", "c3"],
                "right_key": ["p1", "p1"],
                "stint": ["2020", "2020"],
                "role": ["boss", "dev"],
            }
        ),
    )
    commit(expect={Customer: 3, "Product": 1})
    commit(event=OrderPlaced(order_id="o1"))
    session.ensure(Product(sku="p1", price=1.5))
    session.ensure(ANN)
    commit(isolation="snapshot")
    return answers


def observe(session: Session) -> dict[str, Any]:
    """Everything that can be read, in every window, without times."""
    repository = session.repository
    head = repository.head_commit_id()
    windows = [
        ReadWindow(),
        ReadWindow(history=True),
        *(ReadWindow(as_of=c) for c in range(-1, head + 2)),
        *(ReadWindow(history=True, since=c) for c in range(-1, head + 2)),
    ]
    commits = session.list_commits(limit=100)
    return {
        "head": head,
        "rows": {
            (cls.__name__, window): repository.read(spec_of(cls), window).to_pylist()
            for cls in TYPES
            for window in windows
        },
        "schemas": {cls.__name__: repository.read(spec_of(cls)).schema.names for cls in TYPES},
        "by key": repository.read(
            spec_of(Customer), keys=pa.table({"entity_key": ["c2", "c9"]})
        ).to_pylist(),
        "type heads": [repository.type_head(spec_of(cls)) for cls in TYPES],
        "commits": [{k: v for k, v in c.items() if k != "created_at"} for c in commits],
        "single": [session.get_commit(c) is None for c in (0, 1, head, head + 1)],
        "changes": {c: session.list_commit_changes(c) for c in range(head + 2)},
    }


def test_rfc0004_01_backend_parity(tmp_path: Path) -> None:
    answers, seen = {}, {}
    for engine in ENGINES:
        (tmp_path / engine).mkdir()
        uri = make_storage(tmp_path / engine, engine)
        with Session(uri) as session:
            answers[engine] = work(session)
            seen[engine] = observe(session)
        with Session(uri) as again:
            assert observe(again) == seen[engine], f"{engine} reads another state when reopened"

    first = ENGINES[0]
    assert [commit_id for commit_id, _ in answers[first]] == [1, 2, None, 3, 3, 4, 5, 6]
    assert [row["name"] for row in seen[first]["rows"]["Customer", ReadWindow()]] == [
        "Ann",
        "Ben",
        "Cyd",
    ]
    for engine in ENGINES[1:]:
        assert answers[engine] == answers[first], engine
        for what in seen[first]:
            assert seen[engine][what] == seen[first][what], f"{engine}: {what}"


# --- values -------------------------------------------------------------------------------------


class Everywhere(Relation[Everything, Everything]):
    note: Field[str | None] = Field(default=None)


TEXT = st.text(max_size=12)
INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
MOMENTS = st.datetimes(timezones=st.just(UTC))
JSON = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ADDRESSES: st.SearchStrategy[Any] = st.deferred(
    lambda: st.fixed_dictionaries(
        {"city": TEXT},
        optional={"since": st.dates(), "former": st.lists(ADDRESSES, max_size=1)},
    )
)
VALUES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "text": TEXT,
        "number": INTS,
        "real": FLOATS,
        "flag": st.booleans(),
        "moment": MOMENTS,
        "day": st.dates(),
        "raw": st.binary(max_size=12),
        "maybe_text": st.none() | TEXT,
        "maybe_number": st.none() | INTS,
        "maybe_real": st.none() | FLOATS,
        "maybe_flag": st.none() | st.booleans(),
        "maybe_moment": st.none() | MOMENTS,
        "maybe_day": st.none() | st.dates(),
        "maybe_raw": st.none() | st.binary(max_size=12),
        "tags": st.lists(TEXT, max_size=3),
        "moments": st.lists(MOMENTS, max_size=3),
        "weights": st.dictionaries(TEXT, FLOATS, max_size=3),
        "address": st.none() | ADDRESSES,
        "either": INTS | TEXT,
        "anything": JSON,
    }
)
KEYS = st.text(min_size=1, max_size=12)
_examples = itertools.count()


@pytest.fixture(scope="module", params=ENGINES)
def shared(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Session]:
    """One storage for all examples of an engine."""
    with Session(make_storage(tmp_path_factory.mktemp("values"), request.param)) as session:
        yield session


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(VALUES, min_size=1, max_size=4), KEYS)
def test_lossless_round_trip(shared: Session, rows: list[dict[str, Any]], key: str) -> None:
    prefix = f"{next(_examples):06}"  # examples do not meet
    objects = [Everything(id=f"{prefix}-{n}-{key}", **row) for n, row in enumerate(rows)]
    edges = [Everywhere(left_key=o.id, right_key=key, note=o.maybe_text) for o in objects]
    shared.ensure([*objects, *edges])
    commit_id = shared.commit()
    assert commit_id is not None

    for written in (objects, edges):
        spec = spec_of(type(written[0]))
        table = shared.repository.read(spec, ReadWindow(history=True, since=commit_id - 1))
        found = table_to_objects(spec, table)
        assert sorted(found, key=repr) == sorted(written, key=repr)
        assert {o.meta().commit_id for o in found} == {commit_id}
    shared.ensure([*objects, *edges])
    assert shared.commit() is None, "what was read back is what was written"
