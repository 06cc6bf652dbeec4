"""SQL that users write, on DuckDB: what may be asked, and what a mistake is answered with.

A statement sees the stored types and nothing else. It is parsed by the DuckDB that will run it,
and refused unless everything in it is known to be harmless: one SELECT (or the EXPLAIN of one)
whose tables are stored types or its own, whose functions are listed in `sql_functions`. Whatever
got past this would find an instance that can open no file but those of the storage, and whose
settings are locked (`duck.ConfinedDuck`). Only the types that a statement names are looked up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from storage_engine.errors import (
    SqlNotAllowedError,
    StorageBackendError,
)
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.query.results import Parameters, Rows
from storage_engine.repository.duck import Stream
from storage_engine.repository.duck_confined import ConfinedDuck
from storage_engine.repository.protocol import labels
from storage_engine.repository.sql_functions import (
    PATTERNS,
    TABLE_FUNCTIONS,
    is_allowed,
    is_bounded,
    is_bounded_pattern,
)

if TYPE_CHECKING:
    import duckdb

    from storage_engine.commitlog.records import TypeRef

Tables = Mapping[str, TypeSpec]  # by the name that the statement's table gets
Provide = Callable[[Tables], Callable[["duckdb.DuckDBPyConnection"], None]]

_TABLES_SHOWN = 20
_KINDS = ("entity", "relation")
_SPACE = r"(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)"
_OPTION = rf"{_SPACE}*(?:analyze|format{_SPACE}+\w+){_SPACE}*"
_EXPLAIN = re.compile(
    rf"{_SPACE}*explain(?:{_SPACE}+(?P<analyze>analyze)\b)?"
    rf"(?:{_SPACE}*(?P<options>\({_OPTION}(?:,{_OPTION})*\)))?(?=[\s(/-])",
    re.IGNORECASE,
)
_MISSING_TABLE = re.compile(r"Table with name (\S+) does not exist")

# What the parser makes of a SELECT. Anything else is refused, as nobody knows what it reaches.
_QUERIES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE"})
_SOURCES = frozenset(
    {
        "BASE_TABLE",
        "EMPTY",
        "EXPRESSION_LIST",
        "JOIN",
        "PIVOT",
        "SHOW_REF",
        "SUBQUERY",
        "TABLE_FUNCTION",
    }
)
_PLAIN = frozenset({"COLUMN_REF", "CONSTANT", "LAMBDA_REF", "PARAMETER"})
_EXPRESSIONS = frozenset(
    {
        "BETWEEN",
        "CASE",
        "CAST",
        "COLLATE",
        "COLUMN_REF",
        "COMPARISON",
        "CONJUNCTION",
        "CONSTANT",
        "DEFAULT",
        "FUNCTION",
        "LAMBDA",
        "LAMBDA_REF",
        "OPERATOR",
        "PARAMETER",
        "POSITIONAL_REFERENCE",
        "STAR",
        "SUBQUERY",
        "TYPE",
        "WINDOW",
    }
)


@dataclass(frozen=True)
class StoredTypes:
    """The types of a storage, of which only those that a statement names are loaded.

    `refs` are all of them; however many these are, a statement that names types as they are
    called looks at none but its own.
    """

    refs: Set[TypeRef]
    load: Callable[[Sequence[TypeRef]], Sequence[TypeSpec]]

    def labels(self) -> dict[str, TypeRef]:
        """All tables, by name: with the kind before it where two types share one."""
        refs = sorted(self.refs)
        return dict(zip(labels(refs), refs, strict=True))

    def named(self, names: Sequence[str]) -> Tables:
        """By the names of their tables; the case of the statement's names does not matter."""
        chosen: dict[str, tuple[str, TypeRef]] = {}
        for name in names:
            table = self._exactly(name) or self._nearly(name)
            label, _ = chosen.setdefault(name.casefold(), table)
            if label != table[0]:
                raise _alike([label, table[0]])
        specs = {spec.ref: spec for spec in self.load([ref for _, ref in chosen.values()])}
        return {label: specs[ref] for label, ref in chosen.values()}

    def _exactly(self, name: str) -> tuple[str, TypeRef] | None:
        of_kinds = [ref for kind in _KINDS if (ref := (kind, name)) in self.refs]
        return (name, of_kinds[0]) if len(of_kinds) == 1 else None

    def _nearly(self, name: str) -> tuple[str, TypeRef]:
        tables = self.labels()
        alike = [(n, ref) for n, ref in tables.items() if n.casefold() == name.casefold()]
        if not alike:
            raise self.unknown(name)
        candidates = [table for table in alike if table[0] == name] or alike
        if len(candidates) > 1:
            raise _alike([label for label, _ in candidates])
        return candidates[0]

    def unknown(self, name: str) -> ValueError:
        names = list(self.labels())
        more = f" and {len(names) - _TABLES_SHOWN} more" if len(names) > _TABLES_SHOWN else ""
        listed = f"{', '.join(names[:_TABLES_SHOWN])}{more}" if names else "none yet"
        unknown = unknown_name(name, names, what="table")
        return ValueError(f"sql: {unknown} (the tables are the stored types: {listed})")


def _alike(names: Sequence[str]) -> ValueError:
    return ValueError(
        f"sql: {' and '.join(names)} differ in case alone, which SQL does not see: write one of "
        "them exactly so, or use session.query()"
    )


def run_sql(
    duck: ConfinedDuck,
    statement: str,
    parameters: Parameters | None,
    types: StoredTypes,
    provide: Provide,
) -> Rows:
    """`provide` looks the named types up, and gives what makes tables of them on a cursor."""
    import duckdb

    parameters = _as_stored(parameters)
    _check_parameters(parameters)
    with _failures(duck), duck.cursor() as parser, _mistakes(types):
        checked = _check(parser, statement)
    if checked.shows_tables:
        return _shown(types)
    with duck.errors(), _failures(duck):
        tables = types.named(checked.tables)
        create = provide(tables)
        columns = sum(len(row_schema(spec)) for spec in tables.values())
        while True:
            try:
                stream = _begun(duck, checked.text, parameters, types, create)
                return Rows(stream.schema, _batches(duck, stream, types))
            except duckdb.OutOfMemoryException:
                if not duck.reopen_with_room(columns):
                    raise


def _begun(
    duck: ConfinedDuck,
    text: str,
    parameters: Parameters | None,
    types: StoredTypes,
    create: Callable[[duckdb.DuckDBPyConnection], None],
) -> Stream:
    cursor = duck.cursor()
    try:
        create(cursor)
        with _mistakes(types):
            return Stream(duck, cursor, text, parameters)
    except BaseException:
        cursor.close()
        raise


def _batches(duck: ConfinedDuck, stream: Stream, types: StoredTypes) -> Iterator[pa.RecordBatch]:
    with duck.errors(), _failures(duck), _mistakes(types):
        yield from stream.batches()


def _shown(types: StoredTypes) -> Rows:
    """`show tables`, as DuckDB would answer if there were the types and nothing else."""
    table = pa.table({"name": pa.array(sorted(types.labels()), pa.string())})
    return Rows(table.schema, iter(table.to_batches()))


# --- what may be asked --------------------------------------------------------------------------


@dataclass(frozen=True)
class _CheckedStatement:
    text: str
    tables: Sequence[str] = ()
    shows_tables: bool = False


def _check(parser: duckdb.DuckDBPyConnection, statement: str) -> _CheckedStatement:
    """The statement, if it may be run. The text that is checked is the text that is run."""
    import duckdb

    if not isinstance(statement, str):
        raise TypeError(f"sql takes the text of a statement, not {statement!r}")
    if "\0" in statement:
        raise ValueError("sql: a statement cannot have a NUL character in it")
    if _has_surrogate(statement):
        raise ValueError("sql: the statement is not UTF-8 text: it has a lone surrogate in it")
    statements = parser.extract_statements(statement)
    if len(statements) != 1:
        pivot = "; PIVOT needs its values: ON column IN (...)"
        hint = pivot if re.search(r"\bpivot", statement, re.IGNORECASE) else ""
        raise ValueError(f"sql takes one statement, not {len(statements)}{hint}")
    kind = statements[0].type
    select, prefix = statement, ""
    if kind == duckdb.StatementType.EXPLAIN and (explain := _EXPLAIN.match(statement)):
        select = statement[explain.end() :]
        words = ("EXPLAIN", "ANALYZE" if explain["analyze"] else "", explain["options"] or "")
        prefix = f"{' '.join(word for word in words if word)} "
        inner = parser.extract_statements(select)
        kind = inner[0].type if len(inner) == 1 else kind
    if kind != duckdb.StatementType.SELECT:
        raise ValueError(
            f"sql reads only: a SELECT is expected, not {kind.name}; "
            "data is written with session.ensure and session.ingest"
        )
    node = _parsed(parser, select)
    if not prefix and _shows_tables(node):
        return _CheckedStatement(statement, shows_tables=True)
    return _CheckedStatement(f"{prefix}{select}", _tables_of(node))


def _as_stored(parameters: Parameters | None) -> Parameters | None:
    """With the values of members of enumerations, which is what is stored of them."""

    def value_of(given: Any) -> Any:
        return given.value if isinstance(given, Enum) else given

    if isinstance(parameters, Mapping):
        return {name: value_of(given) for name, given in parameters.items()}
    if isinstance(parameters, list | tuple):
        return [value_of(given) for given in parameters]
    return parameters


def _check_parameters(parameters: Any) -> None:
    """Refuse texts that DuckDB cannot take, wherever they are."""
    rest = [parameters]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            if _has_surrogate(value):
                raise ValueError(
                    "sql: a parameter is not UTF-8 text: it has a lone surrogate in it"
                )
        elif isinstance(value, Mapping):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            rest += value


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def check_condition(parser: duckdb.DuckDBPyConnection, condition: str) -> None:
    """Refuse, by a ValueError, text that is not one condition over columns."""
    if "\0" in condition:
        raise ValueError("a condition cannot have a NUL character in it")
    node = _parsed(parser, f"SELECT (\n{condition}\n)")
    clauses = ("where_clause", "group_expressions", "having", "modifiers", "qualify", "sample")
    whole = (
        node["type"] == "SELECT_NODE"
        and len(node["select_list"]) == 1
        and node["from_table"]["type"] == "EMPTY"
        and not node["cte_map"]["map"]
        and not any(node[clause] for clause in clauses)
    )
    if not whole or _tables_of(node):
        raise ValueError("one condition over the columns of the type is expected")


def _parsed(parser: duckdb.DuckDBPyConnection, select: str) -> dict[str, Any]:
    """One SELECT as DuckDB parses it."""
    row = parser.execute("SELECT json_serialize_sql($1::VARCHAR)", [select]).fetchone()
    assert row is not None
    try:
        answer = orjson.loads(row[0])
    except orjson.JSONDecodeError:
        raise ValueError(
            "sql: the statement is nested too deeply; use common table expressions, and IN or "
            "concat(...) instead of long chains of operators"
        ) from None
    if answer["error"]:
        kind = answer["error_type"].capitalize()
        raise ValueError(f"{kind} Error: {answer['error_message']}")
    if len(answer["statements"]) != 1:
        raise ValueError(f"sql takes one statement, not {len(answer['statements'])}")
    node: dict[str, Any] = answer["statements"][0]["node"]
    return node


def _shows_tables(node: Mapping[str, Any]) -> bool:
    source = node.get("from_table") or {}
    asked = (source.get("table_name"), source.get("schema_name"), source.get("catalog_name"))
    return source.get("type") == "SHOW_REF" and asked == ('"tables"', "", "")


def _tables_of(root: Mapping[str, Any]) -> list[str]:
    """The stored types that a statement names; SqlNotAllowedError for all else that it names.

    A name is one of the statement's own where such a common table expression is in scope, as
    DuckDB sees it: after its definition, and within itself only where it recurs.
    """
    tables: dict[str, None] = {}
    rest: list[tuple[Any, frozenset[str]]] = [(root, frozenset())]
    while rest:
        part, own = rest.pop()
        if isinstance(part, list):
            rest += [(item, own) for item in part]
        if not isinstance(part, dict):
            continue
        # JSON that is nested deeply enough ends the process on its way to this type.
        _require(part.get("id") != "VARIANT", "the type VARIANT")
        if "cte_map" in part:
            _require(part["type"] in _QUERIES, part["type"])
            for entry in part["cte_map"]["map"]:
                rest.append((entry["value"], own))
                own |= {entry["key"].casefold()}
            if part["type"] == "RECURSIVE_CTE_NODE":
                recurring = own | {part["cte_name"].casefold()}
                rest.append((part["right"], recurring))
                part = {key: value for key, value in part.items() if key != "right"}
            part = {key: value for key, value in part.items() if key != "cte_map"}
        elif "class" in part:
            _check_expression(part)
        elif "alias" in part and "sample" in part:
            part = _check_source(part, own, tables)
        rest += [(value, own) for value in part.values() if isinstance(value, dict | list)]
    return list(tables)


def _check_expression(node: Mapping[str, Any]) -> None:
    _require(node["class"] in _EXPRESSIONS, f"{node['class']} ({node['type']})")
    if "function_name" in node:
        name, qualified = node["function_name"], node.get("schema") or node.get("catalog")
        _require(is_allowed(name), f"the function {name}")
        _require(not (qualified and is_bounded(name)), f"the function {name} by a longer name")
        if name.lower() in PATTERNS:
            _require(
                _has_bounded_pattern(node["children"]),
                f"the function {name} with a pattern that is no text in the statement, has more "
                "than 100 places, or one that is wider than 999 or as wide as an argument says,",
            )
        if name.lower() == "regexp_replace":
            plain = all(child["class"] in _PLAIN for child in node["children"][1::2])
            _require(plain, "the function regexp_replace with a pattern that is computed")


def _has_bounded_pattern(arguments: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the first is a constant that says how long the result can be."""
    if not arguments or arguments[0]["class"] != "CONSTANT":
        return not arguments  # which DuckDB has its own words for
    pattern = arguments[0]["value"].get("value")
    return pattern is None or (isinstance(pattern, str) and is_bounded_pattern(pattern))


def _check_source(
    node: Mapping[str, Any], own: frozenset[str], tables: dict[str, None]
) -> dict[str, Any]:
    """What is still to be looked at in a member of FROM."""
    kind = node["type"]
    _require(kind in _SOURCES, kind)
    if kind == "BASE_TABLE":
        name, schema, catalog = node["table_name"], node["schema_name"], node["catalog_name"]
        if schema == "recurring" and not catalog and name.casefold() in own:
            return {}  # of a recursive expression USING KEY
        qualified = ".".join(filter(None, (catalog, schema, name)))
        _require(not schema and not catalog, f"the table {qualified}")
        _require(node["at_clause"] is None, "AT (...), session.at(...) looks back instead,")
        if name.casefold() not in own:
            tables[name] = None
    elif kind == "TABLE_FUNCTION":
        function = node["function"]
        name = function["function_name"]
        _require(name.lower() in TABLE_FUNCTIONS, f"the table function {name}")
        return {**node, "function": function["children"]}
    elif kind == "SHOW_REF":
        _require(node["query"] is not None, "SHOW of anything but `show tables` by itself")
    return dict(node)


def _require(allowed: bool, what: str) -> None:
    if not allowed:
        raise SqlNotAllowedError(what)


# --- mistakes -----------------------------------------------------------------------------------


@contextmanager
def _failures(duck: ConfinedDuck) -> Iterator[None]:
    """DuckDB's own, at any point from the first word to the last row: the statement after this one
    gets a new instance, for this one answers nothing any more."""
    import duckdb

    try:
        yield
    except (duckdb.InternalException, duckdb.FatalException) as error:
        duck.reopen()
        raise StorageBackendError(
            f"sql: DuckDB failed on this; write it in another way: {_said(error)}",
            operation="query",
        ) from error


@contextmanager
def _mistakes(types: StoredTypes) -> Iterator[None]:
    """What is wrong with a statement, without DuckDB's advice about tables that are not ours."""
    import duckdb

    try:
        yield
    except duckdb.CatalogException as error:
        missing = _MISSING_TABLE.search(str(error))
        if missing is None:
            raise ValueError(f"sql: {_said(error)}") from error
        raise types.unknown(missing[1]) from error
    except duckdb.PermissionException as error:  # the instance's own refusal, were all else passed
        raise SqlNotAllowedError("a file that is not of the storage") from error
    except (duckdb.ProgrammingError, duckdb.DataError, duckdb.NotSupportedError) as error:
        if isinstance(error, duckdb.InvalidInputException) and "parquet" in str(error).lower():
            raise  # a damaged file, and no mistake of the statement
        raise ValueError(f"sql: {_said(error)}") from error


def _said(error: Exception) -> str:
    """DuckDB's words, the place in the statement included, on one line."""
    words = str(error).partition("\nStack Trace:")[0]
    lines = [line.strip() for line in words.splitlines() if line.strip(" ^")]
    return "; ".join(lines)
