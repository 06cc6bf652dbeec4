"""Every command against every storage that is not as it should be: one clear line, an exit code of
the table, JSON where it was asked for, and nothing written."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from storage_engine.cli.main import app
from storage_engine.commitlog import layout
from tests.cli.conftest import Place
from tests.cli.lines import LINES, LOOK_BEFORE, READ_ROWS, check_answer, leaves, line_of
from tests.cli.support import onto

pytestmark = pytest.mark.usefixtures("nothing_outside")


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
) -> None:
    storage = tmp_path / ("shop.db" if place.backend == "sqlite" else "shop")
    damage(storage)
    before = contents(storage)
    runs = [(command, as_json) for command in LINES for as_json in (False, True)]
    for number, (command, as_json) in enumerate(runs):
        if damage is absent and command == "init":
            continue
        (tmp_path / "cache.toml").write_text(f'cache_dir = "{tmp_path}/cache-{number}"\n')
        done = onto(*line_of(command, uri, "--config", "cache.toml", as_json=as_json))

        check_answer(command, done, as_json=as_json)
        if command in must_fail:
            assert done.code, (command, done)
        if done.code:
            assert contents(storage) == before, (command, done)
            assert not (tmp_path / "out").exists(), (command, done)
        before = contents(storage)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(tmp_path / "copied", ignore_errors=True)
