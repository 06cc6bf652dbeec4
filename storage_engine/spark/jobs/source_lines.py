"""Lines of files as Spark reads them, and what readers of all kinds of files share: names of
options, what is told of a row's origin, files that Spark would pass over without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pyspark.sql import functions as F
from pyspark.sql.types import StructField

from storage_engine.errors import ConfigurationError, ValidationError
from storage_engine.model.csv_text import MALFORMED
from storage_engine.spark.jobs.text_lines import (
    FACTS,
    FAULT,
    FILE,
    LINE,
    START,
    VALUE,
    path_shown,
)
from storage_engine.spark.schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# Options, in lower case: `mapping` knows the formats of dates and times.
OF_VALUES = {"dateformat", "timestampformat"}
OF_FILES = {
    "basepath",
    "ignorecorruptfiles",
    "ignoremissingfiles",
    "modifiedafter",
    "modifiedbefore",
    "pathglobfilter",
    "recursivefilelookup",
}
CORRUPT = "__corrupt"
SIZE = "__size"
# Where Spark sees no beginning in such a file, it takes it for an empty one.
_PACKED = re.compile(r"\.(bz2|snappy|lz4)$", re.I)
_PACKED_NOTHING = 14  # bytes, at most
_AT_ONCE = 8  # files that are looked into


def read_lines(
    spark: SparkSession, paths: Sequence[str], of_files: Mapping[str, str]
) -> tuple[DataFrame, dict[str, StructField]]:
    """Lines with their ends, as bytes; and the columns that the names of folders give."""
    text = spark.read.options(**of_files).option("lineSep", "\n").text(list(paths))
    labels = {field.name: field for field in text.schema.fields if field.name != VALUE}
    value = F.concat(F.col(VALUE).cast("binary"), F.lit(bytearray(b"\n")))
    files = text.inputFiles()
    archives = [path_shown(file) for file in files if file.lower().endswith(".zip")]
    if archives:
        raise ConfigurationError(
            f"source: {archives[0]}: archives are read where an order names them, as CSV and not "
            f"by their folder: {archives[0].rpartition('/')[0]}/*.zip"
        )
    check_packed(spark, files, of_files)
    lines = text.select(
        value.alias(VALUE),
        F.col("_metadata.file_path").alias(FILE),
        F.col("_metadata.file_block_start").alias(START),
        F.col("_metadata.file_size").alias(SIZE),
        *(F.col(quoted(name)) for name in labels),
    )
    return lines, labels


def without_size(lines: DataFrame) -> DataFrame:
    return lines.drop(SIZE)


def with_corrupt(read: DataFrame, names: Sequence[str]) -> DataFrame:
    corrupt = F.col(CORRUPT)
    return read.select(
        *(F.col(quoted(name)) for name in names),
        file_of().alias(FILE),
        corrupt.cast("binary").alias(LINE),
        F.when(corrupt.isNotNull(), F.lit(MALFORMED)).alias(FAULT),
    )


def file_of() -> Column:
    return F.regexp_replace("_metadata.file_path", "^file:/+", "/")


def listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"


def source_columns(frame: DataFrame) -> list[str]:
    """Without what is told of a row's origin."""
    return [name for name in frame.columns if name not in FACTS]


def readable(uri: str) -> str:
    """A file that Spark names, as a path that it reads."""
    return as_path(unquote(uri))


def as_path(name: str) -> str:
    """The path of one file: it is no pattern, whatever its name."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", name)


def check_packed(spark: SparkSession, files: Sequence[str], of_files: Mapping[str, str]) -> None:
    """ValidationError names a packed file that has bytes and no line."""
    packed = [readable(file) for file in files if _PACKED.search(file)]
    ignored = option(of_files, "ignoreCorruptFiles", "false").lower() == "true"
    if not packed or ignored:
        return

    def is_blank(file: str) -> bool:
        return not spark.read.text(file).limit(1).collect()

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        blank = [
            file
            for file, is_one in zip(packed, threads.map(is_blank, packed), strict=True)
            if is_one
        ]
    if not blank:
        return
    sizes = spark.read.format("binaryFile").load(blank).select("path", "length").collect()
    spoiled = sorted(path_shown(row["path"]) for row in sizes if row["length"] > _PACKED_NOTHING)
    if spoiled:
        kind = spoiled[0].rpartition(".")[2]
        raise ValidationError(
            f"{', '.join(spoiled[:3])}: nothing in it can be unpacked; it is damaged, or no {kind} "
            "file"
        )


def option(options: Mapping[str, str], name: str, default: str) -> str:
    """Spark does not care for the case of an option's name."""
    return next((text for n, text in options.items() if n.lower() == name.lower()), default)
