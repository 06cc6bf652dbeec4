"""The `ontologia` data source: `spark.read.format("ontologia")`, SQL views, `df.write`, streams.

    spark.read.format("ontologia").option("storage_uri", uri).option("type", "Customer").load()

Options are texts, checked all at once; those for writing are IngestSpec's. A read is pinned when it
is loaded: each time it runs it shows the same commit. Executors scan their shares of the files with
the storage's own engine and hand Spark Arrow batches. Filters are not pushed down by Spark, whose
cached read plans then mix up filters (PySpark 4.3); the options `columns` and `filter` take their
place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import LongType, StringType, StructField, StructType

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError
from storage_engine.model.spec import TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.query.reference import Reference, parse_reference
from storage_engine.query.spec import When
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.object.read.plan import TypePlan
from storage_engine.repository.object.read.splits import OPERATION, ChangePlan, shares
from storage_engine.repository.protocol import Repository
from storage_engine.spark.driver import (
    SameBranch,
    commit_of,
    find_type,
    incarnation_of,
    opened,
)
from storage_engine.spark.ingest_spec import sink_options
from storage_engine.spark.reader import read_by_engine
from storage_engine.spark.schema import (
    COMMIT_ID,
    arrow_schema,
    chosen_columns,
    spark_schema,
    stored_columns,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COMMON = ("storage_uri", "branch", "type", "models")
_READ = (
    *_COMMON,
    "as_of",
    "history",
    "since",
    "columns",
    "filter",
    "with_commit_id",
    "changes",
    "max_commits",
)
_WRITE = sink_options()
_SPARKS_OWN = frozenset({"checkpointlocation", "path", "queryname"})  # in every sink's options
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class TypeLocation:
    """A type in a storage, on main or another branch. `config` is JSON, so that it travels."""

    uri: str
    type: str
    models: str | None
    config: str
    branch: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], option_names: tuple[str, ...]) -> Self:
        given = {name.lower(): value for name, value in options.items()}
        settings = {name.lower(): name for name in OntologiaConfig.model_fields}
        names = [*option_names, *settings]
        wrong = [
            f"{unknown_name(name, names, what='option')}"
            for name in given
            if name not in names and name not in _SPARKS_OWN
        ]
        if "path" in given:
            wrong.append("a path is given; the place of a storage goes into storage_uri")
        wrong += [
            f"the option {name} is missing"
            for name in ("storage_uri", "type")
            if not given.get(name, "").strip()
        ]
        if wrong:
            raise ConfigurationError(
                f"data source ontologia: {'; '.join(wrong)} "
                f"(options are {', '.join(option_names)}, and settings of OntologiaConfig)"
            )
        config = OntologiaConfig(**{settings[n]: v for n, v in given.items() if n in settings})
        return cls(
            given["storage_uri"],
            given["type"],
            given.get("models"),
            config.model_dump_json(),
            given.get("branch"),
        )

    @property
    def settings(self) -> OntologiaConfig:
        return OntologiaConfig.model_validate_json(self.config)

    def opened(self, as_of: Reference | None = None) -> AbstractContextManager[Repository]:
        return opened(self.uri, self.settings, branch=self.branch, as_of=as_of)


@dataclass(frozen=True)
class ReadOptions:
    """What `spark.read` and `spark.readStream` ask for."""

    place: TypeLocation
    as_of: Reference | None = None
    history: bool = False
    since: int | None = None
    columns: tuple[str, ...] | None = None
    filter: str | None = None
    with_commit_id: bool = False
    changes: bool = False
    max_commits: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        place = TypeLocation.parse(options, _READ)
        given = {name.lower(): value for name, value in options.items()}
        listed = [name.strip() for name in given.get("columns", "").split(",") if name.strip()]
        made = cls(
            place,
            as_of=parse_reference(given["as_of"]) if "as_of" in given else None,
            history=_flag(given, "history"),
            since=_number(given, "since", least=0),
            columns=tuple(listed) or None,
            filter=given.get("filter"),
            with_commit_id=_flag(given, "with_commit_id"),
            changes=_flag(given, "changes"),
            max_commits=_number(given, "max_commits", least=1),
        )
        if made.changes and made.history:
            raise ConfigurationError(
                "data source ontologia: history and changes contradict each other; changes are "
                "the history with an operation column"
            )
        return made


@dataclass(frozen=True)
class SinkOptions:
    """What `df.write` and `writeStream` ask for."""

    place: TypeLocation
    idempotency: tuple[str, int | str] | None = None
    app_id: str | None = None
    writing: Mapping[str, Any] = field(default_factory=dict)  # of `write_type`, as they are

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> Self:
        place = TypeLocation.parse(options, tuple(_WRITE))
        given = {name.lower(): value for name, value in options.items()}
        app_id, version = given.get("app_id"), given.get("version")
        if streaming and version is not None:
            raise ConfigurationError(
                "data source ontologia: a stream has no version, each batch is one by itself; "
                "leave the option out"
            )
        if not streaming and (app_id is None) != (version is None):
            raise ConfigurationError(
                "data source ontologia: app_id and version go together, to name a unit of work "
                "that is written once"
            )
        idempotency = None
        if app_id is not None and version is not None:
            idempotency = (app_id, int(version) if version.isdecimal() else version)
        writing: dict[str, Any] = {
            name: _number(given, name, least=1) if option.form == "size" else given[name]
            for name, option in _WRITE.items()
            if option.path == (name,) and option.flag.writer and name in given
        }
        return cls(place, idempotency, app_id, writing)


def _flag(given: Mapping[str, str], name: str) -> bool:
    value = given.get(name, "false").strip().lower()
    if value not in _FLAGS:
        raise ConfigurationError(
            f"data source ontologia: {name} takes true or false, not {given[name]!r}"
        )
    return _FLAGS[value]


def _number(given: Mapping[str, str], name: str, *, least: int) -> int | None:
    if name not in given:
        return None
    try:
        value = int(given[name])
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigurationError(
            f"data source ontologia: {name} takes a whole number from {least} on, not "
            f"{given[name]!r}"
        )
    return value


NAME = "ontologia"


def register(spark: SparkSession) -> None:
    """Make the format known to a Spark session."""
    spark.dataSource.register(OntologiaDataSource)


@dataclass(frozen=True)
class PinnedRead:
    """A read that is pinned to a commit, as plain data."""

    options: ReadOptions
    spec: TypeSpec  # without the user's class
    commit_id: int
    shown: tuple[str, ...]
    incarnation: str  # of the branch that it is a commit of; empty: main

    @classmethod
    def of(cls, options: ReadOptions) -> PinnedRead:
        with options.place.opened(options.as_of) as repository:
            place = replace(options.place, branch=repository.branch)
            stored = find_type(repository, place.type, models=place.models)
            made = cls(
                replace(options, place=place),
                spec := TypeSpec.from_schema_dict(stored.schema_dict()),
                commit_of(repository, options.as_of),
                _shown(options, spec),
                incarnation_of(repository),
            )
            made.check(repository)
        return made

    @contextmanager
    def opened(self) -> Iterator[Repository]:
        """The storage on the very branch that the read is pinned to."""
        with self.options.place.opened() as repository:
            SameBranch(self.incarnation).check(repository)
            yield repository

    @property
    def when(self) -> When:
        options = self.options
        return When(self.commit_id, options.history or options.since is not None, options.since)

    @property
    def columns(self) -> dict[str, str]:
        """All that a filter can name, with the stored columns behind."""
        lead = [COMMIT_ID, OPERATION] if self.options.changes else [COMMIT_ID]
        return {name: name for name in lead} | stored_columns(self.spec)

    @property
    def schema(self) -> StructType:
        lead = [
            StructField(COMMIT_ID, LongType(), nullable=False),
            StructField(OPERATION, StringType(), nullable=False),
        ]
        fields = {f.name: f for f in [*lead, *spark_schema(self.spec).fields]}
        return StructType([fields[name] for name in self.shown])

    def check(self, repository: Repository) -> None:
        """Before Spark builds on it: the filter can be asked, and the engine can answer."""
        if (objects := repository.objects) is not None:
            if self.options.filter is not None:
                plan = objects.executor().plan(self.spec, When(0, history=True))
                asked = ChangePlan(plan) if self.options.changes else plan
                for _ in self.scan(objects, asked):
                    pass
            return
        for name, given in (("filter", self.options.filter), ("changes", self.options.changes)):
            if given:
                raise ConfigurationError(
                    f"data source ontologia: the option {name} needs an object storage; "
                    f"{repository.uri} is a SQLite file: filter the DataFrame, or follow "
                    "session.changes()"
                )

    def scan(
        self, repository: ObjectRepository, plan: TypePlan | ChangePlan
    ) -> Iterator[pa.RecordBatch]:
        target = arrow_schema(self.schema)
        rows = repository.executor().scan(plan, self.columns, self.shown, self.options.filter)
        for batch in rows.batches:
            yield batch.cast(target)


def _shown(options: ReadOptions, spec: TypeSpec) -> tuple[str, ...]:
    if options.changes:
        named = [name for name in options.columns or () if name not in (COMMIT_ID, OPERATION)]
        chosen = chosen_columns(spec, named) if options.columns is not None else None
        return (COMMIT_ID, OPERATION, *(chosen or stored_columns(spec)))
    chosen = chosen_columns(spec, options.columns)
    shown = list(chosen if chosen is not None else stored_columns(spec))
    leads = options.history or options.since is not None or options.with_commit_id
    return tuple(shown if COMMIT_ID in shown or not leads else [COMMIT_ID, *shown])


@dataclass(frozen=True)
class Share(InputPartition):
    """What one task reads; no plan: all rows, through an engine without files."""

    plan: TypePlan | ChangePlan | None = None


class Nothing(InputPartition):
    """Spark makes a partition of its own where a list is empty; this one says what it is."""

    def __init__(self) -> None:
        super().__init__(None)


def partitions_of(plans: Sequence[TypePlan | ChangePlan]) -> list[InputPartition]:
    return [Share(plan) for plan in plans] or [Nothing()]


def read_share(asked: PinnedRead, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, Share):
        return
    place = asked.options.place
    if partition.plan is not None:
        # Closed at the end: Python workers are killed without a chance to remove spill folders.
        # The plan names the files, so that it does not matter what became of the branch since.
        with opened(place.uri, place.settings) as repository:
            objects = repository.objects
            assert objects is not None, "plans are of files"
            yield from asked.scan(objects, partition.plan)
        return
    target = arrow_schema(asked.schema)
    stored = pa.schema([target.field(name).with_name(asked.columns[name]) for name in asked.shown])
    for batch in read_by_engine(place.uri, place.config, asked.spec, asked.when, stored, ()):
        yield pa.RecordBatch.from_arrays(batch.columns, schema=target)


class BatchReader(DataSourceReader):
    """Reads what was asked, as of the commit it is pinned to."""

    def __init__(self, asked: PinnedRead) -> None:
        self._asked = asked

    def partitions(self) -> list[InputPartition]:
        asked = self._asked
        with asked.opened() as repository:
            if (objects := repository.objects) is None:
                return [Share()]
            if asked.options.changes:
                since = asked.options.since or 0
                return partitions_of(
                    objects.executor().plan_changes(asked.spec, since=since, upto=asked.commit_id)
                )
            return partitions_of(shares(objects.executor().plan(asked.spec, asked.when)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_share(self._asked, partition)


class OntologiaDataSource(DataSource):
    """Spark makes one for each load and save, and pickles it after it was asked for its schema."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._asked: PinnedRead | None = None

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        self._asked = PinnedRead.of(ReadOptions.parse(self.options))
        return self._asked.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self._pinned())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        from storage_engine.spark.streaming import ChangeReader

        return ChangeReader(self._pinned())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from storage_engine.spark.streaming import BatchSink, Sink

        options = SinkOptions.parse(self.options, streaming=False)
        return BatchSink(Sink.plan(options, schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from storage_engine.spark.streaming import Sink, StreamSink

        options = SinkOptions.parse(self.options, streaming=True)
        return StreamSink(Sink.plan(options, schema, overwrite=overwrite), options.app_id)

    def _pinned(self) -> PinnedRead:
        if self._asked is None:
            raise ConfigurationError(
                "data source ontologia: the schema is that of the type; leave .schema(...) out, "
                "and name some columns in the option columns"
            )
        return self._asked
