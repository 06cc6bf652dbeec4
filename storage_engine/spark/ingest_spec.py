"""What an ingestion is asked to do, as data: read this, map it so, write it there.

`IngestSpec` is the one declaration of its options. From its fields come the command line and its
`--help` (`storage_engine.spark.jobs.arguments`), the members of a YAML file (`--order FILE`), the
Dagster declaration, what is passed on to the writer, the options of `df.write.format("ontologia")`
and the table in docs/spark.md: a new option is a new field here.

A spec is checked when it is made. ConfigurationError names all members that are wrong, with file
and line where they came from a file. Nothing here needs Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AliasChoices,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from storage_engine.errors import ConfigurationError
from storage_engine.model.expectations import parse_expectation, parse_expectations
from storage_engine.spark.missing_policy import MissingPolicy, check_whole
from storage_engine.spark.spec_members import (
    CheckedMembers,
    Flag,
    InvalidSpec,
    Members,
    Problem,
    SpecFile,
    SpecOption,
    bytes_of,
    member_of,
    named_texts,
    needed_text,
    no_mapping,
    optional_text,
    options_of,
    texts_as_names,
    unit_of_work,
)

Format = Literal["csv", "json", "parquet", "jdbc"]
Policy = Literal["fail", "ignore", "quarantine"]
OnBadRows = Literal["fail", "quarantine"]

FORMATS: tuple[str, ...] = get_args(Format)
POLICIES: tuple[str, ...] = get_args(Policy)
DRIFTS = ("added", "missing", "retyped")
DRIFTED = "source column "  # how the reasons of rows begin that drift has spoiled

_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".zip": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
_PACKED = (".gz", ".bz2", ".zst")


class SourceFields(Members):
    """Where rows come from."""

    format: Annotated[Format, Flag("format", "source")] = Field(
        description="csv, json (lines), parquet or jdbc; told by the names of files if left out"
    )
    paths: Annotated[Sequence[str], Flag("source", "source", "PATH")] = Field(
        description="file, folder or pattern to read, or a jdbc: URL; may be repeated"
    )
    options: Annotated[Mapping[str, str], Flag("option", "source", "NAME=VALUE")] = Field(
        default_factory=dict,
        description="an option of Spark's reader (sep, encoding, dateFormat, dbtable, ...); the "
        "value env:NAME is taken from the environment when the source is opened",
    )
    row_schema: Annotated[str | None, Flag("schema", "source", "DDL")] = Field(
        default=None,
        validation_alias=AliasChoices("schema", "row_schema"),
        serialization_alias="schema",
        description="the columns that the source should have, 'id STRING, seats BIGINT'; taken "
        "as they come if left out",
    )
    null_value: Annotated[str | None, Flag("null-value", "source", "TEXT")] = Field(
        default=None,
        description="the text that stands for null in CSV, such as NA, beside the empty one",
    )

    @field_validator("paths", mode="before")
    @classmethod
    def _listed(cls, paths: Any) -> tuple[str, ...]:
        paths = (paths,) if isinstance(paths, str) else paths
        if not isinstance(paths, Sequence) or not paths:
            raise ValueError("source.paths takes at least one path")
        if not all(isinstance(path, str) and path for path in paths):
            raise ValueError(f"source.paths takes texts, not {list(paths)!r}")
        return tuple(paths)

    @field_validator("options", mode="before")
    @classmethod
    def _named(cls, raw: Any) -> dict[str, str]:
        return named_texts("source.options", raw)

    @field_validator("row_schema", "null_value", mode="before")
    @classmethod
    def _text(cls, value: Any, info: ValidationInfo) -> Any:
        name = "schema" if info.field_name == "row_schema" else info.field_name
        return optional_text(f"source.{name}", value)


class Source(CheckedMembers, SourceFields):
    """A source that can be opened as it is."""

    within: ClassVar[str] = "source"

    @model_validator(mode="before")
    @classmethod
    def _guess(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or "format" in raw:
            return raw
        paths = raw.get("paths", () if not raw else None)
        listed = [paths] if isinstance(paths, str) else paths
        if not isinstance(listed, list | tuple) or not all(isinstance(p, str) for p in listed):
            return {**raw, "format": FORMATS[0]}  # what is wrong is the paths, and that is said
        return {**raw, "format": guess_format(listed)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.null_value is not None and self.format != "csv":
            raise ValueError(f"source.null_value is for csv: {self.format} has nulls of its own")
        if self.format != "jdbc":
            return self
        if len(self.paths) > 1 or not self.paths[0].startswith("jdbc:"):
            raise ValueError(
                "source.paths of jdbc is one URL that begins with jdbc:, such as "
                "jdbc:postgresql://host/database"
            )
        if ("dbtable" in self.options) == ("query" in self.options):
            raise ValueError(
                "source.options of jdbc needs dbtable (a table) or query (a SELECT), not both"
            )
        return self


class DriftPolicy(CheckedMembers):
    """What to do when a source has other columns than its declared schema says.

    fail:        nothing is written
    ignore:      an added column is left out, a missing one is null, and so is a value that is not
                 of the declared type
    quarantine:  the rows concerned are set aside: those with a value in an added column, all rows
                 when a column is missing, those whose value is not of the declared type
    """

    within: ClassVar[str] = "drift"

    added: Policy = "fail"
    missing: Policy = "fail"
    retyped: Policy = "fail"

    @classmethod
    def parse(cls, raw: Any) -> DriftPolicy:
        """One word for all, or a word each."""
        if isinstance(raw, cls):
            return raw
        if isinstance(raw, str):
            word: Any = raw
            return cls(added=word, missing=word, retyped=word)
        if not isinstance(raw, Mapping):
            raise InvalidSpec([(("drift",), no_mapping("drift", cls, raw))])
        return cls(**texts_as_names(raw))

    def as_dict(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in DRIFTS}


class IngestFields(Members):
    """What is ingested and how, wherever it is stored and whoever asks for it."""

    type: Annotated[str, Flag("type", "order", "NAME", sink=True)] = Field(
        description="the stored name of the type to write"
    )
    models: Annotated[str, Flag("models", "order", "MODULE", sink=True)] = Field(
        description="the Python module that declares the type"
    )
    columns: Annotated[Mapping[str, str], Flag("column", "mapping", "NAME=SQL")] = Field(
        default_factory=dict,
        description="a column of the type as an expression over the source, \"id=concat(a, '-', "
        'b)"; keys are columns like others. A field that is not named takes the '
        "source's column of its own name",
    )
    where: Annotated[str | None, Flag("where", "mapping", "SQL")] = Field(
        default=None,
        description="only rows of the source for which this holds; lines that cannot be read are "
        "bad rows whatever it says",
    )
    transform: Annotated[str | None, Flag("transform", "mapping", "MODULE:FUNCTION")] = Field(
        default=None,
        description="a function DataFrame -> DataFrame for what expressions cannot say, after "
        "the condition and before the columns",
    )
    distinct: Annotated[bool, Flag("distinct", "mapping")] = Field(
        default=False, description="equal rows count once"
    )
    drift: Annotated[DriftPolicy, Flag("drift", "source", "[CASE=]POLICY", "policies")] = Field(
        default_factory=DriftPolicy,
        description="when the source differs from the declared schema: fail (the default), ignore "
        "or quarantine, for all cases or for added=, missing= or retyped= alone",
    )
    order_by: Annotated[
        str | None, Flag("order-by", "writing", "FIELD", writer=True, sink=True)
    ] = Field(
        default=None,
        description="of rows with one identity the greatest of this field wins, and an older row "
        "never replaces a newer one",
    )
    on_bad_rows: Annotated[OnBadRows, Flag("on-bad-rows", "writing", writer=True, sink=True)] = (
        Field(
            default="fail",
            description="stop at rows that cannot be stored (fail, the default) or set them aside "
            "(quarantine)",
        )
    )
    quarantine: Annotated[
        str | None, Flag("quarantine", "writing", "URI", writer=True, sink=True)
    ] = Field(default=None, description="where such rows go; default: beside the storage's data")
    expectations: Annotated[
        Sequence[Mapping[str, Any]], Flag("expect", "writing", "JSON", "json", writer=True)
    ] = Field(
        default=(),
        description='what the data must satisfy, \'{"not_null": "name"}\'; checked before '
        "anything is published. May be repeated; replaces those of the file",
    )
    missing: Annotated[
        MissingPolicy, Flag("missing", "writing", "POLICY", "mapping", writer=True)
    ] = Field(
        default_factory=MissingPolicy,
        description="stored rows that the source, which is a full extract, no longer has: keep "
        "(the default), or '{set: {active: false, ended_at: now}, limit: 10%}' to mark them",
    )
    meta: Annotated[Mapping[str, str], Flag("meta", "writing", "NAME=TEXT", writer=True)] = Field(
        default_factory=dict, description="a text kept with the commit; may be repeated"
    )
    target_part_bytes: Annotated[
        int | None,
        Flag("target-part-bytes", "writing", "N", "size", writer=True, sink=True),
    ] = Field(
        default=None,
        description="about how large the written files should be, counted as Arrow data",
    )

    @field_validator("type", "models", mode="before")
    @classmethod
    def _needed(cls, value: Any, info: ValidationInfo) -> Any:
        return needed_text(str(info.field_name), value)

    @field_validator("columns", "meta", mode="before")
    @classmethod
    def _named(cls, raw: Any, info: ValidationInfo) -> dict[str, str]:
        return named_texts(str(info.field_name), raw)

    @field_validator("where", "transform", "order_by", "quarantine", mode="before")
    @classmethod
    def _text(cls, value: Any, info: ValidationInfo) -> Any:
        return optional_text(str(info.field_name), value)

    @field_validator("distinct", mode="before")
    @classmethod
    def _truth(cls, value: Any) -> Any:
        value = {"true": True, "false": False}.get(value, value) if type(value) is str else value
        if value not in (True, False):
            raise ValueError(f"distinct is true or false, not {value!r}")
        return value

    @field_validator("transform")
    @classmethod
    def _function(cls, value: str | None) -> str | None:
        if value is not None and not all(value.partition(":")):
            raise ValueError(
                f"transform is module:function, such as shop.cleaning:tidy, not {value!r}"
            )
        return value

    @field_validator("drift", mode="before")
    @classmethod
    def _policy(cls, raw: Any) -> Any:
        return DriftPolicy.parse(raw if raw is not None else DriftPolicy())

    @field_validator("expectations", mode="before")
    @classmethod
    def _expected(cls, raw: Any) -> tuple[Mapping[str, Any], ...]:
        """As they would be written down."""
        return checked_expectations(raw)

    @field_validator("missing", mode="before")
    @classmethod
    def _missing(cls, raw: Any) -> Any:
        return MissingPolicy.parse(raw)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        check_whole(self.missing, self.where)
        return self

    @field_validator("target_part_bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        number = bytes_of(value) if isinstance(value, str) else value
        if number is None or (type(number) is int and number >= 1):
            return number
        raise ValueError(f"target_part_bytes is a number of bytes, or such as 256MB, not {value!r}")


def checked_expectations(raw: Any) -> tuple[Mapping[str, Any], ...]:
    """In their normal form. All that are wrong are told, not the first alone."""
    if not isinstance(raw, list | tuple):
        try:
            return tuple(each.as_dict() for each in parse_expectations(raw))
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
    expectations: list[Mapping[str, Any]] = []
    problems: list[Problem] = []
    for number, item in enumerate(raw):
        try:
            expectations.append(parse_expectation(item).as_dict())
        except ConfigurationError as error:
            problems.append((("expectations", str(number)), str(error)))
    if problems:
        raise InvalidSpec(problems)
    return tuple(expectations)


class _StorageFields(Members):
    storage_uri: Annotated[str, Flag("storage-uri", "order", "URI", sink=True)] = Field(
        description="the storage, which must exist: a directory, file:// or s3:// URI"
    )
    branch: Annotated[str | None, Flag("branch", "order", "NAME", sink=True)] = Field(
        default=None, description="the branch to write to, which must exist, instead of main"
    )

    @field_validator("storage_uri", mode="before")
    @classmethod
    def _place(cls, value: Any) -> Any:
        return needed_text("storage_uri", value)

    @field_validator("branch", mode="before")
    @classmethod
    def _named_branch(cls, value: Any) -> Any:
        return optional_text("branch", value)


class IngestSpec(CheckedMembers, IngestFields, _StorageFields):
    """One ingestion: a source, how its rows become rows of a type, and where they are written."""

    source: Source
    outside: Annotated[str | None, Flag("outside", "mapping", "SQL")] = Field(
        default=None,
        description="rows of the source for which this holds are counted and told of, whatever "
        "the condition says; the source is read once more for it",
    )
    count_by: Annotated[str | None, Flag("count-by", "writing", "FIELD", writer=True)] = Field(
        default=None,
        description="the result tells rows inserted, updated and unchanged for each value of this "
        "field, of times for each quarter of an hour, up to 10,000 of them",
    )
    idempotency: Annotated[
        tuple[str, int | str] | None,
        Flag(
            "app-id",
            "writing",
            "TEXT",
            member="app_id",
            help="with the version: this work is applied at most once",
            writer=True,
            sink=True,
        ),
        Flag(
            "app-version",
            "writing",
            "N|TEXT",
            "version",
            member="version",
            help="of the work; a number must grow, a text must differ from the last one",
            sink=True,
        ),
    ] = Field(default=None, description="a unit of work that is applied at most once")

    @field_validator("source", mode="before")
    @classmethod
    def _by_text(cls, raw: Any) -> Any:
        return texts_as_names(raw) if isinstance(raw, Mapping) else raw

    @field_validator("idempotency", mode="before")
    @classmethod
    def _unit_of_work(cls, raw: Any) -> Any:
        return unit_of_work(raw)

    @field_serializer("idempotency")
    def _as_members(self, unit: tuple[str, int | str] | None) -> dict[str, int | str] | None:
        return None if unit is None else {"app_id": unit[0], "version": unit[1]}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        wrong = []
        if self.drift != DriftPolicy() and self.source.row_schema is None:
            wrong.append("drift needs source.schema: without it nothing is known to drift from")
        if "quarantine" in self.drift.as_dict().values() and self.on_bad_rows != "quarantine":
            wrong.append("drift to quarantine needs on_bad_rows: quarantine as well")
        if wrong:
            raise InvalidSpec([(("drift",), text) for text in wrong])
        return self

    def as_dict(self) -> dict[str, Any]:
        """As a YAML file states it: `parse_spec(spec.as_dict()) == spec`."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    def to_arguments(self) -> list[str]:
        """Arguments for `jobs/ingest.py` that state this spec and nothing else."""
        from storage_engine.spark.jobs.arguments import spec_arguments

        return spec_arguments(self)

    def write_options(self) -> dict[str, Any]:
        """What is passed on to `write_type`."""
        given = {name: getattr(self, name) for name in writer_fields()}
        given["expectations"] = parse_expectations(self.expectations)
        given["meta"] = self.meta or None
        return {**given, "holder": self.meta or None}


# -- its options, and files that state it ---------------------------------------------------


def spec_options() -> list[SpecOption]:
    """All of an ingestion, those of the source included, in the order of the fields."""
    return list(options_of(IngestSpec))


def writer_fields() -> list[str]:
    """Names of the fields that `write_type` takes as they are."""
    return list(dict.fromkeys(each.path[0] for each in spec_options() if each.flag.writer))


def sink_options() -> dict[str, SpecOption]:
    """What `df.write.format("ontologia")` takes, by the name of the option there."""
    return {each.path[-1]: each for each in spec_options() if each.flag.sink}


def parse_spec(
    raw: Any, file: SpecFile | None = None, replaced: Sequence[tuple[str, ...]] = ()
) -> IngestSpec:
    """The spec that a dict states, as YAML gives it. `replaced` are members that are not from
    `file`, though it may have them too."""
    if not isinstance(raw, Mapping):
        raise ConfigurationError(no_mapping("order", IngestSpec, raw))
    try:
        return IngestSpec(**texts_as_names(raw))
    except InvalidSpec as error:
        problems = error.problems
    texts = [
        f"{file.place(member_of(path, text), replaced) if file is not None else ''}{text}"
        for path, text in problems
    ]
    raise ConfigurationError("; ".join(texts))


def guess_format(paths: Sequence[str]) -> str:
    """What the names of files say; ConfigurationError when they say nothing, or several things."""
    formats = {_format_of(path) for path in paths}
    if len(formats) == 1 and None not in formats:
        return str(formats.pop())
    text = (
        f"source.format is needed, one of {', '.join(FORMATS)}: the names of the files do not "
        "tell it"
    )
    raise InvalidSpec([((), text)])


def _format_of(path: str) -> str | None:
    if path.startswith("jdbc:"):
        return "jdbc"
    name = path.lower().rstrip("/")
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return next((format for end, format in _SUFFIXES.items() if name.endswith(end)), None)
