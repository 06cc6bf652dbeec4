"""Opens the source of a spec as a DataFrame, as it is found: nothing is inferred from values.

CSV columns are text under the names of the header, and so are plain values of JSON lines with a
declared schema; `mapping` gives them their declared types. Parquet and JDBC bring types of their
own. Lines that cannot be read come as their text in a column of their own, MALFORMED.

CSV files inside .zip archives, which Spark itself cannot open, are unzipped and parsed by executors
with Arrow, an archive a task, so an archive must fit into a task's memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv as pc
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

from storage_engine.errors import ConfigurationError
from storage_engine.spark.ingest_spec import Source
from storage_engine.spark.jobs.program import revealed, spark_said
from storage_engine.spark.schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MALFORMED = "__malformed"  # the text of a line that cannot be read
_OPTIONS = {"header", "sep", "delimiter", "quote", "escape", "encoding", "charset", "multiLine"}
_HEADER_BYTES = 1 << 20


def read_zipped(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]) -> DataFrame:
    """The rows of all CSV files in the archives."""
    beyond = sorted(set(options) - _OPTIONS)
    if beyond:
        raise ConfigurationError(
            f"source.options: {', '.join(beyond)} cannot be used with .zip files; unzip them "
            f"first, or use only {', '.join(sorted(_OPTIONS))}"
        )
    dialect = _CsvDialect(options)
    archives = spark.read.format("binaryFile").load(list(paths)).select("path", "content")
    headers = archives.mapInArrow(dialect.headers, "path string, header array<string>").collect()
    names = _common(headers)
    schema = StructType([StructField(name, StringType()) for name in [*names, MALFORMED]])
    return archives.repartition(max(1, len(headers)), F.col("path")).mapInArrow(
        dialect.rows(names), schema
    )


def _common(headers: Sequence[tuple[str, list[str]]]) -> list[str]:
    if not headers:
        raise ConfigurationError("source: the archives have no CSV files in them")
    first = headers[0]
    for path, header in headers:
        if header != first[1]:
            raise ConfigurationError(
                f"source: the CSV files in {path} and {first[0]} have different headers "
                f"({', '.join(header)} and {', '.join(first[1])}); ingest them by separate orders"
            )
    return list(first[1])


class _CsvDialect:
    """How the CSV files are written. Travels to executors."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._header = options.get("header", "true").lower() == "true"
        self._separator = options.get("sep", options.get("delimiter", ","))
        self._quote = options.get("quote", '"')
        self._escape = options.get("escape", self._quote)
        self._encoding = codecs.lookup(
            options.get("encoding", options.get("charset", "utf-8"))
        ).name
        self._lines = options.get("multiLine", "true").lower() == "true"

    def headers(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for path, content in zip(*batch.to_pydict().values(), strict=True):
                member_names = [self._names(member) for member in _members(content)]
                yield pa.RecordBatch.from_pydict(
                    {"path": [path] * len(member_names), "header": member_names}
                )

    def rows(self, names: Sequence[str]) -> Parse:
        return Parse(self, list(names))

    def parse(self, member: bytes, names: list[str]) -> pa.Table:
        """All rows; lines with more or fewer values come last, as they are."""
        malformed: list[str | None] = []

        def keep(row: pc.InvalidRow) -> str:
            malformed.append(row.text)
            return "skip"

        table = pc.read_csv(
            io.BytesIO(member),
            read_options=pc.ReadOptions(
                column_names=names, skip_rows=int(self._header), encoding=self._encoding
            ),
            parse_options=pc.ParseOptions(
                delimiter=self._separator,
                quote_char=self._quote or False,
                double_quote=self._escape == self._quote,
                escape_char=self._escape if self._escape not in ("", self._quote) else False,
                newlines_in_values=self._lines,
                invalid_row_handler=keep,
            ),
            convert_options=pc.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                null_values=[""],  # as Spark, for which an empty text is null, quoted or not
                strings_can_be_null=True,
            ),
        )
        whole = table.append_column(MALFORMED, pa.nulls(table.num_rows, pa.string()))
        if not malformed:
            return whole
        columns = [pa.nulls(len(malformed), pa.string())] * len(names)
        broken = pa.table([*columns, pa.array(malformed, pa.string())], schema=whole.schema)
        return pa.concat_tables([whole, broken])

    def _names(self, member: bytes) -> list[str]:
        text = member[:_HEADER_BYTES].decode(self._encoding, errors="replace")
        lines = csv.reader(
            io.StringIO(text.removeprefix("\ufeff")),
            delimiter=self._separator,
            quotechar=self._quote or None,
        )
        first = next(lines, [])
        return first if self._header else [f"_c{number}" for number in range(len(first))]


class Parse:
    """The function that executors run."""

    def __init__(self, dialect: _CsvDialect, names: list[str]) -> None:
        self._dialect = dialect
        self._names = names

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for content in batch.column("content"):
                for member in _members(content.as_py()):
                    yield from self._dialect.parse(member, self._names).to_batches()


def _members(content: bytes) -> Iterator[bytes]:
    """The files of an archive, without folders and what macOS adds."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            if not info.is_dir() and not info.filename.startswith("__MACOSX/"):
                yield archive.read(info)


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
                if source.row_schema is not None:
                    options.setdefault("mergeSchema", "true")  # a column of any file counts
                return Opened(spark.read.options(**options).parquet(*source.paths))
            case _:
                return Opened(_jdbc(spark, source, options))
    except (PySparkException, Py4JJavaError) as error:
        raise ConfigurationError(f"source {_shown(source)}: {spark_said(error)}") from error


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
    header = spark.read.options(**options).csv(list(paths)).columns  # reads one line
    names = [StructField(name, StringType()) for name in header]
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
    textual_schema = reader.option("primitivesAsString", "true").json(list(source.paths)).schema
    types = {field.name: _as_text(field.dataType) for field in declared.fields}
    read = [
        StructField(field.name, types.get(field.name, field.dataType))
        for field in textual_schema.fields
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
