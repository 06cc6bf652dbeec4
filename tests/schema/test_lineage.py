"""What a type was before: through versions, renames, drops and second lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from storage_engine import Entity, Field, MissingUpgraderError
from storage_engine.model import objects_to_table, spec_of
from storage_engine.model.spec import TypeSpec
from storage_engine.schema.diff import evolved
from storage_engine.schema.history import SchemaVersion, TypeHistory, TypeRef
from storage_engine.schema.lineage import Lineage, diff_versions, lineage, lives
from storage_engine.schema.upgraders import Upgrader


def fresh() -> list[str]:
    """No storage can know what it makes."""
    return ["made"]


class First(Entity, name="Thing"):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


class Second(Entity, name="Thing"):
    id: Field[str] = Field(primary_key=True)
    count: Field[int] = Field(renamed_from="n")
    tags: Field[list[str]] = Field(default_factory=fresh)


class Third(Entity, name="Thing"):
    id: Field[str] = Field(primary_key=True)
    tags: Field[list[str]] = Field(default_factory=fresh)


def stored(*classes: Any) -> list[TypeSpec]:
    """As a storage has them: with the ids of the one before, without what only classes know."""
    specs: list[TypeSpec] = []
    for cls in classes:
        spec = spec_of(cls)
        spec = evolved(specs[-1], spec) if specs else spec
        specs.append(TypeSpec.from_schema_dict(spec.schema_dict()))
    return specs


def history(
    name: str, spans: Sequence[tuple[int, int | None]], specs: Sequence[TypeSpec], **more: Any
) -> TypeHistory:
    """`renamed_from` is of the last version, or `taken` says it of each."""
    taken = more.pop("taken", [None] * (len(specs) - 1) + [more.pop("renamed_from", None)])
    versions = [
        SchemaVersion(number, spec, spec.schema_sha256, since, until, renamed_from=before)
        for number, (spec, (since, until), before) in enumerate(
            zip(specs, spans, taken, strict=True), start=more.pop("first", 1)
        )
    ]
    return TypeHistory("entity", name, tuple(versions), **more)


def named(*histories: TypeHistory) -> dict[TypeRef, TypeHistory]:
    return {each.ref: each for each in histories}


def told(line: Lineage | None) -> list[tuple[str, int, bool]]:
    assert line is not None
    return [(stage.ref[1], stage.number, stage.continued) for stage in line.stages]


def test_versions_follow_each_other() -> None:
    specs = stored(First, Second, Third)
    histories = named(history("Thing", [(1, 4), (4, 9), (9, None)], specs))
    line = lineage(("entity", "Thing"), histories)
    assert told(line) == [("Thing", 1, False), ("Thing", 2, True), ("Thing", 3, True)]
    assert line is not None
    assert [line.at(c).number if line.at(c) else None for c in (0, 1, 3, 4, 8, 9, 99)] == [  # type: ignore[union-attr]
        None,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert [stage.number for stage in line.between(3, 8)] == [2]
    assert [stage.number for stage in line.between(2, 99)] == [1, 2, 3]
    assert lineage(("entity", "Nothing"), histories) is None


def test_a_rename_leads_back_to_the_other_name() -> None:
    specs = stored(First, Second, Third)
    histories = named(
        history("Old", [(1, 4), (4, 6)], specs[:2], dropped_commit_id=6, renamed_to="New"),
        history("New", [(6, None)], specs[2:], first=3, renamed_from="Old"),
    )
    expected = [("Old", 1, False), ("Old", 2, True), ("New", 3, True)]
    assert told(lineage(("entity", "New"), histories)) == expected
    assert [told(line) for line in lives(histories)] == [expected]


def test_a_rename_is_found_from_either_side() -> None:
    one, two, three = stored(First, First, First)
    old = history("Old", [(1, 4)], [one], dropped_commit_id=4, renamed_to="New")
    # Dropped and created anew since: its history tells of its present life.
    new = history("New", [(4, 6), (7, None)], [two, three], first=2, taken=["Old", None])
    expected = [("Old", 1, False), ("New", 2, True), ("New", 3, False)]
    assert told(lineage(("entity", "New"), named(old, new))) == expected
    assert (new.renamed_from, old.renamed_from) == (None, None)
    assert replace(new, versions=new.versions[:1]).renamed_from == "Old"


def test_a_type_that_took_a_name_which_another_one_had_before() -> None:
    one, two, three = stored(First, First, First)
    histories = named(
        history("Taken", [(1, 3), (7, None)], [one, two], renamed_from="Other"),
        history("Other", [(2, 7)], [three], dropped_commit_id=7, renamed_to="Taken"),
    )
    assert told(lineage(("entity", "Taken"), histories)) == [
        ("Other", 1, False),
        ("Taken", 2, True),
    ]
    assert [told(line) for line in lives(histories)] == [
        [("Taken", 1, False)],
        [("Other", 1, False), ("Taken", 2, True)],
    ]


def test_a_name_that_two_types_were_given_one_after_the_other() -> None:
    """X became A, A became B, Y became A: the past of B still leads to X."""
    spec = stored(First)[0]
    histories = named(
        history("X", [(1, 2)], [spec], dropped_commit_id=2, renamed_to="A"),
        history("A", [(2, 3), (4, None)], [spec, spec], first=2, taken=["X", "Y"]),
        history("B", [(3, None)], [spec], first=3, renamed_from="A"),
        history("Y", [(1, 4)], [spec], dropped_commit_id=4, renamed_to="A"),
    )
    b = [("X", 1, False), ("A", 2, True), ("B", 3, True)]
    a = [("Y", 1, False), ("A", 3, True)]
    assert told(lineage(("entity", "B"), histories)) == b
    assert told(lineage(("entity", "A"), histories)) == a
    assert [told(line) for line in lives(histories)] == [a, b]


def test_a_name_that_is_used_again_begins_a_life_of_its_own() -> None:
    one, two, three = stored(First, First, First)
    histories = named(
        history("Old", [(1, 5), (8, None)], [one, two]),
        history("New", [(5, None)], [three], first=2, renamed_from="Old"),
    )
    assert [told(line) for line in lives(histories)] == [
        [("Old", 1, False), ("New", 2, True)],
        [("Old", 2, False)],
    ]
    assert told(lineage(("entity", "Old"), histories)) == [("Old", 1, False), ("Old", 2, False)]


def test_rows_are_brought_up_version_by_version() -> None:
    specs = stored(First, Second, Third)
    line = lineage(("entity", "Thing"), named(history("Thing", [(1, 4), (4, 9), (9, None)], specs)))
    assert line is not None
    table = objects_to_table(spec_of(First), [First(id="a", n=3)])

    def kept(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "tags": [*row["tags"], str(row.pop("count"))]}

    way = Upgrader("Thing", 2, kept)
    with pytest.raises(MissingUpgraderError, match="Thing from version 2"):
        line.rewrite(line.stages[0], {}, spec_of(Third))
    # The class of today knows what the list began with; the storage alone does not.
    made = line.rewrite(line.stages[0], {way.key: way}, spec_of(Third))(table)
    assert made.to_pylist() == [{"entity_key": "a", "id": "a", "tags": '["made","3"]'}]
    with pytest.raises(MissingUpgraderError, match="Thing from version 1"):
        line.rewrite(line.stages[0], {way.key: way})
    assert line.rewrite(line.last, {})(table) is table


def test_a_renamed_field_shows_between_stored_versions() -> None:
    first, second, _ = history(
        "Thing", [(1, 4), (4, 9), (9, None)], stored(First, Second, Third)
    ).versions
    diff = diff_versions(first, second)
    assert diff.sentences()[0] == "field 'n' renamed to 'count'"
    assert (diff.from_version, diff.to_version) == (1, 2)
