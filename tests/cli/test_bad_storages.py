"""Every command against every storage that is not as it should be: one clear line, an exit code of
the table, JSON where it was asked for, and nothing written."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from storage_engine.cli.main import app
from storage_engine.commitlog import layout
from storage_engine.explore import server
from storage_engine.maintenance import doctor
from tests.cli.conftest import Place
from tests.cli.support import onto

MODELS = "tests.cli.support"
HANDLERS = "tests.cli.test_events"

LINES: dict[str, tuple[str, ...]] = {
    "init": ("--force", "--token", "t"),
    "info": (),
    "query entities": ("Customer",),
    "query relations": ("Employment",),
    "query traverse": ("Customer", "--via", "Employment"),
    "query sql": ("SELECT * FROM Customer",),
    "shell": ("-c", "pass"),
    "explore": ("--port", "0"),
    "commits": (),
    "commits examine": ("1",),
    "log": (),
    "diff": ("0", "2"),
    "export": ("--output", "out"),
    "schema list": (),
    "schema show": ("Product",),
    "schema diff": ("--models", MODELS),
    "schema export": (),
    "schema history": ("Product",),
    "schema drop": ("Employment",),
    "schema repair": ("--apply",),
    "migrate": ("--models", MODELS),
    "import": ("--input", "in.jsonl", "--apply"),
    "restore": ("1", "--apply"),
    "tag list": (),
    "tag create": ("before", "1"),
    "tag delete": ("before",),
    "copy": ("--apply",),  # told where it is by arguments of its own
    "migrate-engine": ("--to", "there"),
    "events list-namespaces": (),
    "events sessions": (),
    "events show": (),
    "events dead-letters": (),
    "events inspect": ("e1",),
    "events replay": ("e1", "--apply"),
    "events redrive": ("--apply",),
    "events cleanup": ("--apply",),
    "events peek": ("--handlers", HANDLERS),
    "events run": ("--handlers", HANDLERS, "--drain"),
    "verify": (),
    "index verify": (),
    "index repair": ("--apply",),
    "compact": ("--apply",),
    "gc": ("--apply",),
    "du": (),
    "doctor": (),
    "lock show": (),
    "lock break": ("--token", "t"),
}


READ_ROWS = {
    "query entities",
    "query relations",
    "query traverse",
    "query sql",
    "diff",
    "export",
    "import",
    "copy",
    "verify",
}  # who reads what is damaged cannot end well
PRINT_THEIR_OWN = {"shell", "log", "explore"}  # and what the page would print is left out here
REPORTS = {"doctor", "verify", "index verify"}  # that fail by what they say
LOOK_BEFORE = {"doctor", "init"}  # there need not be a storage


def leaves(command: Any, path: str = "") -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if not inner or (path and getattr(command, "invoke_without_command", False)):
        yield path
    for name in inner:
        yield from leaves(inner[name], f"{path} {name}".strip())


def test_every_command_is_here() -> None:
    assert {*leaves(get_command(app))} == {*LINES}


def absent(storage: Path) -> None:
    shutil.rmtree(storage)


def newer(storage: Path) -> None:
    if storage.is_dir():
        stamp = storage / layout.ENGINE
        stamp.write_text(json.dumps(json.loads(stamp.read_bytes()) | {"format": 99}))
        return
    connection = sqlite3.connect(storage)
    connection.execute("UPDATE storage_meta SET value = '99' WHERE key = 'format'")
    connection.commit()
    connection.close()


def corrupted(storage: Path) -> None:
    """Manifests, or all pages but the first."""
    if storage.is_dir():
        for path in storage.rglob("manifest*.json"):
            path.write_text("{}")
        return
    data = storage.read_bytes()
    storage.write_bytes(data[:4096] + bytes(len(data) - 4096))


def truncated(storage: Path) -> None:
    for path in storage.rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:40])


def contents(storage: Path) -> dict[str, bytes]:
    """Without the files by which processes of one machine wait for each other."""
    paths = [storage] if storage.is_file() else storage.rglob("*")
    return {
        path.as_posix(): path.read_bytes()
        for path in paths
        if path.is_file() and ".locks" not in path.parts
    }


@pytest.mark.parametrize(
    ("place", "damage", "must_fail"),
    [
        ("directory-v2", absent, {*LINES} - LOOK_BEFORE),
        ("directory-v2", newer, {*LINES}),
        ("directory-v2", corrupted, READ_ROWS),
        ("directory-v2", truncated, READ_ROWS),
        ("sqlite-v2", newer, {*LINES}),
        ("sqlite-v2", corrupted, READ_ROWS),
    ],
    indirect=["place"],
)
def test_every_command_tells_it_in_one_line_and_writes_nothing(
    place: Place,
    uri: str,
    damage: Callable[[Path], None],
    must_fail: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_java", lambda: (17, "java"))
    monkeypatch.setattr(server, "serve", lambda *_args, **_options: True)
    (tmp_path / "in.jsonl").write_text('{"type":"Customer","key":"c9","fields":{"name":"Zed"}}\n')
    storage = tmp_path / ("shop.db" if place.backend == "sqlite" else "shop")
    damage(storage)
    before = contents(storage)
    runs = [(*line, as_json) for line in LINES.items() for as_json in (False, True)]
    for number, (command, extra, as_json) in enumerate(runs):
        if damage is absent and command == "init":
            continue
        (tmp_path / "cache.toml").write_text(f'cache_dir = "{tmp_path}/cache-{number}"\n')
        there = (uri, "copied") if command == "copy" else ("--storage-uri", uri)
        line = (*command.split(), *extra, *there, "--config", "cache.toml")
        done = onto(*line, "--json") if as_json else onto(*line)

        told = (command, done)
        assert "Traceback" not in done.err, told
        assert "defect" not in done.err + done.out, told
        assert done.code in (0, *range(2, 7)), told
        if command in must_fail:
            assert done.code, told
        if as_json and (done.code or command not in PRINT_THEIR_OWN):
            assert isinstance(done.json, dict), told
        elif done.code and command not in REPORTS:
            errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
            assert (len(errors), done.out) == (1, ""), told
        if done.code:
            assert contents(storage) == before, told
            assert not (tmp_path / "out").exists(), told
        before = contents(storage)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(tmp_path / "copied", ignore_errors=True)
