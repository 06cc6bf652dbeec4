"""How `onto query` answers: the line is checked, one commit is fixed, the executor is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import typer

from storage_engine.cli.arguments import Invocation
from storage_engine.cli.errors import prompt_interrupts
from storage_engine.cli.query import FORMATS, TABLE_ROWS, Line
from storage_engine.cli.query_terms import (
    Types,
    chosen,
    condition,
    order_keys,
    parameters,
    row_columns,
)
from storage_engine.cli.results import (
    Answer,
    Format,
    OutputColumn,
    describe,
    refuse_terminal,
    write,
)
from storage_engine.errors import OntologiaError, SchemaMetadataError
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.model.validation import INT64_MAX, unknown_name
from storage_engine.query.aggregates import count
from storage_engine.query.reference import Reference, parse_reference
from storage_engine.query.results import Diagnostic, Plan, SqlExecutor, Traversal, target_keys
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.protocol import Repository

_PATHS_AT_ONCE = 8 * 1024
_PLAN_COLUMNS = ["explain_key", "explain_value"]  # of what EXPLAIN gives
_COMPUTING = re.compile(r"(Conversion|Out of Range|Invalid Input|Invalid Type) Error: ")


@dataclass(frozen=True)
class Question:
    """A line that makes sense so far, and the storage to ask, at one commit."""

    invocation: Invocation
    ctx: typer.Context
    line: Line
    form: Format
    types: Types
    executor: SqlExecutor
    commit_id: int
    version: Callable[[Kind, str, int], TypeSpec]

    def spec(self, kind: Kind, name: str, limit: int | None) -> QuerySpec:
        line = self.line
        if line.schema_version is not None:
            type_spec = self.version(kind, name, line.schema_version)
        else:
            type_spec = self.types.find(kind, name)
        return QuerySpec(
            type_spec,
            where=condition(self.types, type_spec, line.filters),
            order=order_keys(type_spec, line.order_by),
            limit=None if limit is None else min(limit, INT64_MAX),
            offset=min(line.offset or 0, INT64_MAX),
            when=self.when(),
        )

    def when(self) -> When:
        line = self.line
        version = line.schema_version
        if line.history_since is not None:
            since = min(max(line.history_since, 0), INT64_MAX)
            return When(history=True, since=since, schema_version=version)
        if line.with_history:
            return When(history=True, schema_version=version)
        as_of = None if line.as_of is None else self.commit_id
        return When(as_of=as_of, schema_version=version)

    @property
    def table_rows(self) -> int:
        return self.line.limit or TABLE_ROWS

    def rows_asked(self) -> int | None:
        """Tables ask for one more than they show, to see whether there are more."""
        return self.table_rows + 1 if self.form is Format.table else self.line.limit

    def write(self, answer: Answer) -> None:
        limit = self.table_rows if self.form is Format.table else answer.limit
        write(self.invocation.output, self.form, replace(answer, limit=limit))

    def show_plan(self, plan: Plan) -> None:
        output = self.invocation.output
        if self.form is Format.json:
            output.document({"plan": plan.text, **plan.facts})
        else:
            for text in plan.text.splitlines():
                output.line(text)


# --- commands ---------------------------------------------------------------------------------


def answer_rows(
    invocation: Invocation, ctx: typer.Context, line: Line, kind: Kind, name: str
) -> None:
    with _asked(invocation, ctx, line) as asked:
        with _mistakes(ctx):
            spec = asked.spec(kind, name, asked.rows_asked())
            named = dict(row_columns(spec.type))
            names = chosen(line.columns, list(named))
            counted = _counted(spec, line) if line.count else None
        if line.explain:
            asked.show_plan(asked.executor.explain(counted or spec))
            return
        members = {"kind": kind, "type": spec.type.name, "commit_id": asked.commit_id}
        if counted is not None:
            _show_count(asked, spec, counted, members)
            return
        rows = asked.executor.rows(spec)
        nested = _nested(spec.type)
        places = {column: rows.schema.get_field_index(column) for column in named.values()}
        columns = [
            OutputColumn(n, places[named[n]], named[n] in nested, declared=True) for n in names
        ]
        asked.write(Answer(rows.schema, rows.batches, columns, members, rows.diagnostics))


def answer_paths(
    invocation: Invocation, ctx: typer.Context, line: Line, name: str, via: Sequence[str]
) -> None:
    with _asked(invocation, ctx, line) as asked:
        with _mistakes(ctx):
            # The limit is about where paths start: without one, all are followed.
            limit = None if line.limit is None else asked.rows_asked()
            spec = _with_steps(asked.spec("entity", name, limit), asked.types, via)
            target = _target(spec, asked.types)
            columns = _path_columns(spec, target, line.columns, asked.form)
        if line.explain:
            asked.show_plan(asked.executor.explain(spec))
            return
        traversal = asked.executor.traverse(spec)
        members = {
            "kind": "path",
            "type": spec.type.name,
            "via": [step.name for step in spec.via],
            "commit_id": asked.commit_id,
        }
        schema, batches = _flattened(spec, target, traversal, asked)
        answer = Answer(schema, batches, columns, members, traversal.diagnostics)
        if asked.form is Format.table and line.limit is not None:
            more = traversal.sources.num_rows > line.limit
            write(invocation.output, asked.form, replace(answer, more=more))
        else:
            asked.write(answer)


def answer_sql(
    invocation: Invocation, ctx: typer.Context, line: Line, statement: str, params: Sequence[str]
) -> None:
    with _asked(invocation, ctx, line) as asked:
        with _mistakes(ctx):
            values = parameters(params) or None
            text = f"EXPLAIN {statement}" if line.explain else statement
            rows = asked.executor.sql(text, values)
        batches = _checked(ctx, rows.batches)
        # A plan is a picture of many lines, also when the statement itself asks for one.
        drawn = asked.form is Format.table and rows.schema.names == _PLAN_COLUMNS
        if line.explain or drawn:
            told = [told for batch in batches for told in batch.column(1).to_pylist()]
            facts = {"engine": "duckdb", "head": asked.commit_id, "sql": statement}
            asked.show_plan(Plan("\n".join(told), facts))
            return
        limit = asked.rows_asked()
        columns = [OutputColumn(name, n) for n, name in enumerate(_distinct(rows.schema.names))]
        members = {"kind": "sql", "commit_id": asked.commit_id}
        cut = batches if limit is None else _first(batches, limit)
        asked.write(Answer(rows.schema, cut, columns, members, rows.diagnostics))


# --- the line ---------------------------------------------------------------------------------


@contextmanager
def _asked(invocation: Invocation, ctx: typer.Context, line: Line) -> Iterator[Question]:
    form = _format(invocation, ctx, line)
    refuse_terminal(form, ctx)
    _check_time(ctx, line)
    declared = invocation.models()
    with _mistakes(ctx):
        at = None if line.as_of is None else parse_reference(line.as_of, "--as-of")
    with prompt_interrupts(invocation.output.abandon), invocation.repository() as repository:
        head = repository.head_commit_id()
        with _mistakes(ctx):
            commit_id = head if at is None else min(repository.commit_at(at), head)
        _note_reference(invocation, at, line.as_of, commit_id)
        # Everything is read as of one commit, and the JSON names it: the storage may move on.
        executor = repository.executor(commit_id)
        stored = _StoredOrDropped(repository)
        types = Types(declared, repository.type_refs, stored.types)
        version = stored.version
        yield Question(invocation, ctx, line, form, types, executor, commit_id, version)


@dataclass(frozen=True)
class _StoredOrDropped:
    """Types as the storage has them, or had them before they were dropped: what is read of those
    says so itself."""

    repository: Repository

    def types(self, refs: Sequence[tuple[str, str]]) -> Sequence[TypeSpec]:
        stored = self.repository.stored_types(refs)
        if stored:
            return stored
        return [history.last.spec for history in self.repository.type_histories(refs).values()]

    def version(self, kind: Kind, name: str, number: int) -> TypeSpec:
        from storage_engine.runtime.reads import stored_version

        return stored_version(self.repository, name, number, kind).spec


def _format(invocation: Invocation, ctx: typer.Context, line: Line) -> Format:
    name = line.format
    if name is not None and name not in FORMATS:
        ctx.fail(f"--format: {unknown_name(name, FORMATS, what='format')}; use {_or(FORMATS)}")
    if invocation.settings.json and name not in (None, "json"):
        ctx.fail(f"--json contradicts --format {name}: use one of them")
    form = Format(name or ("json" if invocation.settings.json else "table"))
    invocation.output.json = form is Format.json  # errors, too
    if line.explain and form in (Format.csv, Format.arrow):
        ctx.fail(f"--explain is not available with --format {form}: use table or json")
    return form


def _check_time(ctx: typer.Context, line: Line) -> None:
    given = {
        "--as-of": line.as_of is not None,
        "--with-history": line.with_history,
        "--history-since": line.history_since is not None,
    }
    stated = [option for option, there in given.items() if there]
    if len(stated) > 1:
        ctx.fail(f"{' and '.join(stated)} contradict each other: use one of them")


def _note_reference(
    invocation: Invocation, at: Reference | None, text: str | None, commit_id: int
) -> None:
    if isinstance(at, int) and at > commit_id:
        invocation.output.note(f"commit {text} is not there yet: this is commit {commit_id}")
    if isinstance(at, datetime) and commit_id == 0:
        invocation.output.note(f"there was no commit at {text} yet")


@contextmanager
def _mistakes(ctx: typer.Context) -> Iterator[None]:
    """What the user got wrong is a usage error. Only around what looks at the user's texts."""
    try:
        yield
    except OntologiaError:
        raise
    except (ValueError, TypeError) as error:
        _fail(ctx, error)


def _fail(ctx: typer.Context, error: Exception) -> NoReturn:
    ctx.fail(str(error))


def _checked(ctx: typer.Context, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Some mistakes in a statement show only when rows are computed, such as a failing cast. Arrow
    hands on what DuckDB says then as an OSError."""
    try:
        with _mistakes(ctx):
            yield from batches
    except OSError as error:
        if not _COMPUTING.match(str(error)):
            raise
        ctx.fail(f"sql: {error}")


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


# --- counting ---------------------------------------------------------------------------------


def _counted(spec: QuerySpec, line: Line) -> QuerySpec:
    given = {
        "--order-by": line.order_by,
        "--limit": line.limit,
        "--offset": line.offset,
        "--columns": line.columns,
    }
    for option, value in given.items():
        if value:
            raise ValueError(f"--count takes all rows that match; leave out {option}")
    return replace(spec, order=(), limit=None, offset=0, aggregates=(("count", count()),))


def _show_count(
    asked: Question, spec: QuerySpec, counted: QuerySpec, members: Mapping[str, Any]
) -> None:
    table = asked.executor.aggregate(counted)
    number = int(table.column("count")[0].as_py())
    remarks: tuple[Diagnostic, ...] = ()
    if not number and asked.line.as_of is not None:  # there may be a reason for it
        remarks = asked.executor.rows(replace(spec, limit=0)).diagnostics
    output = asked.invocation.output
    if asked.form in (Format.csv, Format.arrow):
        batches = iter(table.to_batches())
        asked.write(Answer(table.schema, batches, [OutputColumn("count", 0)], {}, remarks))
        return
    for note in remarks:
        output.note(describe(note))
    if asked.form is Format.json:
        notes = [dict(note) for note in remarks]
        output.document({**members, "diagnostics": notes, "count": number})
    else:
        output.line(str(number))


# --- paths ------------------------------------------------------------------------------------


def _with_steps(spec: QuerySpec, types: Types, via: Sequence[str]) -> QuerySpec:
    for text in via:
        name, colon, way = text.partition(":")
        if colon and way != "backwards":
            raise ValueError(f"--via {text}: after the colon comes backwards")
        relation = types.find("relation", name)
        spec = spec.followed(relation, backwards=bool(colon), call=f"--via {text}")
    return spec


def _target(spec: QuerySpec, types: Types) -> TypeSpec | None:
    """The entity type in which paths end; None where nothing of it is stored."""
    try:
        return types.endpoint(spec.via[-1], spec.ends(len(spec.via) - 1)[1])
    except SchemaMetadataError:
        return None


def _path_columns(
    spec: QuerySpec, target: TypeSpec | None, given: Sequence[str], form: Format
) -> list[OutputColumn]:
    """All columns of the source, of each step and of the target, by where they are in a path's
    JSON. Tables show keys only, unless told."""
    columns: dict[str, OutputColumn] = {}
    keys: list[OutputColumn] = []
    width = 0
    last = [target] if target is not None else []
    for number, hop in enumerate([spec.type, *spec.via, *last]):
        place: tuple[str | int, ...] = ("relations", number - 1)
        if number in (0, len(spec.via) + 1):
            place = ("source",) if number == 0 else ("target",)
        nested = _nested(hop)
        places = {name: width + n for n, name in enumerate(_stored_names(hop))}
        for name, stored in row_columns(hop):
            label = ".".join(map(str, (*place, name)))
            columns[label] = OutputColumn(
                label, places[stored], stored in nested, (*place, name), declared=True
            )
        if number == 0:
            keys.append(OutputColumn(hop.name, places["entity_key"]))
        elif hop is not target:
            label = f"{number}. {hop.name}"
            if hop.instance_key is not None:
                keys.append(OutputColumn(f"{label}.{hop.instance_key}", places["instance_key"]))
            side = spec.ends(number - 1)[1]
            arrow = f"-> {hop.right}" if side == "right" else f"<- {hop.left}"
            keys.append(OutputColumn(f"{label} {arrow}", places[f"{side}_key"]))
        width += len(places)
    if form is Format.table and not given:
        return keys
    return [columns[name] for name in chosen(given, list(columns))]


def _flattened(
    spec: QuerySpec, target: TypeSpec | None, traversal: Traversal, asked: Question
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Paths as rows: the source's columns, then those of each step and of the target."""
    paths, tables = traversal.paths, [traversal.sources, *traversal.relations]
    if target is not None:
        relation, side, keys = target_keys(spec, traversal)
        targets = asked.executor.endpoints(QuerySpec(relation, when=asked.when()), side, keys)
        ends = traversal.relations[-1].column(f"{side}_key").take(paths.columns[-1])
        rows = pc.index_in(ends, value_set=targets.column("entity_key").combine_chunks())
        paths = paths.append_column("target", rows.cast(pa.int64()))
        tables.append(targets)
    schema = pa.schema(
        [
            column.with_name(f"{number}.{column.name}").with_nullable(True)
            for number, table in enumerate(tables)
            for column in table.schema
        ]
    )
    return schema, _path_batches(paths, tables, schema, asked)


def _path_batches(
    paths: pa.Table, tables: Sequence[pa.Table], schema: pa.Schema, asked: Question
) -> Iterator[pa.RecordBatch]:
    if asked.line.limit is not None:  # tables ask for one source more than they show
        paths = paths.filter(pc.less(paths.column("source"), asked.line.limit))
    for start in range(0, paths.num_rows, _PATHS_AT_ONCE):
        part = paths.slice(start, _PATHS_AT_ONCE)
        taken = [table.take(rows).columns for table, rows in zip(tables, part.columns, strict=True)]
        whole = pa.Table.from_arrays(list(chain.from_iterable(taken)), schema=schema)
        yield from whole.combine_chunks().to_batches()


# --- columns ----------------------------------------------------------------------------------


def _stored_names(spec: TypeSpec) -> list[str]:
    return ["commit_id", *spec.identity, *(field.name for field in spec.fields)]


def _nested(spec: TypeSpec) -> set[str]:
    return {field.name for field in spec.fields if field.storage == "json"}


def _distinct(names: Sequence[str]) -> list[str]:
    """`select a, a`: a second column of a name gets a number, so that JSON keeps both."""
    made: list[str] = []
    for name in names:
        label, number = name, 1
        while label in made or (number > 1 and label in names):
            number += 1
            label = f"{name}_{number}"
        made.append(label)
    return made


def _first(batches: Iterator[pa.RecordBatch], limit: int) -> Iterator[pa.RecordBatch]:
    left = limit
    for batch in batches:
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return
