"""Opens the source of an order as a DataFrame, as it is found: nothing is inferred from values.

CSV columns are text under the names of the header, JSON lines with a declared schema likewise;
`jobs.drift` gives them their declared types. Parquet and JDBC bring types of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
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
from jobs.orders import Source
from jobs.zipped import MALFORMED, read_zipped
from storage_engine.errors import ConfigurationError
from storage_engine.spark.quality import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ENVIRONMENT = "env:"


@dataclass(frozen=True)
class Opened:
    """A source's rows; `textual` when values are text that has yet to get its type."""

    frame: DataFrame
    textual: bool = False


def open_source(spark: SparkSession, source: Source) -> Opened:
    """Raises ConfigurationError when there is nothing to read or an option is wrong."""
    options = {name: _value(name, text) for name, text in source.options.items()}
    try:
        match source.format:
            case "csv":
                return Opened(_csv(spark, source, options), textual=True)
            case "json":
                return _json(spark, source, options)
            case "parquet":
                return Opened(spark.read.options(**options).parquet(*source.paths))
            case _:
                return Opened(_jdbc(spark, source, options))
    except (PySparkException, Py4JJavaError) as error:
        raise ConfigurationError(f"source {_shown(source)}: {spark_said(error)}") from error


def stream_source(spark: SparkSession, source: Source, max_files: int | None) -> DataFrame:
    """A source that is followed. Its schema is declared, with CSV and JSON as text: what arrives
    is compared with it batch by batch. Columns that are not declared cannot be seen."""
    declared = DataType.fromDDL(str(source.schema))
    assert isinstance(declared, StructType)
    options = {name: _value(name, text) for name, text in source.options.items()}
    if source.format == "csv":
        options = {"header": "true", "escape": '"', "enforceSchema": "false", **options}
    if max_files is not None:
        options["maxFilesPerTrigger"] = str(max_files)
    if source.format != "parquet":
        options["columnNameOfCorruptRecord"] = MALFORMED
        texts = [StructField(field.name, _as_text(field.dataType)) for field in declared.fields]
        declared = StructType([*texts, StructField(MALFORMED, StringType())])
    reader = spark.readStream.format(source.format).options(**options)
    frame = reader.schema(declared).load(source.paths[0])
    return _with_nulls(frame, source.null_value)


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
    reader = spark.read.options(**options)
    if source.schema is None:
        return Opened(reader.json(list(source.paths)))
    # One pass tells which columns there are; the declared schema tells their types.
    return Opened(
        reader.option("primitivesAsString", "true")
        .option("columnNameOfCorruptRecord", MALFORMED)
        .json(list(source.paths)),
        textual=True,
    )


def _jdbc(spark: SparkSession, source: Source, options: Mapping[str, str]) -> DataFrame:
    return spark.read.format("jdbc").options(url=source.paths[0], **options).load()


def _value(name: str, text: str) -> str:
    if not text.startswith(_ENVIRONMENT):
        return text
    variable = text.removeprefix(_ENVIRONMENT)
    found = os.environ.get(variable)
    if found is None:
        raise ConfigurationError(
            f"source.options.{name} is to come from the environment variable {variable}, which "
            "is not set"
        )
    return found


def _shown(source: Source) -> str:
    more = f" and {len(source.paths) - 1} more" if len(source.paths) > 1 else ""
    return f"{source.paths[0]}{more}"
