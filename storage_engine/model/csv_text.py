"""CSV as RFC 4180 has it, from pieces of a file: rows as Arrow tables, and records that are none.

A record ends at a line end outside of quotes. What is no record stands for itself, with a reason:
a quote that is never closed (with all that follows it), text after a closing quote, more or fewer
values than there are columns, bytes that are not of the encoding. Everything else arrives as it is
written: no trimming, and line ends within quotes stay as they are.

Bytes without a quote, or without anything wrong, are only looked at as a whole; records one by one
only where something is wrong among them.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.csv as pc

from storage_engine.errors import ValidationError

MALFORMED = "line is malformed"
UNCLOSED = "quote is never closed"
AFTER_QUOTE = "text follows a closing quote"
LONGEST_RECORD = 64 * 1024 * 1024  # beyond it, a quote is taken for one that is never closed
_BOM = codecs.BOM_UTF8
_LINE_END = re.compile(rb"\r\n|\n|\r")
KEPT_OF_RECORD = 64 * 1024  # bytes, of one that is none


@dataclass(frozen=True, slots=True)
class BadRecord:
    """`line` counts from 1; 0 where the file is read in parts."""

    raw: bytes
    fault: str
    line: int = 0
    detail: str = ""


@dataclass(frozen=True)
class CsvDialect:
    """How files are written. `spans_lines`: a quoted value may have line ends in it."""

    separator: str = ","
    quote: str = '"'  # "": none
    escape: str = '"'
    encoding: str = "utf-8"
    header: bool = True
    spans_lines: bool = True
    quoted_nulls: bool = True  # an empty text is null, quoted or not

    @property
    def is_utf8(self) -> bool:
        return codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig", "ascii")

    @property
    def keeps_ascii(self) -> bool:
        """Whether line ends, quotes and separators are the bytes that they are in ASCII."""
        try:
            return '\n",a'.encode(self.encoding) == b'\n",a'
        except UnicodeError:
            return False

    @property
    def own_escape(self) -> str:
        """A character that takes quotes within quotes for themselves; not a second quote."""
        return "" if self.escape == self.quote else self.escape

    @cached_property
    def patterns(self) -> _Patterns:
        return _Patterns.of(self)

    def names(self, record: bytes) -> list[str]:
        """Of the columns, as a header has them."""
        text = self._with_doubled_quotes(record).decode("utf-8")
        names = next(
            csv.reader(
                io.StringIO(text, newline=""),
                delimiter=self.separator,
                quotechar=self.quote or None,
                quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
                doublequote=bool(self.escape),
            ),
            [],
        )
        return names if self.header else [f"_c{number}" for number in range(len(names))]

    def table(self, records: bytes, names: Sequence[str]) -> tuple[pa.Table, list[BadRecord]]:
        """Whole records in UTF-8, and those with more or fewer values."""
        ragged: list[BadRecord] = []

        def keep(row: pc.InvalidRow) -> str:
            detail = f"expected {row.expected_columns} columns, got {row.actual_columns}"
            ragged.append(BadRecord(row.text.encode()[:KEPT_OF_RECORD], MALFORMED, detail=detail))
            return "skip"

        schema = dict.fromkeys(names, pa.string())
        if not records.strip(b"\r\n"):
            return pa.schema(list(schema.items())).empty_table(), ragged
        records = self._with_doubled_quotes(records)
        if records.startswith(_BOM):
            records = _BOM + records  # Arrow leaves out the first, which is a value's here
        table = pc.read_csv(
            pa.BufferReader(records),
            read_options=pc.ReadOptions(
                column_names=list(names), block_size=len(records) + 1, use_threads=False
            ),
            parse_options=pc.ParseOptions(
                delimiter=self.separator,
                quote_char=self.quote or False,
                double_quote=bool(self.escape),
                newlines_in_values=True,
                invalid_row_handler=keep,
            ),
            convert_options=pc.ConvertOptions(
                column_types=schema,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=self.quoted_nulls,
            ),
        )
        return table, ragged

    def _with_doubled_quotes(self, records: bytes) -> bytes:
        """Whole records, without the escapes of quoted values: `\\"` is a quote, `\\\\` a
        backslash, and others stay as they are, as do those of values without quotes."""
        escape, quote = self.own_escape.encode(), self.quote.encode()
        if not escape or not quote or escape not in records:
            return records
        escaped = re.compile(rb"%b([%b%b])" % tuple(map(re.escape, (escape, escape, quote))))

        def doubled(match: re.Match[bytes]) -> bytes:
            value = match["value"]
            if not value.startswith(quote):
                return match.group()
            inner = escaped.sub(rb"\1", value[1:-1]).replace(quote, quote * 2)
            return quote + inner + quote + match["end"]

        return self.patterns.value.sub(doubled, records)


@dataclass(frozen=True)
class _Patterns:
    """Of records. None of them ever looks at a byte twice."""

    records: re.Pattern[bytes]  # as many as there are
    record: re.Pattern[bytes]  # one, or what a file ends with
    before: re.Pattern[bytes]  # the values of a record up to one that is none
    quoted: re.Pattern[bytes]
    value: re.Pattern[bytes]  # of whole records, and what ends it

    @classmethod
    def of(cls, dialect: CsvDialect) -> _Patterns:
        separator = re.escape(dialect.separator.encode())
        end = rb"(?:\r\n|\n|\r)"
        stops = b"" if dialect.spans_lines else rb"\r\n"
        if not dialect.quote:
            quoted, plain = rb"(?!)", rb"[^" + separator + rb"\r\n]*+"
        else:
            quote, escape = (re.escape(c.encode()) for c in (dialect.quote, dialect.own_escape))
            plain = rb"(?:[^%b%b\r\n][^%b\r\n]*+)?+" % (quote, separator, separator)
            if escape:
                follows = rb"[^%b]" % stops if stops else rb"."
                inner = rb"(?:[^%b%b%b]|%b%b)" % (quote, escape, stops, escape, follows)
            else:
                inner = rb"[^%b%b]" % (quote, stops)
            unclosed = rb"%b%b*+" % (quote, inner)
            if dialect.escape and not escape:
                unclosed += rb"(?:%b%b%b*+)*+" % (quote, quote, inner)
            quoted = unclosed + quote
        value = rb"(?>%b|%b)" % (quoted, plain)
        record = rb"%b(?:%b%b)*+" % (value, separator, value)

        def compiled(pattern: bytes) -> re.Pattern[bytes]:
            return re.compile(pattern, re.DOTALL)

        return cls(
            records=compiled(rb"(?>%b%b)*+" % (record, end)),
            record=compiled(rb"%b(?:%b|\Z)" % (record, end)),
            before=compiled(rb"(?>%b%b)*+" % (value, separator)),
            quoted=compiled(quoted),
            value=compiled(rb"(?P<value>%b)(?P<end>%b|%b|\Z)" % (value, separator, end)),
        )


@dataclass
class CsvRows:
    """The rows of one file, or of a part of it that begins and ends with a record.

    names:  of the columns; None: as the header has them
    header: of this part; the file's first record, which is no row
    begins: the part is the file's first: a byte order mark is none of its text
    """

    dialect: CsvDialect
    label: str
    names: list[str] | None = None
    header: bool = True
    begins: bool = True
    first: str = ""  # the file that `names` are of, for messages
    bad: list[BadRecord] = field(default_factory=list)  # taken out by whoever reads
    _rest: bytes = b""
    _wait: int = 0  # look again when there is so much
    _line: int = 1
    _began: bool = False
    _lost: bool = False

    def __post_init__(self) -> None:
        decoder = codecs.getincrementaldecoder(self.dialect.encoding)
        self._decode = None if self.dialect.is_utf8 else decoder(errors="surrogateescape")

    @property
    def _where(self) -> str:
        return f"{self.label}: " if self.label else ""

    def feed(self, data: bytes) -> Iterator[pa.Table]:
        yield from self._take(data, last=False)

    def close(self) -> Iterator[pa.Table]:
        yield from self._take(b"", last=True)

    # -- records -------------------------------------------------------------------------------

    def _take(self, data: bytes, *, last: bool) -> Iterator[pa.Table]:
        if self._decode is not None:
            try:
                text = self._decode.decode(data, last)
            except UnicodeError as error:  # units of several bytes, of which one is not whole
                raise ValidationError(
                    f"{self._where}the text is not {_encoding(self.dialect)} from about line "
                    f"{self._line} on ({error}); {ADVICE}"
                ) from None
            data = text.encode("utf-8", "surrogateescape")
        buffer = self._rest + data if self._rest else data
        if self._lost or not buffer or (len(buffer) < self._wait and not last):
            self._rest = b"" if self._lost else buffer
            return
        if self.begins and not self._began:
            if len(buffer) < len(_BOM) and not last:
                self._rest = buffer
                return
            self._began = True
            buffer = buffer.removeprefix(_BOM)
        sound: list[bytes] = []
        position = 0
        while True:
            end = self._whole(buffer, position, last=last)
            sound.append(buffer[position:end])
            self._line += buffer.count(b"\n", position, end)
            if end >= len(buffer):
                position = end
                break
            position, is_bad = self._odd(buffer, end, last=last)
            if not is_bad:
                break
            if self.header and self.dialect.header and not b"".join(sound).strip(b"\r\n"):
                raise ValidationError(
                    f"{self._where}the header cannot be read ({self.bad[-1].fault}: "
                    f"{shown(self.bad[-1].raw)})"
                )
            # Rows come in the order of the file only among themselves.
            self._line += buffer.count(b"\n", end, position)
        self._rest = buffer[position:]
        self._wait = 2 * len(self._rest) if len(self._rest) > (1 << 20) else 0
        yield from self._tables(b"".join(sound))

    def _whole(self, buffer: bytes, start: int, *, last: bool) -> int:
        """Where whole records end, from `start` on."""
        quote = self.dialect.quote.encode()
        if not quote or buffer.find(quote, start) < 0:
            if last:
                return len(buffer)
            end = buffer.rfind(b"\n", start) + 1
            # A file may have \r alone; one at the very end may be half of a line end.
            return end or max(start, buffer.rfind(b"\r", start, len(buffer) - 1) + 1)
        patterns = self.dialect.patterns
        match = patterns.records.match(buffer, start)
        assert match is not None, "none is a match too"
        end = match.end()
        if last and end < len(buffer):
            final = patterns.record.match(buffer, end)
            end = final.end() if final else end
        return end

    def _odd(self, buffer: bytes, start: int, *, last: bool) -> tuple[int, bool]:
        """What follows whole records: where it ends, and whether it is none. Not so where more of
        the file may complete it."""
        patterns = self.dialect.patterns
        before = patterns.before.match(buffer, start)
        value = before.end() if before else start
        quoted = patterns.quoted.match(buffer, value)
        if quoted is None and buffer[value : value + 1] != self.dialect.quote.encode():
            return start, False  # a line that has yet to end
        if quoted is None and self.dialect.spans_lines:
            if not last and len(buffer) - start <= LONGEST_RECORD:
                return start, False
            self._lost = True  # all that follows is within the quote
            self._set_aside(buffer[start:], UNCLOSED)
            return len(buffer), True
        ends = _LINE_END.search(buffer, quoted.end() if quoted else value)
        if ends is None and not last:
            return start, False
        end = ends.end() if ends is not None else len(buffer)
        self._set_aside(buffer[start:end], AFTER_QUOTE if quoted else UNCLOSED)
        return end, True

    # -- rows ----------------------------------------------------------------------------------

    def _tables(self, records: bytes) -> Iterator[pa.Table]:
        if self.header or self.names is None:
            records = self._headed(records)
        if self.names is None or not records:
            return
        records = self._decoded(records)
        table, ragged = self.dialect.table(records, self.names)
        self.bad += ragged
        if table.num_rows:
            yield table

    def _headed(self, records: bytes) -> bytes:
        """What follows the header, which is the first line that is not blank."""
        records = records.lstrip(b"\r\n")
        match = self.dialect.patterns.record.match(records) if records else None
        if match is None or not records:
            return records
        try:
            names = self.dialect.names(match.group().rstrip(b"\r\n"))
        except UnicodeDecodeError as error:
            raise ValidationError(
                f"{self._where}the header is not {_encoding(self.dialect)} "
                f"(byte {_byte(error)} in {shown(match.group())}); {ADVICE}"
            ) from None
        if self.names is None:
            self.names = names
        elif self.dialect.header and names != self.names:
            of = f" as in {self.first}" if self.first else ""
            raise ValidationError(
                f"{self._where}the header is {', '.join(names)}, not {', '.join(self.names)}{of}; "
                "ingest files with different headers by separate orders"
            )
        self.header = False
        return records[match.end() :] if self.dialect.header else records

    def _decoded(self, records: bytes) -> bytes:
        """Those that are of the encoding."""
        try:
            records.decode("utf-8")
        except UnicodeDecodeError:
            kept = []
            position = 0
            while position < len(records):
                match = self.dialect.patterns.record.match(records, position)
                assert match is not None, "records are whole"
                record = match.group()
                position = max(match.end(), position + 1)
                try:
                    record.decode("utf-8")
                    kept.append(record)
                except UnicodeDecodeError as error:
                    encoding = _encoding(self.dialect)
                    self._set_aside(record, f"line is not {encoding}: byte {_byte(error)}", line=0)
            return b"".join(kept)
        return records

    def _set_aside(self, raw: bytes, fault: str, line: int | None = None) -> None:
        number = self._line if line is None else line
        self.bad.append(BadRecord(raw[:KEPT_OF_RECORD].rstrip(b"\r\n"), fault, number))


ADVICE = "name the encoding that it has, such as latin-1"


def shown(raw: bytes) -> str:
    """Bytes as text for people: what is no UTF-8 is written as `\\xe9`."""
    return raw.decode("utf-8", "backslashreplace").strip("\r\n")


def quoted_cell(text: str | None) -> str:
    """As `session.ingest` reads it: NULL is an empty cell, the empty text a quoted one."""
    if text is None:
        return ""
    if text == "" or text != text.strip() or any(c in text for c in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def check_names(names: Sequence[str], label: str) -> None:
    """ValidationError where two columns could not be told apart."""
    if same := same_names(names):
        raise ValidationError(f"{label}: {same}")


def same_names(names: Sequence[str]) -> str | None:
    """What to say of two columns that could not be told apart."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.get(name.lower())
        if other is not None:
            same = "twice" if other == name else f"and {other!r}, which differ in case alone"
            return f"there is the column {name!r} {same}"
        seen[name.lower()] = name
    return None


def _encoding(dialect: CsvDialect) -> str:
    return "UTF-8" if dialect.is_utf8 else dialect.encoding


def _byte(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}"
