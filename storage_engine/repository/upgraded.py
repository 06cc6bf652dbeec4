"""Answers queries on older versions of types, through upgraders: what `query.upgraded()` asks.

The rows that a query may see are read version by version, as they were stored, brought up to the
class, and put into a temporary table in DuckDB, which answers as it answers for files. One
semantics, then: filters, order, limits and aggregates act on what the upgraders made. Memory stays
bounded, as DuckDB spills; but all rows of the window are upgraded, whatever the limit, except that
conditions on keys are asked before. Where nothing older than the current version can be seen, the
storage answers as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.model.arrow import row_schema
from storage_engine.model.columns import arrow_type
from storage_engine.model.declarations import Side
from storage_engine.model.expressions import Filter, Source
from storage_engine.model.spec import TypeSpec
from storage_engine.query.compiler import Compiler, Statement, result_kinds
from storage_engine.query.conditions import conjuncts
from storage_engine.query.dialects import quoted
from storage_engine.query.results import Diagnostic, Executor, Plan, Rows, Traversal, endpoint_spec
from storage_engine.query.spec import QuerySpec, When, after_pin
from storage_engine.repository.duck import Stream, path_rows
from storage_engine.repository.protocol import Repository, TypeRef
from storage_engine.schema.diff import outdated
from storage_engine.schema.history import TypeHistory
from storage_engine.schema.lineage import Lineage, Stage, lineage
from storage_engine.schema.migration import is_same
from storage_engine.schema.rewrite import Rewrite
from storage_engine.schema.upgraders import Upgrader, UpgraderKey

if TYPE_CHECKING:
    import duckdb

_ROWS = "asked"
_ENDPOINTS: dict[Source, str] = {"left": "left_entities", "right": "right_entities"}


@dataclass(frozen=True)
class _Window:
    """The commits that a query sees."""

    upto: int
    history: bool
    since: int

    def stages(self, past: Lineage) -> list[Stage]:
        if self.history:
            return past.between(self.since, self.upto)
        stage = past.at(self.upto)
        return [] if stage is None else [stage]

    def when(self, stage: Stage) -> When:
        if self.history:
            return When(history=True, since=self.since, schema_version=stage.number)
        return When(as_of=self.upto, schema_version=stage.number)


@dataclass(frozen=True)
class _SeenType:
    """A type that a query looks at, and the versions of it that the query sees, those whose rows
    were purged among them."""

    spec: TypeSpec
    origin: Lineage | None  # None when it was never stored
    stages: Sequence[Stage]
    upto: int

    @property
    def readable(self) -> Sequence[Stage]:
        return [stage for stage in self.stages if stage.purged_upto is None]

    @property
    def is_current(self) -> bool:
        """Whether the storage answers as well by itself."""
        if self.origin is None:
            return True
        if not self.stages:
            return self.upto >= self.origin.last.since
        current = self.origin.history.current
        return all(current is not None and s is self.origin.last for s in self.stages)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        if self.origin is None:
            return ()
        if self.stages:
            purged = sorted({s.purged_upto for s in self.stages if s.purged_upto is not None})
            return tuple({"reason": "type_purged", "dropped_commit_id": d} for d in purged)
        later = [stage.since for stage in self.origin.stages if stage.since > self.upto]
        if not later:
            return ()
        return ({"reason": "commit_before_activation", "activation_commit_id": min(later)},)


class UpgradedExecutor:
    """`Executor` that answers of all versions. `plain` answers what needs no upgrading."""

    def __init__(
        self,
        repository: Repository,
        plain: Executor,
        upgraders: Mapping[UpgraderKey, Upgrader],
        pinned: int | None = None,
    ) -> None:
        self._repository = repository
        self._plain = plain
        self._upgraders = upgraders
        self._pinned = pinned

    # --- the contract ---------------------------------------------------------------------------

    def rows(self, spec: QuerySpec) -> Rows:
        if (seen := self._seen(spec)) is None:
            return self._plain.rows(spec)
        window, types = seen
        schema = _schema(types[_ROWS].spec)
        cursor, statement = self._prepared(
            spec, window, types, lambda c: c.select(spec, _ROWS, schema.names)
        )
        stream = Stream(
            self._repository.duck,
            cursor,
            statement.sql,
            statement.parameters,
            columns=len(schema),
        )
        return Rows(schema, self._batches(stream, schema), types[_ROWS].diagnostics)

    def aggregate(self, spec: QuerySpec) -> pa.Table:
        import duckdb

        if (seen := self._seen(spec)) is None:
            return self._plain.aggregate(spec)
        window, types = seen
        cursor, statement = self._prepared(spec, window, types, lambda c: c.aggregate(spec, _ROWS))
        duck = self._repository.duck
        with cursor, duck.errors():
            try:
                table = duck.run(
                    cursor,
                    lambda: cursor.execute(
                        statement.sql, dict(statement.parameters) or None
                    ).to_arrow_table(),
                )
            except (duckdb.ConversionException, duckdb.OutOfRangeException) as error:
                raise OverflowError(
                    f"sum over {spec.type.name}: the result does not fit into 64 bits"
                ) from error
        kinds = result_kinds(spec)
        return pa.Table.from_arrays(
            [
                column.cast(arrow_type(kind))
                for column, (_, kind) in zip(table.columns, kinds, strict=True)
            ],
            names=[name for name, _ in kinds],
        )

    def traverse(self, spec: QuerySpec) -> Traversal:
        if (seen := self._seen(spec)) is None:
            return self._plain.traverse(spec)
        window, types = seen
        sources = self.rows(
            replace(spec, via=(), backwards=frozenset(), when=When(as_of=window.upto))
        )
        tables = [pa.Table.from_batches(sources.batches, schema=sources.schema)]
        column = "entity_key"
        for number in range(len(spec.via)):
            start, end = spec.ends(number)
            keys = tables[-1].column(column).unique()
            tables.append(self._picked(types[f"step_{number}"], window, f"{start}_key", keys))
            column = f"{end}_key"
        paths = path_rows(self._repository.duck, spec, tables)
        return Traversal(tables[0], tuple(tables[1:]), paths, sources.diagnostics, window.upto)

    def endpoints(self, spec: QuerySpec, side: Side, keys: pa.Array) -> pa.Table:
        window = replace(self._window(When(as_of=spec.when.as_of)), history=False)
        entity = endpoint_spec(spec.type, side, lambda ref: self._repository.stored_types([ref]))
        past = self._past(entity, window, self._repository.type_histories())
        if past.is_current:
            return self._plain.endpoints(spec, side, keys)
        return self._picked(past, window, "entity_key", keys)

    def explain(self, spec: QuerySpec) -> Plan:
        if (seen := self._seen(spec)) is None:
            return self._plain.explain(spec)
        _, types = seen
        lines = [f"{spec.type.kind} {spec.type.name}, {spec.when}, upgraded"]
        versions = []
        for past in types.values():
            for stage in past.readable:
                lines.append(
                    f"  {past.spec.name}: version {stage.number} of {stage.ref[1]}, from commit "
                    f"{stage.since} on"
                )
                versions.append(
                    {
                        "type": past.spec.name,
                        "stored_as": stage.ref[1],
                        "schema_version": stage.number,
                        "since_commit_id": stage.since,
                    }
                )
        lines.append("all of these rows are upgraded into a temporary table, which DuckDB asks")
        facts = {"engine": "duckdb", "query": spec.as_json(), "versions": versions}
        return Plan("\n".join(lines), facts)

    # --- which versions -------------------------------------------------------------------------

    def _seen(self, spec: QuerySpec) -> tuple[_Window, dict[str, _SeenType]] | None:
        """The commits and types that a query looks at; None where nothing needs upgrading."""
        if spec.when.latest and self._pinned is None:
            return None
        window = self._window(spec.when)
        types = self._types(spec, window)
        return None if all(past.is_current for past in types.values()) else (window, types)

    def _window(self, when: When) -> _Window:
        head = self._repository.head_commit_id()
        upto = head if self._pinned is None else min(self._pinned, head)
        if when.as_of is not None:
            asked = self._repository.commit_at(when.as_of)
            beyond = isinstance(when.as_of, int) and when.as_of > upto
            if self._pinned is not None and (beyond or asked > upto):
                raise after_pin(when, upto)
            upto = asked
        return _Window(upto, when.history, when.since or 0)

    def _types(self, spec: QuerySpec, window: _Window) -> dict[str, _SeenType]:
        """The queried type, the endpoint types that its filter asks about, and the steps."""
        histories = self._repository.type_histories()
        specs = {_ROWS: spec.type}
        sides: list[tuple[Side, bool]] = [("left", spec.left), ("right", spec.right)]
        for side, asked in sides:
            if asked:
                specs[_ENDPOINTS[side]] = endpoint_spec(
                    spec.type, side, lambda ref: self._repository.stored_types([ref])
                )
        specs |= {f"step_{n}": relation for n, relation in enumerate(spec.via)}
        return {name: self._past(each, window, histories) for name, each in specs.items()}

    def _past(
        self, spec: TypeSpec, window: _Window, histories: Mapping[TypeRef, TypeHistory]
    ) -> _SeenType:
        origin = lineage(spec.ref, histories)
        if origin is None:
            return _SeenType(spec, None, (), window.upto)
        last = origin.last.version
        if not is_same(last.spec, spec):
            raise outdated(spec, last.version, last.spec)
        return _SeenType(origin.final(spec), origin, window.stages(origin), window.upto)

    # --- their rows -----------------------------------------------------------------------------

    def _prepared(
        self,
        spec: QuerySpec,
        window: _Window,
        types: Mapping[str, _SeenType],
        make: Callable[[Compiler], Statement],
    ) -> tuple[duckdb.DuckDBPyConnection, Statement]:
        """A cursor with the tables that the statement reads from."""
        tables = {side: name for side, name in _ENDPOINTS.items() if name in types}
        duck = self._repository.duck
        cursor = duck.cursor()
        try:
            with duck.errors():
                self._fill(cursor, _ROWS, types[_ROWS], window, _about_keys(spec.where))
                for name in tables.values():
                    self._fill(cursor, name, types[name], window)
            return cursor, make(Compiler("duckdb", "columns", endpoints=tables))
        except BaseException:
            cursor.close()
            raise

    def _fill(
        self,
        cursor: duckdb.DuckDBPyConnection,
        name: str,
        past: _SeenType,
        window: _Window,
        where: Filter | None = None,
    ) -> None:
        cursor.register("batch", _schema(past.spec).empty_table())
        cursor.execute(f"CREATE TEMP TABLE {quoted(name)} AS SELECT * FROM batch")
        for rows in self._upgraded(past, window, where=where):
            cursor.register("batch", rows)
            cursor.execute(f"INSERT INTO {quoted(name)} SELECT * FROM batch")
        cursor.unregister("batch")

    def _upgraded(
        self,
        past: _SeenType,
        window: _Window,
        *,
        where: Filter | None = None,
        keep: Callable[[pa.Table], pa.Table] = lambda rows: rows,
    ) -> Iterator[pa.Table]:
        if past.origin is None:
            return
        # Before anything is read: whether there is a way up from each version.
        ways: list[tuple[Stage, Rewrite]] = [
            (stage, past.origin.rewrite(stage, self._upgraders, past.spec))
            for stage in past.readable
        ]
        executor = self._repository.executor(max(window.upto, 0))
        schema = _schema(past.spec)
        for stage, upgrade in ways:
            stored = QuerySpec(stage.spec, where=where, when=window.when(stage))
            answer = executor.rows(stored)
            for batch in answer.batches:
                rows = keep(pa.Table.from_batches([batch]))
                if rows.num_rows:
                    made = upgrade(rows.drop_columns(["commit_id"]))
                    columns = [rows.column("commit_id"), *made.columns]
                    yield pa.Table.from_arrays(columns, schema=schema)

    def _picked(self, past: _SeenType, window: _Window, column: str, keys: Any) -> pa.Table:
        """The rows with one of these keys, by identity."""
        values = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys

        def keep(rows: pa.Table) -> pa.Table:
            return rows.filter(pc.is_in(rows.column(column), value_set=values))

        parts = [_schema(past.spec).empty_table(), *self._upgraded(past, window, keep=keep)]
        order = [(name, "ascending") for name in past.spec.identity]
        return pa.concat_tables(parts).sort_by(order)

    def _batches(self, stream: Stream, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with self._repository.duck.errors():
            for batch in stream.batches():
                yield batch.cast(schema)


def _schema(spec: TypeSpec) -> pa.Schema:
    return pa.schema([pa.field("commit_id", pa.int64(), nullable=False), *row_schema(spec)])


def _about_keys(where: Filter | None) -> Filter | None:
    """Of the conditions that must all hold, those on keys, which no upgrader changes."""
    parts = [
        part
        for part in conjuncts(where)
        if all(o.identity is not None and o.source == "self" for o in part.operands())
    ]
    return reduce(and_, parts) if parts else None
