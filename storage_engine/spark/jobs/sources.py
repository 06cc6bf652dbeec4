"""Opens the source of a spec as a DataFrame, as it is found: nothing is inferred from values.

CSV columns are text under the names of the header, and so are plain values of JSON lines with a
declared schema; `mapping` gives them their declared types. Parquet and JDBC bring types of their
own. Rows of text come with their file and, where a line cannot be read, with it and the reason
(`text_lines`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import ParseException, PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from storage_engine.errors import ConfigurationError, ValidationError
from storage_engine.model.csv_text import MALFORMED, check_names
from storage_engine.spark.ingest_spec import Source
from storage_engine.spark.jobs.csv_source import read_csv
from storage_engine.spark.jobs.program import raised_there, revealed, spark_said
from storage_engine.spark.jobs.source_lines import (
    CORRUPT,
    OF_FILES,
    OF_VALUES,
    as_path,
    check_packed,
    file_of,
    listed,
    read_lines,
    readable,
    with_corrupt,
    without_size,
)
from storage_engine.spark.jobs.text_lines import (
    FACT_FIELDS,
    FAULT,
    FILE,
    LINE,
    VALUE,
    JsonTask,
    ShapeTask,
    path_shown,
    shape_fields,
)
from storage_engine.spark.schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WIDENED: tuple[tuple[type[DataType], ...], ...] = (
    (ByteType, ShortType, IntegerType, LongType),
    (FloatType, DoubleType),
)


# How a stream looks for files; the rest of a source's options is for reading them.
_OF_DISCOVERY = {
    "cleanSource",
    "fileNameOnly",
    "latestFirst",
    "maxBytesPerTrigger",
    "maxCachedFiles",
    "maxFileAge",
    "maxFilesPerTrigger",
    "pathGlobFilter",
    "recursiveFileLookup",
    "sourceArchiveDir",
}
_FILES = "path string, modificationTime timestamp, length bigint, content binary"
_PATTERN = re.compile(r"[*?\[\]{}]|\.\w+$")  # a pattern, or one file


@dataclass(frozen=True)
class Opened:
    """A source's rows; `textual` when values are text that has yet to get its type."""

    frame: DataFrame
    textual: bool = False


def open_source(spark: SparkSession, source: Source) -> Opened:
    """Raises ConfigurationError when there is nothing to read or an option is wrong."""
    options = _revealed(source)
    try:
        match source.format:
            case "csv":
                return Opened(read_csv(spark, source, options), textual=True)
            case "json":
                return _json(spark, source, options)
            case "parquet":
                return Opened(_parquet(spark, source, options))
            case _:
                return Opened(_jdbc(spark, source, options))
    except (PySparkException, Py4JJavaError) as error:
        if (ours := raised_there(error)) is not None:
            raise ours from None
        place = listed(source.paths)
        raise ConfigurationError(f"source {place}: {spark_said(error)}") from error


def declared_schema(source: Source) -> StructType | None:
    """The declared columns; ConfigurationError when the text is no schema."""
    if source.row_schema is None:
        return None
    try:
        parsed = DataType.fromDDL(source.row_schema)
    except ParseException as error:
        raise _no_schema(source.row_schema, " ".join(str(error).split())) from error
    if not isinstance(parsed, StructType) or not parsed.fields:
        raise _no_schema(source.row_schema, "it names no columns")
    return parsed


def followed(spark: SparkSession, source: Source, max_files: int | None) -> DataFrame:
    """The names of files as they arrive. Their rows are not read here: each batch opens its files
    as any source, so that whatever has drifted in them is seen."""
    options = {n: text for n, text in _revealed(source).items() if n in _OF_DISCOVERY}
    if max_files is not None:
        options["maxFilesPerTrigger"] = str(max_files)
    reader = spark.readStream.format("binaryFile").schema(_FILES).options(**options)
    return reader.load(source.paths[0]).select("path")


def arrived(source: Source, files: Sequence[str]) -> Source:
    """The source, as far as it has come by these files."""
    options = {n: text for n, text in source.options.items() if n not in _OF_DISCOVERY}
    folder = source.paths[0]
    if not _PATTERN.search(folder):
        options.setdefault("basePath", folder)  # values in the names of folders are columns
    return source.replace(paths=tuple(map(as_path, files)), options=options)


def text_types(kind: DataType) -> DataType:
    """Values are text until they get their declared type; nested ones keep their shape."""
    return kind if isinstance(kind, ArrayType | MapType | StructType) else StringType()


# -- JSON ------------------------------------------------------------------------------------------


def _json(spark: SparkSession, source: Source, options: Mapping[str, str]) -> Opened:
    """Strict JSON, as `Session.ingest` reads it, unless options say otherwise."""
    paths = list(source.paths)
    declared = declared_schema(source)
    if not {name.lower() for name in options} <= OF_FILES | OF_VALUES:
        return _json_by_spark(spark, paths, options, declared)
    of_files = {n: text for n, text in options.items() if n.lower() in OF_FILES}
    lines, labels = read_lines(spark, paths, of_files)
    given = StructType([StructField(VALUE, StringType()), *labels.values(), *FACT_FIELDS])
    task = ShapeTask(as_text=declared is not None)
    shapes = without_size(lines).mapInArrow(task, "shape string").collect()
    fields = shape_fields(row["shape"] for row in shapes)
    if not fields:
        raise ConfigurationError(
            f"source {listed(paths)}: there is no JSON object in it to name columns"
        )
    check_names([field.name for field in fields], listed(paths))
    types = {field.name: text_types(field.dataType) for field in declared or StructType()}
    read = [
        StructField(field.name, types.get(field.name, field.dataType))
        for field in fields
        if field.name not in labels
    ]
    checked = without_size(lines).mapInArrow(JsonTask(given), given)
    return Opened(json_columns(checked, read, list(labels), options), textual=declared is not None)


def _json_by_spark(
    spark: SparkSession,
    paths: list[str],
    options: Mapping[str, str],
    declared: StructType | None,
) -> Opened:
    """With options that Spark's own reader alone has."""
    reader = spark.read.options(**options).option("columnNameOfCorruptRecord", CORRUPT)
    if declared is not None:
        reader = reader.option("primitivesAsString", "true")
    # One pass tells which columns there are; the declared schema tells their types.
    types = {field.name: text_types(field.dataType) for field in declared or StructType()}
    inferred = reader.json(paths)
    check_packed(spark, inferred.inputFiles(), options)
    read = [
        StructField(field.name, types.get(field.name, field.dataType))
        for field in inferred.schema.fields
        if field.name != CORRUPT
    ]
    wanted = StructType([*read, StructField(CORRUPT, StringType())])
    reader = spark.read.options(**options).option("columnNameOfCorruptRecord", CORRUPT)
    rows = reader.schema(wanted).json(paths)
    return Opened(with_corrupt(rows, [f.name for f in read]), textual=declared is not None)


def json_columns(
    checked: DataFrame,
    fields: Sequence[StructField],
    others: Sequence[str],
    options: Mapping[str, str],
) -> DataFrame:
    """The columns of lines that are JSON objects, beside `others` and the facts."""
    schema = StructType([*fields, StructField(CORRUPT, StringType())])
    to_json = {
        **{n: text for n, text in options.items() if n.lower() not in OF_FILES},
        "mode": "PERMISSIVE",
        "columnNameOfCorruptRecord": CORRUPT,
    }
    parsed = checked.withColumn("__record", F.from_json(VALUE, schema, to_json))
    record = F.col("__record")
    corrupt = F.when(record.getField(CORRUPT).isNotNull(), F.lit(MALFORMED))
    return parsed.select(
        *(record.getField(field.name).alias(field.name) for field in fields),
        *(F.col(quoted(name)) for name in others),
        FILE,
        LINE,
        F.coalesce(FAULT, corrupt).alias(FAULT),
    )


# -- Parquet ---------------------------------------------------------------------------------------


def _parquet(spark: SparkSession, source: Source, options: dict[str, str]) -> DataFrame:
    """A column of any file counts."""
    options.setdefault("mergeSchema", "true")
    paths = list(source.paths)
    try:
        frame = spark.read.options(**options).parquet(*paths)
        _check_length(spark, paths, options, frame.inputFiles())
        return frame.select("*", file_of().alias(FILE))
    except (PySparkException, Py4JJavaError) as error:
        if "UNABLE_TO_INFER_SCHEMA" in str(error):
            files = spark.read.options(**_listing(options)).text(paths).inputFiles()
            _check_length(spark, paths, options, files)
        if "CANNOT_MERGE_SCHEMAS" not in str(error):
            raise
    plain = {n: text for n, text in options.items() if n.lower() != "mergeschema"}
    return _widened(spark, paths, plain)


def _check_length(
    spark: SparkSession, paths: list[str], options: Mapping[str, str], files: Sequence[str]
) -> None:
    """Spark passes over files without a byte, which no Parquet file is."""
    listed = spark.read.format("binaryFile").options(**_listing(options)).load(paths)
    if listed.select("path").count() >= len(files):
        return
    whole = {path_shown(row["path"]) for row in listed.select("path").collect()}
    empty = sorted({path_shown(file) for file in files} - whole)
    if empty:
        raise ValidationError(
            f"{', '.join(empty[:3])}: is empty, which no Parquet file is; it was cut short"
        )


def _listing(options: Mapping[str, str]) -> dict[str, str]:
    return {n: text for n, text in options.items() if n.lower() in OF_FILES - {"basepath"}}


def _widened(spark: SparkSession, paths: list[str], options: Mapping[str, str]) -> DataFrame:
    """Files whose columns have different types, which Spark does not merge: narrower ones become
    wider, and a column without values is of any type. ValidationError names files that differ in
    more."""

    def read(files: Sequence[str], base: Mapping[str, str]) -> DataFrame:
        return spark.read.options(**{**base, **options}).parquet(*map(readable, files))

    bases: dict[str, dict[str, str]] = {}
    for path in paths:
        base = {} if _PATTERN.search(path) else {"basePath": path}  # for what folders' names say
        of_path = spark.read.options(**options, mergeSchema="false").parquet(path).inputFiles()
        bases |= dict.fromkeys(sorted(of_path), base)
    by_schema: dict[tuple[str, str], list[str]] = {}
    for file, base in bases.items():
        key = read([file], base).schema.json(), base.get("basePath", "")
        by_schema.setdefault(key, []).append(file)
    types: dict[str, tuple[DataType, str]] = {}
    frames = [(read(of, bases[of[0]]), of[0]) for of in by_schema.values()]
    for frame, file in frames:
        for field in frame.schema.fields:
            before, other = types.get(field.name, (NullType(), file))
            wider = _wider(before, field.dataType)
            if wider is None and not _has_values(frame, field.name):
                wider = before
            if wider is None and not _has_values(read([other], bases[other]), field.name):
                wider = field.dataType
            if wider is None:
                raise ValidationError(
                    f"column {field.name} is {before.simpleString()} in {path_shown(other)} and "
                    f"{field.dataType.simpleString()} in {path_shown(file)}; ingest such files by "
                    "separate orders, each with its own columns"
                )
            types[field.name] = (wider, file if wider != before else other)
    made = [
        frame.select(
            *(
                F.col(quoted(f.name)).try_cast(types[f.name][0]).alias(f.name)
                for f in frame.schema.fields
            ),
            file_of().alias(FILE),
        )
        for frame, _ in frames
    ]
    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), made)


def _wider(first: DataType, other: DataType) -> DataType | None:
    """The type that holds values of both."""
    if isinstance(first, NullType) or first.simpleString() == other.simpleString():
        return other
    for family in _WIDENED:
        if isinstance(first, family) and isinstance(other, family):
            return max(first, other, key=lambda kind: family.index(type(kind)))
    return None


def _has_values(frame: DataFrame, name: str) -> bool:
    return bool(frame.filter(F.col(quoted(name)).isNotNull()).limit(1).count())


def _jdbc(spark: SparkSession, source: Source, options: Mapping[str, str]) -> DataFrame:
    return spark.read.format("jdbc").options(url=source.paths[0], **options).load()


def _revealed(source: Source) -> dict[str, str]:
    return {name: revealed(f"source.options.{name}", text) for name, text in source.options.items()}


def _no_schema(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"source.schema {text!r} is not a schema such as 'id STRING, seats BIGINT': {why}"
    )
