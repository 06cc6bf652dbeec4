"""Opens the source of a spec as a DataFrame, as it is found: nothing is inferred from values.

CSV columns are text under the names of the header, and so are plain values of JSON lines with a
declared schema; `mapping` gives them their declared types. Parquet and JDBC bring types of their
own. Rows of text come with their file and, where a line cannot be read, with it and the reason
(`text_lines`).

A CSV file is read by one task, from its beginning, because a quoted value may go over line ends.
Only a large file in which no line leaves a quote open is read in parts. Spark cannot open .zip
archives: executors unzip and parse them, an archive a task, which must fit into its memory.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

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
from storage_engine.model.csv_text import MALFORMED, CsvDialect, CsvRows, check_names
from storage_engine.spark.driver import is_connect
from storage_engine.spark.ingest_spec import Source
from storage_engine.spark.jobs.program import raised_there, revealed, spark_said
from storage_engine.spark.jobs.text_lines import (
    FACT_FIELDS,
    FACTS,
    FAULT,
    FILE,
    LINE,
    NUMBER,
    START,
    VALUE,
    CsvTask,
    HeaderTask,
    JsonTask,
    OpenLinesTask,
    PieceTask,
    ShapeTask,
    WholeCsvTask,
    one_line,
    path_shown,
    shape_fields,
    with_facts,
)
from storage_engine.spark.schema import quoted
from storage_engine.spark.spec_members import bytes_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# What is needed to read CSV by records; `mapping` knows the formats of dates and times.
_OF_CSV = {"header", "sep", "delimiter", "quote", "escape", "encoding", "charset", "multiline"}
_OF_VALUES = {"dateformat", "timestampformat"}
_OF_FILES = {
    "basepath",
    "ignorecorruptfiles",
    "ignoremissingfiles",
    "modifiedafter",
    "modifiedbefore",
    "pathglobfilter",
    "recursivefilelookup",
}
_HEADER_LINES = 200
_CORRUPT = "__corrupt"
# A part of a file begins anywhere but in these.
_UNSPLIT = r"(?i)\.(gz|gzip|deflate|zst|snappy|lz4)$"
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
                return Opened(_csv(spark, source, options), textual=True)
            case "json":
                return _json(spark, source, options)
            case "parquet":
                return Opened(_parquet(spark, source, options))
            case _:
                return Opened(_jdbc(spark, source, options))
    except (PySparkException, Py4JJavaError) as error:
        if (ours := raised_there(error)) is not None:
            raise ours from None
        place = _listed(source.paths)
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
    return source.replace(paths=tuple(files), options=options)


def text_types(kind: DataType) -> DataType:
    """Values are text until they get their declared type; nested ones keep their shape."""
    return kind if isinstance(kind, ArrayType | MapType | StructType) else StringType()


def source_columns(frame: DataFrame) -> list[str]:
    """Without what is told of a row's origin."""
    return [name for name in frame.columns if name not in FACTS]


# -- CSV -------------------------------------------------------------------------------------------


def _csv(spark: SparkSession, source: Source, options: Mapping[str, str]) -> DataFrame:
    """RFC 4180 unless options say otherwise: a header, and quotes doubled inside quotes."""
    zipped = [path for path in source.paths if path.lower().endswith(".zip")]
    plain = [path for path in source.paths if path not in zipped]
    frames = [_plain_csv(spark, plain, options)] if plain else []
    if zipped:
        frames.append(read_zipped(spark, zipped, options))
    frame = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
    return with_nulls(frame, source)


def with_nulls(frame: DataFrame, source: Source) -> DataFrame:
    """Texts that the source writes for a null are nulls."""
    if source.null_value is None:
        return frame
    null = F.lit(source.null_value)
    made = {name: F.nullif(F.col(quoted(name)), null) for name in source_columns(frame)}
    return frame.select(*(made.get(n, F.col(quoted(n))).alias(n) for n in frame.columns))


def read_zipped(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]) -> DataFrame:
    """The rows of all CSV files in the archives."""
    beyond = sorted(name for name in options if name.lower() not in _OF_CSV | _OF_VALUES)
    if beyond:
        raise ConfigurationError(
            f"source.options: {', '.join(beyond)} cannot be used with .zip files; unzip them "
            "first, or use only header, sep, quote, escape, encoding and multiLine"
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
    contents = files.select("path", "content")
    told = "path string, header array<string>, problem string"
    headers = contents.mapInArrow(HeaderTask(dialect, zipped), told).collect()
    problems = [row["problem"] for row in headers if row["problem"] is not None]
    if problems:
        raise ValidationError("; ".join(problems[:3]))
    if not headers:
        what = "the archives have no CSV files in them" if zipped else "there is no header"
        raise ConfigurationError(f"source {_listed(paths)}: {what}")
    first = headers[0]
    for path, header, _ in headers:
        if header != first[1]:
            raise ConfigurationError(
                f"source: {path} and {first[0]} have different headers "
                f"({', '.join(header)} and {', '.join(first[1])}); ingest them by separate orders"
            )
    names = list(first[1])
    check_names(names, first[0])
    schema = with_facts([StructField(name, StringType()) for name in names])
    task = WholeCsvTask(CsvTask(dialect, names, schema, first[0]), zipped)
    count = len(headers)
    return contents.repartition(count, F.col("path")).mapInArrow(task, schema)


def _plain_csv(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]) -> DataFrame:
    named = {name.lower() for name in options}
    of_files = {n: text for n, text in options.items() if n.lower() in _OF_FILES}
    separator = _option(options, "sep", _option(options, "delimiter", ","))
    if named - _OF_CSV - _OF_VALUES - _OF_FILES or len(separator.encode()) != 1:
        return _csv_by_spark(spark, paths, options)
    dialect = csv_dialect(options)
    if dialect.escape not in ("", dialect.quote):
        return _csv_by_spark(spark, paths, options)  # Arrow takes escapes out of plain values too
    if not dialect.keeps_ascii:
        return _whole_csv(spark, paths, options, of_files, zipped=False)
    lines, labels = _lines(spark, paths, of_files)
    names, first = _header(lines, dialect, paths)
    fields = [*(StructField(n, StringType()) for n in names if n not in labels), *labels.values()]
    schema = with_facts(fields)
    task = CsvTask(dialect, names, schema, first)
    if not dialect.spans_lines:
        return lines.mapInArrow(task, schema)
    whole, in_parts, in_pieces = _by_size(spark, lines, dialect, spans="multiline" in named)
    frames = [_without_size(whole).mapInArrow(task, schema)]
    if in_parts is not None:
        by_line = CsvTask(one_line(dialect), names, schema, first)
        frames.append(_without_size(in_parts).mapInArrow(by_line, schema))
    if in_pieces is not None:
        piece = StructType(
            [*_without_size(in_pieces).schema.fields, StructField(NUMBER, LongType())]
        )
        pieces = _without_size(in_pieces).mapInArrow(PieceTask(), piece)
        ordered = pieces.repartition(F.col(FILE)).sortWithinPartitions(FILE, START, NUMBER)
        # All pieces of a file are one part of it.
        joined = ordered.drop(NUMBER).withColumn(START, F.lit(0).cast("bigint"))
        frames.append(joined.mapInArrow(task, schema))
    return reduce(lambda a, b: a.unionByName(b), frames)


_SIZE = "__size"


def _lines(
    spark: SparkSession, paths: Sequence[str], of_files: Mapping[str, str]
) -> tuple[DataFrame, dict[str, StructField]]:
    """Lines with their ends, as bytes; and the columns that the names of folders give."""
    text = spark.read.options(**of_files).option("lineSep", "\n").text(list(paths))
    labels = {field.name: field for field in text.schema.fields if field.name != VALUE}
    value = F.concat(F.col(VALUE).cast("binary"), F.lit(bytearray(b"\n")))
    lines = text.select(
        value.alias(VALUE),
        F.col("_metadata.file_path").alias(FILE),
        F.col("_metadata.file_block_start").alias(START),
        F.col("_metadata.file_size").alias(_SIZE),
        *(F.col(quoted(name)) for name in labels),
    )
    return lines, labels


def _without_size(lines: DataFrame) -> DataFrame:
    return lines.drop(_SIZE)


def _header(lines: DataFrame, dialect: CsvDialect, paths: Sequence[str]) -> tuple[list[str], str]:
    """The columns, and the file that they are of."""
    top = lines.filter(F.col(START) == 0).select(VALUE, FILE).limit(_HEADER_LINES).collect()
    if not top:
        raise ConfigurationError(
            f"source {_listed(paths)}: there is no header to name columns; the files are empty"
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
    is_whole = (F.col(_SIZE) <= least) | F.col(FILE).rlike(_UNSPLIT)
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


def csv_dialect(options: Mapping[str, str]) -> CsvDialect:
    quote = _option(options, "quote", '"')
    encoding = _option(options, "encoding", _option(options, "charset", "utf-8"))
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise ConfigurationError(f"source.options.encoding: {encoding!r} is unknown") from None
    return CsvDialect(
        separator=_option(options, "sep", _option(options, "delimiter", ",")),
        quote="" if quote == "\0" else quote,
        escape=_option(options, "escape", quote),
        encoding=encoding,
        header=_option(options, "header", "true").lower() == "true",
        spans_lines=_option(options, "multiLine", "true").lower() == "true",
    )


def _option(options: Mapping[str, str], name: str, default: str) -> str:
    """Spark does not care for the case of an option's name."""
    return next((text for n, text in options.items() if n.lower() == name.lower()), default)


def _csv_by_spark(
    spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]
) -> DataFrame:
    """With options that Spark's own reader alone has."""
    options = {"header": "true", "escape": '"', "multiLine": "true", **options}
    header = spark.read.options(**options).csv(list(paths)).columns  # reads one line
    names = [StructField(name, StringType()) for name in header]
    if not names:
        raise ConfigurationError(f"source {_listed(paths)}: there is no header to name columns")
    read = (
        spark.read.options(**options)
        # Files whose header differs are an error: values would land in the wrong columns.
        .option("enforceSchema", "false")
        .option("columnNameOfCorruptRecord", _CORRUPT)
        .schema(StructType([*names, StructField(_CORRUPT, StringType())]))
        .csv(list(paths))
    )
    return _with_corrupt(read, header)


def _with_corrupt(read: DataFrame, names: Sequence[str]) -> DataFrame:
    corrupt = F.col(_CORRUPT)
    return read.select(
        *(F.col(quoted(name)) for name in names),
        _file_of().alias(FILE),
        corrupt.cast("binary").alias(LINE),
        F.when(corrupt.isNotNull(), F.lit(MALFORMED)).alias(FAULT),
    )


def _file_of() -> Column:
    return F.regexp_replace("_metadata.file_path", "^file:/+", "/")


# -- JSON ------------------------------------------------------------------------------------------


def _json(spark: SparkSession, source: Source, options: Mapping[str, str]) -> Opened:
    """Strict JSON, as `Session.ingest` reads it, unless options say otherwise."""
    paths = list(source.paths)
    declared = declared_schema(source)
    if not {name.lower() for name in options} <= _OF_FILES | _OF_VALUES:
        return _json_by_spark(spark, paths, options, declared)
    of_files = {n: text for n, text in options.items() if n.lower() in _OF_FILES}
    lines, labels = _lines(spark, paths, of_files)
    given = StructType([StructField(VALUE, StringType()), *labels.values(), *FACT_FIELDS])
    task = ShapeTask(as_text=declared is not None)
    shapes = _without_size(lines).mapInArrow(task, "shape string").collect()
    fields = shape_fields(row["shape"] for row in shapes)
    if not fields:
        raise ConfigurationError(
            f"source {_listed(paths)}: there is no JSON object in it to name columns"
        )
    check_names([field.name for field in fields], _listed(paths))
    types = {field.name: text_types(field.dataType) for field in declared or StructType()}
    read = [
        StructField(field.name, types.get(field.name, field.dataType))
        for field in fields
        if field.name not in labels
    ]
    checked = _without_size(lines).mapInArrow(JsonTask(given), given)
    return Opened(json_columns(checked, read, list(labels), options), textual=declared is not None)


def _json_by_spark(
    spark: SparkSession,
    paths: list[str],
    options: Mapping[str, str],
    declared: StructType | None,
) -> Opened:
    """With options that Spark's own reader alone has."""
    reader = spark.read.options(**options).option("columnNameOfCorruptRecord", _CORRUPT)
    if declared is not None:
        reader = reader.option("primitivesAsString", "true")
    # One pass tells which columns there are; the declared schema tells their types.
    types = {field.name: text_types(field.dataType) for field in declared or StructType()}
    read = [
        StructField(field.name, types.get(field.name, field.dataType))
        for field in reader.json(paths).schema.fields
        if field.name != _CORRUPT
    ]
    wanted = StructType([*read, StructField(_CORRUPT, StringType())])
    reader = spark.read.options(**options).option("columnNameOfCorruptRecord", _CORRUPT)
    rows = reader.schema(wanted).json(paths)
    return Opened(_with_corrupt(rows, [f.name for f in read]), textual=declared is not None)


def json_columns(
    checked: DataFrame,
    fields: Sequence[StructField],
    others: Sequence[str],
    options: Mapping[str, str],
) -> DataFrame:
    """The columns of lines that are JSON objects, beside `others` and the facts."""
    schema = StructType([*fields, StructField(_CORRUPT, StringType())])
    to_json = {
        **{n: text for n, text in options.items() if n.lower() not in _OF_FILES},
        "mode": "PERMISSIVE",
        "columnNameOfCorruptRecord": _CORRUPT,
    }
    parsed = checked.withColumn("__record", F.from_json(VALUE, schema, to_json))
    record = F.col("__record")
    corrupt = F.when(record.getField(_CORRUPT).isNotNull(), F.lit(MALFORMED))
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
        return frame.select("*", _file_of().alias(FILE))
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
    return {n: text for n, text in options.items() if n.lower() in _OF_FILES - {"basepath"}}


def _widened(spark: SparkSession, paths: list[str], options: Mapping[str, str]) -> DataFrame:
    """Files whose columns have different types, which Spark does not merge: narrower ones become
    wider, and a column without values is of any type. ValidationError names files that differ in
    more."""
    files = sorted(spark.read.options(**options, mergeSchema="false").parquet(*paths).inputFiles())
    by_schema: dict[str, tuple[StructType, list[str]]] = {}
    for file in files:
        schema = spark.read.options(**options).parquet(file).schema
        by_schema.setdefault(schema.json(), (schema, []))[1].append(file)
    types: dict[str, tuple[DataType, str]] = {}
    frames = [(spark.read.options(**options).parquet(*of), of[0]) for _, of in by_schema.values()]
    for frame, file in frames:
        for field in frame.schema.fields:
            before, other = types.get(field.name, (NullType(), file))
            wider = _wider(before, field.dataType)
            if wider is None and not _has_values(frame, field.name):
                wider = before
            if wider is None and not _has_values(
                spark.read.options(**options).parquet(other), field.name
            ):
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
            _file_of().alias(FILE),
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


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"


def _no_schema(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"source.schema {text!r} is not a schema such as 'id STRING, seats BIGINT': {why}"
    )
