"""Inputs of `onto import` that are no plain files, and folders of exports that somebody changed."""

from __future__ import annotations

import json
import os
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest

from storage_engine.runtime.exchange import readers
from tests.cli.support import Done, onto

pytestmark = pytest.mark.parametrize("place", ["directory-v2"], indirect=True)
RECORD = '{"type":"Customer","key":"%s","fields":{"name":"Zed"}}\n'


def test_a_named_pipe_is_read_as_stdin_is(uri: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    writer = threading.Thread(
        target=(tmp_path / "rows.jsonl").write_text, args=(RECORD % "c9",), daemon=True
    )
    writer.start()
    done = onto("import", "--input", "rows.jsonl", "--apply", "--json", "--storage-uri", uri)
    writer.join()
    assert (done.code, done.json["commit_id"]) == (0, 3)


def test_a_file_that_changes_while_it_is_read_is_not_imported(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read would be remembered under the digest of what came after it, and the whole file
    be taken for imported."""
    path = tmp_path / "rows.jsonl"
    path.write_text(RECORD % "c8")
    really = readers._JsonLinesInput.read

    def read(self: Any) -> int:
        rows = really(self)
        with path.open("a") as file:
            file.write(RECORD % "c9")
        return rows

    line = ("import", "--input", path, "--apply", "--json", "--storage-uri", uri)
    with monkeypatch.context() as patched:
        patched.setattr(readers._JsonLinesInput, "read", read)
        done = onto(*line)
    assert (done.code, done.json["applied"]) == (4, False)
    assert "changed while it was read" in done.json["problems"][0]["problem"]
    assert onto(*line).json["types"][0]["insert"] == 2


@pytest.mark.parametrize("file", ["../rows.jsonl", "/etc/passwd", "..", 5, None])
def test_a_summary_names_files_beside_it(uri: str, tmp_path: Path, file: Any) -> None:
    assert onto("export", "--output", "out", "--storage-uri", uri).code == 0
    path = tmp_path / "out" / "export.json"
    summary = json.loads(path.read_bytes())
    summary["types"][0]["file"] = file
    path.write_text(json.dumps(summary))
    failed = onto("import", "--input", "out", "--storage-uri", uri)
    assert failed.code == 2
    assert "is no name of a file beside it" in failed.error()


def test_a_broken_summary_can_be_written_over(uri: str, tmp_path: Path) -> None:
    line = ("export", "--output", "out", "--storage-uri", uri)
    assert onto(*line).code == 0
    (tmp_path / "out" / "export.json").write_text("{")
    assert onto(*line).code == 2
    assert onto(*line, "--overwrite").code == 0
    assert onto("import", "--input", "out", "--storage-uri", uri).code == 0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (("export", "--output", "x" * 5000), "File name too long"),
        (("export", "--output", "a\0b"), "is no name of a folder"),
        (("import", "--input", "/dev/null"), "is no file"),
        (("import", "--input", "rows.jsonl.gz"), "is compressed"),
        (("import", "--input", "rows.jsonl", "--meta", "by=\udcff"), "is not UTF-8"),
        (("import", "--input", "rows.jsonl", "--idempotency-key", f"a:{'9' * 5000}"), "64 bits"),
    ],
)
def test_odd_arguments_are_told_in_one_line(
    uri: str, tmp_path: Path, line: tuple[str, ...], told: str
) -> None:
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        (tmp_path / name).write_text(RECORD % "c9")
    failed = onto(*line, "--storage-uri", uri)
    assert failed.code == 2
    assert told in failed.error()


def test_a_preview_names_all_that_the_import_takes(uri: str, tmp_path: Path) -> None:
    """On a branch, say: without it the command would write to main."""
    (tmp_path / "onto.toml").write_text("")
    (tmp_path / "Customer.csv").write_text("id,name\nc9,Zed\n")
    assert onto("branch", "create", "run/1", "--storage-uri", uri).code == 0
    options = [
        *("--storage-uri", uri, "--config", "onto.toml", "--branch", "run/1", "--type", "Customer"),
        *("--on-conflict", "skip", "--idempotency-key", "crm:1", "--meta", "source=the crm"),
    ]
    shown = onto("import", "--input", "Customer.csv", *options).out.splitlines()[-1]
    shown_line = shlex.split(shown.partition("onto import ")[2])
    assert sorted(shown_line) == sorted(["--input", "Customer.csv", *options, "--apply"])
    done = onto("import", *shown_line, "--json")
    assert (done.code, done.json["commit_id"]) == (0, 3)
    assert onto("info", "--json", "--storage-uri", uri).json["head_commit_id"] == 2


def test_an_input_without_rows(uri: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    for apply in ((), ("--apply",)):
        done = onto("import", "--input", "rows.jsonl", "--storage-uri", uri, *apply)
        assert done == Done(0, "Nothing was written: there are no rows in rows.jsonl.\n", "")
