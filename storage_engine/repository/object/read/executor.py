"""Answers queries on an object store with DuckDB, one statement per question.

Rows stream from the statement in bounded memory. `explain` tells how a question would be answered,
in words for people and in facts for programs, and asks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import orjson
import pyarrow as pa

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Head, TypeHead, TypeRef
from storage_engine.index.resolve import Early, Resolution
from storage_engine.model.arrow import row_schema
from storage_engine.model.columns import arrow_type
from storage_engine.model.expressions import Operand
from storage_engine.model.spec import TypeSpec
from storage_engine.query.compiler import Compiler, Conjunct, Statement, result_kinds
from storage_engine.query.dialects import quoted
from storage_engine.query.reference import Reference
from storage_engine.query.results import (
    Diagnostic,
    Parameters,
    Plan,
    Rows,
    Traversal,
    endpoint_spec,
)
from storage_engine.query.spec import Order, QuerySpec, When, after_pin
from storage_engine.repository.duck import Duck, Stream, path_rows
from storage_engine.repository.duck_confined import ConfinedDuck
from storage_engine.repository.object.read.files import (
    Brought,
    MissingFileError,
    Scanner,
    versioned_schema,
)
from storage_engine.repository.object.read.latest import Versions
from storage_engine.repository.object.read.plan import (
    CommitWindow,
    KeyTable,
    TypePlan,
    field_bounds,
    holds_only_nulls,
    in_steps,
    plan_type,
    visible,
)
from storage_engine.repository.object.read.splits import ChangePlan, change_shares, scan_share
from storage_engine.repository.object.stored_schema import check_schema, recorded_spec
from storage_engine.repository.protocol import ReadWindow, distinct_values
from storage_engine.repository.user_sql import StoredTypes, Tables, run_sql
from storage_engine.wording import counted

if TYPE_CHECKING:
    import duckdb

_FILES_SHOWN = 10
_SPLIT_ROWS = 250_000  # between two splits, at least


def explained(
    spec: QuerySpec,
    head: Head,
    plans: Sequence[TypePlan],
    statement: Statement,
    duckdb_plan: str,
    duckdb_tree: Any,
) -> Plan:
    window = plans[0].window
    lines = [
        f"{spec.type.kind} {spec.type.name}, {spec.when}: commits "
        f"{window.since + 1} to {window.upto} of head {head.commit_id}"
    ]
    for plan in plans:
        lines += _type_lines(plan)
    lines += [f"note: {dict(note)}" for plan in plans for note in plan.diagnostics]
    lines += ["", "DuckDB", duckdb_plan]
    facts = {
        "engine": "duckdb",
        "head": head.commit_id,
        "query": spec.as_json(),
        "window": {"since": window.since, "upto": window.upto, "history": window.history},
        "types": [plan.facts() for plan in plans],
        "diagnostics": [dict(note) for plan in plans for note in plan.diagnostics],
        "sql": statement.sql,
        "duckdb": duckdb_tree,
    }
    return Plan("\n".join(lines), facts)


def _type_lines(plan: TypePlan) -> list[str]:
    size = sum(item.file.bytes for item in plan.rows)
    total = len(plan.rows) + sum(plan.pruned.values())
    lines = [
        f"{plan.spec.name}: {len(plan.rows)} of {counted(total, 'file')}, {counted(size, 'byte')}, "
        f"from {'the commit chain' if plan.fallback else 'the index'} "
        f"({counted(plan.entries, 'entry')})"
    ]
    lines += [f"  left out by {reason}: {count}" for reason, count in plan.pruned.items()]
    if plan.newer:
        lines.append(f"  checked for newer versions, keys only: {counted(len(plan.newer), 'file')}")
    if plan.warning is not None:
        lines.append(f"  warning: {plan.warning}")
    lines += [f"  {item.file.path}" for item in plan.rows[:_FILES_SHOWN]]
    if len(plan.rows) > _FILES_SHOWN:
        lines.append(f"  ... and {len(plan.rows) - _FILES_SHOWN} more")
    return lines


_ASKED = "asked"
Side = Literal["left", "right"]


@dataclass(frozen=True)
class Engine:
    """What an executor needs of its repository."""

    chain: Chain
    versions: Versions
    scanner: Scanner
    duck: Duck
    sql_duck: ConfinedDuck
    type_refs: Callable[[Head], Set[TypeRef]]
    stored_types: Callable[[Head, Sequence[TypeRef]], Sequence[TypeSpec]]
    commit_at: Callable[[Head, Reference], int]
    v1: bool
    opened_with: Head | None = None  # what was head when the storage was opened


@dataclass(frozen=True)
class _PreparedQuery:
    """A statement on the cursor that has what it reads from."""

    cursor: duckdb.DuckDBPyConnection
    statement: Statement
    plans: tuple[TypePlan, ...]

    def stream(self, duck: Duck) -> Stream:
        return Stream(
            duck,
            self.cursor,
            self.statement.sql,
            self.statement.parameters,
            columns=self.columns,
            frugal=in_steps(self.statement.sql, _ASKED),
        )

    @property
    def columns(self) -> int:
        return sum(len(versioned_schema(plan.spec)) for plan in self.plans)

    def execute(self, prefix: str = "", *, stepwise: bool = False) -> duckdb.DuckDBPyConnection:
        sql = in_steps(self.statement.sql, _ASKED) if stepwise else self.statement.sql
        return self.cursor.execute(f"{prefix}{sql}", dict(self.statement.parameters) or None)


class ObjectExecutor:
    """`Executor` of the object engines, on the head or pinned to a commit."""

    def __init__(
        self,
        engine: Engine,
        pinned: int | None = None,
        on_head: Callable[[int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._pinned = pinned
        self._on_head = on_head

    # --- the contract ---------------------------------------------------------------------------

    def rows(self, spec: QuerySpec) -> Rows:
        schema = versioned_schema(spec.type)
        spec = self._ordered(spec)
        prepared = self._prepare(spec, lambda c: c.select(spec, _ASKED, schema.names))
        return Rows(schema, self._stream(prepared, schema), _remarks(prepared.plans))

    def _ordered(self, spec: QuerySpec) -> QuerySpec:
        """What one commit wrote is in the order of identities alone: with the commit before them,
        DuckDB would look at every row to find the first few."""
        when = spec.when
        of_one_commit = (
            self._pinned is not None
            and when.history
            and when.as_of is None
            and when.since == self._pinned - 1
        )
        if spec.order or spec.limit is None or not of_one_commit:
            return spec
        column = spec.type.identity[0]
        place = Operand(spec.type.ref, column, frozenset({"str"}), identity=column, declared="str")
        return replace(spec, order=(Order(place),))

    def aggregate(self, spec: QuerySpec) -> pa.Table:
        import duckdb

        prepared = self._prepare(spec, lambda c: c.aggregate(spec, _ASKED))
        with prepared.cursor, self._engine.duck.errors():
            try:
                table = self._engine.duck.run(
                    prepared.cursor,
                    lambda: prepared.execute().to_arrow_table(),
                    columns=prepared.columns,
                    frugal=lambda: prepared.execute(stepwise=True).to_arrow_table(),
                )
            except (duckdb.ConversionException, duckdb.OutOfRangeException) as error:
                raise _sum_overflow(spec) from error
        kinds = result_kinds(spec)
        return pa.Table.from_arrays(
            [
                column.cast(arrow_type(kind))
                for column, (_, kind) in zip(table.columns, kinds, strict=True)
            ],
            names=[name for name, _ in kinds],
        )

    def traverse(self, spec: QuerySpec) -> Traversal:
        head = self._head()
        window = self._window(spec.when, head)
        # The steps must see the state that the sources are read from.
        sources = self.rows(
            replace(
                spec,
                via=(),
                backwards=frozenset(),
                when=When(as_of=window.upto, schema_version=spec.when.schema_version),
            )
        )
        tables = [pa.Table.from_batches(sources.batches, schema=sources.schema)]
        steps = []
        column = "entity_key"
        for number, relation in enumerate(spec.via):
            start, end = spec.ends(number)
            keys = pa.table({f"{start}_key": tables[-1].column(column).unique()})
            step, relations = self._fetch(
                head, relation, replace(window, schema_version=None), keys
            )
            steps.append(step)
            tables.append(relations)
            column = f"{end}_key"
        remarks = sources.diagnostics or _remarks(steps)
        paths = path_rows(self._engine.duck, spec, tables)
        return Traversal(tables[0], tuple(tables[1:]), paths, remarks, window.upto)

    def endpoints(self, spec: QuerySpec, side: Side, keys: pa.Array) -> pa.Table:
        head = self._head()
        entity = self._end(spec.type, side, head)
        window = self._window(When(as_of=spec.when.as_of), head)
        return self._fetch(head, entity, window, pa.table({"entity_key": keys}))[1]

    def explain(self, spec: QuerySpec) -> Plan:
        if spec.aggregates:
            prepared = self._prepare(spec, lambda c: c.aggregate(spec, _ASKED))
        else:
            names = versioned_schema(spec.type).names
            prepared = self._prepare(spec, lambda c: c.select(spec, _ASKED, names), also=spec.via)
        with prepared.cursor, self._engine.duck.errors():
            text, tree = (
                prepared.execute(f"EXPLAIN {form}").fetchall()[0][1]
                for form in ("", "(FORMAT json) ")
            )
        head = self._engine.chain.known_head()
        assert head is not None
        return explained(
            spec, head.head, prepared.plans, prepared.statement, text, orjson.loads(tree)
        )

    def sql(self, statement: str, parameters: Parameters | None = None) -> Rows:
        engine = self._engine
        engine.sql_duck.open_ahead()
        head = engine.chain.read_head().head
        self._tell_head(head)

        def provide(tables: Tables) -> Callable[[duckdb.DuckDBPyConnection], None]:
            window = self._window(When(), head)
            plans, brought = self._opened(head, window, list(tables.values()))
            if any(isinstance(name, str) and name.startswith("s3://") for name in brought.values()):
                engine.sql_duck.reach_s3()

            def create(cursor: duckdb.DuckDBPyConnection) -> None:
                for name, plan in zip(tables, plans, strict=True):
                    ctes = visible(engine.scanner, cursor, plan, _ASKED, brought=brought)
                    columns = ", ".join(map(quoted, versioned_schema(plan.spec).names))
                    cursor.execute(
                        f"CREATE TEMP VIEW {quoted(name)} AS "
                        f"WITH {', '.join(ctes)} SELECT {columns} FROM {_ASKED}"
                    )

            return create

        types = StoredTypes(engine.type_refs(head), lambda refs: engine.stored_types(head, refs))
        return run_sql(engine.sql_duck, statement, parameters, types, provide)

    # --- for readers elsewhere ------------------------------------------------------------------

    def plan(self, spec: TypeSpec, when: When | None = None) -> TypePlan:
        """The files that hold the rows of a type, for whoever scans them elsewhere; none is opened.

        It is good for ever: commits and compactions that come later change nothing about it.
        """
        return self._planned(spec, when or When())[1]

    def plan_at(self, head: Head, spec: TypeSpec, window: CommitWindow) -> TypePlan:
        """The same as of a head that is at hand."""
        (plan,) = self._plan(head, window, [spec], (), None)
        if not self._engine.scanner.has(plan.files):
            (plan,) = self._plan(head, window, [spec], (), None, trust_index=False)
        return plan

    def key_splits(self, spec: TypeSpec, when: When) -> list[str]:
        """As `Repository.key_splits` promises them: where files end, some rows apart."""
        head = self._engine.chain.read_head().head
        (plan,) = self._plan(head, self._window(when, head), [spec], (), None)
        ends = [(item.file.leading_keys.high, max(0, item.file.row_count)) for item in plan.rows]
        splits: list[str] = []
        rows = 0
        for end, count in sorted((end, count) for end, count in ends if end is not None):
            rows += count
            if rows >= _SPLIT_ROWS and end not in splits[-1:]:
                splits.append(end)
                rows = 0
        return splits

    def plan_changes(self, spec: TypeSpec, *, since: int, upto: int) -> list[ChangePlan]:
        """Shares of what the commits after `since` up to `upto` changed, with operations."""
        head, span = self._planned(spec, When(as_of=upto, history=True, since=since))
        (everything,) = self._plan(head, replace(span.window, since=0), [spec], (), None)
        return change_shares(span, everything)

    def scan(
        self,
        plan: TypePlan | ChangePlan,
        columns: Mapping[str, str],
        shown: Sequence[str],
        condition: str | None = None,
    ) -> Rows:
        """The rows of a plan, or of a share of one, in no order.

        `columns` are names with the stored columns behind them (of `versioned_schema`, for changes
        `change_schema`); `condition` is SQL over them, and `shown` are those that are returned.
        """
        return scan_share(self._engine, plan, columns, shown, condition)

    def latest(self, spec: TypeSpec, head: Head) -> Iterator[pa.RecordBatch]:
        """All latest rows as of a head, in the row schema and in no order."""
        plan = self.plan_at(head, spec, CommitWindow(head.commit_id))
        names = row_schema(spec).names
        return self.scan(plan, {name: name for name in names}, names).batches

    def _planned(self, spec: TypeSpec, when: When) -> tuple[Head, TypePlan]:
        head = self._engine.chain.read_head().head
        window = self._window(when, head)
        (plan,) = self._plan(head, window, [spec], (), None)
        if self._engine.scanner.has(plan.files):
            return head, plan
        head = self._engine.chain.read_head().head
        (plan,) = self._plan(head, window, [spec], (), None, trust_index=False)
        return head, plan

    def written_values(
        self,
        spec: TypeSpec,
        field: str,
        window: CommitWindow,
        alike: Callable[[Any, Any], bool],
    ) -> Iterator[tuple[int, Any]]:
        """As `Repository.written_values` promises them: of all versions in the window."""
        head = self._engine.chain.read_head().head
        try:
            (plan,) = self._plan(head, window, [spec], (), None)
            yield from self._values_of(plan, field, alike)
        except MissingFileError:
            head = self._engine.chain.read_head().head
            (plan,) = self._plan(head, window, [spec], (), None, trust_index=False)
            yield from self._values_of(plan, field, alike)

    def _values_of(
        self, plan: TypePlan, field: str, alike: Callable[[Any, Any], bool]
    ) -> Iterator[tuple[int, Any]]:
        (storage,) = [each.storage for each in plan.spec.fields if each.name == field]
        unclear = []
        for item in plan.rows:
            low, high = field_bounds(item.file, field, storage)
            if item.stored is not None or item.entry.min_commit_id < item.entry.max_commit_id:
                unclear.append(item)  # of several commits: its rows tell of which
            elif low is not None and high is not None and alike(low, high):
                yield item.entry.max_commit_id, low
            elif not holds_only_nulls(item.file, field):
                unclear.append(item)
        if unclear:
            columns = {"commit_id": "commit_id", field: field}
            rows = self.scan(replace(plan, rows=tuple(unclear)), columns, list(columns))
            for batch in rows.batches:
                yield from distinct_values(batch, alike)

    # --- reads by identity ----------------------------------------------------------------------

    def read(self, spec: TypeSpec, window: ReadWindow, keys: pa.Table | None = None) -> pa.Table:
        """Rows of a window, as `Repository.read` promises them."""
        head, early = self._begin([spec])
        upto = head.commit_id if window.as_of is None else _clamp(window.as_of, head)
        seen = CommitWindow(upto, max(window.since or 0, 0), window.history)
        return self._fetch(head, spec, seen, keys, early)[1]

    def read_at(
        self, head: Head, spec: TypeSpec, window: CommitWindow, keys: pa.Table | None = None
    ) -> pa.Table:
        """The same as of a head that is at hand."""
        return self._fetch(head, spec, window, keys)[1]

    def _fetch(
        self,
        head: Head,
        spec: TypeSpec,
        window: CommitWindow,
        keys: pa.Table | None,
        early: Early | None = None,
    ) -> tuple[TypePlan, pa.Table]:
        """`keys` may be some of the identity columns."""
        schema = versioned_schema(spec)
        (plan,), brought = self._opened(head, window, [spec], keys=keys, early=early)
        if keys is not None and not keys.num_rows:
            return plan, schema.empty_table()
        columns = ", ".join(map(quoted, schema.names))
        by = ["commit_id", *spec.identity] if window.history else spec.identity
        with self._engine.duck.cursor() as cursor, self._engine.duck.errors():
            wanted = None
            if keys is not None:
                wanted = KeyTable("wanted", keys)
                cursor.register(wanted.name, keys)
            ctes = visible(
                self._engine.scanner, cursor, plan, _ASKED, brought=brought, wanted=wanted
            )
            sql = (
                f"WITH {', '.join(ctes)} SELECT {columns} FROM {_ASKED} "
                f"ORDER BY {', '.join(map(quoted, by))}"
            )
            table = self._engine.duck.run(
                cursor,
                lambda: cursor.execute(sql).to_arrow_table(),
                columns=len(schema),
                frugal=lambda: cursor.execute(in_steps(sql, _ASKED)).to_arrow_table(),
            )
            return plan, table.cast(schema)

    def _head(self) -> Head:
        self._engine.scanner.open_ahead()
        head = self._engine.chain.read_head().head
        self._tell_head(head)
        return head

    def _begin(self, specs: Sequence[TypeSpec]) -> tuple[Head, Early]:
        """The head, and what is known of these types without having waited for it."""
        self._engine.scanner.open_ahead()
        last_seen = self._engine.chain.known_head()
        expected = last_seen.head if last_seen is not None else self._engine.opened_with
        head, early = self._engine.versions.read_early(specs, expected)
        self._tell_head(head)
        return head, early

    def _tell_head(self, head: Head) -> None:
        if self._on_head is not None:
            self._on_head(head.commit_id)

    # --- parts ----------------------------------------------------------------------------------

    def _prepare(
        self,
        spec: QuerySpec,
        make: Callable[[Compiler], Statement],
        *,
        also: Sequence[TypeSpec] = (),
    ) -> _PreparedQuery:
        """`also` are types whose files are planned, for `explain`, but not read."""
        engine = self._engine
        head, early = self._begin([spec.type])
        window = self._window(spec.when, head)
        sides: list[Side] = [s for s, asks in (("left", spec.left), ("right", spec.right)) if asks]  # type: ignore[misc]
        ends = {side: self._end(spec.type, side, head) for side in sides}
        compiler = Compiler(
            "duckdb", "columns", endpoints={side: f"{side}_entities" for side in sides}
        )
        conjuncts = compiler.conjuncts(spec.where)
        (own, *others), brought = self._opened(
            head,
            window,
            [spec.type, *ends.values(), *also],
            conjuncts=conjuncts,
            unread=len(also),
            early=early,
        )
        given: dict[str, Any] = {}
        for conjunct in conjuncts:
            if conjunct.reach in ("identity", "typed"):
                given |= conjunct.parameters
        cursor = engine.duck.cursor()
        try:
            with engine.duck.errors():
                ctes = visible(
                    engine.scanner, cursor, own, _ASKED, brought=brought, conjuncts=conjuncts
                )
                for side, plan in zip(sides, others, strict=False):
                    ctes += visible(
                        engine.scanner, cursor, plan, f"{side}_entities", brought=brought
                    )
            body = make(compiler)
            statement = Statement(
                f"WITH {', '.join(ctes)} {body.sql}", {**given, **body.parameters}, body.columns
            )
            return _PreparedQuery(cursor, statement, (own, *others))
        except BaseException:
            cursor.close()
            raise

    def _end(self, relation: TypeSpec, side: Side, head: Head) -> TypeSpec:
        return endpoint_spec(relation, side, lambda ref: self._engine.stored_types(head, [ref]))

    def _opened(
        self,
        head: Head,
        window: CommitWindow,
        specs: Sequence[TypeSpec],
        *,
        conjuncts: Sequence[Conjunct] = (),
        keys: pa.Table | None = None,
        unread: int = 0,
        early: Early | None = None,
    ) -> tuple[list[TypePlan], Brought]:
        """Plans of the types, and the files they name, but for those of the last `unread`.

        `conjuncts` and `keys` are about the first type. Where an index names what is not there
        (any more), the log itself is asked, anew: a purge may have gone by since.
        """
        try:
            plans = self._plan(head, window, specs, conjuncts, keys, early=early)
            return plans, _bring(self._engine, plans[: len(plans) - unread])
        except MissingFileError:
            head = self._engine.chain.read_head().head
            plans = self._plan(head, window, specs, conjuncts, keys, trust_index=False)
            return plans, _bring(self._engine, plans[: len(plans) - unread])

    def _plan(
        self,
        head: Head,
        window: CommitWindow,
        specs: Sequence[TypeSpec],
        conjuncts: Sequence[Conjunct],
        keys: pa.Table | None,
        *,
        trust_index: bool = True,
        early: Early | None = None,
    ) -> list[TypePlan]:
        engine = self._engine
        resolutions = engine.versions.resolve_all(
            specs,
            head,
            trust_index=trust_index,
            only=window.schema_version,
            upto=window.upto,
            history=window.history,
            early=early,
        )
        plans = []
        for n, (spec, resolution) in enumerate(zip(specs, resolutions, strict=True)):
            top = engine.versions.type_head(spec, head)
            as_stored = n == 0 and window.schema_version is not None
            if not as_stored and not (top is not None and top.is_dropped):
                check_schema(engine.chain, head, spec, top)
            plans.append(
                plan_type(
                    spec,
                    top,
                    resolution,
                    window,
                    conjuncts=conjuncts if n == 0 else (),
                    keys=keys if n == 0 else None,
                    v1=engine.v1,
                    older=self._older(spec, head, top, resolution, window),
                )
            )
        return plans

    def _older(
        self,
        spec: TypeSpec,
        head: Head,
        top: TypeHead | None,
        resolution: Resolution,
        window: CommitWindow,
    ) -> Mapping[int, TypeSpec]:
        """The type in the versions whose rows v1 reads together with those of the current one."""
        if not self._engine.v1 or top is None or not top.past_versions:
            return {}
        within = resolution.within(since=window.since, upto=window.upto)
        numbers = {entry.schema_version_id for entry in within} - {top.schema_version_id}
        if not numbers or window.schema_version is not None:
            return {}
        records = state.schema_records(self._engine.chain, head, [spec.ref])[spec.ref]
        stored = {
            number: recorded_spec(spec.ref, replace(top, schema_version_id=number), record)
            for number, record in records.items()
        }
        # Fields are followed by the ids that are stored; a class has its own.
        current = stored[top.schema_version_id]
        ids = {f.field_id: spec.field(f.name).field_id for f in current.fields}
        # One that another implementation's index does not tell was before all others.
        first = stored[min(stored)]
        return {number: _with_ids(stored.get(number, first), ids) for number in numbers}

    def _window(self, when: When, head: Head) -> CommitWindow:
        upto = head.commit_id if self._pinned is None else _clamp(self._pinned, head)
        if when.as_of is not None:
            asked = self._engine.commit_at(head, when.as_of)
            beyond = isinstance(when.as_of, int) and when.as_of > upto
            if self._pinned is not None and (beyond or asked > upto):
                raise after_pin(when, upto)
            upto = asked
        return CommitWindow(upto, when.since or 0, when.history, when.schema_version)

    def _stream(self, prepared: _PreparedQuery, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with self._engine.duck.errors():
            for batch in prepared.stream(self._engine.duck).batches():
                yield batch.cast(schema)


def _sum_overflow(spec: QuerySpec) -> OverflowError:
    return OverflowError(
        f"sum over {spec.type.name}: the result does not fit into 64 bits (38 digits for decimals)"
    )


def _with_ids(spec: TypeSpec, ids: Mapping[int, int]) -> TypeSpec:
    """A type whose fields have other ids; those that are gone have none that anybody knows."""
    fields = (replace(f, field_id=ids.get(f.field_id, -f.field_id)) for f in spec.fields)
    return replace(spec, fields=tuple(fields))


def _bring(engine: Engine, plans: Sequence[TypePlan]) -> Brought:
    return engine.scanner.bring((plan.spec, item) for plan in plans for item in plan.files)


def _remarks(plans: Sequence[TypePlan]) -> tuple[Diagnostic, ...]:
    """Those on the first type that has any: on the queried one before others."""
    return next((plan.diagnostics for plan in plans if plan.diagnostics), ())


def _clamp(commit_id: int, head: Head) -> int:
    return min(max(commit_id, 0), head.commit_id)
