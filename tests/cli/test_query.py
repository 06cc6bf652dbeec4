"""`onto query`: the same answers on every backend, with stored schemas and with `--models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ENGINES, Place, place_in
from tests.cli.shop import JOINED, fill
from tests.cli.support import Done, create, onto

MODELS = "tests.cli.shop"


@pytest.fixture(scope="module", params=ENGINES)
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Nobody writes to it."""
    place = place_in(tmp_path_factory.mktemp("query"), request.param)
    fill(place.uri, place.engine)
    return place.uri


def ask(uri: str, *args: str) -> dict[str, Any]:
    """The JSON document, which must be the same with the classes and without."""
    stored = onto("query", *args, "--storage-uri", uri, "--json")
    declared = onto("query", *args, "--storage-uri", uri, "--json", "--models", MODELS)
    assert (stored.code, stored.err) == (0, ""), stored
    assert stored == declared
    found: dict[str, Any] = stored.json
    return found


def keys(uri: str, *args: str) -> list[Any]:
    return [row["id"] for row in ask(uri, "entities", "Client", *args)["rows"]]


def test_entities_have_all_their_fields(shop: str) -> None:
    found = ask(shop, "entities", "Client")

    ann, bob, cid = found.pop("rows")
    assert found == {
        "kind": "entity",
        "type": "Client",
        "commit_id": 3,
        "diagnostics": [],
        "row_count": 3,
    }
    assert ann == {
        "commit_id": 2,
        "id": "ann",
        "name": 'Ann "A", B\nC',
        "tier": "Gold",
        "age": 32,
        "active": True,
        "joined": JOINED.isoformat(timespec="microseconds"),
        "photo": "AP8=",
        "tags": ["vip", "x"],
        "profile": {"city": "Bern"},
    }
    assert (bob["commit_id"], bob["name"], bob["joined"]) == (1, "", None)
    assert cid["name"] == "Zoë"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("tier", "==", '"Gold"'), ["ann"]),
        (("$.tier", "eq", '"Gold"'), ["ann"]),
        (("age", "gte", "7"), ["ann", "bob"]),
        (("age", "<", "32"), ["bob"]),
        (("age", "is_null"), ["cid"]),
        (("active", "is_false"), ["bob"]),
        (("id", "in", '["bob", "cid", "x"]'), ["bob", "cid"]),
        (("name", "startswith", '"Ann"'), ["ann"]),
        (("tags", "contains", '"vip"'), ["ann"]),
        (("profile.city", "==", '"Bern"'), ["ann"]),
        (("joined", ">", '"2024-01-31"'), ["ann"]),
        (("photo", "==", '"AP8="'), ["ann"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_rfc0004_08_filters(shop: str, given: tuple[str, ...], expected: list[str]) -> None:
    assert keys(shop, "--filter", *given) == expected


def test_filters_add_up_and_take_two_or_three_values(shop: str) -> None:
    several = ("--filter", "age", "is_not_null", "--filter", "tier", "eq", '"Standard"')

    assert keys(shop, *several) == ["bob"]
    assert keys(shop, *several, "--filter", "active", "is_true") == []
    assert keys(shop, "--filter", "age", "is_null", "--limit", "5") == ["cid"]


def test_order_and_paging(shop: str) -> None:
    assert keys(shop, "--order-by", "age") == ["bob", "ann", "cid"]
    assert keys(shop, "--order-by", "age:desc") == ["ann", "bob", "cid"]
    assert keys(shop, "--order-by", "active:asc", "--order-by", "id:desc") == ["bob", "cid", "ann"]
    assert keys(shop, "--order-by", "id:desc", "--limit", "1", "--offset", "1") == ["bob"]
    assert keys(shop, "--offset", "9" * 30) == []


def test_as_of(shop: str) -> None:
    assert keys(shop, "--as-of", "1") == ["ann", "bob"]
    assert keys(shop, "--as-of", "2099-01-01") == ["ann", "bob", "cid"]
    before = ask(shop, "entities", "Client", "--as-of", "1", "--filter", "tier", "eq", '"Standard"')
    assert [row["id"] for row in before["rows"]] == ["ann", "bob"]
    assert before["commit_id"] == 1
    moment = onto("commits", "examine", "2", "--storage-uri", shop, "--json").json["created_at"]
    assert ask(shop, "entities", "Client", "--as-of", moment)["commit_id"] == 2


def test_a_commit_to_come_is_the_newest_with_a_note(shop: str) -> None:
    for wanted in ("4", "9" * 40):
        shown = onto("query", "entities", "Client", "--as-of", wanted, "--storage-uri", shop)

        assert shown.code == 0
        assert shown.err == f"note: commit {wanted} is not there yet: this is commit 3\n"
        assert len(shown.out.splitlines()) == 4


def test_history(shop: str) -> None:
    rows = ask(shop, "entities", "Client", "--with-history", "--columns", "commit_id,id,tier")
    since = ask(shop, "entities", "Client", "--history-since", "1", "--columns", "id, commit_id")

    assert [tuple(row.values()) for row in rows["rows"]] == [
        (1, "ann", "Standard"),
        (1, "bob", "Standard"),
        (2, "ann", "Gold"),
        (3, "cid", "Standard"),
    ]
    assert [tuple(row.values()) for row in since["rows"]] == [("ann", 2), ("cid", 3)]
    clamped = ask(shop, "entities", "Client", "--history-since", "-1")
    assert len(clamped["rows"]) == len(rows["rows"]), "before the first commit is all of it"


def test_a_read_before_the_type_came_says_so(shop: str) -> None:
    args = ("query", "entities", "Client", "--as-of", "0", "--storage-uri", shop)
    table, rows, count = onto(*args), onto(*args, "--json"), onto(*args, "--json", "--count")

    assert table.out == "No rows.\n"
    assert (rows.json["rows"], count.json["count"]) == ([], 0)
    remarks = rows.json["diagnostics"]
    assert count.json["diagnostics"] == remarks
    for said in (table, rows, count):
        assert said.code == 0
        assert bool(said.err) == bool(remarks)
    if remarks:  # engine v2: v1 has no activation
        assert remarks == [{"reason": "commit_before_activation", "activation_commit_id": 1}]
        assert table.err.startswith("note: ")


def test_relations_by_their_ends(shop: str) -> None:
    found = ask(shop, "relations", "Job", "--filter", "left.tier", "eq", '"Gold"')
    both = (*("--filter", "left.age", "lt", "10"), *("--filter", "right.name", "eq", '"Acme"'))

    assert found["rows"][0] == {
        "commit_id": 1,
        "left_key": "ann",
        "right_key": "acme",
        "stint": "2023",
        "role": "clerk",
    }
    assert [row["stint"] for row in found["rows"]] == ["2023", "2024"]
    assert [row["left_key"] for row in ask(shop, "relations", "Job", *both)["rows"]] == ["bob"]
    by_key = ask(shop, "relations", "Job", "--filter", "stint", "eq", '"2024"', "--count")
    assert by_key["count"] == 2
    assert list(ask(shop, "relations", "Knows")["rows"][0]) == [
        "commit_id",
        "left_key",
        "right_key",
        "since",
    ]


def test_count(shop: str) -> None:
    assert ask(shop, "entities", "Client", "--count") == {
        "kind": "entity",
        "type": "Client",
        "commit_id": 3,
        "diagnostics": [],
        "count": 3,
    }
    shown = onto("query", "entities", "Client", "--count", "--storage-uri", shop)
    line = ("query", "entities", "Client", "--count", "--format", "csv")
    assert shown.out == "3\n"
    assert onto(*line, "--storage-uri", shop).out == "count\n3\n"


def test_traverse(shop: str) -> None:
    found = ask(shop, "traverse", "Client", "--via", "Knows", "--via", "Job")

    assert (found["kind"], found["via"], found["row_count"]) == ("path", ["Knows", "Job"], 2)
    first, second = found["rows"]
    assert first["source"]["id"] == second["source"]["id"] == "bob"
    assert [r["commit_id"] for r in first["relations"]] == [1, 1]
    assert [path["relations"][1]["stint"] for path in found["rows"]] == ["2023", "2024"]
    few = ("--columns", "source.name,relations.1.stint")
    assert ask(shop, "traverse", "Client", "--via", "Knows", "--via", "Job", *few)["rows"] == [
        {"source": {"name": ""}, "relations": [{}, {"stint": "2023"}]},
        {"source": {"name": ""}, "relations": [{}, {"stint": "2024"}]},
    ]


def test_traverse_goes_both_ways_to_the_entities_at_the_end(shop: str) -> None:
    found = ask(shop, "traverse", "Firm", "--via", "Job")
    assert [path["source"]["id"] for path in found["rows"]] == ["acme", "acme", "acme"]
    assert [path["relations"][0]["left_key"] for path in found["rows"]] == ["ann", "ann", "bob"]
    assert [path["target"]["age"] for path in found["rows"]] == [32, 32, 7]
    assert found["rows"][0]["target"]["tags"] == ["vip", "x"]

    there = ask(shop, "traverse", "Client", "--via", "Knows", "--columns", "source.id,target.id")
    back = ask(
        shop,
        *("traverse", "Client", "--via", "Knows:backwards", "--columns", "source.id,target.id"),
    )
    ends = [(path["source"]["id"], path["target"]["id"]) for path in there["rows"]]
    assert ends
    assert [(p["target"]["id"], p["source"]["id"]) for p in back["rows"]] == ends

    table = onto("query", "traverse", "Firm", "--via", "Job", "--storage-uri", shop).out
    assert "1. Job <- Client" in table
    csv = ("--format", "csv", "--columns", "target.id,target.age")
    told = onto("query", "traverse", "Firm", "--via", "Job", *csv, "--storage-uri", shop).out
    assert told.splitlines()[0] == "target.id,target.age"


@pytest.mark.parametrize("path", ["left.tier", "left.$.tier"])
def test_filters_on_ends_are_written_as_the_specification_does_too(shop: str, path: str) -> None:
    gold = ask(shop, "relations", "Job", "--filter", path, "==", '"Gold"')
    assert [row["left_key"] for row in gold["rows"]] == ["ann", "ann"]
    assert ask(shop, "relations", "Job", "--filter", path, "==", '"Iron"')["row_count"] == 0
    acme = ask(shop, "relations", "Job", "--filter", "right.$.name", "is_not_null")
    assert acme["row_count"] == 3
    nested = ask(shop, "relations", "Job", "--filter", "left.$.profile.city", "==", '"Bern"')
    assert nested["row_count"] == gold["row_count"]


def test_sql_stays_inside(shop: str, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("never-to-be-seen")
    line = ("query", "sql", f"select * from read_text('{tmp_path}/secret.txt')")

    told = onto(*line, "--storage-uri", shop)
    assert (told.code, told.out) == (2, "")
    assert "the table function read_text is not allowed" in told.error()
    error = onto(*line, "--storage-uri", shop, "--json").json["error"]
    assert error["type"] == "SqlNotAllowedError"
    assert error["facts"] == {"what": "the table function read_text"}
    assert onto("query", "sql", "show tables", "--storage-uri", shop).out.split()[1:] == [
        *("Client", "Firm", "Job", "Knows"),
    ]


def test_traverse_limits_where_paths_start(shop: str) -> None:
    def shown(*args: str) -> Done:
        return onto("query", "traverse", "Client", "--via", "Job", *args, "--storage-uri", shop)

    table = shown("--limit", "1")
    assert [line.split() for line in table.out.splitlines()[1:3]] == [
        ["ann", "2023", "acme"],
        ["ann", "2024", "acme"],
    ]
    assert table.out.endswith("More rows not shown: raise --limit.\n")
    assert shown("--limit", "1", "--json").json["row_count"] == 2
    assert "More" not in shown().out
    assert len(shown().out.splitlines()) == 4


def test_sql(shop: str) -> None:
    found = ask(
        shop,
        *("sql", "select tier, count(*) as n, sum(age) s from Client group by tier order by 1"),
    )
    joined = ask(
        shop,
        *("sql", "select c.name from Client c join Job j on j.left_key = c.id where role = $role"),
        *("--param", 'role="boss"'),
    )

    assert found["rows"] == [
        {"tier": "Gold", "n": 1, "s": 32},
        {"tier": "Standard", "n": 2, "s": 7},
    ]
    assert joined["rows"] == [{"name": 'Ann "A", B\nC'}]
    past = ask(shop, "sql", "select count(*) n from Client", "--as-of", "1")
    assert (past["rows"], past["commit_id"]) == ([{"n": 2}], 1)
    assert ask(shop, "sql", "select 1 a, 2 a, 3 a_2")["rows"] == [{"a": 1, "a_3": 2, "a_2": 3}]
    assert ask(shop, "sql", "select 1 union all select 1", "--limit", "1")["row_count"] == 1


def test_explain(shop: str) -> None:
    for args in (
        ("entities", "Client", "--filter", "age", "gt", "3"),
        ("entities", "Client", "--count"),
        ("traverse", "Client", "--via", "Job"),
        ("sql", "select * from Client"),
    ):
        told = onto("query", *args, "--explain", "--storage-uri", shop)
        facts = onto("query", *args, "--explain", "--storage-uri", shop, "--json").json

        assert told.code == 0
        assert len(told.out.splitlines()) > 2
        assert facts["plan"]


def test_a_statement_that_asks_for_its_plan_is_shown_it(shop: str) -> None:
    line = ("query", "sql", "explain analyze select * from Client", "--storage-uri", shop)
    told = onto(*line).out
    assert "Total Time" in told
    assert len(told.splitlines()) > 10
    assert "explain_value" not in told
    assert list(onto(*line, "--json").json["rows"][0]) == ["explain_key", "explain_value"]


def test_models_add_types_that_are_not_stored_yet(shop: str) -> None:
    line = ("query", "entities", "Unwritten", "--storage-uri", shop)

    assert onto(*line).code == 2
    assert onto(*line, "--models", MODELS).out == "No rows.\n"


def test_an_empty_storage(place: Place) -> None:
    create(place.uri, place.engine)

    refused = onto("query", "entities", "Client", "--storage-uri", place.uri)
    empty = onto("query", "entities", "Client", "--storage-uri", place.uri, "--models", MODELS)

    assert refused.code == 2
    assert "the storage has no entity types yet" in refused.error()
    assert empty.out == "No rows.\n"
    assert onto("query", "sql", "select 1 as n", "--storage-uri", place.uri).code == 0
