"""Reading across schema versions: raw rows, upgraded history, the change feed and `diff`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_engine import (
    ConfigurationError,
    Entity,
    Field,
    MigrationError,
    MissingUpgraderError,
    SchemaOutdatedError,
    Session,
    left,
)
from storage_engine.query import count
from storage_engine.query import max as max_of
from storage_engine.runtime.migration import apply_drop, preview_drop
from tests.runtime.evolving import (
    UPGRADERS,
    Bought1,
    Bought3,
    Client,
    ClientBought,
    Customer1,
    Customer2,
    Customer3,
    Product1,
)
from tests.runtime.support import ENGINES, make_storage
from tests.runtime.test_migrate import forced


@pytest.fixture(scope="module", params=ENGINES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """1: Ann, Bob, a purchase. 2: Ann is older. 3: version 2. 4: Bob is 40. 5: version 3. 6: Cy.

    For tests that only read."""
    uri = make_storage(tmp_path_factory.mktemp("past"), request.param)
    with Session(uri) as session:
        session.ensure(Customer1(id="a", first="Ann", last="Lee", age=30))
        session.ensure(Customer1(id="b", first="Bob", last="Ray"))
        session.ensure([Product1(sku="p", price=3), Bought1(left_key="a", right_key="p")])
        session.commit()
        session.ensure(Customer1(id="a", first="Ann", last="Lee", age=31))
        session.commit()
    assert forced(uri, Customer2).commit_id == 3
    with Session(uri) as session:
        session.ensure(Customer2(id="b", first="Bob", last="Ray", age=40.5, tags=["new"]))
        session.commit()
    assert forced(uri, Customer3, upgraders=UPGRADERS).commit_id == 5
    with Session(uri) as session:
        session.ensure(Customer3(id="c", name="Cy Coe"))
        assert session.commit() == 6
    return uri


@pytest.fixture(scope="module")
def session(stored: str) -> Iterator[Session]:
    with Session(stored) as opened_session:
        yield opened_session


@pytest.fixture
def past(stored: str, tmp_path: Path) -> str:
    """The same, to go on with."""
    scheme, _, folder = stored.partition("://")
    source = Path(folder.removeprefix("/") if scheme == "sqlite" else folder)
    if scheme == "sqlite":
        source = Path("/") / source
        shutil.copy(source, tmp_path / source.name)
        return f"sqlite:///{tmp_path / source.name}"
    shutil.copytree(source, tmp_path / source.name)
    return f"file://{tmp_path / source.name}"


# --- raw ----------------------------------------------------------------------------------------


def test_raw_rows_are_dicts_of_the_version_that_is_asked_for(session: Session) -> None:
    raw = session.query().raw("Customer", schema_version=1)
    assert raw.collect() == [
        {"id": "a", "first": "Ann", "last": "Lee", "age": 31},
        {"id": "b", "first": "Bob", "last": "Ray", "age": 0},
    ]
    assert raw.as_of(1).first() == {"id": "a", "first": "Ann", "last": "Lee", "age": 30}
    history = raw.with_history().with_commit_ids()
    assert [(r["commit_id"], r["id"], r["age"]) for r in history.collect()] == [
        (1, "a", 30),
        (1, "b", 0),
        (2, "a", 31),
    ]
    assert [r["id"] for r in raw.history_since(1).collect()] == ["a"]
    assert raw.count() == 2
    assert list(raw.objects()) == raw.collect()
    second = session.query().raw("Customer", schema_version=2)
    assert second.where(second.field("age") > 40).collect() == [
        {"id": "b", "first": "Bob", "last": "Ray", "age": 40.5, "tags": ["new"]}
    ]
    assert [r["id"] for r in second.order_by(second.field("age"), desc=True).collect()] == [
        "b",
        "a",
    ]
    assert second.order_by(second.field("age")).limit(1).offset(1).collect()[0]["id"] == "b"
    assert second.sum(second.field("age")) == 71.5
    assert second.to_arrow().column_names[:2] == ["commit_id", "entity_key"]
    assert sum(batch.num_rows for batch in second.batches()) == 2


def test_raw_without_a_version_is_the_newest(session: Session) -> None:
    assert [r["name"] for r in session.query().raw("Customer").collect()] == [
        "Ann Lee",
        "Bob Ray",
        "Cy Coe",
    ]
    assert session.query().raw("Bought").collect() == [
        {"left_key": "a", "right_key": "p", "count": 1}
    ]


def test_raw_names_the_versions_and_types_that_exist(session: Session) -> None:
    with pytest.raises(ConfigurationError, match="no schema version 9: the storage has 1, 2, 3"):
        session.query().raw("Customer", schema_version=9)
    with pytest.raises(ConfigurationError, match="asked for by its name"):
        session.query().raw(Customer1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"did you mean 'Customer'.*Bought, Customer"):
        session.query().raw("Custmer")
    raw = session.query().raw("Customer", schema_version=1)
    with pytest.raises(ValueError, match="unknown field 'name'"):
        raw.field("name")
    with pytest.raises(TypeError, match="upgraded"):
        raw.upgraded()


# --- upgraded -----------------------------------------------------------------------------------


def test_time_travel_goes_through_the_upgraders(session: Session) -> None:
    people = session.query().entities(Customer3)
    upgraded = people.upgraded(UPGRADERS)
    assert [(c.id, c.name, c.age) for c in upgraded.as_of(1).collect()] == [
        ("a", "Ann Lee", 30.0),
        ("b", "Bob Ray", 0.0),
    ]
    assert [c.age for c in upgraded.as_of(2).collect()] == [31.0, 0.0]
    assert [c.tags for c in upgraded.as_of(4).collect()] == [[], ["new"]]
    assert upgraded.as_of(0).collect() == []
    assert upgraded.collect() == people.collect()
    assert upgraded.as_of(6).collect() == people.collect()
    assert upgraded.as_of(5).collect() == people.as_of(5).collect()
    objects = upgraded.as_of(2).collect()
    assert [o.meta().commit_id for o in objects] == [2, 1]
    assert list(upgraded.as_of(2).objects()) == objects


def test_history_covers_all_versions(session: Session) -> None:
    upgraded = session.query().entities(Customer3).upgraded(UPGRADERS)
    told = [(c.meta().commit_id, c.id, c.age) for c in upgraded.with_history().collect()]
    assert told == [
        (1, "a", 30.0),
        (1, "b", 0.0),
        (2, "a", 31.0),
        (3, "a", 31.0),
        (3, "b", 0.0),
        (4, "b", 40.5),
        (5, "a", 31.0),
        (5, "b", 40.5),
        (6, "c", 0.0),
    ]
    since = [(c.meta().commit_id, c.id) for c in upgraded.history_since(3).collect()]
    assert since == [(4, "b"), (5, "a"), (5, "b"), (6, "c")]
    assert upgraded.history_since(3).count() == 4


def test_filters_order_limits_and_aggregates_act_on_upgraded_rows(session: Session) -> None:
    at = session.query().entities(Customer3).upgraded(UPGRADERS).as_of(2)
    assert [c.id for c in at.where(Customer3.name == "Bob Ray").collect()] == ["b"]
    assert [c.id for c in at.where(Customer3.id == "a").collect()] == ["a"]
    assert [c.id for c in at.where((Customer3.id == "a") & (Customer3.age < 5)).collect()] == []
    assert [c.id for c in at.order_by(Customer3.name, desc=True).collect()] == ["b", "a"]
    assert [c.id for c in at.limit(1).offset(1).collect()] == ["b"]
    assert at.sum(Customer3.age) == 31.0
    assert at.count_where(Customer3.age > 1) == 1
    everything = session.query().entities(Customer3).upgraded(UPGRADERS).with_history()
    table = everything.group_by(Customer3.name).agg(n=count(), oldest=max_of(Customer3.age))
    assert table.to_pylist() == [
        {"name": "Ann Lee", "n": 4, "oldest": 31.0},
        {"name": "Bob Ray", "n": 4, "oldest": 40.5},
        {"name": "Cy Coe", "n": 1, "oldest": 0.0},
    ]
    assert "version 1 of Customer" in str(at.explain())


def test_endpoints_and_paths_are_upgraded_too(session: Session) -> None:
    bought = session.query().relations(Bought3).upgraded(UPGRADERS).as_of(1)
    assert bought.where(left(Bought3).name == "Ann Lee").count() == 1
    assert bought.where(left(Bought3).name == "Bob Ray").count() == 0
    (one,) = bought.collect()
    assert (one.left.name, one.left.age) == ("Ann Lee", 30.0)
    paths = session.query().entities(Customer3).upgraded(UPGRADERS).as_of(2).via(Bought3)
    (path,) = paths.collect()
    assert (path.source.age, path.target.price) == (31.0, 3)


def test_where_nothing_leads_up_the_version_is_named(session: Session) -> None:
    upgraded = session.query().entities(Customer3).upgraded({})
    with pytest.raises(MissingUpgraderError, match="Customer from version 2"):
        upgraded.as_of(4).collect()
    with pytest.raises(MissingUpgraderError, match="Customer from version 2"):
        upgraded.with_history().count()
    assert upgraded.as_of(5).count() == 2
    assert upgraded.history_since(5).count() == 1

    def broken(row: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no")

    with pytest.raises(MigrationError, match=r"Customer 'a'.*RuntimeError: no"):
        session.query().entities(Customer3).upgraded({("Customer", 2): broken}).as_of(4).collect()


def test_typed_reads_never_mix_by_themselves(session: Session) -> None:
    if session.repository.engine_version == "v1":
        pytest.skip("v1 reads all versions together")
    people = session.query().entities(Customer3)
    before = people.as_of(4).collect()
    assert before == []
    assert before.diagnostics == (
        {"reason": "commit_before_activation", "activation_commit_id": 5},
    )
    assert [c.meta().commit_id for c in people.with_history().collect()] == [5, 5, 6]


def test_a_class_that_is_not_current_is_refused(stored: str) -> None:
    with Session(stored) as session, pytest.raises(SchemaOutdatedError):
        session.query().entities(Customer2).upgraded().as_of(4).collect()


def test_renames_are_followed(past: str) -> None:
    forced(past, Client, ClientBought)
    with Session(past) as session:
        clients = session.query().entities(Client).upgraded(UPGRADERS)
        assert [(c.full_name, c.age) for c in clients.as_of(2).collect()] == [
            ("Ann Lee", 31.0),
            ("Bob Ray", 0.0),
        ]
        assert [c.full_name for c in clients.as_of(6).collect()] == ["Ann Lee", "Bob Ray", "Cy Coe"]
        assert clients.with_history().count() == 9 + 3


# --- the change feed ----------------------------------------------------------------------------


def fed(session: Session, limit: int = 1000, **options: Any) -> list[dict[str, Any]]:
    """The whole feed, page by page."""
    told: list[dict[str, Any]] = []
    cursor: int | str = 0
    while page := session.changes(cursor, limit, **options):
        assert len(page) <= limit
        told += page
        cursor = page.cursor
    return told


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
def test_the_feed_upgrades_and_a_migration_is_no_change(session: Session, limit: int) -> None:
    told = fed(session, limit, upgraders=UPGRADERS)
    customers = [
        (c["commit_id"], c["key"], c["operation"], c["fields"]["name"], c["fields"]["age"])
        for c in told
        if c["type_name"] == "Customer"
    ]
    assert customers == [
        (1, "a", "insert", "Ann Lee", 30.0),
        (1, "b", "insert", "Bob Ray", 0.0),
        (2, "a", "update", "Ann Lee", 31.0),
        (4, "b", "update", "Bob Ray", 40.5),
        (6, "c", "insert", "Cy Coe", 0.0),
    ]
    assert len(told) == 7
    assert not any("not_upgraded" in change for change in told)


def test_a_feed_does_not_look_before_the_first_commit_of_a_type(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = session.repository
    read = repository.read
    windows: list[Any] = []

    def counted(spec: Any, window: Any, **options: Any) -> Any:
        windows.append(window)
        return read(spec, window, **options)

    monkeypatch.setattr(repository, "read", counted)
    told = [c for c in session.changes(0, upgraders=UPGRADERS) if c["type_name"] == "Product"]
    assert [c["operation"] for c in told] == ["insert"]
    assert windows == []


def test_what_a_migration_did_change_is_told(session: Session) -> None:
    def shouting(row: dict[str, Any]) -> dict[str, Any]:
        name = f"{row.pop('first')} {row.pop('last')}"
        return {**row, "name": name.upper() if row["id"] == "a" else name}

    told = fed(session, upgraders={("Customer", 2): shouting})
    fifth = [(c["key"], c["operation"], c["fields"]["name"]) for c in told if c["commit_id"] == 5]
    assert fifth == [("a", "update", "Ann Lee")]


@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_the_feed_says_in_place_what_it_cannot_upgrade(session: Session, limit: int) -> None:
    told = [c for c in fed(session, limit, upgraders={}) if c["type_name"] == "Customer"]
    assert [(c["commit_id"], c["operation"], c.get("schema_version")) for c in told] == [
        (1, "insert", 1),
        (1, "insert", 1),
        (2, "update", 1),
        (4, "update", 2),
        (5, "migrate", 2),
        (6, "insert", None),
    ]
    assert told[0]["fields"] == {"id": "a", "first": "Ann", "last": "Lee", "age": 30}
    assert "no upgrader for Customer from version 2" in told[0]["not_upgraded"]
    assert "no upgrader for Customer from version 2" in told[4]["not_upgraded"]
    assert "not_upgraded" not in told[5]


def test_one_row_that_an_upgrader_refuses_does_not_stop_the_feed(session: Session) -> None:
    def picky(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == "a":
            raise ValueError("not Ann")
        row["name"] = f"{row.pop('first')} {row.pop('last')}"
        return row

    told = [c for c in fed(session, upgraders={("Customer", 2): picky}) if "key" in c]
    marks = [(c["commit_id"], c["key"], "not_upgraded" in c) for c in told if c["key"] != "p"]
    assert marks == [
        (1, "a", True),
        (1, "b", False),
        (2, "a", True),
        (4, "b", False),
        (5, "a", True),
        (6, "c", False),
    ]


def test_a_cursor_holds_across_a_rename(past: str) -> None:
    with Session(past) as session:
        page = session.changes(0, 2, upgraders=UPGRADERS)
        first = [(c["commit_id"], c["type_name"]) for c in page]
    forced(past, Client, ClientBought)
    with Session(past) as session:
        told = fed(session, 2, upgraders=UPGRADERS)
        rest: list[Any] = []
        cursor: int | str = page.cursor
        while more := session.changes(cursor, 2, upgraders=UPGRADERS):
            rest += more
            cursor = more.cursor
    assert first == [(1, "Customer"), (1, "Customer")]
    assert told[2:] == rest
    assert {c["type_name"] for c in told} == {"Client", "Product", "Bought"}
    assert len(told) == 7


def test_the_feed_keeps_what_a_dropped_type_had_and_says_that_it_ended(past: str) -> None:
    with Session(past) as session:
        preview = preview_drop(session.repository, "Bought")
        apply_drop(session.repository, "Bought", token=preview.token)
        for limit in (1, 100):
            told = [c for c in fed(session, limit) if c["type_name"] == "Bought"]
            assert [(c["commit_id"], c["operation"]) for c in told] == [(1, "insert"), (7, "drop")]


# --- differences --------------------------------------------------------------------------------


def test_diff_goes_across_migrations(session: Session) -> None:
    told = session.diff(1, 6, upgraders=UPGRADERS)
    assert [(d["key"], d["operation"], d["before"], d["after"]) for d in told] == [
        ("a", "update", {"age": 30.0}, {"age": 31.0}),
        ("b", "update", {"age": 0.0, "tags": []}, {"age": 40.5, "tags": ["new"]}),
        ("c", "insert", None, {"id": "c", "name": "Cy Coe", "age": 0.0, "tags": []}),
    ]
    assert session.diff(2, 3, upgraders=UPGRADERS) == []
    assert [d["key"] for d in session.diff(1, 2, upgraders=UPGRADERS)] == ["a"]
    assert [d["key"] for d in session.diff(3, 4, upgraders=UPGRADERS)] == ["b"]
    assert [d["key"] for d in session.diff(5, 6)] == ["c"]
    assert len(session.diff(0, 2, upgraders=UPGRADERS)) == 4


def test_diff_says_what_it_cannot_compare(session: Session) -> None:
    (told,) = [d for d in session.diff(2, 6, upgraders={}) if d["type_name"] == "Customer"]
    assert (told["operation"], told["schema_version"]) == ("migrate", 1)
    assert "no upgrader for Customer from version 2" in told["not_upgraded"]
    assert "raw('Customer', schema_version=2)" in told["not_upgraded"]
    assert "onto migrate" not in told["not_upgraded"]


def test_diff_tells_of_a_drop(past: str) -> None:
    with Session(past) as session:
        preview = preview_drop(session.repository, "Bought")
        apply_drop(session.repository, "Bought", token=preview.token)
        (told,) = session.diff(6, 7)
        assert (told["type_name"], told["operation"], told["commit_id"]) == ("Bought", "drop", 7)
        assert session.diff(5, 7, upgraders=UPGRADERS)[-1]["operation"] in ("drop", "insert")


# --- created anew -------------------------------------------------------------------------------


def test_a_type_that_was_created_anew_has_two_lives(past: str) -> None:
    class Again(Entity, name="Product"):
        sku: Field[str] = Field(primary_key=True)
        label: Field[str]

    with Session(past) as session:
        preview = preview_drop(session.repository, "Product", cascade=True)
        apply_drop(session.repository, "Product", token=preview.token, cascade=True)
    assert forced(past, Again).commit_id == 8
    with Session(past) as session:
        session.ensure(Again(sku="p", label="new"))
        assert session.commit() == 9
        told = [c for c in fed(session) if c["type_name"] == "Product"]
        assert [(c["commit_id"], c["operation"]) for c in told] == [
            (1, "insert"),
            (7, "drop"),
            (9, "insert"),
        ]
        assert told[0]["fields"] == {"sku": "p", "price": 3}
        assert session.query().entities(Again).upgraded().as_of(9).count() == 1
        with pytest.raises(MissingUpgraderError):
            session.query().entities(Again).upgraded().as_of(6).collect()
        assert session.query().raw("Product", schema_version=1).collect() == [
            {"sku": "p", "price": 3}
        ]


def test_a_key_with_another_name_is_still_the_key(past: str) -> None:
    class Coded(Entity, name="Product"):
        code: Field[str] = Field(primary_key=True, renamed_from="sku")
        price: Field[int] = Field(default=0)

    assert forced(past, Coded).commit_id == 7
    with Session(past) as session:
        coded = session.query().entities(Coded).upgraded()
        assert [c.code for c in coded.as_of(1).where(Coded.code == "p").collect()] == ["p"]
        assert coded.with_history().where(Coded.code.startswith("p")).count() == 2
        told = [c for c in fed(session, upgraders=UPGRADERS) if c["type_name"] == "Product"]
        assert [(c["commit_id"], c["fields"]) for c in told] == [(1, {"code": "p", "price": 3})]


def test_what_was_purged_is_not_there_for_anyone(past: str) -> None:
    with Session(past) as session:
        repository = session.repository
        preview = preview_drop(repository, "Bought", purge=True)
        apply_drop(repository, "Bought", token=preview.token, purge=True)
        assert session.query().raw("Bought", schema_version=1).collect() == []
        told = [c for c in fed(session) if c["type_name"] == "Bought"]
        assert [(c["commit_id"], c["operation"]) for c in told] == [(7, "drop")]
        (ended,) = [d for d in session.diff(6, 7) if d["type_name"] == "Bought"]
        assert ended["operation"] == "drop"
    with Session(past) as session:
        found = session.query().relations(Bought3).upgraded().as_of(2).collect()
        assert found == []
        assert found.diagnostics == ({"reason": "type_purged", "dropped_commit_id": 7},)


def test_a_type_that_was_purged_and_created_anew_has_the_rows_of_the_new_one(past: str) -> None:
    class Tool(Entity, name="Product"):
        sku: Field[str] = Field(primary_key=True)
        weight: Field[float]

    purge(past, "Product", cascade=True)
    assert forced(past, Tool).commit_id == 8
    with Session(past) as session:
        session.ensure(Tool(sku="p", weight=1.5))
        session.commit()
        tools = session.query().entities(Tool).upgraded()
        gone = ({"reason": "type_purged", "dropped_commit_id": 7},)
        assert (tools.as_of(2).collect(), tools.as_of(2).collect().diagnostics) == ([], gone)
        history = tools.with_history().collect()
        assert [t.weight for t in history] == [1.5]
        assert history.diagnostics == gone
        assert tools.as_of(9).collect().diagnostics == ()
        told = [c for c in fed(session) if c["type_name"] == "Product"]
        assert [(c["commit_id"], c["operation"]) for c in told] == [(7, "drop"), (9, "insert")]
        assert session.repository.type_histories()["entity", "Product"].purged is False


def test_what_is_purged_of_an_old_name_is_missed_aloud(past: str) -> None:
    forced(past, Client, ClientBought)
    with Session(past) as session:
        preview = preview_drop(session.repository, "Customer", purge=True)
        assert preview.as_dict()["past_of"] == "Client"
    purge(past, "Customer")
    with Session(past) as session:
        clients = session.query().entities(Client).upgraded(UPGRADERS)
        gone = ({"reason": "type_purged", "dropped_commit_id": 7},)
        assert (clients.as_of(6).collect(), clients.as_of(6).collect().diagnostics) == ([], gone)
        history = clients.with_history().collect()
        assert [c.full_name for c in history] == ["Ann Lee", "Bob Ray", "Cy Coe"]
        assert history.diagnostics == gone
        # A feed that begins before it has every row all the same.
        told = [c for c in fed(session, 2) if c["type_name"] in ("Customer", "Client")]
        assert [(c["commit_id"], c["type_name"], c["operation"], c.get("key")) for c in told] == [
            (7, "Client", "insert", "a"),
            (7, "Client", "insert", "b"),
            (7, "Client", "insert", "c"),
            (7, "Customer", "drop", None),
        ]
        assert [d["key"] for d in session.diff(6, 7) if d["type_name"] == "Client"] == list("abc")


def purge(uri: str, name: str, *, cascade: bool = False) -> None:
    with Session(uri) as session:
        options: Any = {"cascade": cascade, "purge": True}
        preview = preview_drop(session.repository, name, **options)
        apply_drop(session.repository, name, token=preview.token, **options)


class Letter(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]


class Parcel(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]


class LetterAsItem(Entity, name="Item", renamed_from="Letter"):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]


class Mail(Entity, renamed_from="Item"):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]


class ParcelAsItem(Entity, name="Item", renamed_from="Parcel"):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_past_of_a_type_whose_name_went_to_another(engine: str, tmp_path: Path) -> None:
    """Letter became Item and then Mail, Parcel became Item: each leads back to where it began."""
    uri = make_storage(tmp_path, engine)
    with Session(uri) as session:
        session.ensure([Letter(id="l", text="dear"), Parcel(id="p", text="heavy")])
        session.commit()
    for number, cls in enumerate((LetterAsItem, Mail, ParcelAsItem), start=2):
        assert forced(uri, cls).commit_id == number
    with Session(uri) as session:
        session.ensure([Mail(id="l", text="hello"), ParcelAsItem(id="p", text="light")])
        session.commit()

    with Session(uri) as session:
        mail = session.query().entities(Mail).upgraded()
        items = session.query().entities(ParcelAsItem).upgraded()
        assert [m.text for m in mail.as_of(1).collect()] == ["dear"]
        assert [m.text for m in items.as_of(1).collect()] == ["heavy"]
        texts = [m.text for m in mail.with_history().collect()]
        assert texts == ["dear", "dear", "dear", "hello"]
        feed = sorted((c["commit_id"], c["type_name"], c["operation"]) for c in session.changes(0))
        assert feed == [
            (1, "Item", "insert"),
            (1, "Mail", "insert"),
            (5, "Item", "update"),
            (5, "Mail", "update"),
        ]
