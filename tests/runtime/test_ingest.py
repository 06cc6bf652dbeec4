"""Bulk sources: every kind is read losslessly, and every mistake is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from storage_engine import Entity, Field, Session, ValidationError
from storage_engine.errors import TypeDeclarationError
from storage_engine.model import row_schema, spec_of
from storage_engine.runtime.arguments import BoundTypes
from storage_engine.runtime.intents import Intents
from storage_engine.runtime.sources import MAX_BATCH_ROWS, open_source
from tests.runtime.support import Address, Everything, head, names, read
from tests.shop import Customer, Employment, Subscription

CUSTOMERS = [
    Customer(id="007", name="Bond", tier="Gold", age=40),
    Customer(id="c2", name='O"Neil, Zoë', tier="Standard", age=None),
]
TABLE = pa.table(
    {
        "id": ["007", "c2"],
        "name": ["Bond", 'O"Neil, Zoë'],
        "tier": ["Gold", "Standard"],
        "age": pa.array([40, None], pa.int32()),
    }
)


class Stream:
    """Something that only speaks the Arrow PyCapsule protocol."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def parquet(folder: Path, name: str = "customers.parquet", table: pa.Table = TABLE) -> Path:
    pq.write_table(table, folder / name)
    return folder / name


def csv(folder: Path, name: str = "customers.csv") -> Path:
    pa_csv.write_csv(TABLE, folder / name)
    return folder / name


def jsonl(folder: Path, name: str = "customers.jsonl") -> Path:
    lines = [json.dumps(row) for row in TABLE.to_pylist()]
    (folder / name).write_text("\n".join(lines))
    return folder / name


SOURCES: dict[str, Callable[[Path], Any]] = {
    "table": lambda _: TABLE,
    "batch": lambda _: TABLE.to_batches()[0],
    "batches": lambda _: TABLE.to_batches(max_chunksize=1),
    "reader": lambda _: TABLE.to_reader(),
    "stream": lambda _: Stream(TABLE),
    "pandas": lambda _: TABLE.to_pandas().set_index(pd.Index(["x", "y"])),
    "polars": lambda _: pl.from_arrow(TABLE),
    "parquet": parquet,
    "parquet-text-path": lambda folder: str(parquet(folder)),
    "csv": csv,
    "jsonl": jsonl,
    "ndjson": lambda folder: jsonl(folder, "customers.ndjson"),
    "files": lambda folder: [
        parquet(folder, table=TABLE.slice(0, 1)),
        parquet(folder, "more.parquet", TABLE.slice(1)),
    ],
    "mixed-list": lambda folder: [TABLE.slice(1).to_pandas(), csv(folder)],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_same_rows(uri: str, tmp_path: Path, kind: str) -> None:
    with Session(uri) as session:
        session.ingest(Customer, SOURCES[kind](tmp_path))
        assert session.commit() == 1
        session.ingest(Customer, SOURCES[kind](tmp_path))
        assert session.commit() is None, "what is stored already makes no commit"

    assert read(uri, Customer) == CUSTOMERS


def test_relations_are_ingested_by_their_keys(uri: str) -> None:
    with Session(uri) as session:
        session.ingest(
            Subscription, pa.table({"left_key": ["a"], "right_key": ["b"], "seats": [2]})
        )
        session.ingest(
            Employment,
            pa.table(
                {
                    "role": ["dev", "lead"],
                    "stint": ["1", "2"],
                    "right_key": ["b", "b"],
                    "left_key": ["a", "a"],
                }
            ),
        )

    assert read(uri, Subscription) == [Subscription(left_key="a", right_key="b", seats=2)]
    assert [(e.instance_key, e.role) for e in read(uri, Employment)] == [
        ("1", "dev"),
        ("2", "lead"),
    ]


def test_many_rows_stream_through(uri: str, tmp_path: Path) -> None:
    count = 200_000
    ids = [f"c{n:06}" for n in range(count)]
    pq.write_table(pa.table({"id": ids, "name": ids}), tmp_path / "many.parquet")
    with Session(uri) as session:
        session.ingest(Customer, tmp_path / "many.parquet")
        session.ensure(Customer(id="c000007", name="Bond"))
        assert session.commit() == 1
        assert session.last_commit is not None
        assert session.last_commit.changes[0].inserted == count
        table = session.repository.read(spec_of(Customer))

    assert table.num_rows == count
    assert table.column("name")[7].as_py() == "Bond"
    assert table.column("entity_key").to_pylist() == ids


def test_batches_are_bounded_and_in_order_of_intent() -> None:
    spec = spec_of(Customer)
    ids = [f"c{n}" for n in range(MAX_BATCH_ROWS + 1)]
    big = pa.RecordBatch.from_pydict({"id": ids, "name": ids})
    intents = Intents(BoundTypes())
    intents.ensure(Customer(id="first", name="x"))
    intents.ingest(spec, open_source(spec, big))
    intents.ensure(Customer(id="last", name="x"))

    (given,) = intents.inputs(limit=2)
    assert given.table is None
    assert given.stream is not None
    batches = list(given.stream)
    assert [b.num_rows for b in batches] == [1, MAX_BATCH_ROWS, 1, 1]
    assert all(b.schema.equals(row_schema(spec)) for b in batches)
    keys = [key for b in batches for key in b.column("entity_key").to_pylist()]
    assert keys == ["first", *ids, "last"]


def test_objects_alone_go_as_one_table() -> None:
    intents = Intents(BoundTypes())
    intents.ensure([CUSTOMERS[0], CUSTOMERS[0].replace(name="James"), CUSTOMERS[1]])

    (given,) = intents.inputs(limit=2)
    assert given.stream is None
    assert given.table is not None
    assert given.table.column("name").to_pylist() == ["James", 'O"Neil, Zoë']


# --- text files keep declared types -------------------------------------------------------------

EVERYTHING = [
    Everything(
        id="1",
        text="007",
        number=-5,
        real=0.5,
        flag=True,
        moment=datetime(2024, 1, 2, 3, 4, 5, 678901, UTC),
        day=date(2024, 2, 29),
        raw=b"\x00\xff",
        tags=["a", "b,c"],
        moments=[datetime(2024, 1, 1, tzinfo=UTC)],
        weights={"x": 1.5},
        address=Address(city="Bern", since=date(2020, 1, 1), former=[{"city": "Ulm"}]),
        either="5",
        anything={"deep": [1, None, "x"]},
    ),
    Everything(
        id="2",
        text="line\nbreak",
        number=2**62,
        real=3.0,
        flag=False,
        moment=datetime(2024, 6, 1, 12, tzinfo=UTC),
        day=date(1, 1, 1),
        raw=b"",
        maybe_text="",
        maybe_number=0,
        maybe_moment=datetime(1999, 12, 31, tzinfo=UTC),
    ),
]


def test_json_lines_hold_every_type(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    first = {
        "id": "1",
        "text": "007",
        "number": -5,
        "real": 0.5,
        "flag": True,
        "moment": "2024-01-02T04:04:05.678901+01:00",
        "day": "2024-02-29",
        "raw": "AP8=",
        "tags": ["a", "b,c"],
        "moments": ["2024-01-01T00:00:00Z"],
        "weights": {"x": 1.5},
        "address": {"city": "Bern", "since": "2020-01-01", "former": [{"city": "Ulm"}]},
        "either": "5",
        "anything": {"deep": [1, None, "x"]},
    }
    second = {
        "id": "2",
        "raw": "",
        "text": "line\nbreak",
        "number": 2**62,
        "real": 3,
        "flag": False,
        "moment": "2024-06-01 12:00:00",
        "day": "0001-01-01",
        "maybe_text": "",
        "maybe_number": 0,
        "maybe_moment": "1999-12-31",
        "maybe_real": None,
    }
    path.write_text(f"\ufeff{json.dumps(first)}\n\n{json.dumps(second, ensure_ascii=False)}\n")
    with Session(uri) as session:
        session.ingest(Everything, path)

    assert read(uri, Everything) == EVERYTHING


def test_csv_holds_every_type(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text(
        "\ufeffid,text,number,real,flag,moment,day,raw,maybe_text,maybe_number,maybe_moment,tags,"
        "moments,weights,address,either,anything\r\n"
        "1,007,-5,0.5,true,2024-01-02T04:04:05.678901+01:00,2024-02-29,AP8=,,,,"
        '"[""a"",""b,c""]","[""2024-01-01T00:00:00Z""]","{""x"":1.5}",'
        '"{""city"":""Bern"",""since"":""2020-01-01"",""former"":[{""city"":""Ulm""}]}",'
        '5,"{""deep"":[1,null,""x""]}"\r\n'
        '2,"line\nbreak",4611686018427387904,3,False,2024-06-01 12:00:00,0001-01-01,"","",0,'
        "1999-12-31,[],[],{},,x,\r\n"
    )
    with Session(uri) as session:
        session.ingest(Everything, path)

    assert read(uri, Everything) == [EVERYTHING[0], EVERYTHING[1].replace(either="x")]


def test_an_empty_csv_cell_is_null_or_the_empty_text(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "gaps.csv"
    path.write_text("id,name,age\nc1,,\nc2,NA,5\nc3,null,6\n")
    with Session(uri) as session:
        session.ingest(Customer, path)

    assert [(c.name, c.age) for c in read(uri, Customer)] == [("", None), ("NA", 5), ("null", 6)]


def test_files_without_rows_are_fine(local: Session, tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("id,name\n")
    (tmp_path / "none.jsonl").write_text("\n")
    pq.write_table(TABLE.slice(0, 0), tmp_path / "none.parquet")
    local.ingest(Customer, [tmp_path / f"none.{suffix}" for suffix in ("csv", "jsonl", "parquet")])

    assert local.commit() is None


def test_json_lines_fill_in_defaults_row_by_row(tmp_path: Path) -> None:
    class Counted(Entity):
        id: Field[str] = Field(primary_key=True)
        number: Field[int] = Field(default_factory=iter([10, 11]).__next__)
        moment: Field[datetime] = Field(default=datetime(2020, 1, 1, tzinfo=UTC))

    path = tmp_path / "rows.jsonl"
    path.write_text('{"id":"a"}\n{"id":"b","number":5,"moment":"2021-01-01"}\n')
    source = open_source(spec_of(Counted), path)

    # The sample taken at ingest() has used the first number.
    (batch,) = source.batches()
    assert batch.column("number").to_pylist() == [11, 5]
    assert batch.column("moment").to_pylist() == [
        datetime(2020, 1, 1, tzinfo=UTC),
        datetime(2021, 1, 1, tzinfo=UTC),
    ]


# --- mistakes -----------------------------------------------------------------------------------


def test_all_wrong_columns_are_reported_at_once(local: Session) -> None:
    table = pa.table({"id": ["c1"], "nmae": ["Ann"], "age": ["old"], "extra": [1]})
    with pytest.raises(ValidationError) as caught:
        local.ingest(Customer, table)

    said = str(caught.value)
    assert said.startswith("Customer: ")
    for part in ("'name' is missing", "'nmae', did you mean 'name'", "'age' is string", "'extra'"):
        assert part in said
    assert caught.value.type == "Customer"
    assert local.commit() is None


def test_the_files_of_a_list_are_checked_together(local: Session, tmp_path: Path) -> None:
    bad = TABLE.rename_columns(["id", "name", "tier", "years"])
    files = [
        parquet(tmp_path, "a.parquet", bad),
        parquet(tmp_path),
        parquet(tmp_path, "b.parquet", bad.drop_columns(["name"])),
    ]
    with pytest.raises(ValidationError) as caught:
        local.ingest(Customer, files)

    said = str(caught.value)
    assert f"{files[0]}: Customer: unknown column 'years'" in said
    assert str(files[1]) not in said
    assert f"{files[2]}: Customer: column 'name' is missing" in said


def bad_file(name: str, content: str | bytes) -> Callable[[Path], Any]:
    def make(folder: Path) -> Path:
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)
        return folder / name

    return make


def folder_named(folder: Path) -> Path:
    (folder / "parts.parquet").mkdir()
    return folder / "parts.parquet"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: f / "none.parquet", r"none\.parquet: cannot be read: .*No such file"),
        (lambda f: f / "none.csv", r"none\.csv: cannot be read: No such file"),
        (lambda f: f / "none.jsonl", r"none\.jsonl: cannot be read: No such file"),
        (folder_named, "is a directory; give its files as a list"),
        (bad_file("a.txt", "x"), r"a\.txt: the name must end in one of \.parquet, \.csv, \.jsonl"),
        (lambda _: "s3://bucket/a.parquet", "ingest reads local files"),
        (bad_file("a.parquet", "x"), r"a\.parquet: cannot be read: .*[Pp]arquet"),
        (bad_file("a.csv", ""), r"a\.csv: Customer: the first line must name the columns"),
        (bad_file("a.csv", "id,nmae\n"), r"a\.csv: Customer: column 'name' is missing"),
        (bad_file("a.csv", "id,name,name\n"), "column 'name' is there 2 times"),
        (bad_file("a.csv", "id;name\nc1;Ann\n"), "unknown column 'id;name'"),
        (bad_file("a.csv", b"\xff\xfeid"), r"a\.csv: the header is not UTF-8"),
        (bad_file("a.jsonl", '{"id":"a"}\n'), r"a\.jsonl: Customer: column 'name' is missing in 1"),
        (bad_file("a.jsonl", '{"id":"a","nam":"b"}\n'), "'nam', did you mean 'name'"),
        (bad_file("a.jsonl", '\n{"id":\n[1]\n'), "line 2 is not JSON .*line 3 is not a JSON obj"),
        (bad_file("a.jsonl", '{"id":"a","name":5}'), r"'name' is not text \(got 5\) in 1 row"),
        (bad_file("a.jsonl", '{"id":"","name":""}'), "'id' is empty in 1 row"),
        (bad_file("a.jsonl", '{"id":null,"name":""}'), "'id' is null in 1 row"),
        (lambda _: [], "list of sources is empty"),
        (lambda _: [TABLE, 5], "ingest takes .* got int"),
        (lambda _: 5, "ingest takes an Arrow table.*; got int"),
        (lambda _: {"id": ["a"]}, "got dict"),
        (lambda _: [{"id": "a"}], "got dict"),
        (lambda _: CUSTOMERS[0], r"objects go to ensure\(\)"),
        (lambda _: CUSTOMERS, r"objects go to ensure\(\)"),
        (lambda _: pl.DataFrame({"id": ["a"]}).lazy(), r"lazy_frame\.collect\(\)"),
        (lambda _: pl.DataFrame({"id": ["a"]}), "column 'name' is missing"),
        (lambda _: pl.Series("id", ["a"]), "Series: .*cannot be read"),
        (lambda _: pd.DataFrame({"id": ["a"], "name": [b"b"]}), "'name' is binary"),
        (lambda _: pd.DataFrame({"id": ["a", 5], "name": "x"}), "pandas DataFrame: .*column id"),
        (lambda _: [TABLE, TABLE.drop_columns(["name"])], "source 1: Customer: column 'name'"),
    ],
)
def test_a_bad_source_is_refused_at_once(
    local: Session, tmp_path: Path, make: Callable[[Path], Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        local.ingest(Customer, make(tmp_path))

    assert caught.value.type == "Customer"
    assert local.commit() is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: pa.table({"id": ["a", None], "name": ["x", "y"]}), "'id' is null in 1 row .*1"),
        (
            lambda _: pa.table({"id": ["", "b"], "name": ["x", None]}),
            "'id' is empty.*'name' is null",
        ),
        (
            bad_file("a.csv", "id,name,age\na,x,5\nb,y,old\nc,z,0x10\n"),
            r"a\.csv: Customer: column 'age' is not an integer of 64 bits \(got 'old'\) "
            r"in 2 rows \(first row 1\)",
        ),
        (
            bad_file("a.csv", "id,name\na,x\nb\n"),
            r"a\.csv: Customer: cannot be read: .*2 columns, got 1",
        ),
        (bad_file("a.csv", "id,name\n,x\n"), "'id' is empty in 1 row"),
        (
            bad_file(
                "a.jsonl", '{"id":"a","name":"x"}\n' * 2_000 + '{"id":"b","name":5,"age":"x"}\n'
            ),
            r"'name' is not text \(got 5\) in 1 row \(row 2000\); column 'age' is not an integer",
        ),
        (
            lambda f: [
                csv(f),
                parquet(f, "b.parquet", TABLE.set_column(0, "id", pa.array(["x", None]))),
            ],
            r"b\.parquet: Customer: column 'id' is null in 1 row \(row 1\)",
        ),
    ],
)
def test_a_bad_row_fails_the_commit_and_publishes_nothing(
    uri: str, tmp_path: Path, make: Callable[[Path], Any], said: str
) -> None:
    session = Session(uri)
    session.ensure(CUSTOMERS)
    session.ingest(Customer, make(tmp_path))
    with pytest.raises(ValidationError, match=said):
        session.commit()

    assert head(uri) == 0
    session.discard()
    session.ensure(CUSTOMERS)
    assert session.commit() == 1
    session.close()


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("real", '"1.5"', "not a number that a float holds exactly"),
        ("real", str(2**53 + 1), "not a number that a float holds exactly"),
        ("number", "1.0", "not an integer"),
        ("number", str(2**63), "not an integer of 64 bits"),
        ("number", "true", "not an integer"),
        ("flag", "1", "not true or false"),
        ("moment", '"yesterday"', "ISO 8601 datetime"),
        ("moment", '"2024-01-01T00:00:00.1234567Z"', "at most microseconds"),
        ("moment", "5", "ISO 8601 datetime"),
        ("day", '"2024-02-30"', "ISO 8601 date"),
        ("raw", '"?"', "not base64"),
        ("tags", '["a", 5]', "does not fit its type"),
        ("anything", str(2**64), "beyond 64 bits"),
        ("address", '{"town":"Bern"}', "does not fit its type"),
    ],
)
def test_json_values_are_not_coerced(
    local: Session, tmp_path: Path, column: str, value: str, said: str
) -> None:
    good = json.dumps(
        {
            "id": "1",
            "text": "",
            "number": 1,
            "real": 1,
            "flag": True,
            "moment": "2024-01-01",
            "day": "2024-01-01",
            "raw": "",
        }
    )
    path = tmp_path / "a.jsonl"
    path.write_text(f'{good}\n{good[:-1]},"{column}":{value}}}\n')
    with pytest.raises(ValidationError, match=rf"column '{column}' .*{said}.*\(row 1\)"):
        local.ingest(Everything, path)


def test_only_declared_types_are_ingested(local: Session) -> None:
    for wrong in (int, "Customer", None):
        with pytest.raises(TypeDeclarationError, match="not an Entity or Relation class"):
            local.ingest(wrong, TABLE)  # type: ignore[arg-type]


def test_a_reader_used_up_by_a_failed_commit_says_so(local: Session) -> None:
    schema = pa.schema([("id", pa.string()), ("name", pa.string())])

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([["a"], ["x"]], schema=schema)
        yield pa.record_batch([[None], ["x"]], schema=schema)

    local.ingest(Customer, pa.RecordBatchReader.from_batches(schema, rows()))
    with pytest.raises(ValidationError, match="'id' is null"):
        local.commit()
    with pytest.raises(ValidationError, match=r"only once .* discard\(\)"):
        local.commit()
    local.discard()
    assert local.commit() is None


def test_a_file_is_read_again_after_a_failed_commit(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "late.csv"
    path.write_text("id,name,age\na,x,old\n")
    with Session(uri) as session:
        session.ingest(Customer, path)
        with pytest.raises(ValidationError, match="not an integer"):
            session.commit()
        path.write_text("id,name,age\na,x,5\n")
        assert session.commit() == 1
    assert names(uri) == {"a": "x"}


def test_a_csv_whose_header_changed_is_refused(local: Session, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,name\na,x\n")
    local.ingest(Customer, path)
    path.write_text("name,id\na,x\n")
    with pytest.raises(ValidationError, match="header changed"):
        local.commit()
    local.discard()
