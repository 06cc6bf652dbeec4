"""Opens the source of an order as a DataFrame, as it is found: nothing is inferred from values.

CSV columns are text under the names of the header, and so are plain values of JSON lines with a
declared schema; `jobs.drift` gives them their declared types. Parquet and JDBC bring types of their
own. Lines that cannot be read come as their text in a column of their own, MALFORMED.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import ParseException, PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from jobs.boundary import spark_said
from jobs.environment import revealed
from jobs.orders import Source
from jobs.zipped import MALFORMED, read_zipped
from storage_engine.errors import ConfigurationError
from storage_engine.spark.schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
                return Opened(_csv(spark, source, options), textual=True)
            case "json":
                return _json(spark, source, options)
            case "parquet":
                if source.schema is not None:
                    options.setdefault("mergeSchema", "true")  # a column of any file counts
                return Opened(spark.read.options(**options).parquet(*source.paths))
            case _:
                return Opened(_jdbc(spark, source, options))
    except (PySparkException, Py4JJavaError) as error:
        raise ConfigurationError(f"source {_shown(source)}: {spark_said(error)}") from error


def declared_schema(source: Source) -> StructType | None:
    """The declared columns; ConfigurationError when the text is no schema."""
    if source.schema is None:
        return None
    try:
        parsed = DataType.fromDDL(source.schema)
    except ParseException as error:
        raise _no_schema(source.schema, " ".join(str(error).split())) from error
    if not isinstance(parsed, StructType) or not parsed.fields:
        raise _no_schema(source.schema, "it names no columns")
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
    return replace(source, paths=tuple(files), options=options)


def _as_text(kind: DataType) -> DataType:
    """Values are text until they get their declared type; nested ones keep their shape."""
    return kind if isinstance(kind, ArrayType | MapType | StructType) else StringType()


def _csv(spark: SparkSession, source: Source, options: Mapping[str, str]) -> DataFrame:
    """RFC 4180 unless options say otherwise: a header, and quotes doubled inside quotes."""
    options = {"header": "true", "escape": '"', **options}
    zipped = [path for path in source.paths if path.lower().endswith(".zip")]
    plain = [path for path in source.paths if path not in zipped]
    frames = [_plain_csv(spark, plain, options)] if plain else []
    if zipped:
        frames.append(read_zipped(spark, zipped, options))
    frame = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
    if not [name for name in frame.columns if name != MALFORMED]:
        raise ConfigurationError(f"source {_shown(source)}: there is no header to name columns")
    return _with_nulls(frame, source.null_value)


def _with_nulls(frame: DataFrame, null_value: str | None) -> DataFrame:
    if null_value is None:
        return frame
    null = F.lit(null_value)
    return frame.select(*(F.nullif(F.col(quoted(n)), null).alias(n) for n in frame.columns))


def _plain_csv(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]) -> DataFrame:
    found = spark.read.options(**options).csv(list(paths)).columns  # reads one line
    names = [StructField(name, StringType()) for name in found]
    return (
        spark.read.options(**options)
        # Files whose header differs are an error: values would land in the wrong columns.
        .option("enforceSchema", "false")
        .option("columnNameOfCorruptRecord", MALFORMED)
        .schema(StructType([*names, StructField(MALFORMED, StringType())]))
        .csv(list(paths))
    )


def _json(spark: SparkSession, source: Source, options: Mapping[str, str]) -> Opened:
    reader = spark.read.options(**options).option("columnNameOfCorruptRecord", MALFORMED)
    declared = declared_schema(source)
    if declared is None:
        return Opened(reader.json(list(source.paths)))
    # One pass tells which columns there are; the declared schema tells their types.
    found = reader.option("primitivesAsString", "true").json(list(source.paths)).schema
    types = {field.name: _as_text(field.dataType) for field in declared.fields}
    read = [
        StructField(field.name, types.get(field.name, field.dataType))
        for field in found.fields
        if field.name != MALFORMED
    ]
    schema = StructType([*read, StructField(MALFORMED, StringType())])
    reader = spark.read.options(**options).option("columnNameOfCorruptRecord", MALFORMED)
    return Opened(reader.schema(schema).json(list(source.paths)), textual=True)


def _jdbc(spark: SparkSession, source: Source, options: Mapping[str, str]) -> DataFrame:
    return spark.read.format("jdbc").options(url=source.paths[0], **options).load()


def _revealed(source: Source) -> dict[str, str]:
    return {name: revealed(f"source.options.{name}", text) for name, text in source.options.items()}


def _shown(source: Source) -> str:
    more = f" and {len(source.paths) - 1} more" if len(source.paths) > 1 else ""
    return f"{source.paths[0]}{more}"


def _no_schema(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"source.schema {text!r} is not a schema such as 'id STRING, seats BIGINT': {why}"
    )
