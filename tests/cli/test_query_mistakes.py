"""Mistakes on the line are one line each, and nothing that is typed reaches a statement."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Place
from tests.cli.shop import fill
from tests.cli.support import onto

CLIENT = ("entities", "Client")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = f"file://{tmp_path_factory.mktemp('mistakes')}/shop"
    fill(uri, "v2")
    return uri


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("entities", "Clint"), "unknown entity type 'Clint', did you mean 'Client'?"),
        (("entities", "zzz"), "(there are Client, Firm)"),
        (("entities", "Job"), "Job is a relation type, not an entity type"),
        (("relations", "Client"), "Client is an entity type, not a relation type"),
        ((*CLIENT, "--filter", "agee", "gt", "1"), "unknown field 'agee', did you mean 'age'?"),
        ((*CLIENT, "--filter", "zzz", "gt", "1"), "(there are id, name, tier, age"),
        ((*CLIENT, "--filter", "age", "gtt", "1"), "unknown operator 'gtt'"),
        ((*CLIENT, "--filter", "age", "gt"), "needs a value, written as JSON"),
        ((*CLIENT, "--filter", "age"), "takes PATH OP JSON"),
        ((*CLIENT, "--filter=age"), "write --filter PATH OP JSON, without ="),
        ((*CLIENT, "--filter", "tier", "eq", "Gold"), "a text needs quotes: '\"Gold\"'"),
        ((*CLIENT, "--filter", "age", "eq", '"x"'), "cannot be compared with 'x'"),
        ((*CLIENT, "--filter", "age", "eq", "null"), "use Client.age.is_null or .is_not_null"),
        ((*CLIENT, "--filter", "active", "eq", "true"), "use Client.active.is_true or .is_false"),
        ((*CLIENT, "--filter", "left.age", "eq", "1"), "unknown field 'left'"),
        (("relations", "Job", "--filter", "left.agee", "eq", "1"), "did you mean 'age'?"),
        (("relations", "Job", "--filter", "x", "eq", "1"), "begin with left. or right"),
        ((*CLIENT, "--order-by", "agee"), "did you mean 'age'?"),
        ((*CLIENT, "--order-by", "age:down"), "after the colon comes asc or desc"),
        ((*CLIENT, "--order-by", "tags"), "tags"),
        (("relations", "Job", "--order-by", "left.age"), "can be used in --filter only"),
        ((*CLIENT, "--as-of", ""), "the name of a tag is not empty"),
        ((*CLIENT, "--as-of", "2024-13-01"), "not a time in ISO 8601"),
        ((*CLIENT, "--as-of", "2024-01-01T25:00"), "not a time in ISO 8601"),
        ((*CLIENT, "--as-of", "1", "--with-history"), "--as-of and --with-history contradict"),
        ((*CLIENT, "--history-since", "1", "--with-history"), "contradict each other"),
        ((*CLIENT, "--limit", "0"), "--limit"),
        ((*CLIENT, "--count", "--limit", "1"), "leave out --limit"),
        ((*CLIENT, "--count", "--order-by", "age"), "leave out --order-by"),
        ((*CLIENT, "--columns", "id,agee"), "unknown column 'agee', did you mean 'age'?"),
        ((*CLIENT, "--columns", "id,id"), "id is given twice"),
        ((*CLIENT, "--format", "jsn"), "did you mean 'json'?"),
        ((*CLIENT, "--explain", "--format", "csv"), "--explain is not available"),
        (("traverse", "Client"), "--via"),
        (("traverse", "Client", "--via", "Jb"), "did you mean 'Job'?"),
        (("traverse", "Firm", "--via", "Knows"), "--via Knows starts at Client, but the path has"),
        (("traverse", "Client", "--via", "Job:backwards"), "--via Job:backwards starts at Firm"),
        (("traverse", "Client", "--via", "Job:back"), "after the colon comes backwards"),
        (("traverse", "Client", "--via", "Job", "--count"), "--count"),
        (("sql", "select * from Clint"), "did you mean 'Client'?"),
        (("sql", "select nam from Client"), "nam"),
        (("sql", "drop table Client"), "sql reads only"),
        (("sql", "select 1; select 2"), "one statement, not 2"),
        (("sql", "select $a"), "a"),
        (("sql", "select 1", "--param", "a"), "write NAME=JSON"),
        (("sql", "select $a", "--param", "a=x"), "a text needs quotes: 'a=\"x\"'"),
        (("sql", "select $a", "--param", "a=1", "--param", "a=2"), "given twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_and_exits_2(shop: str, args: tuple[str, ...], said: str) -> None:
    failed = onto("query", *args, "--storage-uri", shop)
    described = onto("query", *args, "--storage-uri", shop, "--format", "json")

    assert failed.code == 2
    assert said in failed.error()
    assert "--help`" in failed.err
    if "--format" not in args:
        assert described.code == 2
        assert said in described.json["error"]["message"]
        assert described.err == ""


@pytest.mark.parametrize(
    "args",
    [
        CLIENT,
        ("relations", "Job"),
        ("traverse", "Client", "--via", "Job"),
        ("sql", "from Client order by id"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("limit", [2**63 - 2, 2**63 - 1, 2**63, 10**30])
def test_a_limit_beyond_all_numbers_is_none(shop: str, args: tuple[str, ...], limit: int) -> None:
    for form in ("table", "json", "csv"):
        line = ("query", *args, "--storage-uri", shop, "--format", form)
        limited = onto(*line, "--limit", str(limit))
        assert limited.code == 0, limited.err
        assert limited.out == onto(*line).out


def test_a_tag_that_is_not_there_is_named(shop: str) -> None:
    failed = onto("query", *CLIENT, "--as-of", "v1", "--storage-uri", shop)

    assert failed.code == 4
    assert "no tag 'v1'" in failed.error()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("nowhere.models", "No module named 'nowhere'"),
        ("shop/models.py", "takes the name of a module"),
        ("json", "declares no entity or relation types"),
        ("broken_models", "ZeroDivisionError"),
    ],
)
def test_models_that_cannot_be_used(shop: str, module: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "broken_models.py").write_text("print('noise')\n1 / 0\n")

    failed = onto("query", *CLIENT, "--storage-uri", shop, "--models", module, "--json")

    assert failed.code == 2
    assert said in failed.json["error"]["message"]


def test_a_class_that_differs_from_the_storage_is_a_mismatch(shop: str, tmp_path: Path) -> None:
    (tmp_path / "changed_models.py").write_text(
        "from storage_engine.model import Entity, Field\n"
        "class Firm(Entity):\n"
        "    id: Field[str] = Field(primary_key=True)\n"
        "    name: Field[int]\n"
    )

    failed = onto("query", "entities", "Firm", "--storage-uri", shop, "--models", "changed_models")

    assert failed.code == 3


def test_json_contradicts_another_format(shop: str) -> None:
    failed = onto("query", *CLIENT, "--storage-uri", shop, "--json", "--format", "csv")

    assert failed.code == 2
    assert "--json contradicts --format csv" in failed.json["error"]["message"]


# --- injection ----------------------------------------------------------------------------------

ATTACKS = [
    "'; DROP TABLE entity_history; --",
    '"; DROP TABLE commits; --',
    "x' OR '1'='1",
    'x") OR ("1"="1',
    "../../../etc/passwd",
    "$1",
    "%' UNION SELECT * FROM sqlite_master --",
    "\\'; ATTACH '/tmp/x' AS y; --",
]


def fingerprint(place: Place) -> Any:
    path = Path(place.uri.partition("://")[2])
    if place.backend == "sqlite":
        with sqlite3.connect(path) as connection:
            return list(connection.iterdump())
    found = sorted(p for p in path.rglob("*") if p.is_file())
    return [(str(p), hashlib.sha256(p.read_bytes()).hexdigest()) for p in found]


def test_nothing_that_is_typed_changes_the_storage(place: Place, tmp_path: Path) -> None:
    fill(place.uri, place.engine)
    before = fingerprint(place)
    around = {p for p in tmp_path.rglob("*") if "shop" not in p.name}

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    for text in ATTACKS:
        refused = [
            ("entities", text),
            ("relations", text),
            ("traverse", "Client", "--via", text),
            (*CLIENT, "--filter", text, "eq", "1"),
            (*CLIENT, "--filter", f"profile.{text}", "eq", "1"),
            (*CLIENT, "--filter", "age", text, "1"),
            (*CLIENT, "--filter", "age", "eq", text),
            (*CLIENT, "--order-by", text),
            (*CLIENT, "--columns", text),
            (*CLIENT, "--as-of", text),
            (*CLIENT, "--format", text),
            ("sql", "select 1", "--param", f"{text}=1"),
            ("sql", text),
        ]
        for args in refused:
            done = onto("query", *args, "--storage-uri", place.uri)
            # A path into a dict may have any key that the language can say: then nothing is there.
            allowed = args[2:3] == ("--filter",) and args[3].startswith("profile.")
            code = 4 if "--as-of" in args else 2  # a tag that is not there
            assert done.code == code or (allowed and done.out == "No rows.\n"), (args, done)
            assert "defect" not in done.err
        for field, op in (("name", "eq"), ("name", "contains"), ("id", "eq"), ("tags", "contains")):
            found = onto(
                *("query", *CLIENT, "--storage-uri", place.uri, "--json"),
                *("--filter", field, op, quoted(text)),
            )
            assert (found.code, found.json["rows"]) == (0, []), (field, op, text)
        value = onto(
            *("query", "sql", "select id from Client where name = $v", "--json"),
            *("--param", f"v={quoted(text)}", "--storage-uri", place.uri),
        )
        assert (value.code, value.json["rows"]) == (0, [])
    for statement in (
        f"copy (select 1) to '{tmp_path}/leak.csv'",
        f"explain analyze copy (select 1) to '{tmp_path}/leak.csv'",
        f"attach '{tmp_path}/leak.db'",
        "create table x as select 1",
        "insert into Client select * from Client",
        "set memory_limit = '1GB'",
        "install httpfs",
    ):
        assert onto("query", "sql", statement, "--storage-uri", place.uri).code == 2

    assert fingerprint(place) == before
    assert {p for p in tmp_path.rglob("*") if "shop" not in p.name} == around
