"""A corpus of dirty sources: what is in the files, what is stored of it, what is set aside and why.

Each case is read by Spark with `on_bad_rows: quarantine`, and by `Session.ingest` where it has a
door for such files. `rows` and `bad` hold for both: a case with bad rows is one that
`Session.ingest`, which sets nothing aside, refuses. Where the doors differ, `differs` says how, and
docs/spark.md ("Where Spark and Session.ingest differ") why.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.model import Entity, Field


class Dirty(Entity):
    id: Field[str] = Field(primary_key=True)
    s: Field[str | None] = Field(default=None)
    n: Field[int | None] = Field(default=None)
    x: Field[float | None] = Field(default=None)
    b: Field[bool | None] = Field(default=None)
    at: Field[datetime | None] = Field(default=None)
    day: Field[date | None] = Field(default=None)


FIELDS = ("s", "n", "x", "b", "at", "day")
TYPES = {
    "id": "STRING",
    "s": "STRING",
    "n": "BIGINT",
    "x": "DOUBLE",
    "b": "BOOLEAN",
    "at": "TIMESTAMP",
    "day": "DATE",
}


@dataclass(frozen=True)
class Differs:
    """What `Session.ingest` does instead: refuses with these words, or stores these rows."""

    says: str = ""
    rows: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Case:
    """`rows` by id, without nulls; `bad` counts rows by reason; `kept` is what the side table has:
    lines, or rows as JSON. `refused`: nothing is stored, and the message matches this."""

    name: str
    files: Mapping[str, bytes]
    format: str
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bad: Mapping[str, int] = field(default_factory=dict)
    kept: Sequence[str] | None = None
    refused: str | None = None
    session: str | None = None  # words of Session.ingest, where it refuses
    differs: Differs | None = None
    columns: str | None = None  # the declared schema, by letters: "id s n"; None: not declared
    options: Mapping[str, str] = field(default_factory=dict)
    members: Mapping[str, Any] = field(default_factory=dict)  # of the order
    null_value: str | None = None

    @property
    def schema(self) -> str | None:
        if self.columns is None:
            return None
        return ", ".join(f"{name} {TYPES[name]}" for name in self.columns.split())


CASES: list[Case] = []


def _case(name: str, files: Mapping[str, bytes], format: str, **expected: Any) -> None:
    CASES.append(Case(name, files, format, **expected))


# -- CSV -------------------------------------------------------------------------------------------

MALFORMED = "line is malformed"
UNCLOSED = "quote is never closed"
AFTER = "text follows a closing quote"
NO_ID = "column 'id' is null"


def _not(name: str) -> str:
    return f"source column {name} is not {TYPES[name].lower()}"


def _csv(name: str, content: bytes | str, **expected: Any) -> None:
    raw = content if isinstance(content, bytes) else content.encode()
    expected.setdefault("columns", "id s")
    _case(name, {"a.csv": raw}, "csv", **expected)


def _texts(**texts: str | None) -> dict[str, dict[str, Any]]:
    return {key: {} if text is None else {"s": text} for key, text in texts.items()}


_csv("plain", "id,s\na,x\nb,y\n", rows=_texts(a="x", b="y"))
_csv("separator in quotes", 'id,s\na,"x,y"\n', rows=_texts(a="x,y"))
_csv("doubled quotes", 'id,s\na,"say ""hi"""\n', rows=_texts(a='say "hi"'))
_csv("value that is a quote", 'id,s\na,""""\n', rows=_texts(a='"'))
_csv(
    "line break in quotes",
    'id,s\na,"hello\nz,world"\nb,y\n',
    rows=_texts(a="hello\nz,world", b="y"),
)
_csv("CRLF in quotes", 'id,s\r\na,"x\r\ny"\r\nb,z\r\n', rows=_texts(a="x\r\ny", b="z"))
_csv("CR in quotes", 'id,s\na,"x\ry"\n', rows=_texts(a="x\ry"))
_csv("blank line in quotes", 'id,s\na,"x\n\ny"\n', rows=_texts(a="x\n\ny"))
_csv("quoted key with a break", 'id,s\n"a\nb",x\n', rows={"a\nb": {"s": "x"}})
_csv("quoted header", '"id","s"\na,x\n', rows=_texts(a="x"))
_csv(
    "line break in the header",
    '"id","s\nt"\na,x\n',
    refused="column s\nt \\(string\\) is added",
    session="unknown column",
)
_csv("lines end in CRLF", "id,s\r\na,x\r\nb,y\r\n", rows=_texts(a="x", b="y"))
_csv("lines end in CR", "id,s\ra,x\rb,y\r", rows=_texts(a="x", b="y"))
_csv("line ends of all kinds", "id,s\na,x\r\nb,y\nc,z\r\n", rows=_texts(a="x", b="y", c="z"))
_csv("no line end at the end", "id,s\na,x\nb,y", rows=_texts(a="x", b="y"))
_csv("quotes at the end", 'id,s\na,"x"', rows=_texts(a="x"))
_csv("blank lines", "id,s\n\na,x\n\n\nb,y\n\n", rows=_texts(a="x", b="y"))
_csv("blank lines before the header", "\n\nid,s\na,x\n", rows=_texts(a="x"))
_csv("byte order mark", b"\xef\xbb\xbfid,s\na,x\n", rows=_texts(a="x"))
_csv("byte order mark and quotes", b'\xef\xbb\xbf"id","s"\na,x\n', rows=_texts(a="x"))
_csv(
    "byte order mark of a later row",
    b"id,s\na,x\n\xef\xbb\xbfb,y\n",
    rows={"a": {"s": "x"}, "\ufeffb": {"s": "y"}},
)
_csv("header alone", "id,s\n")
_csv("header alone, no line end", "id,s")
_csv("empty file", "", refused="no header", session="the first line must name the columns")
_csv("blank file", "\n\n", refused="does not end", session="the first line must name the columns")
_csv("spaces are values", "id,s\n a , x \n", rows={" a ": {"s": " x "}})
_csv("tabs are values", "id,s\na,\tx\t\n", rows=_texts(a="\tx\t"))
_csv(
    "quote after a space",
    'id,s\na, "x,y"\nb,z\n',
    rows=_texts(b="z"),
    bad={MALFORMED: 1},
    kept=['a, "x,y"'],
    session="expected 2 columns, got 3",
)
_csv("quote within a value", 'id,s\na,5" pipe\nb,6" pipe\n', rows=_texts(a='5" pipe', b='6" pipe'))
_csv("one quote within a value", 'id,s\na,5" pipe\nb,y\n', rows=_texts(a='5" pipe', b="y"))
_csv(
    "text after a closing quote",
    'id,s\na,"x"y\nb,z\n',
    rows=_texts(b="z"),
    bad={AFTER: 1},
    kept=['a,"x"y'],
    session=AFTER,
)
_csv(
    "space after a closing quote",
    'id,s\na,"x" \nb,z\n',
    rows=_texts(b="z"),
    bad={AFTER: 1},
    kept=['a,"x" '],
    session=AFTER,
)
_csv(
    "quote never closed at the end",
    'id,s\na,x\nb,"hello',
    rows=_texts(a="x"),
    bad={UNCLOSED: 1},
    kept=['b,"hello'],
    session="line 3: quote is never closed",
)
_csv(
    "quote never closed in the middle",
    'id,s\na,x\nb,"hello\nc,world\nd,e\n',
    rows=_texts(a="x"),
    bad={UNCLOSED: 1},
    kept=['b,"hello\nc,world\nd,e'],
    session="line 3: quote is never closed",
)
_csv(
    "quote never closed in the key",
    'id,s\n"a,hello\nb,c\n',
    bad={UNCLOSED: 1},
    kept=['"a,hello\nb,c'],
    session=UNCLOSED,
)
_csv(
    "quote never closed after doubled ones",
    'id,s\na,"x""\nb,y\n',
    bad={UNCLOSED: 1},
    kept=['a,"x""\nb,y'],
    session=UNCLOSED,
)
_csv(
    "quote closed by that of the next line",
    'id,s\na,"hello\nb,"world"\nc,d\n',
    rows=_texts(c="d"),
    bad={AFTER: 1},
    kept=['a,"hello\nb,"world"'],
    session=AFTER,
)
_csv("quote never closed in the header", 'id,"s\na,x\n', refused="does not end", session=UNCLOSED)
_csv(
    "too many values",
    "id,s\na,x,1\nb,y\n",
    rows=_texts(b="y"),
    bad={MALFORMED: 1},
    kept=["a,x,1"],
    session="expected 2 columns, got 3",
)
_csv(
    "too few values",
    "id,s\na\nb,y\n",
    rows=_texts(b="y"),
    bad={MALFORMED: 1},
    kept=["a"],
    session="expected 2 columns, got 1",
)
_csv(
    "separator at the end of each line",
    "id,s\na,x,\nb,y,\n",
    bad={MALFORMED: 2},
    kept=["a,x,", "b,y,"],
    session="expected 2 columns, got 3",
)
_csv(
    "no key",
    "id,s\n,x\nb,y\n",
    rows=_texts(b="y"),
    bad={NO_ID: 1},
    kept=['{"id": null, "s": "x"}'],
    session="column 'id' is empty",
)
_csv("no values", "id,s\n,\n", bad={NO_ID: 1}, session="column 'id' is empty")
_csv(
    "empty text in quotes",
    'id,s\na,""\nb,\n',
    rows=_texts(a=None, b=None),
    differs=Differs(rows=_texts(a="", b=None)),
)
_csv("NUL", "id,s\na,x\0y\n", rows=_texts(a="x\0y"))
_csv("beyond the basic plane", "id,s\na,😀 ﬁ é\n", rows=_texts(a="😀 ﬁ é"))
_csv("replacement character as a value", "id,s\na,�\n", rows=_texts(a="�"))
_csv(
    "line and paragraph separators",
    "id,s\na,x\u2028y\u2029z\x85\x0b\x0c\n",
    rows=_texts(a="x\u2028y\u2029z\x85\x0b\x0c"),
)
_csv("long value", f"id,s\na,{'x' * 300_000}\n", rows=_texts(a="x" * 300_000))
_csv("one column", "id\na\nb\n", columns="id", rows=_texts(a=None, b=None))
_csv("comment is a value", "id,s\n#a,x\n", rows={"#a": {"s": "x"}})
_csv(
    "Latin-1",
    b"id,s\na,caf\xe9\nb,x\n",
    rows=_texts(b="x"),
    bad={"line is not UTF-8: byte 0xe9": 1},
    kept=["a,caf\\xe9"],
    session="line is not UTF-8: byte 0xe9.*caf.*xe9",
)
_csv(
    "Latin-1, said so",
    b"id,s\na,caf\xe9\n",
    options={"encoding": "latin-1"},
    rows=_texts(a="café"),
    differs=Differs("line is not UTF-8: byte 0xe9"),
)
_csv(
    "Latin-1 in the header",
    b"id,s\xe9\na,x\n",
    refused="the header is not UTF-8 .byte 0xe9",
    session="the header is not UTF-8",
)
_csv(
    "Windows-1252 with a byte that it does not have",
    b"id,s\na,\x80\nb,\x81\n",
    options={"encoding": "cp1252"},
    rows=_texts(a="€"),
    bad={"line is not cp1252: byte 0x81": 1},
    kept=["b,\\x81"],
    session="line is not UTF-8: byte 0x80",
)
_csv(
    "UTF-16",
    "id,s\na,é\nb,\u0a0a\n".encode("utf-16"),
    options={"encoding": "utf-16"},
    rows=_texts(a="é", b="\u0a0a"),
    differs=Differs("the header is not UTF-8"),
)
_csv(
    "UTF-16, not said",
    "id,s\na,x\n".encode("utf-16"),
    refused="the header is not UTF-8 .byte 0xff",
    session="the header is not UTF-8",
)
_csv(
    "surrogates as bytes",
    b"id,s\na,\xed\xa0\x80\n",
    bad={"line is not UTF-8: byte 0xed": 1},
    kept=["a,\\xed\\xa0\\x80"],
    session="byte 0xed",
)
_csv(
    "character cut short at the end",
    b"id,s\na,x\nb,\xc3",
    rows=_texts(a="x"),
    bad={"line is not UTF-8: byte 0xc3": 1},
    kept=["b,\\xc3"],
    session="byte 0xc3",
)
_csv(
    "bytes in a quoted value over lines",
    b'id,s\na,"x\n\xe9"\nb,y\n',
    rows=_texts(b="y"),
    bad={"line is not UTF-8: byte 0xe9": 1},
    kept=['a,"x\n\\xe9"'],
    session="byte 0xe9",
)
_csv(
    "tabs, said so",
    "id\ts\na\tx,y\n",
    options={"sep": "\t"},
    rows=_texts(a="x,y"),
    differs=Differs("unknown column"),
)
_csv(
    "semicolons, not said",
    "id;s\na;x\n",
    refused="column id;s .string. is added",
    session="unknown column 'id;s'",
)
_csv(
    "backslash before quotes, said so",
    'id,s\na,"say \\"hi\\"\nthere"\nb,C:\\dir\nc,"C:\\\\d\\ir"\n',
    options={"escape": "\\"},
    rows=_texts(a='say "hi"\nthere', b="C:\\dir", c="C:\\d\\ir"),
    differs=Differs(AFTER),
)
_csv(
    "no quotes, said so",
    'id,s\na,"x\nb,y"\n',
    options={"quote": ""},
    rows=_texts(a='"x', b='y"'),
    differs=Differs(rows=_texts(a="x\nb,y")),
)
_csv(
    "one line each, said so",
    'id,s\na,"x\ny"\nb,z\n',
    options={"multiLine": "false"},
    rows=_texts(b="z"),
    bad={UNCLOSED: 1, MALFORMED: 1},
    kept=['a,"x', 'y"'],
    differs=Differs(rows=_texts(a="x\ny", b="z")),
)
_csv(
    "NA for null",
    "id,s\na,NA\n",
    null_value="NA",
    rows=_texts(a=None),
    differs=Differs(rows=_texts(a="NA")),
)
_csv(
    "no header, said so",
    "a,x\nb,y\n",
    columns=None,
    options={"header": "false"},
    members={"columns": {"id": "_c0", "s": "_c1"}},
    rows=_texts(a="x", b="y"),
    differs=Differs("column 'id' is missing"),
)
_csv("column twice", "id,s,s\na,x,y\n", refused="the column 's' twice", session="is there 2 times")
_csv(
    "columns that differ in case",
    "id,ID\na,x\n",
    columns="id",
    refused="differ in case alone",
    session="unknown column 'ID'",
)
_csv(
    "header in capitals, one mapped",
    "ID,S\na,x\n",
    columns=None,
    members={"columns": {"id": "ID"}},
    refused="the source has 'S' where the type has 's'",
    session="unknown column",
)
_csv(
    "header in capitals",
    "ID,S\na,x\n",
    refused="column ID .string. is added",
    session="unknown column 'ID'",
)
_csv(
    "space in the header",
    "id, s\na,x\n",
    refused="column  s .string. is added",
    session="unknown column ' s'",
)
_csv("no name in the header", "id,\na,x\n", refused="is added", session="unknown column ''")
_csv(
    "column too many",
    "id,s,t\na,x,1\n",
    refused="column t .string. is added",
    session="unknown column 't'",
)
_csv(
    "key missing",
    "s\nx\n",
    columns="id s",
    refused="column id .string. is missing",
    session="column 'id' is missing",
)
_csv(
    "key twice",
    "id,s\na,x\na,y\n",
    refused="identities appear more than once",
    differs=Differs(rows=_texts(a="y")),
)


# values of CSV: a column each, two rows, of which the second is in question


def _value(name: str, column: str, text: str, value: Any = None, **expected: Any) -> None:
    """`value` None: it is bad, and the side table has the text."""
    quoted = f'"{text}"' if "," in text else text
    content = f"id,{column}\na,{quoted}\nb,\n"
    columns = f"id {column}"
    if value is not None:
        _csv(name, content, columns=columns, rows={"a": {column: value}, "b": {}}, **expected)
        return
    row = f'{{"id": "a", "{column}": "{text}"}}'
    expected.setdefault("bad", {_not(column): 1})
    expected.setdefault("session", f"column '{column}'")
    _csv(name, content, columns=columns, rows={"b": {}}, kept=[row], **expected)


_value("least int", "n", "-9223372036854775808", -(2**63))
_value("greatest int", "n", "9223372036854775807", 2**63 - 1)
_value("int beyond 64 bits", "n", "9223372036854775808")
_value("int with zeros", "n", "007", 7)
_value("int with a fraction of nothing", "n", "1.0")
_value("int in scientific notation", "n", "1e3")
_value("int in hexadecimal", "n", "0x10")
_value("int with underscores", "n", "1_000")
_value("int with a separator of thousands", "n", "1,000")
_value("int with a plus", "n", "+5", 5, differs=Differs("column 'n'"))
_value("int with spaces", "n", " 5 ", 5, differs=Differs("column 'n'"))
_value("int in other digits", "n", "٣")
_value("words for an int", "n", "many")
_value("float", "x", "-0.5e-3", -0.0005)
_value("float without a leading zero", "x", ".5", 0.5)
_value("float of many digits", "x", "0.1000000000000000055511151231257827", 0.1)
_value("float with a letter", "x", "1d")
_value("float with another letter", "x", "1f")
_value("float with a comma", "x", "1,5")
_value("not a number", "x", "NaN", bad={"column 'x' is NaN or infinite": 1})
_value("infinite", "x", "Infinity", bad={"column 'x' is NaN or infinite": 1})
_value("float too large", "x", "1e400", bad={"column 'x' is NaN or infinite": 1})
_value("true", "b", "true", True)
_value("True", "b", "True", True)
_value("1 for true", "b", "1", True)
_value("yes for true", "b", "yes", True, differs=Differs("column 'b'"))
_value("maybe", "b", "maybe")
_value("2 for true", "b", "2")
_value("time with T and Z", "at", "2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
_value("time with a space", "at", "2026-01-02 03:04:05", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
_value(
    "time with an offset",
    "at",
    "2026-01-02T03:04:05+02:00",
    datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC),
)
_value(
    "time with microseconds",
    "at",
    "2026-01-02T03:04:05.000006",
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
)
_value("time of a day alone", "at", "2026-01-02", datetime(2026, 1, 2, tzinfo=UTC))
_value("time without a day", "at", "10:30")
_value("time without a day, with seconds", "at", "10:30:05")
_value("time without a day, with T", "at", "T10:30")
_value("time that is a year", "at", "2026")
_value("time that is a word", "at", "today")
_value("time finer than microseconds", "at", "2026-01-02T03:04:05.000000001")
_value("time that is none", "at", "2026-02-30T00:00:00")
_value("time with a 25th hour", "at", "2026-01-02T25:00:00")
_value("day", "day", "2026-01-02", date(2026, 1, 2))
_value("day that is none", "day", "2026-02-30")
_value("day with a time", "day", "2026-01-02T03:04:05")
_value("day with other text", "day", "2026-01-02 or so")
_value("day that is a time", "day", "10:30")
_value("day that is a month", "day", "2026-01")
_value("day in another order", "day", "31.12.2026")
_value(
    "day in another order, said so",
    "day",
    "31.12.2026",
    date(2026, 12, 31),
    options={"dateFormat": "dd.MM.yyyy"},
    differs=Differs("column 'day'"),
)

# several files, folders

_case(
    "two files",
    {"in/a.csv": b"id,s\na,x\n", "in/b.csv": b"id,s\nb,y\n"},
    "csv",
    columns="id s",
    rows=_texts(a="x", b="y"),
)
_case(
    "two files, columns in another order",
    {"in/a.csv": b"id,s\na,xx\n", "in/b.csv": b"s,id\ny,b\n"},
    "csv",
    columns="id s",
    refused="in/b.csv: the header is s, id, not id, s as in .*in/a.csv",
    differs=Differs(rows=_texts(a="xx", b="y")),
)
_case(
    "two files, a column more",
    {"in/a.csv": b"id,s\na,xx\n", "in/b.csv": b"id,s,n\nb,y,1\n"},
    "csv",
    columns="id s",
    refused="column n .string. is added",
    differs=Differs(rows={"a": {"s": "xx"}, "b": {"s": "y", "n": 1}}),
)
_case(
    "quote never closed in one of two files",
    {"in/a.csv": b'id,s\na,"x\n', "in/b.csv": b"id,s\nb,y\n"},
    "csv",
    columns="id s",
    rows=_texts(b="y"),
    bad={UNCLOSED: 1},
    kept=['a,"x'],
    session="a.csv: .*quote is never closed",
)
_case(
    "an empty file among others",
    {"in/a.csv": b"id,s\na,x\n", "in/b.csv": b""},
    "csv",
    columns="id s",
    rows=_texts(a="x"),
    differs=Differs("b.csv: .*the first line must name the columns"),
)
_case(
    "hidden files",
    {"in/a.csv": b"id,s\na,x\n", "in/_SUCCESS": b"", "in/.b.csv.crc": b"crc"},
    "csv",
    columns="id s",
    rows=_texts(a="x"),
    differs=Differs("must end in one of"),
)
_case(
    "values in the names of folders",
    {"in/s=x/a.csv": b"id\na\n", "in/s=y/b.csv": b"id\nb\n"},
    "csv",
    columns="id s",
    rows=_texts(a="x", b="y"),
    differs=Differs(rows=_texts(a=None, b=None)),
)
_case(
    "spaces and other signs in names",
    {"in/a b%é.csv": b'id,s\na,"x\n'},
    "csv",
    columns="id s",
    bad={UNCLOSED: 1},
    kept=['a,"x'],
    session="a b%é.csv: ",
)

# -- packed ----------------------------------------------------------------------------------------

GOOD = b"id,s\na,x\n"


def _gz(name: str, content: bytes, file: str = "a.csv.gz", **expected: Any) -> None:
    _case(name, {file: content}, "csv", columns="id s", **expected)


_gz("gz", gzip.compress(b'id,s\na,"x\ny"\n'), rows=_texts(a="x\ny"))
_gz("gz of two parts", gzip.compress(GOOD) + gzip.compress(b"b,y\n"), rows=_texts(a="x", b="y"))
_gz("gz that is cut short", gzip.compress(GOOD * 50)[:-12], refused="a.csv.gz")
_gz("gz that is none", GOOD, refused="a.csv.gz")
_gz("gz with a wrong checksum", gzip.compress(GOOD)[:-8] + b"12345678", refused="a.csv.gz")
_gz("gz with more after it", gzip.compress(GOOD) + b"garbage", refused="a.csv.gz")
_gz("gz of nothing", b"", refused="a.csv.gz: there is no header")
_gz(
    "gz with a quote never closed",
    gzip.compress(b'id,s\na,x\nb,"y\n'),
    rows=_texts(a="x"),
    bad={UNCLOSED: 1},
    kept=['b,"y'],
)
_gz(
    "gz in Latin-1",
    gzip.compress(b"id,s\na,\xe9\n"),
    bad={"line is not UTF-8: byte 0xe9": 1},
    kept=["a,\\xe9"],
)
_gz("bz2", bz2.compress(GOOD), "a.csv.bz2", rows=_texts(a="x"))
_gz("zst that is none", GOOD, "a.csv.zst", refused="a.csv.zst")
_case(
    "bz2 that is none, among others",
    {"in/a.csv": GOOD, "in/b [1].csv.bz2": GOOD * 9, "in/c.csv.bz2": bz2.compress(b"")},
    "csv",
    columns="id s",
    refused=r"/in/b \[1\].csv.bz2: nothing in it can be unpacked.* or no bz2 file",
    session="the name must end in",
)


def _zipped(members: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


def _zip(name: str, content: bytes, **expected: Any) -> None:
    _case(name, {"a.zip": content}, "csv", columns="id s", **expected)


def _spoiled(content: bytes) -> bytes:
    """With one byte of the first member's data changed."""
    place = content.index(b"a.csv") + len(b"a.csv") + 4
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


def _locked(content: bytes) -> bytes:
    """As if members were encrypted: a bit in both headers."""
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.index(mark) + place
        content = content[:at] + bytes([content[at] | 1]) + content[at + 1 :]
    return content


_zip(
    "zip",
    _zipped({"a.csv": b'id,s\na,"x\ny"\n', "b/c.csv": b"id,s\nb,y\n"}),
    rows=_texts(a="x\ny", b="y"),
)
_zip(
    "zip with backslashes before quotes",
    _zipped({"a.csv": b'id,s\na,"say \\"hi\\"\nthere"\nb,C:\\dir\nc,"C:\\\\d\\ir"\n'}),
    options={"escape": "\\"},
    rows=_texts(a='say "hi"\nthere', b="C:\\dir", c="C:\\d\\ir"),
)
_zip(
    "zip, separator of two characters",
    _zipped({"a.csv": GOOD}),
    options={"sep": "::"},
    refused="one ASCII character",
)
_case(
    "zip in a folder",
    {"in/a.csv": GOOD, "in/b.zip": _zipped({"a.csv": GOOD})},
    "csv",
    columns="id s",
    refused=r"/in/b.zip: archives are read where an order names them.*/in/\*.zip",
    session="the name must end in",
)
_case(
    "UTF-16 in folders whose names are columns",
    {"in/s=x/a.csv": "id\na\n".encode("utf-16")},
    "csv",
    options={"encoding": "utf-16"},
    refused="s is in the names of folders, which are not read with .*utf-16",
    session="line 1: line is not UTF-8|header is not UTF-8|cannot be read",
)
_csv(
    "encoding that is none",
    "id\na\n",
    options={"encoding": "base64"},
    refused="is unknown",
    columns="id",
    differs=Differs(rows={"a": {}}),
)
_zip("zip from a Mac", _zipped({"a.csv": GOOD, "__MACOSX/._a.csv": b"\0"}), rows=_texts(a="x"))
_zip("zip that is none", GOOD, refused="a.zip: cannot be read as a zip file")
_zip("zip of nothing", _zipped({}), refused="a.zip.*no CSV files")
_zip("zip that is empty", b"", refused="a.zip")
_zip(
    "zip that is cut short", _zipped({"a.csv": GOOD})[:40], refused="a.zip: cannot be read as a zip"
)
_zip(
    "zip with a spoiled byte",
    _spoiled(_zipped({"a.csv": GOOD * 9})),
    refused="a.zip: cannot be read as a zip",
)
_zip(
    "zip that is locked",
    _locked(_zipped({"a.csv": GOOD})),
    refused="a.zip: cannot be read as a zip",
)
_zip(
    "zip with other headers",
    _zipped({"a.csv": GOOD, "b.csv": b"s,id\ny,b\n"}),
    refused="a.zip/b.csv and .*a.zip/a.csv have different columns",
)
_zip(
    "zip with a quote never closed",
    _zipped({"a.csv": b'id,s\na,"x\n', "b.csv": b"id,s\nb,y\n"}),
    rows=_texts(b="y"),
    bad={UNCLOSED: 1},
    kept=['a,"x'],
)
_zip(
    "zip in Latin-1",
    _zipped({"a.csv": b"id,s\na,\xe9\nb,y,z\n"}),
    bad={"line is not UTF-8: byte 0xe9": 1, MALFORMED: 1},
    kept=["a,\\xe9", "b,y,z"],
)

# -- JSON lines ------------------------------------------------------------------------------------


def _json(name: str, content: bytes | str, **expected: Any) -> None:
    raw = content if isinstance(content, bytes) else content.encode()
    expected.setdefault("columns", "id s")
    _case(name, {"a.jsonl": raw}, "json", **expected)


def _line(name: str, line: str | bytes, fault: str = MALFORMED, **expected: Any) -> None:
    """A line that cannot be read, after one that can."""
    raw = line if isinstance(line, bytes) else line.encode()
    shown = raw.decode("utf-8", "backslashreplace")
    expected.setdefault("session", "line 2 is not")
    _json(
        name,
        b'{"id": "a", "s": "x"}\n' + raw + b"\n",
        rows=_texts(a="x"),
        bad={fault: 1},
        kept=[shown],
        **expected,
    )


_json("JSON", '{"id": "a", "s": "x"}\n{"s": "y", "id": "b"}\n', rows=_texts(a="x", b="y"))
_json("JSON, blank lines", '\n{"id": "a", "s": "x"}\n  \n\n', rows=_texts(a="x"))
_json("JSON, CRLF", '{"id": "a", "s": "x"}\r\n', rows=_texts(a="x"))
_json(
    "JSON, byte order marks",
    b'\xef\xbb\xbf{"id": "a", "s": "x"}\n\xef\xbb\xbf{"id": "b"}\n',
    rows=_texts(a="x", b=None),
)
_json("JSON, no line end", '{"id": "a", "s": "x"}', rows=_texts(a="x"))
_json(
    "JSON, keys missing and null",
    '{"id": "a", "s": "x"}\n{"id": "b"}\n{"id": "c", "s": null}\n',
    rows=_texts(a="x", b=None, c=None),
)
_json(
    "JSON, escapes",
    '{"id": "a", "s": "\\u00e9\\n\\ud83d\\ude00\\u0000"}\n',
    rows=_texts(a="é\n😀\0"),
)
_json("JSON, key twice in a line", '{"id": "a", "s": "x", "s": "y"}\n', rows=_texts(a="y"))
_json("JSON, empty text", '{"id": "a", "s": ""}\n', rows=_texts(a=""))
_line("JSON, no JSON", "{broken")
_line("JSON, cut short", '{"id": "b", "s": "y')
_line("JSON, two objects in a line", '{"id": "b"}{"id": "c"}')
_line("JSON, more after an object", '{"id": "b"} and so on')
_line("JSON, a list", '[{"id": "b"}]')
_line("JSON, a number", "5")
_line("JSON, null", "null")
_line("JSON, NaN", '{"id": "b", "s": NaN}')
_line("JSON, single quotes", "{'id': 'b'}")
_line("JSON, comma at the end", '{"id": "b",}')
_line("JSON, tab in a text", '{"id": "b\t"}')
_line("JSON, unknown escape", '{"id": "b\\q"}')
_line("JSON, zero before a number", '{"id": "b", "s": 007}')
_line(
    "JSON, first half of a pair",
    '{"id": "b", "s": "\\ud800x"}',
    "line has half of a surrogate pair",
)
_line(
    "JSON, second half of a pair",
    '{"id": "b", "s": "\\udc00"}',
    "line has half of a surrogate pair",
)
_line("JSON in Latin-1", b'{"id": "b", "s": "caf\xe9"}', "line is not UTF-8: byte 0xe9")
_json(
    "JSON, CSV in it",
    "id,s\na,x\n",
    refused="there is no JSON object",
    session="line 1 is not JSON",
)
_json("JSON, empty file", "", refused="there is no JSON object", differs=Differs(rows={}))
_json(
    "JSON, fraction of nothing for an int",
    '{"id": "a", "n": 1.0}\n{"id": "b", "n": 2}\n',
    columns="id n",
    rows={"b": {"n": 2}},
    bad={_not("n"): 1},
    kept=['{"id": "a", "n": 1.0}'],
    session="column 'n' is not an integer",
)
_json(
    "JSON, text for an int",
    '{"id": "a", "n": "5"}\n',
    columns="id n",
    rows={"a": {"n": 5}},
    differs=Differs("column 'n' is not an integer"),
)
_json(
    "JSON, number for a text",
    '{"id": "a", "s": 5}\n',
    rows=_texts(a="5"),
    differs=Differs("column 's' is not text"),
)
_json(
    "JSON, int beyond 64 bits",
    '{"id": "a", "n": 9223372036854775808}\n',
    columns="id n",
    bad={_not("n"): 1},
    kept=['{"id": "a", "n": 9223372036854775808}'],
    session="column 'n' is not an integer",
)
_json(
    "JSON, time without a day",
    '{"id": "a", "at": "10:30"}\n',
    columns="id at",
    bad={_not("at"): 1},
    kept=['{"id": "a", "at": "10:30"}'],
    session="column 'at'",
)
_json(
    "JSON, no key",
    '{"s": "x"}\n{"id": "b"}\n',
    rows=_texts(b=None),
    bad={NO_ID: 1},
    kept=['{"s": "x"}'],
    session="column 'id' is missing",
)
_json(
    "JSON, another key",
    '{"id": "a", "t": 1}\n',
    columns="id",
    refused="column t .string. is added",
    session="unknown column 't'",
)
_json(
    "JSON, nothing declared",
    '{"id": "a", "n": 1, "x": 0.5, "b": true}\n{"id": "b"}\n',
    columns=None,
    rows={"a": {"n": 1, "x": 0.5, "b": True}, "b": {}},
)
_case(
    "JSON, files with different keys",
    {"in/a.jsonl": b'{"id": "a", "s": "x"}\n', "in/b.jsonl": b'{"id": "b", "n": 2}\n'},
    "json",
    rows={"a": {"s": "x"}, "b": {"n": 2}},
)
_case(
    "JSON, gz",
    {"a.jsonl.gz": gzip.compress(b'{"id": "a", "s": "x"}\n')},
    "json",
    columns="id s",
    rows=_texts(a="x"),
)
_case(
    "JSON, gz cut short",
    {"a.jsonl.gz": gzip.compress(b'{"id": "a", "s": "x"}\n' * 50)[:-12]},
    "json",
    columns="id s",
    refused="a.jsonl.gz",
)
_case(
    "JSON, gz that is none",
    {"a.jsonl.gz": b'{"id": "a"}\n'},
    "json",
    columns="id s",
    refused="a.jsonl.gz",
)

# -- Parquet ---------------------------------------------------------------------------------------


def _table(**columns: Any) -> bytes:
    made = io.BytesIO()
    pq.write_table(pa.table(columns), made)
    return made.getvalue()


def _parquet(name: str, *contents: bytes, **expected: Any) -> None:
    files = {f"in/{letter}.parquet": raw for letter, raw in zip("abc", contents, strict=False)}
    _case(name, files, "parquet", **expected)


PLAIN = _table(id=["a"], s=["x"])
_parquet("Parquet", PLAIN, rows=_texts(a="x"))
_parquet("Parquet without rows", _table(id=pa.array([], pa.string())))
_parquet(
    "Parquet, files with different columns",
    PLAIN,
    _table(id=["b"], n=[2]),
    _table(id=["c"], x=[0.5]),
    rows={"a": {"s": "x"}, "b": {"n": 2}, "c": {"x": 0.5}},
)
_parquet(
    "Parquet, columns in another order",
    PLAIN,
    _table(s=["y"], id=["b"]),
    rows=_texts(a="x", b="y"),
)
_parquet(
    "Parquet, ints of different width",
    _table(id=["a"], n=pa.array([1], pa.int32())),
    _table(id=["b"], n=pa.array([2**40], pa.int64())),
    rows={"a": {"n": 1}, "b": {"n": 2**40}},
)
_case(
    "Parquet, ints of different width in folders whose names are columns",
    {
        "in/s=x/a [1] %20.parquet": _table(id=["a"], n=pa.array([1], pa.int32())),
        "in/s=y/a [1] %20.parquet": _table(id=["b"], n=pa.array([2**40], pa.int64())),
    },
    "parquet",
    rows={"a": {"s": "x", "n": 1}, "b": {"s": "y", "n": 2**40}},
    differs=Differs(rows={"a": {"n": 1}, "b": {"n": 2**40}}),
)
_parquet(
    "Parquet, a column of nulls in one file",
    PLAIN,
    _table(id=["b"], s=pa.nulls(1)),
    rows=_texts(a="x", b=None),
)
_parquet(
    "Parquet, a column that is text in one file",
    _table(id=["a"], n=[1]),
    _table(id=["b"], n=["2"]),
    refused="column n is bigint in .*a.parquet and string in .*b.parquet",
    session="b.parquet: .*column 'n' is string",
)
_parquet(
    "Parquet, unknown column in one file",
    PLAIN,
    _table(id=["b"], t=[1]),
    refused="unknown column 't'",
    session="b.parquet: .*unknown column 't'",
)
_parquet("Parquet cut short", PLAIN[: len(PLAIN) // 2], refused="a.parquet", session="a.parquet")
_parquet("Parquet that is text", b"id,s\na,x\n" * 9, refused="a.parquet", session="a.parquet")
_parquet("Parquet that is empty", b"", refused="a.parquet", session="a.parquet")
_parquet(
    "Parquet, an empty file among others",
    PLAIN,
    b"",
    refused="b.parquet: is empty",
    session="b.parquet",
)
_parquet(
    "Parquet with spoiled pages",
    PLAIN[:4] + b"\xff" * 40 + PLAIN[44:],
    refused="a.parquet",
    session="a.parquet",
)
_parquet(
    "Parquet, no key",
    _table(id=["a", None], s=["x", "y"]),
    rows=_texts(a="x"),
    bad={NO_ID: 1},
    kept=['{"id": null, "s": "y"}'],
    session="column 'id' is null",
)
_parquet(
    "Parquet, not a number and infinite",
    _table(id=["a", "b", "c"], x=[float("nan"), float("-inf"), 0.5]),
    rows={"c": {"x": 0.5}},
    bad={"column 'x' is NaN or infinite": 2},
    kept=['{"id": "a", "x": "NaN"}', '{"id": "b", "x": "-Infinity"}'],
    session="column 'x' is NaN or infinite",
)
_parquet(
    "Parquet, text that is not UTF-8",
    _table(
        id=["a", "b"], s=pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xe9", b"y"]).buffers())
    ),
    rows=_texts(b="y"),
    bad={"column 's' is not valid UTF-8": 1},
    kept=['{"id": "a", "s": "\\\\xe9"}'],
    session="column 's' is not valid UTF-8",
)
_parquet(
    "Parquet, times and days",
    _table(
        id=["a"],
        at=pa.array([datetime(2026, 1, 2, tzinfo=UTC)], pa.timestamp("us", "UTC")),
        day=pa.array([date(2026, 1, 2)]),
    ),
    rows={"a": {"at": datetime(2026, 1, 2, tzinfo=UTC), "day": date(2026, 1, 2)}},
)
_parquet(
    "Parquet, dictionaries",
    _table(
        id=pa.array(["a", "b"]).dictionary_encode(), s=pa.array(["x", None]).dictionary_encode()
    ),
    rows=_texts(a="x", b=None),
)
_parquet(
    "Parquet, column names in capitals",
    _table(ID=["a"], S=["x"]),
    members={"columns": {"id": "ID"}},
    refused="the source has 'S' where the type has 's'",
    session="unknown column",
)

_parquet(
    "Parquet, unsigned ints",
    _table(id=["a"], n=pa.array([2**62], pa.uint64())),
    rows={"a": {"n": 2**62}},
)
_parquet(
    "Parquet, unsigned ints beyond 64 bits",
    _table(id=["a", "b"], n=pa.array([2**63, 1], pa.uint64())),
    rows={"b": {"n": 1}},
    bad={"column 'n' is beyond 64 bits": 1},
    session="column 'n' is beyond 64 bits",
)
_parquet(
    "Parquet, whole doubles for ints",
    _table(id=["a", "b"], n=[2.0**60, 2.0]),
    rows={"a": {"n": 2**60}, "b": {"n": 2}},
)
_parquet(
    "Parquet, a fraction for an int",
    _table(id=["a", "b"], n=[1.5, 2.0]),
    rows={"b": {"n": 2}},
    bad={"column 'n' is not a whole number": 1},
    kept=['{"id": "a", "n": 1.5}'],
    session="column 'n' is not a whole number",
)
_parquet("Parquet, a column of nulls", _table(id=["a"], s=pa.nulls(1)), rows=_texts(a=None))

BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "names are unique"
