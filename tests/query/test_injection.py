"""Nothing that a user passes becomes SQL: no value, no key, no name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from storage_engine.model.expressions import Filter
from storage_engine.query.aggregates import count, max
from storage_engine.query.compiler import Compiler
from storage_engine.query.spec import QuerySpec
from tests.query.worlds import ENGINES, THING, Thing, World

ATTACKS = [
    "'; DROP TABLE rows_columns; --",
    "' OR 1=1 --",
    "') OR ('1'='1",
    '" OR ""="',
    "$q0",
    ":q0",
    "?",
    "%",
    "\\'; DELETE FROM rows_payload; --",
    "x\x00' OR 1=1",
    "/* */ UNION SELECT 1",
]
KEYS = ["' OR 1=1 --", "a') = 1 OR ('", "$q0", ":q0 ", "a].b[*", "x'; DROP TABLE rows_columns; --"]


@pytest.fixture(name="world")
def a_world() -> Any:
    made = World([Thing(id="a", text="a", profile={"a": "a"}), Thing(id="b", tags=["x"])])
    yield made
    for shape in ("columns", "payload"):
        assert made.lite.execute(f"SELECT COUNT(*) FROM rows_{shape}").fetchone() == (2,)
        assert made.duck.execute(f"SELECT COUNT(*) FROM rows_{shape}").fetchone() == (2,)
    made.close()


def everywhere(world: World, expression: Filter) -> None:
    expected = world.expected(expression)
    for engine, shape in ENGINES:
        assert world.where(engine, shape, expression) == expected, (engine, shape)


@pytest.mark.parametrize("attack", ATTACKS)
def test_values_stay_values(world: World, attack: str) -> None:
    for made in (
        Thing.id == attack,
        Thing.text != attack,
        Thing.text.in_([attack, "a"]),
        Thing.text.startswith(attack),
        Thing.text.endswith(attack),
        Thing.text.contains(attack),
        Thing.tags.contains(attack),
        Thing.profile["a"] == attack,
        Thing.events.any_path("k") == attack,
        ~(Thing.open == attack),
    ):
        everywhere(world, made)


@pytest.mark.parametrize("key", KEYS)
def test_keys_stay_keys(world: World, key: str) -> None:
    everywhere(world, Thing.profile[key] == "a")
    everywhere(world, Thing.profile[key].is_null())
    everywhere(world, Thing.profile["a"][key].any_path("a") == 1)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_value_is_in_the_text(attack: str) -> None:
    secret = f"{attack} 4711"
    made = (Thing.text == secret) & (Thing.profile["k4711"] > 4711.5)
    for engine, shape in ENGINES:
        spec = QuerySpec(THING, made, limit=4711, offset=4711)
        compiled = Compiler(engine, shape).select(spec, "rows", ["entity_key"])
        assert "4711" not in compiled.sql
        names = set(re.findall(r"[$:](q\d+)\b", compiled.sql))
        assert names == set(compiled.parameters)


@pytest.mark.parametrize("name", ATTACKS)
def test_names_of_results_and_tables_stay_names(world: World, name: str) -> None:
    spec = QuerySpec(THING, aggregates=((name, count()), ("m", max(Thing.text))))
    for engine, shape in ENGINES:
        made = Compiler(engine, shape).aggregate(spec, f"rows_{shape}")
        assert made.columns[0] == (name, "int")
        assert world.run(engine, shape, made.sql, made.parameters) == [(2, "a")]
        if "\x00" in name:
            continue
        attack = Compiler(engine, shape).select(QuerySpec(THING), name, ["entity_key"])
        with pytest.raises(Exception, match=r"(?i)no such table|does not exist"):
            world.run(engine, shape, attack.sql, attack.parameters)
