"""What `onto query` writes: whole, streamed, and never to be mistaken when it was cut short."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.cli.main import run
from storage_engine.cli.output import Output
from storage_engine.cli.results import Answer, Format, OutputColumn, csv_cell, json_value, write
from storage_engine.runtime.session import Session
from tests.cli.shop import Client, fill
from tests.cli.support import ROOT, commit, onto

PROGRAM = [sys.executable, "-m", "storage_engine.cli.main", "query"]
ENDLESS = "select x, y from range(10000000) a(x), range(10000000) b(y)"
SLOW = "select count(*) from range(10000000) a(x), range(10000000) b(y) where (x * y) % 7 = 3"


@pytest.fixture
def shop(tmp_path: Path) -> str:
    uri = f"file://{tmp_path}/shop"
    fill(uri, "v2")
    return uri


def query(uri: str, *args: str) -> Any:
    return onto("query", *args, "--storage-uri", uri)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def arrow(uri: str, *args: str) -> pa.Table:
    written = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(written, write_through=True)) as out:
        code = run(["query", *args, "--storage-uri", uri, "--format", "arrow"])
        out.flush()
    assert code == 0
    return pa.ipc.open_stream(written.getvalue()).read_all()


# --- tables -------------------------------------------------------------------------------------


def test_a_table_is_cut_and_says_so(shop: str) -> None:
    commit(shop, *(Client(id=f"k{n:03}", name="n") for n in range(60)))

    cut = query(shop, "entities", "Client").out.splitlines()
    told = query(shop, "entities", "Client", "--limit", "63").out.splitlines()

    assert len(cut) == 1 + 50 + 1
    assert cut[-1] == "More rows not shown: raise --limit."
    assert len(told) == 1 + 63
    for form in ("json", "csv"):
        assert query(shop, "entities", "Client", "--format", form).out.count("k0") == 60


def test_a_table_cannot_steer_the_terminal(shop: str) -> None:
    commit(shop, Client(id="evil", name="a\x1b[31m[bold]b"))

    shown = query(shop, "entities", "Client", "--filter", "id", "eq", '"evil"').out

    assert "a\\x1b[31m[bold]b" in shown


# --- csv ----------------------------------------------------------------------------------------


def test_csv_comes_back_as_it_was(shop: str, tmp_path: Path) -> None:
    columns = "id,name,tier,age,active,joined,photo,tags,profile"
    written = query(shop, "entities", "Client", "--format", "csv", "--columns", columns).out
    rows = list(csv.DictReader(io.StringIO(written)))
    assert rows[0]["name"] == 'Ann "A", B\nC'
    assert json.loads(rows[0]["tags"]) == ["vip", "x"]

    (tmp_path / "clients.csv").write_text(written)
    with Session(shop) as session:
        session.ingest(Client, tmp_path / "clients.csv")
        assert session.commit() is None, "the file says the same as the storage"


def test_cells() -> None:
    assert [csv_cell(v) for v in (None, "", " a", "a,b", 'a"b', "a\nb", "a", 1, 1.5, True)] == [
        *("", '""', '" a"', '"a,b"', '"a""b"', '"a\nb"', "a", "1", "1.5", "true")
    ]
    assert json_value(float("nan")) is None
    assert json_value([{"a": b"\x00", "b": [float("inf")]}]) == [{"a": "AA==", "b": [None]}]


def test_sql_values_of_every_kind(shop: str) -> None:
    statement = (
        "select 1.5::decimal(9,2) d, 1e400::double inf, [1, null] l, {'a': date '2024-01-01'} s, "
        "170141183460469231731687303715884105727::hugeint h, 'x'::blob b, time '12:00' t, "
        "interval 1 day i, timestamp '2024-01-01 00:00:00' ts, map {'k': 1} m, "
        "timestamp_ns '2024-01-01 00:00:00.000000001' ns, null n"
    ).replace("1e400::double", "'inf'::double")
    found = query(shop, "sql", statement, "--json").json["rows"][0]

    assert (found["d"], found["inf"], found["l"]) == (1.5, None, [1, None])
    assert found["s"] == {"a": "2024-01-01"}
    assert found["h"] == 2**127 - 1
    assert found["b"] == "eA=="
    assert found["ts"] == "2024-01-01T00:00:00.000000"
    for form in ("table", "csv"):
        assert query(shop, "sql", statement, "--format", form).code == 0


# --- json ---------------------------------------------------------------------------------------


def test_format_json_is_json(shop: str) -> None:
    assert (
        query(shop, "entities", "Client", "--format", "json").out
        == query(shop, "entities", "Client", "--json").out
    )
    for args in (("entities", "Clint"), ("entities", "Client", "--limit", "x")):
        failed = query(shop, *args, "--format", "json")
        assert failed.code == 2
        assert failed.json["error"]["type"] == "UsageError"


def test_what_fails_after_rows_were_written_is_told_inside_the_document(shop: str) -> None:
    statement = "select cast(if(x < 600000, '1', 'z') as int) z from range(700000) t(x)"
    failed = query(shop, "sql", statement, "--json")

    assert failed.code == 2
    assert len(failed.json["rows"]) > 0
    assert "Could not convert" in failed.json["error"]["message"]
    assert "row_count" not in failed.json
    table = query(shop, "sql", statement, "--format", "csv")
    assert table.code == 2
    assert table.err.startswith("error: ")


def test_an_interrupted_document_is_not_json(capsys: pytest.CaptureFixture[str]) -> None:
    def batches() -> Any:
        yield [{"a": 1}]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Output(json=True).stream({"kind": "x"}, batches())

    written = capsys.readouterr().out
    assert '{"a": 1}' in written
    with pytest.raises(json.JSONDecodeError):
        json.loads(written)


# --- arrow --------------------------------------------------------------------------------------


def test_arrow_has_the_declared_types(shop: str) -> None:
    table = arrow(shop, "entities", "Client")
    paths = arrow(shop, "traverse", "Client", "--via", "Job")

    assert table.column("joined").type == pa.timestamp("us", "UTC")
    assert table.column("photo").to_pylist() == [b"\x00\xff", None, None]
    assert table.column("tags").to_pylist()[0] == '["vip","x"]'
    assert paths.column("relations.0.stint").to_pylist() == ["2023", "2024", "2024"]
    assert arrow(shop, "entities", "Client", "--filter", "age", "gt", "99").num_rows == 0
    assert arrow(shop, "entities", "Client", "--count").to_pylist() == [{"count": 3}]


def test_arrow_is_refused_on_a_terminal(shop: str) -> None:
    master, terminal = pty.openpty()
    done = subprocess.run(
        [*PROGRAM, "entities", "Client", "--storage-uri", shop, "--format", "arrow"],
        stdout=terminal,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
        env=environment(),
    )
    os.close(terminal)
    os.close(master)
    assert done.returncode == 2
    assert "Arrow is binary" in done.stderr


# --- ends before the end ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "csv", "arrow"])
def test_a_reader_that_goes_away_ends_the_query(shop: str, form: str) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "sql", ENDLESS, "--storage-uri", shop, "--format", form],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10_000)
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(timeout=120), errors) == (141, b"")


@pytest.mark.parametrize("kind", ["directory", "sqlite"])
@pytest.mark.parametrize("form", ["json", "arrow"])
def test_ctrl_c_ends_a_query_that_is_deep_in_the_engine(
    tmp_path: Path, kind: str, form: str
) -> None:
    uri = f"file://{tmp_path}/shop" if kind == "directory" else f"sqlite:///{tmp_path}/shop.db"
    fill(uri, "v2")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [*PROGRAM, "sql", SLOW, "--storage-uri", uri, "--format", form],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TMPDIR=str(scratch)),
    )
    deadline = time.monotonic() + 240
    while not any(scratch.rglob("ontologia-duckdb-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)

    assert (process.returncode, out, err) == (130, b"", b"")
    assert list(scratch.iterdir()) == []


def test_an_interrupted_arrow_stream_cannot_be_read_as_whole(shop: str) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "sql", ENDLESS, "--storage-uri", shop, "--format", "arrow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    begun = process.stdout.read(100_000)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)

    assert (process.returncode, err) == (130, b"")
    with pytest.raises((OSError, pa.ArrowInvalid), match="Expected to"):
        pa.ipc.open_stream(begun + rest).read_all()


def test_a_stream_that_fails_between_two_batches_cannot_be_read_as_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = pa.record_batch({"a": pa.array([1])})

    def batches() -> Any:
        yield batch
        raise KeyboardInterrupt

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    with pytest.raises(KeyboardInterrupt):
        write(Output(), Format.arrow, Answer(batch.schema, batches(), [OutputColumn("a", 0)]))

    with pytest.raises((OSError, pa.ArrowInvalid), match="Expected to"):
        pa.ipc.open_stream(written.getvalue()).read_all()
