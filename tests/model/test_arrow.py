"""Arrow schemas, and lossless round trips of objects and payloads."""

import json
import string
from datetime import UTC, date, datetime
from typing import Any, NotRequired, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_engine.errors import IntegrityError, ValidationError
from storage_engine.model import (
    ARROW_TYPES,
    SQLITE_TYPES,
    SYSTEM_COLUMNS,
    SYSTEM_FIELD_IDS,
    Entity,
    Field,
    Relation,
    TypeSpec,
    canonical_json,
    fields_json,
    objects_to_table,
    parquet_schema,
    row_schema,
    spec_of,
    table_from_fields_json,
    table_to_objects,
)


class Tree(TypedDict):
    at: datetime
    raw: NotRequired[bytes]
    children: "NotRequired[list[Tree]]"


class Thing(Entity):
    id: Field[str] = Field(primary_key=True)
    s: Field[str | None]
    i: Field[int | None]
    f: Field[float]
    b: Field[bool | None]
    at: Field[datetime]
    maybe_at: Field[datetime | None]
    on: Field[date | None]
    raw: Field[bytes | None]
    tags: Field[list[str] | None]
    days: Field[dict[str, list[date]]]
    tree: Field[Tree]
    mixed: Field[int | float | bool | str | None]
    free: Field[Any]
    either: Field[list[int] | list[float] | int | datetime]


class Rel(Relation[Thing, Thing]):
    stint: Field[str] = Field(instance_key=True)
    n: Field[int]


class Bare(Relation[Thing, Thing]):
    pass


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEY = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
INT = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
AT = st.datetimes(timezones=st.just(UTC))
LEAF = st.none() | st.booleans() | INT | FLOAT | TEXT
FREE = st.recursive(
    LEAF, lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXT, x, max_size=3), max_leaves=6
)
TREE: st.SearchStrategy[Any] = st.recursive(
    st.fixed_dictionaries({"at": AT}, optional={"raw": st.binary(max_size=5)}),
    lambda inner: st.fixed_dictionaries({"at": AT, "children": st.lists(inner, max_size=2)}),
    max_leaves=4,
)
THING = st.builds(
    Thing,
    id=KEY,
    s=st.none() | TEXT,
    i=st.none() | INT,
    f=FLOAT,
    b=st.none() | st.booleans(),
    at=AT,
    maybe_at=st.none() | AT,
    on=st.none() | st.dates(),
    raw=st.none() | st.binary(max_size=8),
    tags=st.none() | st.lists(TEXT, max_size=3),
    days=st.dictionaries(TEXT, st.lists(st.dates(), max_size=2), max_size=2),
    tree=TREE,
    mixed=LEAF,
    free=FREE,
    either=st.lists(INT, max_size=2) | st.lists(FLOAT, max_size=2) | INT | AT,
)


def typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: typed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [typed(v) for v in value]
    return (type(value).__name__, repr(value))


@settings(deadline=None, max_examples=50)
@given(st.lists(THING, max_size=4))
def test_objects_round_trip(things: list[Thing]):
    spec = spec_of(Thing)
    table = objects_to_table(spec, things)
    assert table.schema.equals(row_schema(spec))
    table.validate(full=True)
    again = table_to_objects(spec, table)
    assert again == things
    assert [typed(vars(o)) for o in again] == [typed(vars(o)) for o in things]


@settings(deadline=None, max_examples=50)
@given(st.lists(THING, max_size=4))
def test_payload_round_trip(things: list[Thing]):
    spec = TypeSpec.from_schema_dict(spec_of(Thing).schema_dict())  # no class needed
    table = objects_to_table(spec_of(Thing), things)
    payloads = fields_json(spec, table)
    assert payloads.type == pa.string()
    for text in payloads.to_pylist():
        assert canonical_json(json.loads(text)) == text
    again = table_from_fields_json(spec, table.select(spec.identity), payloads)
    assert again.equals(table)


@settings(deadline=None, max_examples=50)
@given(st.lists(THING, min_size=1, max_size=3))
def test_parquet_round_trip(things: list[Thing]):
    spec = spec_of(Thing)
    table = objects_to_table(spec, things)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    assert table_to_objects(spec, pq.read_table(pa.BufferReader(sink.getvalue()))) == things


def test_relations_round_trip_with_meta():
    spec = spec_of(Rel)
    made = [Rel(left_key="a", right_key="b", stint=s, n=n) for n, s in enumerate("xy")]
    table = objects_to_table(spec, made)
    assert table.column("instance_key").to_pylist() == ["x", "y"]
    again = table_to_objects(spec, table.add_column(0, "commit_id", pa.array([7, 8])))
    assert again == made
    assert [o.meta().commit_id for o in again] == [7, 8]
    assert again[1].meta().instance_key == "y"


def test_unkeyed_relation_without_fields():
    spec = spec_of(Bare)
    made = [Bare(left_key="a", right_key="b")]
    table = objects_to_table(spec, made)
    assert table.to_pylist() == [{"left_key": "a", "right_key": "b", "instance_key": ""}]
    assert table_to_objects(spec, table) == made
    payloads = fields_json(spec, table)
    assert payloads.to_pylist() == ["{}"]
    assert table_from_fields_json(spec, table, payloads).equals(table)


def test_no_objects():
    spec = spec_of(Thing)
    table = objects_to_table(spec, [])
    assert table.num_rows == 0
    assert table.schema.equals(row_schema(spec))
    assert table_to_objects(spec, table) == []


def test_several_chunks():
    spec = spec_of(Bare)
    one = objects_to_table(spec, [Bare(left_key="a", right_key="b")])
    two = objects_to_table(spec, [Bare(left_key="c", right_key="d")])
    assert [o.left_key for o in table_to_objects(spec, pa.concat_tables([one, two]))] == ["a", "c"]
    assert len(fields_json(spec, pa.concat_tables([one, two]))) == 2


def test_objects_of_another_class():
    with pytest.raises(ValidationError, match="expected Rel objects, got Bare"):
        objects_to_table(spec_of(Rel), [Bare(left_key="a", right_key="b")])


def test_objects_need_a_class():
    spec = TypeSpec.from_schema_dict(spec_of(Bare).schema_dict())
    with pytest.raises(TypeError, match="no class to build"):
        table_to_objects(spec, objects_to_table(spec_of(Bare), []))


class Listed(Entity):
    id: Field[str] = Field(primary_key=True)
    xs: Field[list[float]]


def test_values_changed_in_place_are_checked_when_written():
    listed = Listed(id="a", xs=[1.0])
    listed.xs.append(float("nan"))
    with pytest.raises(ValidationError, match=r"Listed 'a': xs\[1\]: must be finite"):
        objects_to_table(spec_of(Listed), [Listed(id="b", xs=[]), listed])


class Older(Entity, name="T"):
    id: Field[str] = Field(primary_key=True)


class Newer(Entity, name="T"):
    id: Field[str] = Field(primary_key=True)
    tier: Field[str] = Field(default="Standard")
    since: Field[datetime] = Field(default=datetime(2024, 1, 1, tzinfo=UTC))
    tags: Field[list[str]] = Field(default_factory=list)
    note: Field[str | None]


class Stricter(Entity, name="T"):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


def test_payloads_from_before_a_field_existed():
    table = objects_to_table(spec_of(Older), [Older(id="a")])
    payloads = fields_json(spec_of(Older), table)
    again = table_to_objects(
        spec_of(Newer), table_from_fields_json(spec_of(Newer), table, payloads)
    )
    assert again == [Newer(id="a", note=None)]
    with pytest.raises(IntegrityError, match="no value for 'n'"):
        table_from_fields_json(spec_of(Stricter), table, payloads)


def test_every_storage_has_its_columns():
    assert set(ARROW_TYPES) == set(SQLITE_TYPES)
    assert row_schema(spec_of(Thing)).field("at").type == pa.timestamp("us", tz="UTC")
    assert row_schema(spec_of(Thing)).field("tree").type == pa.string()
    nullable = {f.name for f in row_schema(spec_of(Thing)) if f.nullable}
    assert nullable == {
        *["s", "i", "b", "maybe_at", "on", "raw", "tags", "mixed", "free"],
    }


def ids(schema: pa.Schema) -> dict[str, int]:
    return {f.name: int(f.metadata[b"PARQUET:field_id"]) for f in schema}


def test_parquet_schemas():
    v1 = parquet_schema(spec_of(Rel), engine_version="v1")
    v2 = parquet_schema(spec_of(Rel), engine_version="v2")
    staged = parquet_schema(spec_of(Rel), engine_version="v2", with_commit_id=False)
    system = ["relation_type", "left_key", "right_key", "instance_key", "schema_version_id"]
    assert v1.names == ["commit_id", *system, "n", "fields_json"]
    assert v2.names == ["commit_id", *system, "n"]
    assert staged.names == [*system, "n"]
    entity = parquet_schema(spec_of(Thing), engine_version="v2")
    assert entity.names[:5] == ["commit_id", "entity_type", "entity_key", "schema_version_id", "id"]


def test_field_ids_are_fixed():
    assert ids(parquet_schema(spec_of(Rel), engine_version="v1")) == {
        "commit_id": 1,
        "relation_type": 3,
        "left_key": 5,
        "right_key": 6,
        "instance_key": 7,
        "schema_version_id": 8,
        "n": 1001,
        "fields_json": 9,
    }
    assert ids(parquet_schema(spec_of(Older), engine_version="v2")) == {
        "commit_id": 1,
        "entity_type": 2,
        "entity_key": 4,
        "schema_version_id": 8,
        "id": 1001,
    }
    assert set(SYSTEM_FIELD_IDS) == SYSTEM_COLUMNS


def test_field_ids_reach_the_file():
    schema = parquet_schema(spec_of(Rel), engine_version="v2")
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    read = pq.read_schema(pa.BufferReader(sink.getvalue()))
    assert ids(read) == ids(schema)


def test_large_batch_keeps_order():
    names = [c * 3 for c in string.ascii_letters] * 20
    spec = spec_of(Rel)
    made = [Rel(left_key=n, right_key="r", stint=str(i), n=i) for i, n in enumerate(names)]
    assert table_to_objects(spec, objects_to_table(spec, made)) == made


def test_unreadable_stored_value():
    spec = spec_of(Listed)
    table = pa.table({"entity_key": ["a"], "id": ["a"], "xs": ["[1"]}, schema=row_schema(spec))
    with pytest.raises(IntegrityError, match=r"Listed\.xs: unreadable stored value"):
        table_to_objects(spec, table)


class Deep(TypedDict):
    next: "NotRequired[Deep]"


class Nested(Entity):
    id: Field[str] = Field(primary_key=True)
    deep: Field[Deep]


def test_nesting_is_refused_before_it_cannot_be_written():
    def nested(levels: int) -> Any:
        value: dict[str, Any] = {}
        for _ in range(levels):
            value = {"next": value}
        return value

    fine = Nested(id="a", deep=nested(100))
    assert table_to_objects(spec_of(Nested), objects_to_table(spec_of(Nested), [fine])) == [fine]
    for levels in (230, 250, 260, 400):
        try:
            made = Nested(id="a", deep=nested(levels))
        except ValidationError:
            continue
        assert objects_to_table(spec_of(Nested), [made]).num_rows == 1, levels
