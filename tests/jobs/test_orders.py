"""Orders from arguments, from YAML and from both; all without Spark."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_engine.errors import ConfigurationError
from storage_engine.spark.ingest_spec import OnBadRows, guess_format, parse_spec
from storage_engine.spark.jobs import compact, ingest, migrate, stream
from storage_engine.spark.jobs.arguments import parse_ingest
from storage_engine.spark.jobs.ingest import DriftPolicy, IngestSpec, Source, parse
from storage_engine.spark.missing_policy import MissingPolicy
from storage_engine.spark.spec_members import InvalidSpec, read_yaml

MINIMAL = IngestSpec(
    storage_uri="store",
    type="Customer",
    models="tests.jobs.shop",
    source=Source(format="csv", paths=("a.csv",)),
)

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
mappings = st.dictionaries(names, texts, max_size=2)
expectations = st.one_of(
    names.map(lambda n: {"not_null": n}),
    st.lists(names, min_size=1, max_size=3, unique=True).map(lambda n: {"unique": n}),
    st.tuples(names, st.integers(-9, 0), st.integers(0, 9) | st.none()).map(
        lambda t: {"range": {"column": t[0], "min": t[1], **({"max": t[2]} if t[2] else {})}}
    ),
    st.tuples(names, names).map(lambda t: {"pattern": {"column": t[0], "pattern": t[1]}}),
    st.tuples(names, names).map(lambda t: {"referential": {"column": t[0], "type": t[1]}}),
)


missing_policies = st.just(MissingPolicy()) | st.builds(
    MissingPolicy,
    action=st.just("mark"),
    set=st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts, min_size=1),
    limit=st.integers(0, 100).map(lambda n: f"{n}%") | st.integers(0, 10**9).map(str),
    scope=texts,
)


@st.composite
def orders(draw: st.DrawFn) -> IngestSpec:
    schema = draw(st.none() | texts)
    on_bad_rows: OnBadRows = draw(st.sampled_from(["fail", "quarantine"]))
    policies = ["fail", "ignore", *(["quarantine"] if on_bad_rows == "quarantine" else [])]
    policy = st.sampled_from(policies)
    return IngestSpec(
        storage_uri=draw(texts),
        type=draw(texts),
        models=draw(texts),
        source=Source(
            format=draw(st.sampled_from(["csv", "json", "parquet"])),
            paths=tuple(draw(st.lists(texts, min_size=1, max_size=3))),
            options=draw(mappings),
            row_schema=schema,
        ),
        columns=draw(mappings),
        where=draw(st.none() | texts),
        missing=draw(missing_policies),
        transform=draw(st.none() | st.just("module:function")),
        distinct=draw(st.booleans()),
        order_by=draw(st.none() | names),
        on_bad_rows=on_bad_rows,
        quarantine=draw(st.none() | texts),
        drift=draw(st.builds(DriftPolicy, added=policy, missing=policy, retyped=policy))
        if schema
        else DriftPolicy(),
        expectations=tuple(draw(st.lists(expectations, max_size=2))),
        idempotency=draw(st.none() | st.tuples(texts, st.integers() | texts)),
        meta=draw(mappings),
        target_part_bytes=draw(st.none() | st.integers(1, 10**12)),
    )


@settings(max_examples=60, deadline=None)
@given(orders())
def test_arguments_and_yaml_state_the_same_order(order: IngestSpec) -> None:
    assert parse(order.to_arguments()) == order
    assert parse_spec(order.as_dict()) == order
    assert parse_spec(json.loads(json.dumps(order.as_dict()))) == order
    assert parse_spec(yaml.safe_load(yaml.safe_dump(order.as_dict()))) == order


def test_csv_and_jdbc_orders_go_the_same_way() -> None:
    csv = MINIMAL.replace(source=Source(format="csv", paths=("-a.csv", "b=c"), null_value="NA"))
    jdbc = MINIMAL.replace(
        source=Source(
            format="jdbc", paths=("jdbc:x:y",), options={"dbtable": "t", "password": "env:PASSWORD"}
        ),
    )
    for order in (csv, jdbc):
        assert parse(order.to_arguments()) == order


def test_arguments_come_on_top_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "order.yaml"
    path.write_text(
        "storage_uri: store\ntype: Customer\nmodels: tests.jobs.shop\n"
        "source: {paths: a.csv, null_value: NA, schema: id STRING, options: {header: true}}\n"
        "columns: {id: a, name: b}\ndistinct: true\ndrift: ignore\n"
        "expectations: [{not_null: name}]\nidempotency: {app_id: crm, version: 7}\n"
    )
    order = parse([f"--order={path}"])
    assert order.source == Source(
        format="csv",
        paths=("a.csv",),
        options={"header": "true"},
        row_schema="id STRING",
        null_value="NA",
    )
    assert (order.drift, order.idempotency) == (DriftPolicy.parse("ignore"), ("crm", 7))

    changed = parse(
        [
            f"--order={path}",
            "--type=Product",
            "--source=b.csv",
            "--column=name=c",
            "--no-distinct",
            "--drift=added=fail",
            "--app-version=8",
            '--expect={"unique": "id"}',
        ]
    )
    assert changed == order.replace(
        type="Product",
        source=order.source.replace(paths=("b.csv",)),
        columns={"id": "a", "name": "c"},
        distinct=False,
        drift=DriftPolicy(added="fail", missing="ignore", retyped="ignore"),
        idempotency=("crm", 8),
        expectations=({"unique": "id"},),
    )


@pytest.mark.parametrize(
    ("paths", "format"),
    [
        (["a.csv.gz", "B.CSV", "c.zip"], "csv"),
        (["a.jsonl"], "json"),
        (["s3a://bucket/x/*.parquet", "folder.parquet/"], "parquet"),
        (["jdbc:derby:memory:x"], "jdbc"),
        (["a.csv", "b.parquet"], None),
        (["folder"], None),
    ],
)
def test_names_of_files_tell_the_format(paths: list[str], format: str | None) -> None:
    if format is not None:
        assert guess_format(paths) == format
    else:
        with pytest.raises(ConfigurationError, match=r"source\.format is needed"):
            guess_format(paths)


SOURCE: dict[str, Any] = {"format": "csv", "paths": ["a.csv"]}
_UNTEXTED: dict[Any, Any] = {**SOURCE, 5: "x"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"typ": "x"}, "order has no member 'typ'; did you mean type?"),
        ({"type": None}, "type is needed"),
        ({"source": "a.csv"}, "source is a mapping"),
        ({"source": {}}, "source.format is needed"),
        ({"source": {**SOURCE, "format": "xml"}}, "source.format is one of csv, json, parquet"),
        ({"source": {**SOURCE, "paths": [1]}}, "source.paths takes texts"),
        ({"source": {**SOURCE, "paths": []}}, "source.paths takes at least one path"),
        ({"source": {**SOURCE, "format": "json", "null_value": "NA"}}, "null_value is for csv"),
        ({"source": {"format": "jdbc", "paths": ["a"]}}, "one URL that begins with jdbc:"),
        ({"source": {"format": "jdbc", "paths": ["jdbc:a"]}}, "needs dbtable (a table) or query"),
        ({"source": {"format": "csv"}}, "the order does not say source.paths"),
        ({"source": {"path": "a.csv"}}, "source has no member 'path'; did you mean paths?"),
        ({"source": {"paths": 5}}, "source.paths takes at least one path"),
        ({"source": {"paths": ["a.csv", 5]}}, "source.paths takes texts"),
        ({"source": _UNTEXTED}, "source has no member '5'"),
        ({"drift": {True: "fail"}}, "drift has no member 'True'"),
        ({"columns": ["id"]}, "columns is a mapping of names to texts"),
        ({"columns": {"id": ["a"]}}, "columns.id is a text"),
        ({"meta": {"a=b": "c"}}, "meta: 'a=b' is not a name"),
        ({"transform": "tidy"}, "transform is module:function"),
        ({"distinct": "often"}, "distinct is true or false"),
        ({"on_bad_rows": "drop"}, "on_bad_rows is one of fail, quarantine"),
        ({"drift": "ignore"}, "drift needs source.schema"),
        ({"drift": {"lost": "fail"}}, "drift has no member 'lost'"),
        (
            {"source": {**SOURCE, "schema": "a INT"}, "drift": "quarantine"},
            "needs on_bad_rows: quarantine",
        ),
        ({"expectations": {"not_null": "a"}}, "expectations are a list"),
        ({"expectations": [{"nul": "a"}]}, "'nul' is not known; known are not_null"),
        ({"idempotency": {"app_id": "a"}}, "idempotency.version is a number or a text"),
        ({"target_part_bytes": 0}, "target_part_bytes is a number of bytes"),
    ],
)
def test_what_is_wrong_with_an_order_is_said(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_spec({**MINIMAL.as_dict(), **wrong})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense; see jobs/ingest.py --help"),
        ([], "the order does not say storage_uri, type, models, source"),
        (["--order=/nowhere.yaml"], "/nowhere.yaml: cannot be read: No such file"),
        (["--column=id"], "--column takes NAME=VALUE, not 'id'"),
        (["--expect={"], "--expect: '{' is not JSON"),
        (["--drift=maybe"], "--drift takes fail, ignore, quarantine"),
        (["--target-part-bytes=big"], "'big' is not a size such as 256MB"),
        (["--master=local", "--remote=sc://x"], "--master and --remote exclude each other"),
        (["--models=tests.jobs.none"], "models tests.jobs.none: cannot be imported"),
        (["--type=Nobody"], "type 'Nobody' is not in tests.jobs.shop, which has Customer"),
    ],
)
def test_a_wrong_line_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = MINIMAL.to_arguments() if arguments and "--order" not in arguments[0] else []
    assert ingest.main([*base, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    assert said in line

    assert ingest.main([*base, *arguments, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["error"]
    assert said in found["message"]
    assert found["exit_code"] == 2


def test_yaml_that_is_none_is_said(tmp_path: Path) -> None:
    path = tmp_path / "order.yaml"
    for text, said in (("a: [", "is not YAML"), ("- a", "is a mapping")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=said):
            parse([f"--order={path}"])


def test_run_options_are_no_part_of_the_order() -> None:
    call = parse_ingest([*MINIMAL.to_arguments(), "--master=local[1]", "--conf=a=b", "--dry-run"])
    assert call.spec == MINIMAL
    assert (call.run.master, call.run.conf, call.run.dry_run) == ("local[1]", {"a": "b"}, True)


@pytest.mark.parametrize("program", [ingest, stream, compact, migrate])
def test_help_is_complete_and_in_the_documentation(
    program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--help"]) == 0
    assert "Exit codes" in capsys.readouterr().out
    name = program.__name__.rpartition(".")[2]
    parser = getattr(
        __import__(
            "storage_engine.spark.jobs.arguments" if name == "ingest" else program.__name__,
            fromlist=["parser"],
        ),
        f"{name}_parser",
    )()
    documented = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    for action in parser._actions:
        assert action.help, action.option_strings
        if action.option_strings != ["-h", "--help"]:
            assert f"`{action.option_strings[-1]}" in documented, action.option_strings


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"type: a\ntype: b\n", "order.yaml:2: type is given twice, first in line 1"),
        (b"source:\n  paths: a\n  paths: b\n", ":3: source.paths is given twice"),
        (b"type: [a\nmodels: b\n", "order.yaml:2: is not YAML: "),
        (b"type: a\nmodels: \xff\n", "order.yaml:2: is not UTF-8"),
        (b"type: 2013-13-45\n", "order.yaml: is not YAML: month must be in 1..12"),
        (b"a: &a [*a]\n", "order.yaml: "),
    ],
)
def test_a_file_that_cannot_be_taken_is_named_with_the_line(
    content: bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "order.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        read_yaml(str(path))
    assert said in str(caught.value)


def test_sizes_and_truths_may_be_texts() -> None:
    """As templates and variables of the environment give them."""
    order = parse_spec({**MINIMAL.as_dict(), "distinct": "true", "target_part_bytes": "256MB"})
    assert (order.distinct, order.target_part_bytes) == (True, 256_000_000)
    assert order == parse_spec(
        {**MINIMAL.as_dict(), "distinct": True, "target_part_bytes": "256000000"}
    )


def test_an_invalid_spec_survives_the_way_to_another_process() -> None:
    with pytest.raises(InvalidSpec) as caught:
        Source(format="csv", paths=[])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)
