"""Lines by themselves: which are whole records, and those of a side table that are read again."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from storage_engine.errors import ValidationError
from storage_engine.model.csv_text import KEPT_OF_RECORD, CsvDialect, CsvRows
from storage_engine.spark.jobs.replay import _csv_record
from storage_engine.spark.jobs.text_lines import FILE, VALUE, OpenLinesTask, one_line
from storage_engine.spark.quarantine import SOURCE, SetAside, as_json


@pytest.mark.parametrize(
    ("line", "opens"),
    [
        (b"a,b\n", False),
        (b'a,"b"\n', False),
        (b'"a ""b""",c\r\n', False),
        (b'5" x,7" y\n', False),
        (b'a,"b\n', True),
        ('Zoé,"école\n'.encode("latin-1"), True),
        ('Zoé,"école"\n'.encode("latin-1"), False),
        (b'p1" x,y,"first\n', True),  # an even number of quotes
        (b'7",y,"first\n', True),
        (b'"a"b,c\n', True),
    ],
)
def test_a_line_that_is_no_whole_record_opens_its_file(line: bytes, opens: bool) -> None:
    batch = pa.RecordBatch.from_pydict({VALUE: pa.array([b"x\n", line]), FILE: ["f", "f"]})
    told = [f for b in OpenLinesTask(one_line(CsvDialect()))([batch]) for f in b[FILE].to_pylist()]
    assert told == (["f"] if opens else [])


@pytest.mark.parametrize(
    ("data", "encoding", "message"),
    [
        (b'"id"x,s\n1,2\n', "utf-8", "the header cannot be read"),
        ("id,s\n1,é\n".encode("utf-16")[:-1], "utf-16", "not utf-16"),
    ],
)
def test_what_cannot_be_read_at_all_is_refused(data: bytes, encoding: str, message: str) -> None:
    rows = CsvRows(CsvDialect(encoding=encoding), "f.csv")
    with pytest.raises(ValidationError, match=f"f.csv: .*{message}"):
        assert not [*rows.feed(data), *rows.close()]


CUT = {
    "byte order marks": (
        CsvDialect(),
        b'\xef\xbb\xbfid,s\na,x\n\xef\xbb\xbfb,y\nc,"\xef\xbb\xbf"\n\xef\xbb\xbfd,z',
        [["a", "x"], ["\ufeffb", "y"], ["c", "\ufeff"], ["\ufeffd", "z"]],
    ),
    "escapes": (
        CsvDialect(escape="\\"),
        b'id,s\na,"x\\"y\\\\"\nb,C:\\dir\nc,x\\\nd,"\\\n"\n"e\\"",\\"\n',
        [["a", 'x"y\\'], ["b", "C:\\dir"], ["c", "x\\"], ["d", "\\\n"], ['e"', '\\"']],
    ),
    "doubled quotes": (
        CsvDialect(),
        b'id,s\r\na,"x""y\r\n"\r\n"b\n",\r\n',
        [["a", 'x"y\r\n'], ["b\n", None]],
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_where_a_file_is_cut_makes_no_difference(name: str) -> None:
    """At any byte, and at any two that follow each other by three."""
    dialect, data, expected = CUT[name]
    for at in range(len(data) + 1):
        rows = CsvRows(dialect, "f")
        tables = [*rows.feed(data[:at]), *rows.feed(data[at : at + 3]), *rows.feed(data[at + 3 :])]
        tables += rows.close()
        got = [list(row.values()) for table in tables for row in table.to_pylist()]
        assert (got, rows.bad, rows.names) == (expected, [], ["id", "s"]), at


def test_a_part_that_is_not_the_first_keeps_its_byte_order_mark() -> None:
    rows = CsvRows(CsvDialect(), "f", ["id"], header=False, begins=False)
    tables = [*rows.feed(b"\xef\xbb\xbfa\n"), *rows.close()]
    assert [row for table in tables for row in table.to_pylist()] == [{"id": "\ufeffa"}]


def again(line: str, **options: str) -> tuple[object, str | None]:
    row = _csv_record(SetAside(json.dumps({"id": None, "s": None}), SOURCE, line, "f"), options)
    return row.values, row.fault


def test_a_line_of_the_side_table_is_text_whatever_the_source_was() -> None:
    assert again("1,café", encoding="latin-1") == ({"id": "1", "s": "café"}, None)
    assert again("1,café", encoding="utf-16") == ({"id": "1", "s": "café"}, None)


def test_a_line_that_nobody_has_put_right_is_bad_again() -> None:
    for line, fault in {
        "1,caf\\xe9": r"line has \xe9 for a byte that is no text",
        "1," + "v" * KEPT_OF_RECORD: "line is not whole",
        "1,x,extra": "line is malformed",
    }.items():
        values, told = again(line)
        assert values is None
        assert told is not None
        assert fault in told


def test_what_folders_are_called_is_not_of_the_line() -> None:
    aside = json.dumps({"id": None, "s": None, "day": "2024-01-01"})
    row = _csv_record(SetAside(aside, SOURCE, "1,x", "/in/day=2024-01-01/a.csv"), {})
    assert row.values == {"id": "1", "s": "x", "day": "2024-01-01"}


def test_maps_are_objects() -> None:
    column = pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))
    from storage_engine.spark.quarantine import _values

    assert as_json({"m": _values(column)[0]}) == '{"m": {"k": "v"}}'
