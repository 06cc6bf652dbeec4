"""Reading types into Spark: latest, as of a point in history, or all versions.

Promise: a DataFrame shows one commit for ever. Its files are named when it is made, so commits,
compactions and other heads that come between making and running it change nothing; purging files
(`onto gc --purge-compacted`) leaves them a reader's grace. Conditions on values never decide
before it is known which version of an identity is the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import functions

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.query.reference import Reference
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.object.read.files import versioned_schema
from storage_engine.repository.object.read.plan import TypePlan
from storage_engine.repository.open import MEMORY
from storage_engine.repository.protocol import Repository
from storage_engine.runtime.session import Session
from storage_engine.spark.driver import commit_of, find_type, opened, smallest_memory
from storage_engine.spark.scans import Scan, in_arrow, scan_of
from storage_engine.spark.schema import (
    COMMIT_ID,
    chosen_columns,
    spark_schema,
    stored_columns,
)
from storage_engine.spark.staged_parts import exchanged

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# Keys of newer versions go to every executor as long as its memory has room for them: bytes of it
# for each, and for each character of a key. With more of them all rows are shuffled and sorted,
# which takes several times as long.
_MEMORY_PER_ROW, _MEMORY_PER_CHARACTER = 400, 4
_KEY_CHARACTERS = 64  # where the log does not tell
_HASH = "__hash"


def read_entities(
    spark: SparkSession, type: Any, source: Session | str, **options: Any
) -> DataFrame:
    """The entities of a type. Options are those of `read_type`."""
    return _read(spark, type, source, "entity", **options)


def read_relations(
    spark: SparkSession, type: Any, source: Session | str, **options: Any
) -> DataFrame:
    """The relations of a type. Options are those of `read_type`."""
    return _read(spark, type, source, "relation", **options)


def read_type(
    spark: SparkSession,
    type: Any,
    source: Session | str,
    *,
    branch: str | None = None,
    as_of: Reference | None = None,
    history: bool = False,
    since: int | None = None,
    columns: Iterable[str] | None = None,
    filter: str | Column | None = None,
    with_commit_id: bool = False,
) -> DataFrame:
    """The rows of a type, given as a class, a TypeSpec or the name that it is stored under.

    source:          a Session, or a storage URI
    branch:          the branch to read; the session's own, or main, when left out
    as_of:           a commit id, an instant, a tag, or a commit of a branch (`run/42@17`); the head
                     as it is now when left out
    history:         every version, with its `commit_id` in front, instead of the newest
    since:           every version that came after this commit
    columns:         some of the columns; the others are not read
    filter:          a Spark SQL condition or a Column, over all columns
    with_commit_id:  latest rows with the commit that wrote them in front

    Columns are the field names; a relation also has `left_key`, `right_key` and its instance key
    under its own name. Nested fields are strings that hold JSON.
    """
    return _read(
        spark,
        type,
        source,
        None,
        branch=branch,
        as_of=as_of,
        history=history,
        since=since,
        columns=columns,
        filter=filter,
        with_commit_id=with_commit_id,
    )


def _read(
    spark: SparkSession,
    type: Any,
    source: Session | str,
    kind: Kind | None,
    *,
    branch: str | None = None,
    as_of: Reference | None = None,
    history: bool = False,
    since: int | None = None,
    columns: Iterable[str] | None = None,
    filter: str | Column | None = None,
    with_commit_id: bool = False,
) -> DataFrame:
    with opened(source, branch=branch, as_of=as_of) as repository:
        spec = find_type(repository, type, kind=kind)
        versions = history or since is not None
        wanted = chosen_columns(spec, columns)
        when = When(commit_of(repository, as_of), history=versions, since=since)
        shown = list(stored_columns(spec))
        if wanted is not None and filter is None:
            shown = [name for name in shown if name in wanted]
        with_commit_id = with_commit_id or versions or COMMIT_ID in (wanted or ())
        frame = _rows(spark, repository, spec, when, shown, with_commit_id=with_commit_id)
    if filter is not None:
        try:
            frame = frame.filter(filter)
        except AnalysisException as error:
            first_line = str(error).partition("\n")[0]
            raise ConfigurationError(f"filter {filter!r} on {spec.name}: {first_line}") from error
    if wanted is not None:
        lead = [COMMIT_ID] if with_commit_id and COMMIT_ID not in wanted else []
        frame = frame.select(*lead, *wanted)
    return frame


def _rows(
    spark: SparkSession,
    repository: Repository,
    spec: TypeSpec,
    when: When,
    shown: Sequence[str],
    *,
    with_commit_id: bool,
) -> DataFrame:
    """The rows with these columns under the names that users know them by."""
    stored = [stored_columns(spec)[name] for name in shown]
    lead = [COMMIT_ID] if with_commit_id else []
    if (objects := repository.objects) is not None:
        plan = objects.executor().plan(spec, when)
        if not plan.rows:
            schema = spark_schema(spec, with_commit_id=with_commit_id)
            return spark.createDataFrame([], schema).select(*lead, *shown)
        if plan.newer:  # the key is read anyway, so it stands for the field that it is made of
            stored = ["entity_key" if name == spec.primary_key else name for name in stored]
        scan = scan_of(spark, objects.store, objects.config, spec, plan.files)
        rows = visible(scan, plan, stored, with_commit_id=with_commit_id)
    else:
        rows = _by_engine(spark, repository, spec, when, [*lead, *stored])
    renamed = [functions.col(c).alias(name) for c, name in zip(stored, shown, strict=True)]
    return rows.select(*lead, *renamed)


def visible(
    scan: Scan, plan: TypePlan, columns: Sequence[str], *, with_commit_id: bool
) -> DataFrame:
    """The rows of a plan that a reader sees.

    A row is dropped where a newer file has its identity, for which keys and commits of those files
    are read, and no more. So Catalyst may push any condition on values below: it picks candidates
    only. One file set with unique identities is a plain scan.
    """
    condition = plan.window.condition([item.entry for item in plan.rows])
    identity = plan.spec.identity
    needs_commit = bool(with_commit_id or condition or plan.newer)
    keys = [name for name in identity if name not in columns] if plan.newer else []
    rows = scan.read(plan.rows, [*keys, *columns], with_commit_id=needs_commit).alias("q")
    if condition:
        rows = rows.where(condition)
    if plan.newer:
        newer = scan.read(plan.newer, identity, with_commit_id=True).alias("q")
        condition = plan.window.condition([item.entry for item in plan.newer])
        if condition:
            newer = newer.where(condition)
        if _fits_everywhere(newer.sparkSession, plan):
            newer = newer.hint("broadcast")
        newer = newer.withColumn(_HASH, functions.xxhash64(*identity))
        rows = rows.alias("q").join(newer.alias("n"), _overtaken(identity), "left_anti")
    lead = [COMMIT_ID] if with_commit_id else []
    return rows.select(*lead, *columns)


def _overtaken(identity: Sequence[str]) -> Column:
    """Whether `n` is a newer version of `q`. Joined by one number, for which Spark has a table that
    is several times as fast as that for texts; so keys are not compared by `=`, which Spark would
    take for another key of the join."""
    hashed = functions.xxhash64(*(functions.col(f"q.{name}") for name in identity))
    same = " AND ".join(
        f"n.`{name}` >= q.`{name}` AND n.`{name}` <= q.`{name}`" for name in identity
    )
    newer = functions.expr(f"{same} AND n.{COMMIT_ID} > q.{COMMIT_ID}")
    return (hashed == functions.col(f"n.{_HASH}")) & newer


def _fits_everywhere(spark: SparkSession, plan: TypePlan) -> bool:
    """Whether the keys of newer versions are little for the driver and for every executor."""
    keys = [item.file.keys(name) for item in plan.newer for name in plan.spec.identity]
    lengths = [len(bound) for bounds in keys for bound in bounds if bound is not None]
    characters = len(plan.spec.identity) * max(lengths, default=_KEY_CHARACTERS)
    each = _MEMORY_PER_ROW + _MEMORY_PER_CHARACTER * characters
    return sum(item.file.row_count for item in plan.newer) <= smallest_memory(spark) // each


def _by_engine(
    spark: SparkSession, repository: Repository, spec: TypeSpec, when: When, columns: list[str]
) -> DataFrame:
    """SQLite: one task reads the rows through the engine, on whatever machine it runs."""
    if repository.uri.endswith(MEMORY):
        raise ConfigurationError(
            f"{repository.uri} lives in the memory of this process, where Spark's workers cannot "
            "read it; give a file or a directory"
        )
    schema = exchanged(pa.schema([versioned_schema(spec).field(name) for name in columns]))
    plain = TypeSpec.from_schema_dict(spec.schema_dict())  # without the user's class
    work = partial(read_by_engine, repository.uri, "{}", plain, when, schema)
    return in_arrow(spark, 1, work, schema)


def read_by_engine(
    uri: str, config: str, spec: TypeSpec, when: When, schema: pa.Schema, _numbers: Iterable[int]
) -> Iterator[pa.RecordBatch]:
    """Rows of a storage without files that a task could be given; `when.as_of` is a commit id."""
    assert isinstance(when.as_of, int)
    asked = QuerySpec(spec, when=When(history=when.history, since=when.since))
    with opened(uri, OntologiaConfig.model_validate_json(config)) as repository:
        for batch in repository.executor(when.as_of).rows(asked).batches:
            yield batch.select(schema.names).cast(schema)
