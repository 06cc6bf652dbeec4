"""`onto init`: what it makes, what it refuses, and how a storage is erased on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_engine.repository.open import LATEST_ENGINE
from tests.cli.conftest import Place
from tests.cli.support import Customer, commit, create, files, onto


def test_init_creates_a_storage_that_info_can_show(place: Place) -> None:
    made = onto("init", "--storage-uri", place.uri, "--engine-version", place.engine)

    assert (made.code, made.err) == (0, "")
    assert f"Created an empty {place.engine} storage" in made.out
    assert "onto info" in made.out
    info = onto("info", "--storage-uri", place.uri, "--json").json
    assert (info["engine_version"], info["head_commit_id"]) == (place.engine, 0)


def test_init_takes_the_latest_engine_unless_told(tmp_path: Path) -> None:
    assert onto("init", "--storage-uri", tmp_path / "x", "--json").json["engine_version"] == (
        LATEST_ENGINE
    )


def test_init_without_a_storage_makes_onto_db(tmp_path: Path) -> None:
    made = onto("init")

    assert made.code == 0
    assert (tmp_path / "onto.db").is_file()


def test_init_refuses_a_storage_that_is_there(uri: str) -> None:
    refused = onto("init", "--storage-uri", uri)

    assert refused.code == 4
    assert "head at commit 2" in refused.error()
    assert "--force --dry-run" in refused.err


def test_init_refuses_an_unknown_engine(tmp_path: Path) -> None:
    refused = onto("init", "--storage-uri", tmp_path / "x", "--engine-version", "v9")

    assert refused.code == 2
    assert "'v9'" in refused.error()
    assert not (tmp_path / "x").exists()


def test_rfc0004_06_init_dry_run_writes_nothing(place: Place, tmp_path: Path) -> None:
    planned = onto("init", "--storage-uri", place.uri, "--dry-run", "--json")

    assert planned.code == 0
    assert planned.json["applied"] is False
    assert planned.json["objects"]
    assert planned.json["token"] is None
    assert files(tmp_path) == []


def test_dry_run_says_how_to_go_on(place: Place) -> None:
    planned = onto("init", "--storage-uri", place.uri, "--dry-run", "--engine-version", "v1")

    assert "Would create an empty v1 storage" in planned.out
    assert f"onto init --storage-uri {place.uri} --engine-version v1" in planned.out


def test_rfc0004_06_force_flow_erases_with_the_token_of_the_preview(uri: str) -> None:
    preview = onto("init", "--storage-uri", uri, "--force", "--dry-run", "--json")
    assert preview.code == 0
    assert preview.json["applied"] is False
    assert preview.json["erases"]["head_commit_id"] == 2
    assert onto("info", "--storage-uri", uri, "--json").json["head_commit_id"] == 2

    token = preview.json["token"]
    applied = onto("init", "--storage-uri", uri, "--force", "--token", token, "--json")

    assert applied.code == 0
    assert applied.json["applied"] is True
    assert onto("info", "--storage-uri", uri, "--json").json["head_commit_id"] == 0
    assert onto("commits", "--storage-uri", uri, "--json").json["commits"] == []


def test_force_preview_for_people_has_token_and_command(uri: str) -> None:
    preview = onto("init", "--storage-uri", uri, "--force", "--dry-run")

    token = onto("init", "--storage-uri", uri, "--force", "--dry-run", "--json").json["token"]
    assert f"Would erase {uri} with its 2 commits" in preview.out
    assert f"Token: {token}" in preview.out
    assert f"--force --token {token}" in preview.out


def test_force_without_or_with_a_wrong_token_erases_nothing(uri: str) -> None:
    for options in ([], ["--token", "wrong"]):
        refused = onto("init", "--storage-uri", uri, "--force", *options)
        assert refused.code == 4
        assert "--force --dry-run" in refused.error()

    assert onto("info", "--storage-uri", uri, "--json").json["head_commit_id"] == 2


def test_the_token_is_void_once_the_storage_has_moved_on(uri: str) -> None:
    token = onto("init", "--storage-uri", uri, "--force", "--dry-run", "--json").json["token"]
    commit(uri, Customer(id="c3", name="Cy"))

    refused = onto("init", "--storage-uri", uri, "--force", "--token", token)

    assert refused.code == 4
    assert "no longer fits" in refused.error()
    assert onto("info", "--storage-uri", uri, "--json").json["head_commit_id"] == 3


def test_a_token_without_force_is_a_usage_error(tmp_path: Path) -> None:
    refused = onto("init", "--storage-uri", tmp_path / "x", "--token", "t")

    assert refused.code == 2
    assert "--force" in refused.error()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("flag", ["--storage-uri", "--db"])
def test_the_hint_repeats_the_storage_as_it_was_given(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "my shop.db"

    made = onto("init", flag, path)

    storage = f"--db '{path}'" if flag == "--db" else f"--storage-uri 'sqlite:///{path}'"
    assert f"onto info {storage}" in made.out


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"commit_id": -1}', b"\xff\x00"])
def test_a_storage_whose_head_is_malformed_can_be_erased(tmp_path: Path, content: bytes) -> None:
    uri = f"file://{tmp_path}/store"
    create(uri, "v2")
    commit(uri, Customer(id="a", name="A"))
    (tmp_path / "store" / "meta" / "head.json").write_bytes(content)
    place = ("--storage-uri", uri)
    assert onto("init", *place).code == 3
    assert "head cannot be read" in onto("init", "--force", *place).error()
    planned = onto("init", "--force", "--dry-run", *place, "--json").json
    assert planned["erases"]["head_commit_id"] is None
    assert "whose head cannot be read" in onto("init", "--force", "--dry-run", *place).out
    done = onto("init", "--force", "--token", planned["token"], *place)
    assert done.code == 0, done
    assert onto("info", *place, "--json").json["head_commit_id"] == 0
    assert not list((tmp_path / "store" / "commits").rglob("*.parquet"))
    assert commit(uri, Customer(id="b", name="B")) is not None


def test_a_storage_that_is_there_may_stay(place: Place) -> None:
    first = onto("init", "--storage-uri", place.uri, "--engine-version", place.engine, "--exist-ok")
    assert (first.code, "Created" in first.out) == (0, True)
    commit(place.uri, Customer(id="c1", name="Ann"))

    again = onto("init", "--storage-uri", place.uri, "--exist-ok", "--json")
    assert (again.code, again.json["applied"], again.json["engine_version"]) == (
        0,
        False,
        place.engine,
    )
    assert onto("info", "--storage-uri", place.uri, "--json").json["head_commit_id"] == 1
    refused = onto("init", "--storage-uri", place.uri)
    assert refused.code == 4
    assert f"Session('{place.uri}')" in refused.error()
    assert "--exist-ok" in refused.error()
    both = onto("init", "--storage-uri", place.uri, "--exist-ok", "--force")
    assert both.code == 2
