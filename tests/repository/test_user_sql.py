"""SQL of users sees the stored types and nothing else, whatever it tries, on every storage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import duckdb
import pyarrow as pa
import pytest

from storage_engine import Entity, Field, Relation, Session, initialize_storage
from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    ConfigurationError,
    OntologiaError,
    SqlNotAllowedError,
    StorageBackendError,
)
from storage_engine.model import TypeSpec, spec_of
from storage_engine.query.spec import When
from storage_engine.repository import duck, duck_confined, open_repository
from storage_engine.repository.sql_functions import COLLATIONS, FUNCTIONS, is_allowed
from storage_engine.repository.sqlite import stored

SECRET = "never-to-be-seen"
SMALL = OntologiaConfig(s3_duckdb_memory_limit="100MB")


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    tags: Field[list[str]] = Field(default_factory=list)


class Knows(Relation[Customer, Customer]):
    since: Field[int] = Field(default=0)


@pytest.fixture(params=["memory-v1", "memory-v2", "directory-v1", "directory-v2", "sqlite-v2"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind, engine = request.param.split("-")
    made = {
        "memory": f"memory://{tmp_path.name}-{engine}",
        "directory": f"file://{tmp_path}/store",
        "sqlite": f"sqlite:///{tmp_path}/store.db",
    }[kind]
    initialize_storage(made, engine_version=engine)
    return made


@pytest.fixture
def session(uri: str, tmp_path: Path) -> Iterator[Session]:
    (tmp_path / "secret.csv").write_text(f"a,b\n{SECRET},2\n")
    with Session(uri) as opened:
        for n in range(20):  # many small files, so that rows are handed over in memory, too
            opened.ensure(Customer(id=f"c{n}", name=f"name {n}", tags=["a", "b"]))
            if n == 19:
                opened.ensure(Knows(left_key="c1", right_key="c2", since=7))
            opened.commit()
        opened.flush()
        yield opened


FILES = [
    "select * from read_text('{secret}')",
    "select json_structure(repeat('[', 200000) || repeat(']', 200000))",
    "select json_transform('{{}}', repeat('[', 10000) || '1' || repeat(']', 10000))",
    "select * from read_blob('{secret}')",
    "select * from read_csv('{secret}')",
    "select * from read_csv_auto('{secret}')",
    "select * from READ_CSV('{secret}')",
    "select * from \"read_csv\"('{secret}')",
    "select * from main.read_csv('{secret}')",
    "select * from system.main.read_csv('{secret}')",
    "from '{secret}'",
    'select * from "{secret}"',
    "table '{secret}'",
    "summarize '{secret}'",
    "describe '{secret}'",
    "describe select * from read_csv('{secret}')",
    "select * from glob('{folder}/*')",
    "select * from sniff_csv('{secret}')",
    "select * from parquet_metadata('{folder}/x.parquet')",
    "select * from parquet_scan('{folder}/store/commits/*/*/*.parquet')",
    "select * from read_parquet(['{folder}/store/snapshots/*'])",
    "select * from read_json('{folder}/store/meta/head.json')",
    "select * from read_text('{folder}/store/meta/head.json')",
    "select * from read_duckdb('{folder}/x.db')",
    "select * from query('select * from read_text(''{secret}'')')",
    "select * from query_table('{secret}')",
    "select * from json_execute_serialized_sql(json_serialize_sql('select 1'))",
    "select json_serialize_plan('select * from read_csv(''{secret}'')')",
    "select json_serialize_sql('select 1')",
    "select (select content from read_text('{secret}')) from Customer",
    "select * from Customer where exists (select 1 from read_text('{secret}'))",
    "with a as (with b as (from read_text('{secret}')) from b) select * from a",
    "with a as not materialized (select 1) select * from a union all from read_text('{secret}')",
    "with recursive a(x) as (select 'x' union all select content from read_text('{secret}')) "
    "from a",
    "select * from Customer, lateral (select * from read_text('{secret}')) t",
    "select * from (values ((select content from read_text('{secret}')))) t",
    "select 1 order by (select content from read_text('{secret}'))",
    "select 1 limit (select size from read_text('{secret}'))",
    "select list_transform([1], lambda x: (select content from read_text('{secret}')))",
    "pivot (from read_csv('{secret}')) on a in ('x') using count(*)",
    "select /* read_text */ * from/**/read_text/**/('{secret}') -- Customer",
    "explain select * from read_csv('{secret}')",
    "explain analyze select * from read_csv('{secret}')",
    "explain (format json) select * from read_csv('{secret}')",
    "/* explain */ explain /* /* */ select * from read_csv('{secret}')",
    "select * from Customer join read_csv('{secret}') t on true",
    "select * from Customer at (version => (select size from read_text('{secret}')))",
    "select * from which_secret('s3://x/y', 's3')",
    "select * from histogram_values('{secret}', 'a')",
    "select 1 as x group by all having exists (from read_text('{secret}'))",
    "select sum(1) over (order by (select size from read_text('{secret}')))",
    "select * from read_text($path)",
    "select * from arrow_scan(1, 2, 3)",
    "select * from pandas_scan(1)",
]

INSIDE = [
    "select * from duckdb_settings()",
    "select * from duckdb_secrets()",
    "select * from duckdb_secrets(redact = false)",
    "select * from duckdb_tables()",
    "select * from duckdb_views()",
    "select * from duckdb_logs()",
    "select * from duckdb_external_file_cache()",
    "select * from duckdb_temporary_files()",
    "select * from pragma_database_size()",
    "select * from pragma_table_info('Customer')",
    "select * from pragma_user_agent()",
    "select * from information_schema.tables",
    "select * from pg_catalog.pg_class",
    "select * from sqlite_master",
    "select * from duckdb_tables",
    "select * from pg_class",
    "select * from temp.main.Customer",
    "select * from main.Customer",
    "select current_setting('temp_directory')",
    "select 'temp_directory'.current_setting()",
    "select list_transform(['temp_directory'], lambda x: current_setting(x))",
    "select main.current_setting('temp_directory')",
    "select \"current_setting\"('temp_directory')",
    "select CURRENT_SETTING('temp_directory')",
    "select getenv('HOME')",
    "select getvariable('x')",
    "select current_query()",
    "select pg_get_viewdef(1)",
    "select write_log('x')",
    "select pg_sleep(1)",
    "select nextval('x')",
    "select * from enable_logging()",
    "select * from enable_profiling('json', 'x')",
    "select * from checkpoint()",
    "show all tables",
    "show databases",
    "show variables",
    "select * from (show tables)",
    "show tables from main",
    "show memory_limit",
    "select * from fetched_0",
    "select * from asked",
    "select * from asked_candidates",
    "with a as (select * from fetched_0), fetched_0 as (select 1) select * from a",
    "with fetched_0 as (select * from fetched_0) select * from fetched_0",
    "with recursive fetched_0 as (select * from fetched_0 union all select * from fetched_0) "
    "select * from fetched_0",
    "select * from (with fetched_0 as (select 1) select * from fetched_0) x, fetched_0",
]

STATEMENTS = [
    "copy Customer to '{folder}/out.csv'",
    "copy (select 1) to '{folder}/out.csv'",
    "export database '{folder}/out'",
    "import database '{folder}/out'",
    "attach '{folder}/x.db'",
    "install httpfs",
    "load httpfs",
    "set memory_limit = '1GB'",
    "set variable x = 1",
    "reset threads",
    "pragma database_list",
    "pragma memory_limit = '1GB'",
    "call pragma_version()",
    "create table x as select 1",
    "create macro f() as table select * from read_text('{secret}')",
    "create temp view Customer2 as select 1",
    "create secret (type s3, key_id 'a')",
    "prepare x as select 1",
    "execute x",
    "use main",
    "begin",
    "checkpoint",
    "vacuum",
    "drop view Customer",
    "update Customer set name = 'x'",
    "select 1; select * from read_text('{secret}')",
    "select 1; copy (select 1) to '{folder}/out.csv'",
    "explain analyze copy (select 1) to '{folder}/out.csv'",
    "explain (analyze) copy (select 1) to '{folder}/out.csv'",
    "explain (analyze, format json) copy (select 1) to '{folder}/out.csv'",
    "explain explain select 1",
    "select 1\0; select 2",
    "select '\ud800'",
]


def _filled(statement: str, folder: Path) -> str:
    return statement.replace("{secret}", f"{folder}/secret.csv").replace("{folder}", str(folder))


def test_no_statement_leaves_the_storage(session: Session, tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    for statement in (*FILES, *INSIDE, *STATEMENTS):
        query = session.sql(_filled(statement, tmp_path))
        with pytest.raises((ValueError, OntologiaError)) as refusal:
            raise AssertionError(f"{statement}: {query.collect()}")
        assert SECRET not in str(refusal.value), statement
    assert sorted(os.listdir(tmp_path)) == before
    assert len(session.sql("select * from Customer").collect()) == 20  # it goes on


@pytest.mark.parametrize("statement", ["from read_text('x')", "select current_setting('x')"])
def test_the_refusal_says_what_is_allowed(session: Session, statement: str) -> None:
    with pytest.raises(SqlNotAllowedError, match=r"not allowed.* over the stored types.*show tabl"):
        session.sql(statement).collect()


def test_what_is_allowed_works(session: Session) -> None:
    def values(statement: str, parameters: object = None) -> list[tuple[object, ...]]:
        rows = session.sql(statement, parameters).collect()  # type: ignore[arg-type]
        return [tuple(row.values()) for row in rows]

    assert values("select count(*) from CUSTOMER c join knows k on k.left_key = c.id") == [(1,)]
    assert values("with Customer as (select 1 as one) select * from Customer") == [(1,)]
    assert values("with c as (from Customer), d as (from c) select count(*) from d") == [(20,)]
    assert values(
        "with recursive r(n) as (select 1 union all select n + 1 from r where n < 5) "
        "select max(n), (select count(*) from Customer) from r"
    ) == [(5, 20)]
    assert values(
        "with recursive r(a, b) using key (a) as "
        "(select 1, 1 union select a, b + 1 from recurring.r where b < 3) select * from r"
    ) == [(1, 3)]
    assert values("select * from range(2), generate_series(1, 1) g(x)") == [(0, 1), (1, 1)]
    assert values("select value from Customer c, json_each(tags) where c.id = 'c1' order by 1") == [
        ('"a"',),
        ('"b"',),
    ]
    assert values("select unnest([1, 2])") == [(1,), (2,)]
    assert values(
        "select row_number() over (order by id), lag(id) over (order by id) "
        "from Customer order by 1 limit 1"
    ) == [(1, None)]
    assert values("pivot Customer on id in ('c1') using count(*) group by name")[0]
    assert values("select $a::int + $b", {"a": 1, "b": 2}) == [(3,)]
    assert values("select 5!, 'a' || 'b', [x + 1 for x in [1]], {'k': 1}.k, date '2020-01-01'")
    assert values("select try_cast('x' as int), 'x' collate nocase = 'X'") == [(None, True)]
    assert values("-- a comment\nselect 1 /* another */;") == [(1,)]
    assert values("describe Customer")[0][0] == "commit_id"
    assert values("describe select 1 as x")[0][0] == "x"
    assert values("summarize Customer")
    assert values("show tables") == [("Customer",), ("Knows",)]
    assert values(" /* x */ SHOW TABLES;") == [("Customer",), ("Knows",)]
    assert values("explain select * from Customer")
    assert values("/* x */ explain -- y\n analyze select * from Customer")
    assert values("explain (format json) (select 1)")
    assert values("select * from Customer where id in (" + ",".join(["'c1'"] * 3000) + ")")
    assert values("select count(*) from Customer where " + " or ".join(["id = 'c1'"] * 900))


def test_python_variables_and_numbers_of_tables_are_out_of_sight(session: Session) -> None:
    frame = pa.table({"secret": [SECRET]})
    with pytest.raises(ValueError, match="unknown table 'frame'"):
        session.sql("select * from frame").collect()
    assert frame.num_rows == 1


def test_deep_nesting_is_answered_in_words(session: Session) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|depth"):
        session.sql("select " + " || ".join(["'x'"] * 900)).collect()


def test_a_statement_loads_the_schemas_that_it_names(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    restore = TypeSpec.from_schema_dict.__func__  # type: ignore[attr-defined]

    def counted(cls: type[TypeSpec], stored: Mapping[str, Any]) -> TypeSpec:
        loaded.append(stored["name"])
        return cast("TypeSpec", restore(cls, stored))

    monkeypatch.setattr(TypeSpec, "from_schema_dict", classmethod(counted))
    for statement, names in {
        "select count(*) from customer": ["Customer"],
        "with Customer as (select 1 as left_key) select * from Knows, Customer": ["Knows"],
        "show tables": [],
        "select 'Customer'": [],
    }.items():
        loaded.clear()
        stored._schema.cache_clear()  # SQLite remembers them by their text
        session.sql(statement).collect()
        assert loaded == names, statement


# --- the second wall ----------------------------------------------------------------------------


def test_what_got_past_the_parser_would_find_a_locked_instance(tmp_path: Path) -> None:
    inside = tmp_path / "in side's"
    inside.mkdir()
    for folder in (inside, tmp_path):
        duckdb.sql(
            f"copy (select 1 as a) to '{str(folder).replace(chr(39), chr(39) * 2)}/x.parquet'"
        )
    (tmp_path / "secret.csv").write_text(SECRET)
    confined = duck_confined.ConfinedDuck(
        uri="x", memory_limit="256MB", folders=lambda: [f"{inside}/"]
    )
    try:
        cursor = confined.cursor()
        path = str(inside).replace("'", "''")
        assert cursor.execute(f"from read_parquet('{path}/x.parquet')").fetchall() == [(1,)]
        for statement in (
            f"from read_text('{tmp_path}/secret.csv')",
            f"from read_text('{path}/../secret.csv')",
            f"from read_parquet('{tmp_path}/x.parquet')",
            f"from glob('{tmp_path}/*')",
            f"copy (select 1) to '{tmp_path}/out.csv'",
            f"attach '{tmp_path}/x.db'",
            "from read_csv('http://127.0.0.1:9/x.csv')",
            "set threads = 1",
            "set allowed_directories = ['/']",
            "set enable_external_access = true",
            "set lock_configuration = false",
            "install httpfs",
            "load httpfs",
            "create persistent secret (type s3, key_id 'a')",
        ):
            with pytest.raises(duckdb.Error):
                cursor.execute(statement).fetchall()
        assert not (tmp_path / "out.csv").exists()
    finally:
        confined.close()


def test_too_little_memory_for_all_threads_is_enough_for_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are locked, so an instance with fewer threads takes over."""
    opened: list[int | None] = []
    begun = duck_confined.ConfinedDuck._open

    def counted(self: duck_confined.ConfinedDuck) -> duckdb.DuckDBPyConnection:
        opened.append(self._threads)
        return begun(self)

    monkeypatch.setattr(duck_confined.ConfinedDuck, "_open", counted)
    initialize_storage(f"file://{tmp_path}/store", engine_version="v2")
    with Session(f"file://{tmp_path}/store", config=SMALL) as session:
        session.ensure(Customer(id="a", name="A"))
        session.commit()
        real = duck.Stream
        failed: list[int] = []

        class Failing(real):  # type: ignore[misc, valid-type]
            def __init__(self, *args: object) -> None:
                if not failed:
                    failed.append(1)
                    raise duckdb.OutOfMemoryException("Out of Memory Error: planted")
                super().__init__(*args)

        monkeypatch.setattr("storage_engine.repository.user_sql.Stream", Failing)
        monkeypatch.setattr(duck, "_THREAD_BYTES", 100 * 1000**2)
        assert session.sql("select name from Customer").collect() == [{"name": "A"}]
    assert opened == [None, 1]


def test_rows_under_way_outlive_the_instance_they_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another statement needs S3, or fewer threads: those that run go on."""
    monkeypatch.setattr(duck_confined, "load_httpfs", lambda _connection: None)
    monkeypatch.setattr(duck_confined, "create_secret", lambda _connection, _secret: None)
    monkeypatch.setattr(duck, "_THREAD_BYTES", 256 * 1000**2)
    confined = duck_confined.ConfinedDuck(uri="x", memory_limit="256MB")
    try:
        first = duck.Stream(
            confined, confined.cursor(), "select * from range(300000) t(n)"
        ).batches()
        read = next(first).num_rows
        confined.reach_s3()
        with confined.cursor() as second:
            assert second.execute("select current_setting('threads') > 1").fetchall() == [(True,)]
        assert confined.reopen_with_room(0)
        with confined.cursor() as third:
            assert third.execute("select current_setting('threads')").fetchall() == [(1,)]
        assert not confined.reopen_with_room(0)
        assert read + sum(batch.num_rows for batch in first) == 300_000
    finally:
        confined.close()


@pytest.mark.parametrize("rows_before", [0, 200_000])
def test_a_failure_of_duckdb_at_any_row_ends_with_its_statement(
    session: Session, monkeypatch: pytest.MonkeyPatch, rows_before: int
) -> None:
    """It invalidates the instance; whoever asks next gets another one."""
    real = duck._next

    def failing(reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
        batch = real(reader)
        if not rows_before or (batch is not None and batch.column(0)[-1].as_py() >= rows_before):
            said = "INTERNAL Error: planted\n\nStack Trace:\n\n/lib/duckdb.so(here)"
            with duck._kinds():
                raise OSError(said)
        return batch

    confined: list[duck_confined.ConfinedDuck] = []
    reopen = duck_confined.ConfinedDuck.reopen

    def invalidated(self: duck_confined.ConfinedDuck) -> None:
        confined.append(self)
        assert self._connection is not None
        self._connection.close()  # as DuckDB leaves it: it answers nothing from now on
        reopen(self)

    monkeypatch.setattr(duck_confined.ConfinedDuck, "reopen", invalidated)
    with monkeypatch.context() as patch:
        patch.setattr(duck, "_next", failing)
        with pytest.raises(StorageBackendError, match=r"another way: INTERNAL Error: planted$"):
            session.sql("select * from range(400000) t(n)").collect()
    assert len(confined) == 1
    assert session.sql("select count(*) as n from Customer").collect()[0]["n"]
    confined[0].cursor().close()
    working = confined[0]._connection
    reopen(confined[0])  # for a statement of the old instance, which another thread has replaced
    assert confined[0]._connection is working


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"select {'[' * 100}1{']' * 100}", "nested too deeply for Arrow"),
        ("select '\udcff'", "not UTF-8"),
    ],
)
def test_what_cannot_be_answered_or_read_is_a_mistake(
    session: Session, statement: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        session.sql(statement).collect()


DEEP = (
    "select (name::json)::variant is null from Customer",
    "select try_cast(name::json as VaRiAnT) is null from Customer",
    "select ([name::json])::variant[] is null from Customer",
    "select (name::json)::struct(a variant) is null from Customer",
    "select cast_to_type(name::json, null::variant) is null from Customer",
    "select replace_type(name::json, null::json, null::variant) is null from Customer",
    "select variant_typeof(name) from Customer",
    "select count(*) from Customer, json_tree(name)",
)


def test_deep_json_does_not_become_what_ends_the_process(session: Session) -> None:
    session.ensure(Customer(id="deep", name="[" * 200_000 + "]" * 200_000))
    session.commit()
    for statement in DEEP:
        with pytest.raises(
            SqlNotAllowedError, match=r"VARIANT|variant_typeof|json_tree"
        ) as refused:
            session.sql(statement).collect()
        assert str(refused.value).count("json_tree") == statement.count("json_tree")


def test_a_parameter_that_is_no_text(session: Session) -> None:
    given: list[Any] = [["\udcff"], {"x": "a\ud800"}, [["deep", "\udcff"]]]
    for parameters in given:
        statement = "select $x" if isinstance(parameters, dict) else "select ?"
        with pytest.raises(ValueError, match="a parameter is not UTF-8 text"):
            session.sql(statement, parameters).collect()


LONG = (
    "repeat('x', 3000000000)",
    "repeat(repeat('x', 1000000), 1000000)",
    "repeat(['x'], 3000000000)",
    "repeat('x'::blob, 3000000000)",
    "lpad('x', 2000000000, 'y')",
    "rpad('x', 2000000000, 'y')",
    "bitstring('1', 2000000000)",
    "list_resize([1], 3000000000)",
    "array_resize([1], 3000000000, 0)",
    "range(3000000000)",
    "range(0, 3000000000)",
    "range(3000000000, 0, -1)",
    "generate_series(3000000000)",
    "repeat('x', n * 3000000)",
    "replace(repeat('a', 100000), 'a', repeat('b', 20000))",
)
TOO_WIDE = (
    "format('{:>1000000000}', 'x')",
    "format('{:>{}}', 'x', 1000000000)",
    "printf('%1000000000d', 1)",
    "printf('%*d', 1000000000, 1)",
    f"format('{'{0}' * 101}', 'x')",
    "format(repeat('{0}', n::int), 'x')",
    "printf(concat('%', n::int, 'd'), 1)",
)


def test_values_are_not_made_as_long_as_somebody_says(session: Session) -> None:
    """DuckDB does not count their bytes: the machine would run out of memory, not the statement."""
    for value in LONG:
        with pytest.raises(ValueError, match="more than 1,000,000 characters or members"):
            session.sql(f"select len(({value})::varchar) from range(1, 3) t(n)").collect()


def test_a_replaced_pattern_makes_nothing_too_long(session: Session) -> None:
    long = "regexp_replace(repeat('a', 100000), 'a', repeat('b', 20000), 'g')"
    with pytest.raises(ValueError, match="more than 10,000,000 characters"):
        session.sql(f"select strlen({long})").collect()


@pytest.mark.parametrize("value", TOO_WIDE)
def test_a_pattern_says_how_long_its_result_can_be(session: Session, value: str) -> None:
    with pytest.raises(SqlNotAllowedError, match="with a pattern that is no text"):
        session.sql(f"select strlen({value}) from range(3) t(n)").collect()


def test_bounded_functions_can_be_nested(session: Session) -> None:
    """Each argument is written once into the statement, however deep it stands."""
    cleaned, many = "n::varchar", "'a'"
    for digit in range(10):
        for _ in range(3):
            cleaned = f"replace({cleaned}, '{digit}', 'x')"
            many = f"repeat({many}, 1)"
    (row,) = session.sql(f"select {cleaned} a, {many} b from range(12, 13) t(n)").collect()
    assert (row["a"], row["b"]) == ("xx", "a")


def test_values_of_ordinary_length_are_made(session: Session) -> None:
    row = session.sql(
        "select repeat('ab', 3) a, repeat(['x'], 2) b, repeat('\\x00'::blob, 2) c, "
        "repeat(null, 2) d, lpad('7', 3, '0') e, rpad('7', 3, '0') f, list_resize([1], 2) g, "
        "array_resize([1], 2, 5) h, "
        "range(3) i, range(1, 3) j, range(5, 1, -2) k, generate_series(2) l, "
        "range(timestamp '2026-01-01', timestamp '2026-01-03', interval 1 day) m, "
        "bitstring('1', 4)::varchar n, repeat('x', -1) o, replace('banana', 'an', 'AN') p, "
        "replace(null, 'a', 'b') q, replace('abc', '', 'x') r, regexp_replace('ab', '.', 'x') s, "
        "regexp_replace('ab', '(.)', '\\1\\1', 'g') t, format('{:>3}|{}', 'x', 7) u, "
        "printf('%03d', 7) v, strlen(replace(repeat('ab', 500000), 'a', 'b')) w, "
        "list_transform(['a', 'b'], lambda x: repeat(x, 2)) x"
    ).collect()[0]
    assert (row["p"], row["q"], row["r"], row["s"]) == ("bANANa", None, "abc", "xb")
    assert (row["t"], row["u"], row["v"], row["w"]) == ("aabb", "  x|7", "007", 1_000_000)
    assert row["x"] == ["aa", "bb"]
    assert (row["a"], row["b"], row["c"], row["d"]) == ("ababab", ["x", "x"], b"\0\0", None)
    assert (row["e"], row["f"], row["g"], row["h"]) == ("007", "700", [1, None], [1, 5])
    assert (row["i"], row["j"], row["k"], row["l"]) == ([0, 1, 2], [1, 2], [5, 3], [0, 1, 2])
    assert (len(row["m"]), row["n"], row["o"]) == (2, "0001", "")
    with pytest.raises(SqlNotAllowedError, match="by a longer name"):
        session.sql("select system.main.repeat('x', 3)").collect()


def test_every_function_of_duckdb_is_sorted() -> None:
    """A new one stays out until it is put into one of the lists, after a look at what it does."""
    with duckdb.connect(":memory:") as connection:
        rows = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() "
            "WHERE function_type IN ('scalar', 'aggregate', 'macro')"
        ).fetchall()
    there = {name.lower() for (name,) in rows if name[0].isalpha()}
    sorted_out = FUNCTIONS | REFUSED
    assert {n for n in there - sorted_out if not n.startswith(COLLATIONS)} == set()
    assert not FUNCTIONS & REFUSED
    assert not is_allowed("__internal_decompress_string")


# --- conditions of Spark's reader ---------------------------------------------------------------


@pytest.mark.parametrize(
    "condition",
    [
        "exists (from read_text('{secret}'))",
        "true) union all select content from read_text('{secret}') where (true",
        "true) from read_text('{secret}') where (true",
        "true), (true",
        "true) order by (1",
        "current_setting('temp_directory') = 'x'",
        "id in (select id from asked)",
        "true; select 1",
        " ",
        "\0",
    ],
)
def test_a_condition_sees_columns_alone(tmp_path: Path, condition: str) -> None:
    uri = f"file://{tmp_path}/store"
    initialize_storage(uri, engine_version="v2")
    with Session(uri) as session:
        session.ensure(Customer(id="a", name="A"))
        session.commit()
    repository = open_repository(uri)
    try:
        executor = repository.executor()
        plan = executor.plan(spec_of(Customer), When())  # type: ignore[attr-defined]
        columns = {"id": "id", "name": "name"}
        kept = executor.scan(plan, columns, ["id"], "name = 'A' -- true")  # type: ignore[attr-defined]
        assert sum(batch.num_rows for batch in kept.batches) == 1
        with pytest.raises(ConfigurationError, match="filter"):
            executor.scan(  # type: ignore[attr-defined]
                plan, columns, ["id"], _filled(condition, tmp_path)
            )
    finally:
        repository.close()


# Tell of settings, sessions and catalogs, run or plan other statements, write logs, or wait.
_REFUSED = """
make_type variant_bytes_to_variant variant_extract variant_normalize variant_to_parquet_variant
variant_typeof
from_json from_json_strict json_contains json_group_structure json_merge_patch json_structure
json_transform json_transform_strict
col_description current_catalog current_connection_id current_database current_query
current_query_id current_role current_schema current_schemas current_setting
current_transaction_id current_user currval format_pg_type format_type get_block_size
getvariable has_any_column_privilege has_column_privilege has_database_privilege
has_foreign_data_wrapper_privilege has_function_privilege has_language_privilege
has_schema_privilege has_sequence_privilege has_server_privilege has_table_privilege
has_tablespace_privilege in_search_path inet_client_addr inet_client_port inet_server_addr
inet_server_port json_deserialize_sql json_serialize_plan json_serialize_sql map_to_pg_oid
nextval obj_description parse_duckdb_log_message pg_collation_is_visible pg_conf_load_time
pg_conversion_is_visible pg_function_is_visible pg_get_constraintdef pg_get_expr pg_get_viewdef
pg_has_role pg_is_other_temp_schema pg_my_temp_schema pg_opclass_is_visible
pg_operator_is_visible pg_opfamily_is_visible pg_postmaster_start_time pg_sleep
pg_table_is_visible pg_ts_config_is_visible pg_ts_dict_is_visible pg_ts_parser_is_visible
pg_ts_template_is_visible pg_type_is_visible session_user setseed shobj_description sleep_ms
stats txid_current user write_log
"""
REFUSED = frozenset(_REFUSED.split())
