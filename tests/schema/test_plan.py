"""Which migration makes the declared types current, and what it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from storage_engine.errors import (
    ConfigurationError,
    MigrationError,
    MigrationTokenError,
    MissingUpgraderError,
    TypeDeclarationError,
)
from storage_engine.model import Entity, Field, Relation, TypeSpec, spec_of
from storage_engine.schema import upgraders as declared_upgraders
from storage_engine.schema.history import SchemaVersion, TypeHistory
from storage_engine.schema.migration import (
    MigrationPlan,
    MigrationRequest,
    StoredState,
    plan_migration,
    present_names,
)
from storage_engine.schema.upgraders import (
    Upgrader,
    load_upgraders,
    resolve_upgraders,
    steps_from,
    upgrader,
)


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    age: Field[int]


class Older(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    age: Field[int]
    tier: Field[str] = Field(default="Standard")


class Incompatible(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    age: Field[str]


class Client(Entity, renamed_from="Customer"):
    id: Field[str] = Field(primary_key=True)
    age: Field[int]


class Likes(Relation[Customer, Customer]):
    pass


class LikesClient(Relation[Client, Client], name="Likes"):
    pass


def history(spec: TypeSpec, version: int = 1, **facts: Any) -> TypeHistory:
    stored = SchemaVersion(version, spec, spec.schema_sha256, 1)
    return TypeHistory(spec.kind, spec.name, (stored,), **facts)


def plan(
    *classes: type, stored: list[TypeHistory], upgraders: dict[Any, Any] | None = None
) -> MigrationPlan:
    return plan_migration(
        [spec_of(cls) for cls in classes],
        {h.ref: h for h in stored},
        resolve_upgraders(upgraders or {}),
    )


def same(row: Any) -> Any:
    return row


STORED = history(spec_of(Customer))


def test_nothing_to_do() -> None:
    assert plan(Customer, stored=[STORED]).migrations == ()


def test_an_additive_change_is_the_next_version() -> None:
    made = plan(Older, stored=[STORED])
    (migration,) = made.migrations
    assert (migration.version, migration.missing, migration.steps) == (2, (), ())
    assert (migration.diff.from_version, migration.diff.to_version) == (1, 2)
    made.require_possible()


def test_what_is_not_additive_needs_an_upgrader() -> None:
    made = plan(Incompatible, stored=[STORED])
    assert made.missing == [("Customer", 1)]
    with pytest.raises(MissingUpgraderError, match="field 'age' was int, is str") as error:
        made.require_possible()
    assert error.value.missing == [("Customer", 1)]

    with_upgrader = plan(Incompatible, stored=[STORED], upgraders={("Customer", 1): same})
    assert with_upgrader.missing == []
    assert [m.version for m in with_upgrader.migrations] == [2]


def test_a_chain_skips_the_versions_that_this_storage_never_had() -> None:
    steps = {("Customer", n): same for n in (1, 2, 3, 7)}
    (migration,) = plan(Incompatible, stored=[STORED], upgraders=steps).migrations
    assert migration.version == 4
    assert [s.from_version for s in migration.steps] == [1, 2, 3]
    (later,) = plan(
        Incompatible, stored=[history(spec_of(Customer), 3)], upgraders=steps
    ).migrations
    assert (later.version, len(later.steps)) == (4, 1)


def test_identity_cannot_be_migrated() -> None:
    class Recoded(Entity, name="Customer"):
        code: Field[str] = Field(primary_key=True)
        age: Field[int]

    made = plan(Recoded, stored=[STORED], upgraders={("Customer", 1): same})
    with pytest.raises(MigrationError, match="primary key was id, is code"):
        made.require_possible()


def test_a_new_type_and_one_that_is_created_anew() -> None:
    (new,) = plan(Customer, stored=[]).migrations
    assert (new.version, new.source, new.diff.from_version) == (1, None, None)

    dropped = history(spec_of(Customer), 4, dropped_commit_id=9)
    (again,) = plan(Older, stored=[dropped]).migrations
    assert (again.version, again.source) == (5, None)
    used = {f.field_id for f in dropped.last.spec.fields}
    assert used.isdisjoint(f.field_id for f in again.spec.fields)  # ids are never used again


def test_a_rename_takes_rows_and_relations_along() -> None:
    stored = [history(spec_of(Customer), 2), history(spec_of(Likes))]
    made = plan(Client, LikesClient, stored=stored)
    made.require_possible()
    client, likes = made.migrations
    assert client.rename == ("entity", "Customer")
    assert (client.version, client.source_ref) == (3, ("entity", "Customer"))
    assert (likes.version, likes.rename) == (2, None)
    (drop,) = made.drops
    assert (drop.ref, drop.version, drop.renamed_to) == (("entity", "Customer"), 2, "Client")

    # Later the marker is still there, and means nothing.
    after = [
        history(spec_of(Client), 3),
        history(spec_of(Customer), 2, dropped_commit_id=5, renamed_to="Client"),
        history(spec_of(LikesClient), 2),
    ]
    assert plan(Client, LikesClient, stored=after).migrations == ()
    # A relation that comes later follows the rename too.
    (alone,) = plan(LikesClient, stored=[*after[:2], history(spec_of(Likes))]).migrations
    assert alone.diff.additive


def test_the_hash_of_a_plan_is_of_what_it_does() -> None:
    first = plan(Older, stored=[STORED])
    assert first.sha256 == plan(Older, stored=[STORED]).sha256
    others = [
        plan(Incompatible, stored=[STORED]),
        plan(Older, stored=[history(spec_of(Customer), 2)]),
        plan(Older, stored=[STORED], upgraders={("Customer", 1): same}),
        plan(stored=[STORED]),
    ]
    assert first.sha256 not in {p.sha256 for p in others}
    assert (
        plan(Older, stored=[STORED], upgraders={("Customer", 1): lambda row: row}).sha256
        == others[2].sha256
    )


def test_under_the_lock_the_planned_versions_must_still_stand() -> None:
    made = plan(Older, stored=[STORED])
    request = MigrationRequest(made.migrations)
    sha256 = spec_of(Customer).schema_sha256
    request.check_unmoved({("entity", "Customer"): StoredState(1, sha256)}.get)
    for moved in (
        StoredState(2, spec_of(Older).schema_sha256),
        StoredState(1, sha256, dropped=True),
        None,
    ):
        with pytest.raises(MigrationTokenError, match="another migration was faster"):
            request.check_unmoved({("entity", "Customer"): moved}.get)

    new = MigrationRequest(plan(Customer, stored=[]).migrations)
    new.check_unmoved(lambda _: None)
    with pytest.raises(MigrationTokenError):
        new.check_unmoved({("entity", "Customer"): StoredState(1, sha256)}.get)


# --- upgraders ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_other_upgraders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared_upgraders, "_declared", {})


@pytest.fixture
def module() -> Iterator[ModuleType]:
    made = ModuleType("shop_upgraders")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_declared_upgraders_are_found(module: ModuleType) -> None:
    @upgrader("Customer", from_version=1)
    @upgrader("Customer", from_version=2)
    def keep(row: dict[str, Any]) -> dict[str, Any]:
        return row

    @upgrader("Order", from_version=1, batch=True)
    def keep_table(table: Any) -> Any:
        return table

    module.keep = keep  # type: ignore[attr-defined]
    everything = {("Customer", 1), ("Customer", 2), ("Order", 1)}
    assert set(resolve_upgraders(None)) == everything
    assert set(load_upgraders("shop_upgraders")) == {("Customer", 1), ("Customer", 2)}
    assert set(resolve_upgraders([keep, keep_table])) == everything
    assert resolve_upgraders({("Order", 4): keep_table})["Order", 4].batch
    assert keep({"id": "1"}) == {"id": "1"}  # a plain function, for tests of its own


def test_upgraders_that_cannot_be() -> None:
    upgrader("Customer", from_version=1)(same)
    upgrader("Customer", from_version=1)(same)  # a module that is loaded again
    with pytest.raises(ConfigurationError, match="two upgraders from version 1"):
        upgrader("Customer", from_version=1)(plan)
    with pytest.raises(ConfigurationError, match="stored name"):
        upgrader(Customer, from_version=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="1 or more"):
        upgrader("Customer", from_version=0)
    with pytest.raises(ConfigurationError, match="does not say what it upgrades"):
        resolve_upgraders([lambda row: row])
    with pytest.raises(ConfigurationError, match="a list of functions"):
        resolve_upgraders(lambda row: row)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"cannot import .*'no_such_module'"):
        load_upgraders("no_such_module")


def test_steps_follow_old_and_new_names() -> None:
    steps = {key: Upgrader(*key, same) for key in [("Old", 1), ("New", 2), ("New", 4)]}
    assert [s.key for s in steps_from(steps, ["New", "Old"], 1)] == [("Old", 1), ("New", 2)]
    assert steps_from(steps, ["New"], 1) == []


def test_the_version_that_was_current_at_a_commit() -> None:
    spec = spec_of(Customer)
    versions = (
        SchemaVersion(1, spec, "a", 2, superseded_at_commit_id=5),
        SchemaVersion(2, spec, "b", 5, superseded_at_commit_id=8),
        SchemaVersion(3, spec, "c", 11),
    )
    past = TypeHistory("entity", "Customer", versions)
    active = [past.active_at(n) for n in range(1, 13)]
    assert [v and v.version for v in active] == [None, 1, 1, 1, 2, 2, 2, None, None, None, 3, 3]


def test_a_rename_does_not_strand_relations() -> None:
    stored = [history(spec_of(Customer)), history(spec_of(Likes))]
    with pytest.raises(
        MigrationError, match=r"Customer is an end of Likes.*declare it with Client"
    ):
        plan(Client, stored=stored).require_possible()
    plan(Client, LikesClient, stored=stored).require_possible()
    ended = history(spec_of(Likes), dropped_commit_id=3)
    plan(Client, stored=[stored[0], ended]).require_possible()


def test_ends_are_followed_through_all_renames() -> None:
    """As storages have them whose relations were left behind by an earlier release."""

    class Buyer(Entity):
        id: Field[str] = Field(primary_key=True)
        age: Field[int]

    class LikesBuyer(Relation[Buyer, Buyer], name="Likes"):
        pass

    class Back(Entity, name="Customer", renamed_from="Buyer"):
        id: Field[str] = Field(primary_key=True)
        age: Field[int]

    stored = [
        history(spec_of(Customer), dropped_commit_id=2, renamed_to="Client"),
        history(spec_of(Client), dropped_commit_id=3, renamed_to="Buyer"),
        history(spec_of(Buyer)),
        history(spec_of(Likes)),
    ]
    plan(Buyer, LikesBuyer, stored=stored).require_possible()
    names = present_names({h.ref: h for h in stored})
    assert names == {"Customer": "Buyer", "Client": "Buyer"}
    back = present_names({h.ref: h for h in stored}, {"Buyer": "Customer"})
    assert back == {"Client": "Customer", "Buyer": "Customer"}
    plan(Back, Likes, stored=stored).require_possible()
    plan(Back, stored=stored).require_possible()  # which is what it points to
    stored[-1] = history(spec_of(LikesClient))
    with pytest.raises(MigrationError, match=r"Buyer is an end of Likes.*with Customer as that"):
        plan(Back, stored=stored).require_possible()


def entity(name: str, renamed_from: str | None = None, **fields: Any) -> Any:
    """`x="y"` is a field x that was called y before, `x=None` one that was not."""
    body: dict[str, Any] = {
        "__annotations__": {"id": Field[str]} | dict.fromkeys(fields, Field[int | None]),
        "id": Field(primary_key=True),
    }
    body |= {n: Field(renamed_from=old) for n, old in fields.items() if old is not None}
    return type(name, (Entity,), body, renamed_from=renamed_from)


def test_a_type_is_not_renamed_and_kept() -> None:
    with pytest.raises(MigrationError, match=r"Client: .*renamed from Customer.*still declared"):
        plan(Client, Customer, stored=[STORED]).require_possible()
    # Over, the marker is harmless: a new type has the old name.
    plan(Client, Customer, stored=[STORED, history(spec_of(Client))]).require_possible()
    # So it is in a storage that never had the old one.
    plan(Client, Customer, stored=[]).require_possible()
    ended = history(spec_of(Customer), dropped_commit_id=2)
    plan(Client, Customer, stored=[ended]).require_possible()


@pytest.mark.parametrize("stored", [True, False])
def test_types_are_not_renamed_to_each_other(stored: bool) -> None:
    ring = [entity("A", "C"), entity("B", "A"), entity("C", "B"), entity("D", "A")]
    before = [history(spec_of(cls)) for cls in ring] if stored else []
    with pytest.raises(MigrationError, match=r"A, C, B are marked as renamed from each other"):
        plan(*ring, stored=before)
    plan(*ring[1:], stored=[]).require_possible()


def test_a_field_is_not_renamed_and_kept() -> None:
    stored = [history(spec_of(entity("T", a=None)))]
    both = entity("T", a=None, b="a")
    with pytest.raises(MigrationError, match=r"'b' is marked as renamed from 'a'.*still declared"):
        plan(both, stored=stored).require_possible()
    plan(both, stored=stored, upgraders={("T", 1): same}).require_possible()
    plan(entity("T", b="a"), stored=stored).require_possible()
    # Over, the marker is harmless, and a new field may have the name.
    plan(both, stored=[history(spec_of(entity("T", b=None)))]).require_possible()
    plan(both, stored=[history(spec_of(both))]).require_possible()
    plan(both, stored=[]).require_possible()


def test_fields_are_not_renamed_to_each_other() -> None:
    with pytest.raises(TypeDeclarationError, match=r"T.a: fields are marked as renamed from each"):
        entity("T", a="b", b="a")
    with pytest.raises(TypeDeclarationError, match="from each other"):
        entity("T", a="b", b="c", c="a")
    entity("T", a="b", b="c", c="d")
