"""`validate` and `migrate`: what sessions say of declared and stored types, and do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from storage_engine import (
    ConfigurationError,
    DropDependencyError,
    Entity,
    Field,
    MigrationError,
    MigrationTokenError,
    MissingUpgraderError,
    Ontology,
    SchemaOutdatedError,
    Session,
    TypeDroppedError,
)
from storage_engine.runtime.migration import apply_drop, preview_drop
from storage_engine.schema.upgraders import Upgrader
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


@pytest.fixture
def shop(uri: str) -> str:
    """Commit 1: two customers and a product, one bought. 2: Ann is older."""
    return filled(uri)


def filled(uri: str) -> str:
    with Session(uri) as session:
        session.ensure(Customer1(id="a", first="Ann", last="Lee", age=30))
        session.ensure(Customer1(id="b", first="Bob", last="Ray"))
        session.ensure([Product1(sku="p", price=3), Bought1(left_key="a", right_key="p")])
        assert session.commit() == 1
        session.ensure(Customer1(id="a", first="Ann", last="Lee", age=31))
        assert session.commit() == 2
    return uri


def forced(uri: str, *types: Any, **options: Any) -> Any:
    with opened(uri, *types) as session:
        return session.migrate(dry_run=False, force=True, **options)


def opened(uri: str, *types: Any) -> Session:
    entities = [t for t in types if issubclass(t, Entity)]
    relations = [t for t in types if not issubclass(t, Entity)]
    return Session(uri, entity_types=entities, relation_types=relations)


# --- validate -----------------------------------------------------------------------------------


def test_what_is_declared_as_stored_is_valid(shop: str) -> None:
    class Invoice(Entity):
        id: Field[str] = Field(primary_key=True)

    with opened(shop, Customer1, Product1, Bought1, Invoice) as session:
        session.validate()
    with Ontology(storage_uri=shop, entity_types=[Customer1]) as ontology:
        ontology.validate()


def test_validate_names_all_differences_of_all_types(shop: str) -> None:
    class Other(Entity, name="Product"):
        sku: Field[str] = Field(primary_key=True)
        price: Field[str]

    with opened(shop, Customer2, Other) as session, pytest.raises(SchemaOutdatedError) as caught:
        session.validate()
    message = str(caught.value)
    for part in ("Customer (stored version 1)", "'tags' added", "Product", "'price' was int, is"):
        assert part in message
    assert "onto migrate" in message
    assert len(caught.value.differences) >= 4
    assert caught.value.type == "Customer, Product"


def test_validate_needs_types(uri: str) -> None:
    with Session(uri) as session, pytest.raises(ConfigurationError, match="entity_types"):
        session.validate()


# --- preview and apply --------------------------------------------------------------------------


def test_a_preview_tells_what_would_happen_and_changes_nothing(shop: str) -> None:
    class Invoice(Entity):
        id: Field[str] = Field(primary_key=True)

    with opened(shop, Customer2, Product1, Invoice) as session:
        preview = session.migrate()
        assert preview.has_changes
        assert preview.possible
        assert [diff.type_name for diff in preview.diffs] == ["Customer", "Invoice"]
        assert preview.estimated_rows == {"Customer": 2}
        assert preview.types_requiring_upgraders == ()
        assert preview.types_schema_only == ("Invoice",)
        assert preview.missing_upgraders == ()
        assert preview.token.startswith("2-")
        assert session.migrate() == preview
        assert session.repository.head_commit_id() == 2


def test_an_additive_migration_needs_no_upgrader(shop: str) -> None:
    with opened(shop, Customer2) as session:
        told: list[tuple[str, int]] = []
        result = session.migrate(
            dry_run=False,
            token=session.migrate().token,
            progress=lambda name, rows: told.append((name, rows)),
        )
        assert result.success
        assert result.types_migrated == ("Customer",)
        assert result.rows_migrated == {"Customer": 2}
        assert result.new_schema_versions == {"Customer": 2}
        assert result.commit_id == 3
        assert result.duration_s > 0
        assert {name for name, _ in told} == {"Customer"}
        assert sum(rows for _, rows in told) == 2
        # The same session goes on.
        found = session.query().entities(Customer2).collect()
        assert [(c.id, c.age, c.tags) for c in found] == [("a", 31.0, []), ("b", 0.0, [])]
        session.validate()
        session.ensure(Customer2(id="a", first="Ann", last="Lee", age=31.5, tags=["x"]))
        assert session.commit(isolation="snapshot") == 4
        assert session.snapshot == 4
        (record,) = [c for c in session.list_commits() if c["id"] == 3]
        assert record["kind"] == "migration"
        assert record["types"] == ["Customer"]


def test_nothing_to_do_is_success_without_a_commit(shop: str) -> None:
    with opened(shop, Customer1) as session:
        preview = session.migrate()
        assert not preview.has_changes
        result = session.migrate(dry_run=False, token=preview.token)
        assert (result.success, result.commit_id, result.types_migrated) == (True, None, ())
        assert session.repository.head_commit_id() == 2


def test_to_apply_takes_a_token(shop: str) -> None:
    with opened(shop, Customer2) as session:
        with pytest.raises(MigrationTokenError, match="takes the token of a preview"):
            session.migrate(dry_run=False)
        with pytest.raises(MigrationTokenError, match="'soon' is not a token"):
            session.migrate(dry_run=False, token="soon")
        with pytest.raises(ConfigurationError, match="dry_run=False"):
            session.migrate(token="2-0000000000000000")  # type: ignore[call-overload]
        assert session.repository.head_commit_id() == 2


def test_rfc0004_7_a_token_drifts_with_the_head(shop: str) -> None:
    with opened(shop, Customer2, Product1) as session:
        token = session.migrate().token
        with Session(shop) as other:
            other.ensure(Product1(sku="q"))
        with pytest.raises(MigrationTokenError) as caught:
            session.migrate(dry_run=False, token=token)
        assert "head moved from commit 2 to 3" in str(caught.value)
        assert "Product changed" in str(caught.value)
        assert session.repository.head_commit_id() == 3
        assert session.migrate(dry_run=False, token=session.migrate().token).commit_id == 4


def test_a_token_drifts_with_the_classes(shop: str) -> None:
    with opened(shop, Customer2) as session:
        token = session.migrate().token
    differs = pytest.raises(MigrationTokenError, match="declared classes or the upgraders differ")
    with opened(shop, Customer3) as session, differs:
        session.migrate(dry_run=False, token=token, upgraders={("Customer", 1): one_step})


def one_step(row: dict[str, Any]) -> dict[str, Any]:
    row["name"] = f"{row.pop('first')} {row.pop('last')}"
    return row


def test_two_migrations_of_one_preview_make_one_commit(shop: str) -> None:
    with opened(shop, Customer2) as one, opened(shop, Customer2) as two:
        token = one.migrate().token
        assert one.migrate(dry_run=False, token=token).commit_id == 3
        again = two.migrate(dry_run=False, token=token)
        assert (again.success, again.commit_id) == (True, None)


def test_pending_intents_are_not_mixed_into_a_migration(shop: str) -> None:
    with opened(shop, Customer2, Product1) as session:
        session.ensure(Product1(sku="z"))
        with pytest.raises(ConfigurationError, match="Product is still pending"):
            session.migrate(dry_run=False, force=True)
        session.discard()
        assert session.migrate(dry_run=False, force=True).commit_id == 3


# --- upgraders ----------------------------------------------------------------------------------


def test_a_missing_upgrader_is_named_before_anything_happens(shop: str) -> None:
    with opened(shop, Customer3) as session:
        preview = session.migrate(upgraders={})
        assert preview.missing_upgraders == (("Customer", 1),)
        assert preview.types_requiring_upgraders == ("Customer",)
        assert not preview.possible
        with pytest.raises(MissingUpgraderError, match="@upgrader\\('Customer', from_version=1\\)"):
            session.migrate(dry_run=False, token=preview.token, upgraders={})
        assert session.repository.head_commit_id() == 2


def test_upgraders_by_row_by_batch_and_in_chains(shop: str) -> None:
    def double(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "age": row["age"] * 2.0, "tags": ["old"]}

    def joined(table: pa.Table) -> pa.Table:
        name = pc.binary_join_element_wise(table.column("first"), table.column("last"), " ")
        return table.drop_columns(["first", "last"]).append_column("name", name)

    ways = {("Customer", 1): double, ("Customer", 2): Upgrader("Customer", 2, joined, batch=True)}
    result = forced(shop, Customer3, upgraders=ways)
    assert result.new_schema_versions == {"Customer": 3}
    with Session(shop) as session:
        found = session.query().entities(Customer3).collect()
        assert [(c.name, c.age, c.tags) for c in found] == [
            ("Ann Lee", 62.0, ["old"]),
            ("Bob Ray", 0.0, ["old"]),
        ]


def test_an_upgrader_that_raises_on_a_late_row_publishes_nothing(uri: str) -> None:
    with Session(uri) as session:
        keys = [f"c{n:05}" for n in range(5000)]
        session.ingest(
            Customer1, pa.table({"id": keys, "first": ["A"] * 5000, "last": ["B"] * 5000})
        )
        assert session.commit() == 1

    def fragile(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == "c04999":
            raise KeyError("middle")
        return one_step(row)

    with opened(uri, Customer3) as session:
        with pytest.raises(MigrationError) as caught:
            session.migrate(dry_run=False, force=True, upgraders={("Customer", 1): fragile})
        error = caught.value
        assert (error.type, error.identity) == ("Customer", "c04999")
        assert error.old == {"id": "c04999", "first": "A", "last": "B", "age": 0}
        for part in ("Customer 'c04999'", "fragile", "KeyError", "'first': 'A'"):
            assert part in str(error)
        assert session.repository.head_commit_id() == 1
        # Nothing is half done: the next try goes through, and old code goes on until then.
        with Session(uri) as old:
            old.ensure(Customer1(id="c04999", first="C", last="D"))
        way = {("Customer", 1): one_step}
        assert session.migrate(dry_run=False, force=True, upgraders=way).commit_id == 3
        assert session.query().entities(Customer3).count() == 5000
        newest = session.query().entities(Customer3).where(Customer3.id == "c04999").first()
        assert newest is not None
        assert newest.name == "C D"


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"name": 3}, "name"),
        ({}, "name"),
        ({"name": "x", "extra": 1}, "extra"),
        ({"name": "x", "id": "other"}, "keys cannot change"),
        (None, "rows cannot be left out"),
    ],
)
def test_what_an_upgrader_makes_is_checked(tmp_path: Path, made: Any, told: str) -> None:
    shop = filled(f"sqlite:///{tmp_path}/onto.db")  # rewriting is the same for all engines

    def wrong(row: dict[str, Any]) -> Any:
        if made is None or row["id"] != "b":
            return None if made is None else one_step(row)
        return {"id": row["id"], "age": 1.0} | made

    with opened(shop, Customer3) as session:
        with pytest.raises(MigrationError) as caught:
            session.migrate(dry_run=False, force=True, upgraders={("Customer", 1): wrong})
        assert told in str(caught.value)
        assert caught.value.type == "Customer"
        assert caught.value.identity in ("a", "b")
        assert caught.value.old is not None
        assert session.repository.head_commit_id() == 2
    with Session(shop) as old:
        assert old.query().entities(Customer1).count() == 2


def test_an_upgrader_may_not_use_the_session_that_migrates(shop: str) -> None:
    with opened(shop, Customer3) as session:

        def curious(row: dict[str, Any]) -> dict[str, Any]:
            session.query()
            return one_step(row)

        with pytest.raises(MigrationError, match="use another session"):
            session.migrate(dry_run=False, force=True, upgraders={("Customer", 1): curious})


# --- renames and drops --------------------------------------------------------------------------


def test_a_type_and_its_relations_are_renamed_in_one_commit(shop: str) -> None:
    forced(shop, Customer2)
    forced(shop, Customer3, upgraders=UPGRADERS)
    with opened(shop, Client, Product1, ClientBought) as session:
        with pytest.raises(SchemaOutdatedError, match="name was Customer, is Client"):
            session.validate()
        preview = session.migrate()
        assert preview.estimated_rows == {"Client": 2, "Bought": 1}
        result = session.migrate(dry_run=False, token=preview.token)
        assert result.new_schema_versions == {"Client": 4, "Bought": 2}
        (bought,) = session.query().relations(ClientBought).collect()
        assert bought.left.full_name == "Ann Lee"
        session.validate()
    with opened(shop, Customer3) as old:
        with pytest.raises(TypeDroppedError, match="renamed to Client by commit 5: write to Cli"):
            old.validate()
        old.ensure(Customer3(id="x", name="X"))
        with pytest.raises(TypeDroppedError, match="renamed to Client"):
            old.commit()
        old.discard()
    with opened(shop) as session, pytest.raises(DropDependencyError, match="Bought"):
        preview_drop(session.repository, "Client")


def test_a_new_name_is_not_used_before_the_migration(shop: str) -> None:
    """As a type of its own it would begin without the rows, and never get them."""
    forced(shop, Customer2)
    forced(shop, Customer3, upgraders=UPGRADERS)
    with opened(shop, Client) as early:
        with pytest.raises(SchemaOutdatedError, match=r"new name of Customer.*version 3.*Migrate"):
            early.query().entities(Client).collect()
        early.ensure(Client(id="x", full_name="X"))
        with pytest.raises(SchemaOutdatedError, match="new name of Customer"):
            early.commit()
        early.discard()
    forced(shop, Client, ClientBought)
    with opened(shop, Client) as session:
        session.ensure(Client(id="x", full_name="X"))
        session.commit()
        assert session.query().entities(Client).count() == 3
    with opened(shop, Client, Customer3) as session:  # a new one of the old name
        session.migrate(dry_run=False, force=True)
        session.ensure(Client(id="y", full_name="Y"))
        session.ensure(Customer3(id="y", name="Y"))
        session.commit()
        session.validate()


def test_a_dropped_type_is_refused_read_as_empty_and_created_anew(shop: str) -> None:
    with opened(shop, Customer1, Product1, Bought1) as session:
        repository = session.repository
        preview = preview_drop(repository, "Customer", cascade=True)
        assert preview.dependents == ("Bought",)
        _, commit_id = apply_drop(repository, "Customer", token=preview.token, cascade=True)
        assert commit_id == 3
        found = session.query().entities(Customer1).collect()
        assert found == []
        (note,) = found.diagnostics
        assert note["dropped_commit_id"] == 3
        session.ensure(Customer1(id="c", first="Cy", last="Coe"))
        with pytest.raises(TypeDroppedError, match="dropped by commit 3"):
            session.commit()
        session.discard()
        with pytest.raises(TypeDroppedError):
            session.validate()
        result = session.migrate(dry_run=False, force=True)
        assert result.new_schema_versions == {"Customer": 2, "Bought": 2}
        assert session.query().entities(Customer1).collect() == []
        session.ensure(Customer1(id="a", first="Ann", last="Two"))
        assert session.commit() == 5
        assert [c.last for c in session.query().entities(Customer1).collect()] == ["Two"]


def test_views_that_were_pinned_before_a_migration_stay(shop: str) -> None:
    with opened(shop, Customer2) as session:
        view = session.at(2)
        assert session.migrate(dry_run=False, force=True).commit_id == 3
        before = view.query().entities(Customer2).collect()
        if session.repository.engine_version == "v1":  # reads all versions together
            assert [c.id for c in before] == ["a", "b"]
        else:
            assert before == []
            (note,) = before.diagnostics
            assert note == {"reason": "commit_before_activation", "activation_commit_id": 3}
        upgraded = view.query().entities(Customer2).upgraded().collect()
        assert [(c.id, c.age) for c in upgraded] == [("a", 31.0), ("b", 0.0)]
        now = session.at(3).query().entities(Customer2)
        assert now.count() == 2


def test_an_ontology_migrates(shop: str) -> None:
    with Ontology(storage_uri=shop, entity_types=[Customer2]) as ontology:
        preview = ontology.migrate()
        result = ontology.migrate(dry_run=False, token=preview.token)
        assert result.commit_id == 3
        ontology.validate()
        assert ontology.query().entities(Customer2).count() == 2


def test_relations_follow_entities_whose_fields_changed(shop: str) -> None:
    forced(shop, Customer3, upgraders={("Customer", 1): one_step})
    with opened(shop, Customer3, Product1, Bought3) as session:
        session.validate()
        (bought,) = session.query().relations(Bought3).collect()
        assert bought.left.name == "Ann Lee"


# --- edges --------------------------------------------------------------------------------------


def test_an_empty_storage_gets_its_types_before_any_row(uri: str) -> None:
    with opened(uri, Customer1, Product1, Bought1) as session:
        session.validate()
        preview = session.migrate()
        assert preview.token.startswith("0-")
        assert preview.types_schema_only == ("Customer", "Product", "Bought")
        assert preview.estimated_rows == {}
        result = session.migrate(dry_run=False, token=preview.token)
        assert result.commit_id == 1
        assert result.rows_migrated == {"Customer": 0, "Product": 0, "Bought": 0}
        assert not session.migrate().has_changes
        assert session.query().entities(Customer1).collect() == []
        session.ensure(Customer1(id="a", first="A", last="B"))
        assert session.commit() == 2
    # Without rows, any change is a matter of the schema alone.
    with opened(uri, Product1) as session:
        session.validate()
    forced(uri, Customer3, upgraders={("Customer", 1): one_step})
    with Session(uri) as session:
        assert [c.name for c in session.query().entities(Customer3).collect()] == ["A B"]


def test_types_that_share_a_name_are_told_apart(uri: str) -> None:
    from storage_engine import Relation

    class Pair(Relation[Customer1, Product1], name="Customer"):
        pass

    class Paired(Relation[Customer2, Product1], name="Customer"):
        note: Field[str | None] = Field(default=None)

    with Session(uri) as session:
        session.ensure([Customer1(id="a", first="A", last="B"), Product1(sku="p")])
        session.ensure(Pair(left_key="a", right_key="p"))
        session.commit()
    with opened(uri, Customer2, Paired) as session:
        preview = session.migrate()
        assert preview.estimated_rows == {"entity:Customer": 1, "relation:Customer": 1}
        result = session.migrate(dry_run=False, token=preview.token)
        assert result.new_schema_versions == {"entity:Customer": 2, "relation:Customer": 2}
        with pytest.raises(ConfigurationError, match="an entity type and a relation type"):
            session.query().raw("Customer", schema_version=1)
        raw = session.query().raw("Customer", schema_version=1, kind="relation")
        assert raw.collect() == [{"left_key": "a", "right_key": "p"}]
        (pair,) = session.query().relations(Paired).upgraded().as_of(1).collect()
        assert (pair.note, pair.left.tags) == (None, [])


def test_a_storage_in_memory_migrates_too() -> None:
    with Ontology(":memory:") as ontology:
        with ontology.session() as old:
            old.ensure(Customer1(id="a", first="A", last="B"))
        with ontology.session() as new:
            new.query().entities(Customer2)  # bound as it comes
            assert new.migrate(dry_run=False, force=True).commit_id == 2
            upgraded = new.query().entities(Customer2).upgraded()
            assert [c.tags for c in upgraded.as_of(1).collect()] == [[]]
            assert len(new.changes(0)) == 1


def test_old_code_that_meets_a_migration_writes_nothing(shop: str) -> None:
    with opened(shop, Customer1, Product1) as old:
        old.ensure(Customer1(id="z", first="Z", last="Z"))
        forced(shop, Customer2)
        with pytest.raises(SchemaOutdatedError, match="field 'tags' removed"):
            old.commit()
        old.discard()
        with pytest.raises(SchemaOutdatedError):
            old.query().entities(Customer1).collect()
        old.ensure(Product1(sku="new"))
        assert old.commit() == 4
    with Session(shop) as session:
        assert session.query().entities(Customer2).count() == 2


def test_upgraders_are_given_by_name_and_version(shop: str) -> None:
    with opened(shop, Customer3) as session:
        for wrong in ({"Customer": one_step}, {(Customer3, 1): one_step}):
            with pytest.raises(ConfigurationError, match='such as \\("Customer", 1\\)'):
                session.migrate(upgraders=wrong)  # type: ignore[arg-type]
