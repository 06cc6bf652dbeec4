"""`onto copy` and `onto migrate-engine`: previews, applies, compares, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Place
from tests.cli.support import Customer, commit, create, files, onto, opened


def test_copy_previews_then_copies_then_has_nothing_to_do(uri: str, tmp_path: Path) -> None:
    target = f"{tmp_path}/copy"
    preview = onto("copy", uri, target)
    assert (preview.code, preview.err) == (0, "")
    assert "Nothing was written. To copy: onto copy" in preview.out
    assert not Path(target).exists()
    done = onto("copy", uri, target, "--apply")
    assert (done.code, done.err) == (0, "")
    assert "The same: 2 commits" in done.out
    with opened(uri) as ours, opened(target) as theirs:
        assert theirs.list_commits() == ours.list_commits()
    again = onto("copy", uri, target, "--apply", "--json")
    assert (again.json["commits"], again.json["since"], again.json["applied"]) == (0, 2, True)


def test_copy_compares_and_says_what_differs(tmp_path: Path) -> None:
    source, target = f"file://{tmp_path}/source", f"{tmp_path}/copy.db"
    create(source, "v2")
    commit(source, Customer(id="c1", name="Ann"))
    assert onto("copy", source, target, "--apply").code == 0
    assert onto("copy", source, target, "--verify").code == 0
    commit(source, Customer(id="c2", name="Bob"))
    differs = onto("copy", source, target, "--verify")
    assert differs.code == 3
    assert "1 difference." in differs.out
    told = onto("copy", source, target, "--verify", "--json")
    assert (told.code, told.json["ok"]) == (3, False)
    assert told.json["differences"][0]["what"] == "commit"


def test_copy_refuses(tmp_path: Path) -> None:
    source, other = f"file://{tmp_path}/source", f"{tmp_path}/other"
    for uri in (source, other):
        create(uri, "v2")
        commit(uri, Customer(id="c1", name="Ann"))
    before = files(tmp_path / "other")
    refused = onto("copy", source, other, "--apply")
    assert refused.code == 4
    assert "it is not empty" in refused.err
    assert files(tmp_path / "other") == before
    assert onto("copy", source, source).code == 2
    before = files(tmp_path / "source")
    inside = onto("copy", source, f"{tmp_path}/source/meta/copy", "--apply")
    assert inside.code == 2
    assert "among its own objects" in inside.err
    assert files(tmp_path / "source") == before
    missing = onto("copy", f"{tmp_path}/nothing", other)
    assert missing.code == 5
    assert "(storage" not in missing.err  # the settings name none of the two
    assert onto("copy", source, other, "--apply", "--verify").code == 2
    assert onto("copy", source, other, "--storage-uri", other).code == 2
    assert onto("copy", source, "s3:///no-bucket").code == 2


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    source = f"file://{tmp_path}/source"
    create(source, "v2")
    commit(source, Customer(id="c1", name="Ann"))
    (tmp_path / "file").write_text("not a folder")
    done = onto("copy", source, f"{tmp_path}/file/below", "--apply")
    assert done.code == 5
    assert "file/below" in done.err


def test_the_target_has_settings_of_its_own(tmp_path: Path) -> None:
    source = f"{tmp_path}/source.db"
    create(f"sqlite:///{source}", "v2")
    (tmp_path / "target.toml").write_text("checkpoint_interval = 0\n")
    done = onto("copy", source, f"{tmp_path}/copy", "--target-config", f"{tmp_path}/target.toml")
    assert done.code == 2
    assert "checkpoint_interval" in done.err


@pytest.mark.parametrize("place", ["directory-v1", "sqlite-v1"], indirect=True)
def test_migrate_engine(place: Place, uri: str) -> None:
    preview = onto("migrate-engine", "--storage-uri", uri, "--json")
    assert preview.code == 0
    plan = preview.json
    assert (plan["source_engine"], plan["target_engine"], plan["applied"]) == ("v1", "v2", False)
    shown = onto("migrate-engine", "--storage-uri", uri)
    assert f"--apply --token {plan['token']}" in shown.out
    needs = onto("migrate-engine", "--storage-uri", uri, "--apply")
    assert needs.code == 4
    assert "needs a token" in needs.err
    done = onto("migrate-engine", "--storage-uri", uri, "--apply", "--token", plan["token"])
    assert done.code == 0
    assert "To switch over" in done.out
    info = json.loads(onto("info", "--storage-uri", plan["target"], "--json").out)
    assert (info["engine_version"], info["head_commit_id"]) == ("v2", 2)
    assert json.loads(onto("info", "--storage-uri", uri, "--json").out)["engine_version"] == "v1"
