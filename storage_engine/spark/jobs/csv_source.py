"""CSV as a DataFrame of text columns, under the names of the header.

A file is read by one task, from its beginning, because a quoted value may go over line ends. Only
a large file in which no line leaves a quote open is read in parts. Spark cannot open .zip
archives: executors unzip and parse them, an archive a task, which must fit into its memory. With
options that Spark's own parser alone has, that reads the files.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from storage_engine.errors import ConfigurationError, ValidationError
from storage_engine.model.csv_text import CsvDialect, CsvRows, check_names
from storage_engine.spark.driver import is_connect
from storage_engine.spark.ingest_spec import Source
from storage_engine.spark.jobs.source_lines import (
    CORRUPT,
    OF_FILES,
    OF_VALUES,
    SIZE,
    check_packed,
    listed,
    option,
    read_lines,
    source_columns,
    with_corrupt,
    without_size,
)
from storage_engine.spark.jobs.text_lines import (
    FILE,
    NUMBER,
    START,
    VALUE,
    CsvTask,
    HeaderTask,
    OpenLinesTask,
    PieceTask,
    WholeCsvTask,
    one_line,
    path_shown,
    with_facts,
)
from storage_engine.spark.schema import quoted
from storage_engine.spark.spec_members import bytes_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# What is needed to read CSV by records, in lower case.
_OF_CSV = {"header", "sep", "delimiter", "quote", "escape", "encoding", "charset", "multiline"}
_OF_BINARY = {"path", "modificationTime", "length", "content"}
_HEADER_LINES = 200
# A part of a file begins anywhere but in these.
_UNSPLIT = r"(?i)\.(gz|gzip|deflate|zst|snappy|lz4)$"


def read_csv(spark: SparkSession, source: Source, options: Mapping[str, str]) -> DataFrame:
    """RFC 4180 unless options say otherwise: a header, and quotes doubled inside quotes."""
    zipped = [path for path in source.paths if path.lower().endswith(".zip")]
    plain = [path for path in source.paths if path not in zipped]
    frames = [_plain_csv(spark, plain, options)] if plain else []
    if zipped:
        frames.append(_zipped_csv(spark, zipped, options))
    if plain and zipped:
        # Those of folders' names too, which nothing in an archive has.
        of_files, of_archives = (source_columns(frame) for frame in frames)
        _check_same((listed(zipped), of_archives), (listed(plain), of_files))
    return with_nulls(reduce(lambda a, b: a.unionByName(b), frames), source)


def with_nulls(frame: DataFrame, source: Source) -> DataFrame:
    """Texts that the source writes for a null are nulls."""
    if source.null_value is None:
        return frame
    null = F.lit(source.null_value)
    made = {name: F.nullif(F.col(quoted(name)), null) for name in source_columns(frame)}
    return frame.select(*(made.get(n, F.col(quoted(n))).alias(n) for n in frame.columns))


def _check_same(header: tuple[str, Sequence[str]], first: tuple[str, Sequence[str]]) -> None:
    """Files of one order have the same columns in the same order: a line that is set aside tells
    no names with its values."""
    if list(header[1]) != list(first[1]):
        raise ConfigurationError(
            f"source: {header[0]} and {first[0]} have different columns "
            f"({', '.join(header[1])} and {', '.join(first[1])}); ingest them by separate orders"
        )


def _zipped_csv(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]) -> DataFrame:
    """The rows of all CSV files in the archives."""
    beyond = sorted(name for name in options if name.lower() not in _OF_CSV | OF_VALUES)
    if beyond:
        raise ConfigurationError(
            f"source.options: {', '.join(beyond)} cannot be used with .zip files; unzip them "
            "first, or use only header, sep, quote, escape, encoding and multiLine"
        )
    if not _by_bytes(options):
        raise ConfigurationError(
            "source.options: sep, quote and escape are one ASCII character each with .zip files; "
            "unzip them first"
        )
    return _whole_csv(spark, paths, options, {}, zipped=True)


def _whole_csv(
    spark: SparkSession,
    paths: Sequence[str],
    options: Mapping[str, str],
    of_files: Mapping[str, str],
    *,
    zipped: bool,
) -> DataFrame:
    dialect = csv_dialect(options)
    files = spark.read.format("binaryFile").options(**of_files).load(list(paths))
    labels = [name for name in files.columns if name not in _OF_BINARY]
    if labels:
        raise ConfigurationError(
            f"source {listed(paths)}: {', '.join(labels)} is in the names of folders, which are "
            f"not read with .zip files and with encoding {dialect.encoding}; write the files as "
            "UTF-8, or ingest each folder by itself"
        )
    contents = files.select("path", "content")
    told = "path string, header array<string>, problem string"
    headers = contents.mapInArrow(HeaderTask(dialect, zipped), told).collect()
    problems = [row["problem"] for row in headers if row["problem"] is not None]
    if problems:
        raise ValidationError("; ".join(problems[:3]))
    if not headers:
        what = "the archives have no CSV files in them" if zipped else "there is no header"
        raise ConfigurationError(f"source {listed(paths)}: {what}")
    first = headers[0]
    for path, header, _ in headers:
        _check_same((path, header), (first[0], first[1]))
    names = list(first[1])
    check_names(names, first[0])
    schema = with_facts([StructField(name, StringType()) for name in names])
    task = WholeCsvTask(CsvTask(dialect, names, schema, first[0]), zipped)
    count = len(headers)
    return contents.repartition(count, F.col("path")).mapInArrow(task, schema)


def _plain_csv(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]) -> DataFrame:
    named = {name.lower() for name in options}
    of_files = {n: text for n, text in options.items() if n.lower() in OF_FILES}
    if named - _OF_CSV - OF_VALUES - OF_FILES or not _by_bytes(options):
        return _csv_by_spark(spark, paths, options)
    dialect = csv_dialect(options)
    if dialect.own_escape:
        return _csv_by_spark(spark, paths, options)
    if not dialect.keeps_ascii:
        return _whole_csv(spark, paths, options, of_files, zipped=False)
    lines, labels = read_lines(spark, paths, of_files)
    names, first = _header(lines, dialect, paths)
    fields = [*(StructField(n, StringType()) for n in names if n not in labels), *labels.values()]
    schema = with_facts(fields)
    task = CsvTask(dialect, names, schema, first)
    if not dialect.spans_lines:
        return lines.mapInArrow(task, schema)
    whole, in_parts, in_pieces = _by_size(spark, lines, dialect, spans="multiline" in named)
    frames = [without_size(whole).mapInArrow(task, schema)]
    if in_parts is not None:
        by_line = CsvTask(one_line(dialect), names, schema, first)
        frames.append(without_size(in_parts).mapInArrow(by_line, schema))
    if in_pieces is not None:
        piece = StructType(
            [*without_size(in_pieces).schema.fields, StructField(NUMBER, LongType())]
        )
        pieces = without_size(in_pieces).mapInArrow(PieceTask(), piece)
        ordered = pieces.repartition(F.col(FILE)).sortWithinPartitions(FILE, START, NUMBER)
        # All pieces of a file are one part of it.
        joined = ordered.drop(NUMBER).withColumn(START, F.lit(0).cast("bigint"))
        frames.append(joined.mapInArrow(task, schema))
    return reduce(lambda a, b: a.unionByName(b), frames)


def _header(lines: DataFrame, dialect: CsvDialect, paths: Sequence[str]) -> tuple[list[str], str]:
    """The columns, and the file that they are of."""
    top = lines.filter(F.col(START) == 0).select(VALUE, FILE).limit(_HEADER_LINES).collect()
    if not top:
        raise ConfigurationError(
            f"source {listed(paths)}: there is no header to name columns; the files are empty"
        )
    first = path_shown(top[0][FILE])
    rows = CsvRows(dialect, first)
    for row in top:
        if row[FILE] == top[0][FILE] and rows.names is None:
            for _ in rows.feed(bytes(row[VALUE])):
                pass
    if rows.names is None:
        raise ValidationError(f"{first}: the first record, which names the columns, does not end")
    check_names(rows.names, first)
    return rows.names, first


def _by_size(
    spark: SparkSession, lines: DataFrame, dialect: CsvDialect, *, spans: bool
) -> tuple[DataFrame, DataFrame | None, DataFrame | None]:
    """Lines of files that Spark reads as a whole; of those that it reads in parts and may, because
    no line leaves a quote open; and of those that it must not. `spans`: the order says that values
    go over lines."""
    least = _least_part(spark)
    if not is_connect(spark):
        plan: Any = lines._jdf
        if int(str(plan.queryExecution().optimizedPlan().stats().sizeInBytes())) <= least:
            return lines, None, None
    is_whole = (F.col(SIZE) <= least) | F.col(FILE).rlike(_UNSPLIT)
    whole, large = lines.filter(is_whole), lines.filter(~is_whole)
    if spans:
        return whole, None, large
    spanning = [] if not dialect.quote else _spanning(large, dialect)
    is_spanning = F.col(FILE).isin(spanning) if spanning else F.lit(False)
    return whole, large.filter(~is_spanning), large.filter(is_spanning) if spanning else None


def _spanning(lines: DataFrame, dialect: CsvDialect) -> list[str]:
    """The files in which some line is no whole record by itself."""
    task = OpenLinesTask(one_line(dialect))
    files = lines.select(VALUE, FILE).mapInArrow(task, f"{FILE} string").distinct().collect()
    return [row[FILE] for row in files]


def _least_part(spark: SparkSession) -> int:
    """Files of up to this size are never read in parts."""
    sizes = []
    for name in ("maxPartitionBytes", "openCostInBytes"):
        text = str(spark.conf.get(f"spark.sql.files.{name}"))
        sizes.append(bytes_of(text.upper().removesuffix("B")) or bytes_of(text.upper()) or 0)
    return min(sizes)


def _by_bytes(options: Mapping[str, str]) -> bool:
    """Whether a byte is enough to tell separators, quotes and escapes."""
    signs = [option(options, name, ",") for name in ("sep", "delimiter")]
    marks = [option(options, name, "") for name in ("quote", "escape")]
    return all(len(s.encode()) == 1 for s in signs) and all(len(m.encode()) <= 1 for m in marks)


def csv_dialect(options: Mapping[str, str]) -> CsvDialect:
    quote = option(options, "quote", '"').replace("\0", "")
    encoding = option(options, "encoding", option(options, "charset", "utf-8"))
    try:
        codecs.lookup(encoding)
        "".encode(encoding)  # not all that Python calls a codec is of text
    except (LookupError, UnicodeError):
        raise ConfigurationError(f"source.options.encoding: {encoding!r} is unknown") from None
    return CsvDialect(
        separator=option(options, "sep", option(options, "delimiter", ",")),
        quote=quote,
        escape=option(options, "escape", quote),
        encoding=encoding,
        header=option(options, "header", "true").lower() == "true",
        spans_lines=option(options, "multiLine", "true").lower() == "true",
    )


def _csv_by_spark(
    spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]
) -> DataFrame:
    """With options that Spark's own reader alone has."""
    options = {"header": "true", "escape": '"', "multiLine": "true", **options}
    files = spark.read.options(**options).csv(list(paths))  # reads one line
    check_packed(spark, files.inputFiles(), options)
    header = files.columns
    names = [StructField(name, StringType()) for name in header]
    if not names:
        raise ConfigurationError(f"source {listed(paths)}: there is no header to name columns")
    read = (
        spark.read.options(**options)
        # Files whose header differs are an error: values would land in the wrong columns.
        .option("enforceSchema", "false")
        .option("columnNameOfCorruptRecord", CORRUPT)
        .schema(StructType([*names, StructField(CORRUPT, StringType())]))
        .csv(list(paths))
    )
    return with_corrupt(read, header)
