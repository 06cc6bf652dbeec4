"""The error boundary: one line or one JSON object, the right exit code, a traceback on demand."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import json
import logging
import os
import pty
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from storage_engine import errors
from storage_engine.cli import arguments
from storage_engine.cli import errors as boundary
from storage_engine.commitlog import layout
from storage_engine.objectstore.local import DirectoryStore
from tests.cli.conftest import Place
from tests.cli.support import (
    ROOT,
    Customer,
    Employment,
    Product,
    commit,
    create,
    onto,
    onto_process,
    opened,
)

ERRORS = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.OntologiaError)
]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_has_its_own_line_in_the_table(cls: type[errors.OntologiaError]) -> None:
    assert cls in boundary.EXIT_CODES


def test_a_subclass_takes_its_parents_code() -> None:
    class Special(errors.IntegrityError):
        pass

    assert boundary.exit_code_of(Special) == 3


# --- storages that are not as they should be -----------------------------------------------------


@pytest.mark.parametrize("args", [("info",), ("commits",), ("commits", "examine", "1")])
def test_rfc0004_11_uninitialised_prefix_fails_fast(args: tuple[str, ...], tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/nothing"

    failed = onto(*args, "--storage-uri", uri)

    assert failed.code == 5
    assert f"no ontology at {uri}: run `onto init --storage-uri {uri}` first" in failed.error()
    assert not (tmp_path / "nothing").exists()
    described = onto(*args, "--storage-uri", uri, "--json")
    assert described.err == ""
    assert described.json["error"] == {
        "type": "UninitializedStorageError",
        "message": failed.error(),
        "exit_code": 5,
        "retryable": False,
        "facts": {"uri": uri},
    }


def test_the_storage_is_named_once_however_it_was_given(tmp_path: Path) -> None:
    failed = onto("info", "--storage-uri", "./nothing").error()

    assert "(storage" not in failed
    assert f"{tmp_path}/nothing" in failed


def test_a_newer_format_exits_5(place: Place) -> None:
    create(place.uri, place.engine)
    if place.backend == "sqlite":
        connection = sqlite3.connect(place.uri.removeprefix("sqlite:///"))
        connection.execute("UPDATE storage_meta SET value = '99' WHERE key = 'format'")
        connection.commit()
        connection.close()
    else:
        path = Path(place.uri.removeprefix("file://")) / layout.ENGINE
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"format": 99}))

    failed = onto("info", "--storage-uri", place.uri)

    assert failed.code == 5
    assert "upgrade ontologia first" in failed.error()


@pytest.mark.parametrize("engine", ["v1", "v2"])
def test_a_damaged_log_exits_3(engine: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, engine)
    commit(uri, Customer(id="c1", name="Ann"))
    manifest = next((tmp_path / "shop").glob("commits/*/manifest.json"))
    manifest.unlink()

    for args in (("info",), ("commits",), ("commits", "examine", "1")):
        failed = onto(*args, "--storage-uri", uri)
        assert failed.code == 3, args
        assert "missing" in failed.error()

    (tmp_path / "shop" / layout.HEAD).write_text("{")
    error = onto("info", "--storage-uri", uri, "--json")
    assert error.code == 3
    assert error.json["error"]["facts"]["key"] == layout.HEAD


def test_a_foreign_sqlite_file_exits_5(tmp_path: Path) -> None:
    path = tmp_path / "text.db"
    path.write_text("not a database, and longer than a header" * 100)

    failed = onto("info", "--db", path)

    assert failed.code == 5
    assert str(path) in failed.error()


def test_a_held_lock_exits_5_and_names_the_holder(tmp_path: Path) -> None:
    uri, config = f"file://{tmp_path}/shop", tmp_path / "fast.toml"
    create(uri, "v2")
    config.write_text("s3_lock_timeout_ms = 50\n")
    token = onto("init", "--storage-uri", uri, "--force", "--dry-run", "--json").json["token"]
    erase = ("init", "--storage-uri", uri, "--force", "--token", token, "--config", config)
    with opened(uri) as repository:
        lease = repository.lock.acquire()
        failed = onto(*erase)
        described = onto(*erase, "--json").json["error"]
        lease.release()

    assert failed.code == 5
    assert "held by 'writer'" in failed.error()
    assert f"(storage {uri})" in failed.err
    assert described["retryable"] is True
    assert described["facts"]["owner_id"] == "writer"
    assert onto(*erase).code == 0


# --- lines that are wrong ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("inf",), "Did you mean 'info'?"),
        (("comits",), "Did you mean 'commits'"),
        (("commits", "examin", "1"), "Did you mean 'examine'?"),
        (("info", "--storage-url", "x"), "--storage-uri"),
        (("info", "extra"), "extra"),
        (("info", "--storage-uri"), "--storage-uri"),
        (("--json",), "no command given"),
        (("import", "--input", "x", "--on-conflict", "abrt"), "conflict': 'abrt' is not one of"),
    ],
)
def test_a_wrong_line_exits_2_and_says_what_was_meant(args: tuple[str, ...], hint: str) -> None:
    if "--json" not in args:
        failed = onto(*args)
        assert failed.code == 2
        assert hint in failed.error()
        assert "--help`" in failed.err

    error = onto("--json", *args)
    assert error.code == 2
    assert error.err == ""
    assert error.json["error"]["type"] == "UsageError"
    assert hint in error.json["error"]["message"]


def test_no_arguments_show_the_help() -> None:
    shown = onto()

    assert shown.code == 2
    assert "Usage: onto" in shown.out
    assert shown.err == ""


# --- what must not happen ------------------------------------------------------------------------


def _failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def target(self: arguments.Invocation) -> Any:
        raise error

    monkeypatch.setattr(arguments.Invocation, "target", target)


def test_a_defect_of_ours_exits_1_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, RuntimeError("boom\nand more"))

    failed = onto("info")

    assert failed.code == 1
    assert failed.error().startswith("unexpected RuntimeError: boom and more; this is a defect")
    assert "Traceback" in onto("info", "--debug").err
    described = onto("info", "--json")
    assert described.code == 1
    assert described.json["error"]["type"] == "RuntimeError"


def test_debug_shows_the_traceback_before_the_line(tmp_path: Path) -> None:
    failed = onto("--debug", "info", "--storage-uri", tmp_path / "nothing")

    assert failed.code == 5
    assert failed.err.startswith("Traceback")
    assert "Traceback" not in onto("-v", "info", "--storage-uri", tmp_path / "nothing").err
    assert failed.err.splitlines()[-1].startswith("error: no ontology")


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, KeyboardInterrupt())

    failed = onto("info")

    assert (failed.code, failed.out, failed.err) == (130, "", "")


def test_the_repository_is_closed_when_a_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    really_close = DirectoryStore.close

    def close(store: DirectoryStore) -> None:
        closed.append(store.uri)
        really_close(store)

    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    monkeypatch.setattr(DirectoryStore, "close", close)

    assert onto("commits", "examine", "7", "--storage-uri", uri).code == 4
    assert closed == [uri]


def test_warnings_of_the_engine_go_to_stderr_only(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    commit(uri, Customer(id="c1", name="Ann"))
    (tmp_path / "shop" / layout.index("entity", "Customer")).unlink()

    examined = onto("commits", "examine", "1", "--storage-uri", uri, "--json")

    assert examined.json["identities_total"] == 1
    assert examined.err.startswith("warning: ")
    assert "index of Customer" in examined.err
    assert logging.getLogger("storage_engine").handlers == []


# --- as a process --------------------------------------------------------------------------------


def test_the_program_runs_as_a_process(tmp_path: Path) -> None:
    made = onto_process("init", "--storage-uri", "./shop", cwd=tmp_path)
    info = onto_process("info", "--json", cwd=tmp_path, ONTOLOGIA_STORAGE_URI="./shop")
    failed = onto_process("info", "--storage-uri", "./nothing", cwd=tmp_path)

    assert (made.code, made.err) == (0, "")
    assert (info.code, info.json["head_commit_id"]) == (0, 0)
    assert failed.code == 5
    assert "no ontology at" in failed.error()


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "storage_engine.cli.main", "info"]
    for extra in ([], ["--json"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [*program, *extra],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        os.close(writing)
        assert done.returncode == 141
        assert done.stderr == "warning: onto.db does not exist yet; the first commit creates it\n"


def test_rows_that_nobody_reads_are_no_error(tmp_path: Path) -> None:
    create(f"file://{tmp_path}/shop", "v2")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = _raw_process("export", "--output", "-", "--storage-uri", "shop", stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_locale_that_lacks_characters(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/shop.db"
    create(uri, "v2")
    commit(uri, Customer(id="c1", name="Jürgen ☃"))
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ask = ("query", "entities", "Customer", "--db", "shop.db")
    for extra in ((), ("--format", "csv")):
        done = subprocess.run(
            [sys.executable, "-m", "storage_engine.cli.main", *ask, *extra],
            capture_output=True,
            check=True,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **plain},
        )
        assert "Jürgen ☃" in done.stdout.decode("utf-8")


def _on_a_terminal(columns: int, *args: str) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 5, columns, 0, 0))
    done = _raw_process(*args, stdout=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, "")
    return shown.decode()


def test_a_terminal_that_is_too_narrow_still_shows_everything(tmp_path: Path) -> None:
    create(f"file://{tmp_path}/shop", "v2")
    commit(f"file://{tmp_path}/shop", Customer(id="c1", name="Ann"))
    shown = _on_a_terminal(12, "info", "--storage-uri", "shop")
    assert "Customer" in shown
    assert "directory" in shown


def test_words_are_whole_on_a_terminal(tmp_path: Path) -> None:
    create(f"file://{tmp_path}/shop", "v2")
    made = commit(
        f"file://{tmp_path}/shop",
        Customer(id="c1", name="Ann"),
        Product(sku="p1"),
        Employment(left_key="c1", right_key="p1", stint="2024", role="clerk"),
        metadata={"source": "long " * 20},
    )
    assert made is not None
    shown = _on_a_terminal(80, "commits", "--storage-uri", "shop")
    assert re.search(
        r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00 +data +writer +Customer", shown
    )
    assert all(len(line) <= 80 for line in re.sub(r"\x1b\[\d*m", "", shown).splitlines())


def test_programs_are_given_whole_lines_without_blanks_at_their_ends(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/shop.db"
    commit(uri, Customer(id="c1", name="x" * 10_000), Customer(id="c2", name="Ann"))
    shown = onto("query", "entities", "Customer", "--storage-uri", uri).out.splitlines()
    assert [line.split() for line in shown] == [
        ["commit_id", "id", "name"],
        ["1", "c1", "x" * 10_000],
        ["1", "c2", "Ann"],
    ]
    assert shown == [line.rstrip() for line in shown]


def test_names_in_metadata_cannot_steer_the_terminal(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/shop.db"
    commit(uri, Customer(id="c1", name="Ann"), metadata={"a\nid \x1b[31m": "b"})
    shown = onto("commits", "examine", "1", "--storage-uri", uri).out
    assert r"meta a\nid \x1b[31m" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_a_full_disk_is_told_in_one_line(tmp_path: Path, extra: tuple[str, ...]) -> None:
    create(f"file://{tmp_path}/shop", "v2")
    with Path("/dev/full").open("wb") as full:
        done = _raw_process("info", "--storage-uri", "shop", *extra, stdout=full)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr
    assert "defect" not in done.stderr


def test_closed_streams_are_no_place_for_other_files(tmp_path: Path) -> None:
    """The next file that is opened would be stdout: the database."""
    create(f"sqlite:///{tmp_path}/shop.db", "v2")
    before = (tmp_path / "shop.db").read_bytes()
    line = f"exec {sys.executable} -m storage_engine.cli.main info --db shop.db <&- >&- 2>&-"
    done = subprocess.run(
        ["sh", "-c", line], check=False, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0
    assert (tmp_path / "shop.db").read_bytes() == before


def _raw_process(*args: str, stdout: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "storage_engine.cli.main", *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_ctrl_c_ends_a_process_quietly(tmp_path: Path) -> None:
    """Waiting for a lock that somebody holds, as a person would see it."""
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    token = onto("init", "--storage-uri", uri, "--force", "--dry-run", "--json").json["token"]
    config = tmp_path / "patient.toml"
    config.write_text("s3_lock_timeout_ms = 60000\n")
    with opened(uri) as repository:
        lease = repository.lock.acquire()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "storage_engine.cli.main", "init"),
                *("--storage-uri", uri, "--force", "--token", token, "--config", str(config)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        deadline = time.monotonic() + 240
        while not _has_begun(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
        lease.release()

    assert (process.returncode, out, err) == (130, "", "")
    assert onto("info", "--storage-uri", uri, "--json").json["head_commit_id"] == 0


def _has_begun(pid: int) -> bool:
    """Whether the process has come as far as loading the engine, inside the boundary.

    Until it is `onto`, it is a copy of this process, which has loaded the engine long ago.
    """
    process = Path(f"/proc/{pid}")
    is_onto = b"storage_engine.cli.main" in (process / "cmdline").read_bytes()
    return is_onto and "pyarrow" in (process / "maps").read_text()
