"""CSV files inside .zip archives, which Spark itself cannot open.

Executors unzip and parse whole archives with Arrow, so an archive must fit into a task's memory;
files of gigabytes are better off as .gz or plain. All columns are text.
"""

from __future__ import annotations

import codecs
import csv
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv as pc
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from storage_engine.errors import ConfigurationError

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
    dialect = _Dialect(options)
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


class _Dialect:
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
                found = [self._names(member) for member in _members(content)]
                yield pa.RecordBatch.from_pydict({"path": [path] * len(found), "header": found})

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

    def __init__(self, dialect: _Dialect, names: list[str]) -> None:
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
