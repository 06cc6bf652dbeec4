"""`onto export` and `onto import`, in processes of their own where pipes and signals matter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Session
from storage_engine.commitlog import layout
from tests.cli import shop
from tests.cli.conftest import Place
from tests.cli.support import ROOT, create, onto, onto_process
from tests.engines import new_storage

SHOP = "tests.cli.shop"


@pytest.fixture(params=["directory-v2", "sqlite-v2"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """What engines do with rows is tested in tests/runtime."""
    backend, engine = request.param.split("-")
    uri = f"sqlite:///{tmp_path}/shop.db" if backend == "sqlite" else f"file://{tmp_path}/shop"
    return Place(backend, engine, uri)


@pytest.fixture
def store(place: Place) -> str:
    shop.fill(place.uri, place.engine)
    return place.uri


def target_of(place: Place, tmp_path: Path) -> str:
    """Another storage, of the other kind."""
    if place.backend == "sqlite":
        create(f"file://{tmp_path}/other", "v2")
        return f"file://{tmp_path}/other"
    return f"sqlite:///{tmp_path}/other.db"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "export.json"}


@pytest.mark.parametrize("place", ["sqlite-v2"], indirect=True)
def test_the_example_of_the_rfc(place: Place, store: str, tmp_path: Path) -> None:
    """RFC 0004, section 8: export, init, import, in processes of their own."""
    done = onto_process("export", "--storage-uri", store, "--output", "data/", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "8 rows of 4 types as of commit 3, in data"
    first = json.loads((tmp_path / "data/Client.jsonl").open().readline())
    assert [first["type"], first["key"], first["fields"]["tier"]] == ["Client", "ann", "Gold"]
    target = target_of(place, tmp_path)
    line = ["import", "--storage-uri", target, "--input", "data/", "--models", SHOP]
    preview = onto(*line)
    assert preview.code == 0
    shown = preview.out.splitlines()[-1]
    assert shown.startswith("Nothing was written. To import: onto import --input data/")
    assert f"--storage-uri {target} --models {SHOP} --apply" in shown
    done = onto_process(*line, "--apply", "--on-conflict", "abort", cwd=tmp_path)
    assert done.code == 0
    assert done.err == "" or "does not exist yet; the first commit creates it" in done.err
    assert done.out.splitlines()[-1] == "Commit 1: 8 rows written."
    again = onto(*line, "--apply", "--json").json
    assert (again["applied"], again["already_applied"], again["commit_id"]) == (True, True, 1)
    onto("export", "--storage-uri", target, "--output", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "data")


@pytest.mark.parametrize("place", ["directory-v2"], indirect=True)
def test_a_pipe_from_one_storage_into_another(place: Place, store: str, tmp_path: Path) -> None:
    target = target_of(place, tmp_path)
    program = f"{sys.executable} -m storage_engine.cli.main"
    done = subprocess.run(
        f"set -o pipefail; {program} export --storage-uri {store} --output - | "
        f"{program} import --storage-uri {target} --input - --format jsonl --apply --json",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, b"") or b"does not exist yet" in done.stderr
    assert json.loads(done.stdout)["commit_id"] == 1
    with Session(target) as session:
        assert session.query().entities(shop.Client).count() == 3


def test_the_json_of_both(store: str, tmp_path: Path) -> None:
    told = onto(
        "export", "--storage-uri", store, "--output", "out", "--type", "Client", "--type", "Job",
        "--format", "csv", "--as-of", "1", "--with-metadata", "--json",
    )  # fmt: skip
    assert told.code == 0
    assert {k: told.json[k] for k in ("commit_id", "rows", "file_format", "complete")} == {
        "commit_id": 1, "rows": 5, "file_format": "csv", "complete": True,
    }  # fmt: skip
    assert [(t["kind"], t["type_name"], t["file"]) for t in told.json["types"]] == [
        ("entity", "Client", "Client.csv"), ("relation", "Job", "Job.csv"),
    ]  # fmt: skip
    report = onto("import", "--storage-uri", store, "--input", "out", "--json")
    assert report.code == 6  # ann is Gold by now
    assert (report.json["conflicts"], report.json["applied"]) == (1, False)
    assert report.json["types"][0]["conflict_examples"] == ["ann"]
    assert set(report.json) == {
        "source", "applied", "commit_id", "already_applied", "on_conflict", "base_commit_id",
        "conflicts", "types", "problems", "problems_complete", "idempotency", "notes",
    }  # fmt: skip


def test_conflicts_exit_6(store: str, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(
        '{"type": "Firm", "key": "acme", "fields": {"name": "Other"}}\n'
        '{"type": "Firm", "key": "new", "fields": {"name": "New"}}\n'
    )
    line = ["import", "--storage-uri", store, "--input", "c.jsonl"]
    for more in ([], ["--apply"]):
        refused = onto(*line, *more)
        assert refused.code == 6
        assert "stored otherwise, Firm: acme" in refused.out
        assert refused.err.startswith("error: c.jsonl: rows are stored with other values")
        assert "--on-conflict skip" in refused.err
    assert onto(*line, "--apply", "--on-conflict", "skip", "--meta", "by=me").code == 0
    commit = onto("commits", "examine", "4", "--storage-uri", store, "--json").json
    assert "by" in json.dumps(commit)
    done = onto(*line, "--apply", "--on-conflict", "upsert")
    assert done.out.splitlines()[-1] == "Commit 5: 1 row written."
    with Session(store) as session:
        session.ensure(shop.Firm(id="acme", name="Changed by others"))
    changed = onto(*line, "--apply", "--on-conflict", "upsert")
    assert (changed.code, "was imported by commit 5" in changed.err) == (6, True)
    named = [*line, "--apply", "--on-conflict", "upsert", "--idempotency-key", "nightly:7"]
    assert onto(*named).out.splitlines()[-1] == "Commit 7: 1 row written."
    assert "imported before by commit 7" in onto(*named).out


def test_problems_exit_4_with_their_lines(store: str, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/Client.csv").write_text("id,name,age\na,x,1\nb,x,old\n")
    (tmp_path / "bad/z.jsonl").write_text('{"type": "Frim", "key": "a"}\n\n{"type": "Firm"\n')
    line = ["import", "--storage-uri", store, "--input", "bad", "--apply"]
    done = onto(*line)
    assert done.code == 4
    first, *others = done.out.splitlines()
    assert first.startswith("Client.csv line 3: column 'age' is not an integer")
    assert [text.partition(":")[0] for text in others] == ["z.jsonl line 1", "z.jsonl line 3"]
    assert "did you mean 'Firm'?" in others[0]
    assert done.err == (
        "error: bad: 3 problems, nothing was written: mend the input and run it again\n"
    )
    told = onto(*line, "--json")
    assert (told.code, told.err) == (4, "")
    assert [(p["file"], p["line"]) for p in told.json["problems"]] == [
        ("Client.csv", 3), ("z.jsonl", 1), ("z.jsonl", 3),
    ]  # fmt: skip
    assert len(onto("commits", "--storage-uri", store, "--json").json["commits"]) == 3


MISTAKES: list[tuple[list[str], int, str]] = [
    (["export"], 2, "--output"),
    (["export", "--output", "x", "--format", "xml"], 2, "xml"),
    (["export", "--output", "x", "--type", "Cleint"], 2, "did you mean 'Client'"),
    (["export", "--output", "x", "--as-of", "99"], 2, "no commit 99"),
    (["export", "--output", "x", "--as-of", "no-tag"], 4, "no-tag"),
    (["export", "--output", "x", "--as-of", "1", "--history-since", "0"], 2, "contradict"),
    (["export", "--output", "taken"], 2, "has other files"),
    (["export", "--output", "taken/file"], 2, "is a file"),
    (["export", "--output", "taken/file/below"], 5, "cannot be written"),
    (["import"], 2, "--input"),
    (["import", "--input", "nowhere"], 2, "is not there"),
    (["import", "--input", "taken"], 2, "no files to import"),
    (["import", "--input", "taken/file"], 2, "--format"),
    (["import", "--input", "taken", "--on-conflict", "merge"], 2, "merge"),
    (["import", "--input", "taken", "--idempotency-key", "x"], 2, "APP:VERSION"),
    (["import", "--input", "taken", "--meta", "x"], 2, "KEY=VALUE"),
]  # fmt: skip


@pytest.mark.parametrize("place", ["directory-v2"], indirect=True)
def test_mistakes_are_one_line(store: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("")
    for args, code, expected in MISTAKES:
        done = onto(*args, "--storage-uri", store)
        assert (done.code, expected in done.error()) == (code, True), done.err
        told = onto(*args, "--storage-uri", store, "--json")
        assert told.json["error"]["exit_code"] == code
        assert not (tmp_path / "x").exists()
    line = ["export", "--storage-uri", store, "--output", "-"]
    assert "leave out --json" in onto(*line, "--json").json["error"]["message"]
    several = onto_process(*line, "--format", "csv", cwd=tmp_path)
    assert (several.code, "has one type" in several.error()) == (2, True)


@pytest.mark.parametrize("place", ["directory-v2"], indirect=True)
def test_a_type_that_was_dropped_or_is_declared_otherwise_exits_3(
    store: str, tmp_path: Path
) -> None:
    assert onto("export", "--storage-uri", store, "--output", "out").code == 0
    (tmp_path / "stale_firms.py").write_text(
        "from storage_engine import Entity, Field\n\nclass Firm(Entity):\n"
        "    id: Field[str] = Field(primary_key=True)\n    name: Field[str]\n"
        "    size: Field[int | None] = None\n"
    )
    stale = onto("import", "--storage-uri", store, "--input", "out", "--models", "stale_firms")
    assert stale.code == 3
    assert "onto migrate" in stale.error()
    token = onto("schema", "drop", "Knows", "--storage-uri", store, "--json").json["token"]
    drop = ["schema", "drop", "Knows", "--storage-uri", store, "--apply", "--token", token]
    assert onto(*drop).code == 0
    refused = onto("import", "--storage-uri", store, "--input", "out", "--apply")
    assert refused.code == 3
    assert "Knows was dropped by commit 4" in refused.error()


@pytest.mark.parametrize("place", ["directory-v2"], indirect=True)
def test_ctrl_c_leaves_nothing_half(place: Place, store: str, tmp_path: Path) -> None:
    """While it waits for the rest of its input, and while it writes what nobody reads."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "storage_engine.cli.main"]
    line = [*program, "import", "--storage-uri", store, "--input", "-", "--format", "jsonl"]
    importing = subprocess.Popen(
        [*line, "--apply"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    assert importing.stdin is not None
    importing.stdin.write(b'{"type": "Firm", "key": "new", "fields": {"name": "New"}}\n')
    importing.stdin.flush()
    _wait_for_scratch(importing.pid)
    importing.send_signal(signal.SIGINT)
    _, err = importing.communicate(timeout=60)
    assert importing.returncode == 130
    assert b"Traceback" not in err
    assert len(onto("commits", "--storage-uri", store, "--json").json["commits"]) == 3


def _wait_for_scratch(pid: int) -> None:
    """Until the process has the file open into which it puts its input."""
    for _ in range(600):
        links = Path(f"/proc/{pid}/fd").glob("*")
        with_input = False
        for link in links:
            try:
                with_input |= os.readlink(link).endswith("/piped")
            except OSError:
                continue
        if with_input:
            return
        time.sleep(0.05)
    raise AssertionError("the import has not begun")


@pytest.mark.parametrize("place", ["directory-v2"], indirect=True)
def test_an_interrupted_export_in_a_pipe_is_not_imported(
    place: Place, store: str, tmp_path: Path
) -> None:
    whole = onto_process("export", "--storage-uri", store, "--output", "-", cwd=tmp_path)
    assert whole.code == 0
    lines = whole.out.splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_text("".join(lines[:-1]))
    target = target_of(place, tmp_path)
    done = onto("import", "--storage-uri", target, "--input", "cut.jsonl", "--apply")
    assert done.code == 4
    assert "its last line is missing" in done.out


# --- S3 -------------------------------------------------------------------------------------------


@pytest.mark.s3
def test_from_sqlite_into_s3_and_out_again(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The first time in processes of their own."""
    shop.fill(f"sqlite:///{tmp_path}/shop.db", "v2")
    for file_format in ("jsonl", "csv", "parquet"):
        s3 = new_storage("seaweedfs-v2", request, tmp_path)
        (tmp_path / "s3.toml").write_text(
            "".join(f'{name} = "{value}"\n' for name, value in s3.settings.items() if value)
        )
        there: list[Any] = ["--storage-uri", s3.uri, "--config", tmp_path / "s3.toml"]
        first, again = tmp_path / f"{file_format}-1", tmp_path / f"{file_format}-2"
        out = ["--format", file_format, "--output"]
        assert onto("export", "--db", "shop.db", *out, first).code == 0
        line: list[Any] = ["import", *there, "--input", first, "--apply"]
        missing = onto(*line)
        assert (missing.code, "onto init" in missing.error()) == (5, True)
        assert onto("init", *there).code == 0
        if file_format == "jsonl":
            done = onto_process(*line, "--json", cwd=tmp_path)
            exported = onto_process("export", *there, *out, again, cwd=tmp_path)
        else:
            done = onto(*line, "--json")
            exported = onto("export", *there, *out, again)
        assert (done.code, done.json["commit_id"], exported.code) == (0, 1, 0)
        assert contents(again) == contents(first)
        assert len(contents(first)) == 4
        repeated = onto("import", *there, "--input", again, "--apply", "--json")
        assert (repeated.code, repeated.json["already_applied"]) == (0, True)


# --- storages that cannot be read -----------------------------------------------------------------


def _newer(root: Path) -> None:
    stamp = root / layout.ENGINE
    stamp.write_text(json.dumps(json.loads(stamp.read_bytes()) | {"format": 99}))


def _without_manifests(root: Path) -> None:
    for path in root.rglob("manifest*.json"):
        path.write_text("{")


def _truncated(root: Path) -> None:
    for path in root.rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize("damage", [_newer, _without_manifests, _truncated])
@pytest.mark.parametrize("place", ["directory-v2"], indirect=True)
def test_a_storage_that_cannot_be_read_is_told_in_one_line(
    store: str, tmp_path: Path, damage: Any
) -> None:
    (tmp_path / "c.jsonl").write_text('{"type":"Firm","key":"acme","fields":{"name":"Other"}}\n')
    damage(tmp_path / "shop")
    before = {p: p.read_bytes() for p in (tmp_path / "shop").rglob("*") if p.is_file()}
    where: list[Any] = ["--storage-uri", store, "--config", tmp_path / "no-cache.toml"]
    (tmp_path / "no-cache.toml").write_text(f'cache_dir = "{tmp_path}/cache"\n')
    for line in (["export", "--output", "out"], ["import", "--input", "c.jsonl", "--apply"]):
        done = onto(*line, *where)
        assert done.code in (3, 5), done
        assert "defect" not in done.error()
        assert not (tmp_path / "out").exists()
    assert {p: p.read_bytes() for p in (tmp_path / "shop").rglob("*") if p.is_file()} == before
