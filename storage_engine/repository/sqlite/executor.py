"""Answers queries on a SQLite storage, for both engines.

Every answer comes from one snapshot. Rows stream: the statement, its transaction and the
connection live as long as the iterator, and end with it however it ends. An in-memory storage has
one connection for everything, so there an answer is complete before it is handed out. SQL of users
runs in DuckDB, on Arrow tables of the types that it names.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.model.columns import arrow_type
from storage_engine.model.expressions import Source, json_form
from storage_engine.model.spec import TypeSpec
from storage_engine.query.compiler import Compiler, Statement, result_kinds
from storage_engine.query.results import (
    Diagnostic,
    Parameters,
    Plan,
    Rows,
    Traversal,
    endpoint_spec,
)
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.protocol import ReadWindow
from storage_engine.repository.sqlite import control_tables
from storage_engine.repository.sqlite.connection import ask, batches, plan_of
from storage_engine.repository.sqlite.data_table import (
    DataTable,
    from_values,
    has_right_keys,
    read_schema,
)
from storage_engine.repository.sqlite.traversal import Hops
from storage_engine.repository.sqlite.type_histories import ending_of
from storage_engine.repository.sqlite.visible import (
    Seen,
    Visible,
    nothing,
    resolve,
    visible,
    with_tables,
)
from storage_engine.repository.user_sql import StoredTypes, Tables, run_sql

if TYPE_CHECKING:
    import duckdb

    from storage_engine.repository.sqlite.engine import SqliteRepository


def described(
    spec: QuerySpec,
    engine: str,
    seen: Seen,
    asked: Sequence[tuple[Statement, list[str]]],
    remarks: Sequence[Diagnostic],
) -> Plan:
    """`asked`: the statements, with SQLite's plan for each."""
    lines = [f"{spec.type.name} on {engine}, head {seen.head}: {_versions(seen)}"]
    for statement, plan in asked:
        lines += ["", statement.sql, *(f"  {line}" for line in plan)]
    if not asked:
        lines.append("nothing to read: there are no such versions")
    facts: dict[str, Any] = {
        "engine": engine,
        "head": seen.head,
        "window": seen.as_json(),
        "query": spec.as_json(),
        "sql": ";\n".join(statement.sql for statement, _ in asked),
        "statements": [
            {
                "sql": statement.sql,
                "parameters": {k: json_form(v) for k, v in statement.parameters.items()},
                "plan": plan,
            }
            for statement, plan in asked
        ],
        "diagnostics": [dict(remark) for remark in remarks],
    }
    return Plan("\n".join(lines), facts)


def _versions(seen: Seen) -> str:
    if seen.history:
        return f"all versions after commit {seen.since} up to commit {seen.upto}"
    return f"the newest version of each identity as of commit {seen.upto}"


_ROWS = "visible"
_ENDPOINTS: dict[Source, str] = {"left": "visible_left", "right": "visible_right"}


@dataclass(frozen=True)
class _Type:
    """A type that a query looks at, in the versions that it sees."""

    spec: TypeSpec
    table: DataTable | None  # None when nothing of it is stored
    versions: Visible
    diagnostics: tuple[Diagnostic, ...]

    @property
    def stored(self) -> DataTable | None:
        """None when no version can be visible."""
        return None if self.diagnostics else self.table


class SqliteExecutor:
    """Part of `SqliteRepository`, which knows where its types are and how their rows read."""

    def __init__(
        self,
        repository: SqliteRepository,
        pinned: int | None = None,
        on_head: Callable[[int], None] | None = None,
    ) -> None:
        self._repository = repository
        self._pinned = pinned
        self._on_head = on_head

    # --- rows -----------------------------------------------------------------------------------

    def rows(self, spec: QuerySpec) -> Rows:
        stream = self._stream(spec)
        diagnostics = next(stream)  # begun: to be dropped now ends it in order
        batches = iter([*stream]) if self._repository.in_memory else stream
        return Rows(read_schema(spec.type), batches, diagnostics)

    def _stream(self, spec: QuerySpec) -> Generator[Any, None, None]:
        """Diagnostics, then batches."""
        with self._repository.reading("query", lasting=True) as connection:
            try:
                yield from self._answer(connection, spec)
            except GeneratorExit:
                return  # nobody wants the rest; the connection is as good as before

    def _answer(
        self, connection: sqlite3.Connection | None, spec: QuerySpec
    ) -> Generator[Any, None, None]:
        seen = self._seen(connection, spec.when)
        types = self._types(connection, spec, seen)
        yield _remarks(types.values())
        if connection is None or types[_ROWS].stored is None:
            return
        for columns in batches(ask(connection, self._select(spec, types))):
            yield from self._repository.to_arrow(spec.type, columns).to_batches()

    def _select(
        self, spec: QuerySpec, types: Mapping[str, _Type], columns: Sequence[str] | None = None
    ) -> Statement:
        if columns is None:
            payload = self._repository.payload_names(spec.type)
            columns = ["commit_id", *spec.type.identity, *payload]
        return _composed(types, self._compiler().select(spec, _ROWS, columns))

    def sql(self, statement: str, parameters: Parameters | None = None) -> Rows:
        repository = self._repository
        # All tables as of one commit, whatever is committed meanwhile.
        upto = repository.head_commit_id() if self._pinned is None else self._pinned
        self._note(upto)

        def provide(tables: Tables) -> Callable[[duckdb.DuckDBPyConnection], None]:
            answers = {
                name: self.rows(QuerySpec(spec, when=When(as_of=upto)))
                for name, spec in tables.items()
            }
            loaded = {
                name: pa.Table.from_batches(rows.batches, schema=rows.schema)
                for name, rows in answers.items()
            }

            def create(cursor: duckdb.DuckDBPyConnection) -> None:
                for name, table in loaded.items():
                    cursor.register(name, table)

            return create

        types = StoredTypes(frozenset(repository.type_refs()), repository.stored_types)
        return run_sql(repository.duck, statement, parameters, types, provide)

    # --- aggregates -----------------------------------------------------------------------------

    def aggregate(self, spec: QuerySpec) -> pa.Table:
        kinds = result_kinds(spec)
        parts = [_to_table(kinds, [()] * len(kinds))]
        with self._repository.reading("aggregate") as connection:
            seen = self._seen(connection, spec.when)
            types = self._types(connection, spec, seen)
            if connection is None or types[_ROWS].stored is None:
                if not spec.groups:
                    parts.append(_to_table(kinds, _of_no_rows(spec)))
            else:
                answer = batches(ask(connection, self._aggregate(spec, types)))
                parts += [_to_table(kinds, columns) for columns in answer]
        return pa.concat_tables(parts)

    def _aggregate(self, spec: QuerySpec, types: Mapping[str, _Type]) -> Statement:
        return _composed(types, self._compiler().aggregate(spec, _ROWS))

    # --- traversals -----------------------------------------------------------------------------

    def traverse(self, spec: QuerySpec) -> Traversal:
        with self._repository.reading("traverse") as connection:
            seen = self._seen(connection, spec.when)
            types = self._types(connection, spec, seen)
            steps = self._steps(connection, spec, seen)
            hops = [types[_ROWS], *steps]
            remarks = _remarks([*types.values(), *steps])
            if connection is None or any(hop.stored is None for hop in hops):
                first, *others = [read_schema(hop.spec).empty_table() for hop in hops]
                none = [pa.chunked_array([], pa.int64())] * len(hops)
                return Traversal(first, tuple(others), _paths(none), remarks, seen.upto)
            temporary = self._hops(connection, spec)
            for statement in self._fill(connection, temporary, spec, types, steps):
                ask(connection, statement).close()
            return self._found(connection, temporary, hops, remarks, seen.upto)

    def _found(
        self,
        connection: sqlite3.Connection,
        temporary: Hops,
        hops: Sequence[_Type],
        remarks: tuple[Diagnostic, ...],
        commit_id: int,
    ) -> Traversal:
        places: list[list[pa.Array]] = [[] for _ in hops]
        for columns in batches(ask(connection, Statement(temporary.paths(), {}))):
            for part, values in zip(places, columns, strict=True):
                part.append(pa.array(values, pa.int64()))
        tables, rows = [], []
        for n, hop in enumerate(hops):
            numbers: list[int] = []
            parts = [read_schema(hop.spec).empty_table()]
            for columns in batches(ask(connection, self._fetch(temporary, n, hop))):
                numbers += columns[0]
                parts.append(self._repository.to_arrow(hop.spec, columns[1:]))
            tables.append(pa.concat_tables(parts))
            through = pa.chunked_array(places[n], pa.int64())
            rows.append(pc.index_in(through, value_set=pa.array(numbers, pa.int64())))
        return Traversal(tables[0], tuple(tables[1:]), _paths(rows), remarks, commit_id)

    def _hops(self, connection: sqlite3.Connection, spec: QuerySpec) -> Hops:
        temporary = Hops(self._repository.temporary_name("hops"), len(spec.via), spec.backwards)
        for create in temporary.create():
            connection.execute(create)
        return temporary

    def _fill(
        self,
        connection: sqlite3.Connection,
        temporary: Hops,
        spec: QuerySpec,
        types: Mapping[str, _Type],
        steps: Sequence[_Type],
    ) -> Iterator[Statement]:
        sources = self._select(spec, types, ["commit_id", "entity_key"])
        yield Statement(temporary.sources(sources.sql), sources.parameters)
        for number, step in enumerate(steps, start=1):
            table = step.versions
            indexed = step.table is not None and has_right_keys(connection, step.table)
            relations = temporary.step(number, table.name, by_right_key=indexed)
            select = with_tables([table], relations)
            yield Statement(temporary.fill_step(number, select), table.parameters)
        yield Statement(temporary.fill_paths(), {})

    def _fetch(self, temporary: Hops, number: int, hop: _Type) -> Statement:
        assert hop.table is not None
        payload = self._repository.payload_names(hop.spec)
        return Statement(temporary.found(number, hop.table, payload), hop.table.parameters)

    # --- endpoints ------------------------------------------------------------------------------

    def endpoints(
        self, spec: QuerySpec, side: Literal["left", "right"], keys: pa.Array
    ) -> pa.Table:
        entity = endpoint_spec(spec.type, side, lambda ref: self._repository.stored_types([ref]))
        with self._repository.reading("load endpoints") as connection:
            seen = self._seen(connection, When(as_of=spec.when.as_of))
            wanted = pa.table({"entity_key": keys})
            return self._repository.read_on(connection, entity, ReadWindow(as_of=seen.upto), wanted)

    # --- explain --------------------------------------------------------------------------------

    def explain(self, spec: QuerySpec) -> Plan:
        asked: list[tuple[Statement, list[str]]] = []
        with self._repository.reading("explain") as connection:
            seen = self._seen(connection, spec.when)
            types = self._types(connection, spec, seen)
            steps = self._steps(connection, spec, seen)
            hops = [types[_ROWS], *steps]
            if connection is not None and all(hop.stored for hop in hops):
                asked += [
                    (statement, plan_of(connection, statement))
                    for statement in self._statements(connection, spec, types, steps)
                ]
        engine = f"{self._repository.backend} {self._repository.engine_version}"
        return described(spec, engine, seen, asked, _remarks([*types.values(), *steps]))

    def _statements(
        self,
        connection: sqlite3.Connection,
        spec: QuerySpec,
        types: Mapping[str, _Type],
        steps: Sequence[_Type],
    ) -> list[Statement]:
        if spec.aggregates:
            return [self._aggregate(spec, types)]
        if not spec.via:
            return [self._select(spec, types)]
        temporary = self._hops(connection, spec)
        return [
            *self._fill(connection, temporary, spec, types, steps),
            Statement(temporary.paths(), {}),
            *(self._fetch(temporary, n, hop) for n, hop in enumerate([types[_ROWS], *steps])),
        ]

    # --- what is looked at ----------------------------------------------------------------------

    def _note(self, head: int) -> None:
        if self._on_head is not None:
            self._on_head(head)

    def _seen(self, connection: sqlite3.Connection | None, when: When) -> Seen:
        head = control_tables.head(connection)[0] if connection else 0
        self._note(head)
        return resolve(
            when, head, self._pinned, lambda ref: self._repository.commit_on(connection, ref)
        )

    def _types(
        self, connection: sqlite3.Connection | None, spec: QuerySpec, seen: Seen
    ) -> dict[str, _Type]:
        """The queried type, and the endpoint types that its filter asks about."""
        version = spec.when.schema_version
        types = {_ROWS: self._type(connection, _ROWS, spec.type, seen, version)}
        sides: list[tuple[Literal["left", "right"], bool]] = [
            ("left", spec.left),
            ("right", spec.right),
        ]
        for side, asked in sides:
            if asked:
                entity = endpoint_spec(spec.type, side, lambda ref: _stored(connection, ref))
                name = _ENDPOINTS[side]
                types[name] = self._type(connection, name, entity, seen)
        return types

    def _steps(
        self, connection: sqlite3.Connection | None, spec: QuerySpec, seen: Seen
    ) -> list[_Type]:
        return [
            self._type(connection, f"step_{n}", relation, seen)
            for n, relation in enumerate(spec.via)
        ]

    def _type(
        self,
        connection: sqlite3.Connection | None,
        name: str,
        spec: TypeSpec,
        seen: Seen,
        version: int | None = None,
    ) -> _Type:
        payload = self._repository.payload_names(spec)
        table = self._repository.table_on(connection, spec, version)
        remarks: tuple[Diagnostic, ...] = ()
        if table is None:
            columns = ["commit_id", *spec.identity, *payload]
            ending = None
            if connection is not None and version is None:
                ending = ending_of(connection, *spec.ref)
            if ending is not None:
                remarks = ({"reason": "type_dropped", "dropped_commit_id": ending.commit_id},)
            return _Type(spec, None, nothing(name, columns), remarks)
        if seen.upto < table.activation_commit_id:
            activation = table.activation_commit_id
            remarks = ({"reason": "commit_before_activation", "activation_commit_id": activation},)
        return _Type(spec, table, visible(name, table, payload, seen), remarks)

    def _compiler(self) -> Compiler:
        return Compiler("sqlite", self._repository.shape, endpoints=_ENDPOINTS)


def _composed(types: Mapping[str, _Type], statement: Statement) -> Statement:
    """A compiled statement on top of the tables that it names."""
    tables = [stored.versions for stored in types.values()]
    parameters = dict(statement.parameters)
    for table in tables:
        parameters |= table.parameters
    return Statement(with_tables(tables, statement.sql), parameters)


def _remarks(types: Iterable[_Type]) -> tuple[Diagnostic, ...]:
    """Those on the first type that has any: on the queried one before others."""
    return next((stored.diagnostics for stored in types if stored.diagnostics), ())


def _stored(connection: sqlite3.Connection | None, ref: tuple[str, str]) -> list[TypeSpec]:
    return [spec for _, spec in control_tables.known_types(connection, ref)] if connection else []


def _of_no_rows(spec: QuerySpec) -> list[tuple[int | None]]:
    return [(0 if aggregate.function == "count" else None,) for _, aggregate in spec.aggregates]


def _to_table(kinds: Sequence[tuple[str, str]], columns: Sequence[Sequence[Any]]) -> pa.Table:
    arrays = [
        from_values(values, kind, arrow_type(kind))
        for values, (_, kind) in zip(columns, kinds, strict=True)
    ]
    return pa.Table.from_arrays(arrays, names=[name for name, _ in kinds])


def _paths(places: Sequence[pa.ChunkedArray]) -> pa.Table:
    names = ["source", *(f"step_{n}" for n in range(len(places) - 1))]
    return pa.Table.from_arrays([place.cast(pa.int64()) for place in places], names=names)
