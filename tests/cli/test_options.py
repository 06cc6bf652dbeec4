"""Global options: where they may stand, what beats what, and how they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_engine import Session, __version__
from storage_engine.errors import ConfigurationError
from storage_engine.repository.open import LATEST_ENGINE
from tests.cli.support import Customer, commit, create, files, onto


@pytest.fixture
def shop(tmp_path: Path) -> str:
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    return uri


def test_options_stand_before_or_after_the_command(shop: str) -> None:
    lines = [
        ("--json", "--storage-uri", shop, "commits"),
        ("commits", "--json", "--storage-uri", shop),
        ("--json", "commits", "--storage-uri", shop),
    ]
    assert {onto(*line).out for line in lines} == {onto(*lines[0]).out}
    assert onto(*lines[0]).json == {"commits": [], "more": 0}
    for line in (
        ("--json", "commits", "--storage-uri", shop, "examine", "1"),
        ("commits", "examine", "1", "--storage-uri", shop, "--json"),
    ):
        assert onto(*line).json["error"]["type"] == "CommitNotFoundError"


def test_the_later_option_wins(shop: str, tmp_path: Path) -> None:
    other = f"file://{tmp_path}/other"

    shown = onto("--storage-uri", other, "info", "--storage-uri", shop, "--json")

    assert shown.json["uri"] == shop


@pytest.mark.parametrize("args", [("info",), ("commits",), ("commits", "examine", "1"), ("init",)])
def test_rfc0004_05_storage_uri_and_db_conflict(
    args: tuple[str, ...], shop: str, tmp_path: Path
) -> None:
    before = files(tmp_path)
    for uri in (shop, f"sqlite:///{tmp_path}/a.db", "s3://bucket/prefix"):
        refused = onto(*args, "--storage-uri", uri, "--db", tmp_path / "b.db")

        assert refused.code == 2
        assert "name different storages" in refused.error()
        assert uri in refused.err
    assert files(tmp_path) == before


def test_rfc0004_05_storage_uri_and_db_may_agree(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    assert onto("init", "--storage-uri", f"sqlite:///{path}", "--db", path).code == 0
    assert path.is_file()


def test_rfc0004_05_db_alone_means_sqlite_and_nothing_means_onto_db(tmp_path: Path) -> None:
    by_path = onto("info", "--db", tmp_path / "plain-name.db", "--json").json
    default = onto("info", "--json").json

    assert (by_path["backend"], default["backend"]) == ("sqlite", "sqlite")
    assert default["db_path"] == "onto.db"
    assert default["engine_version"] == LATEST_ENGINE


def test_a_folder_of_dagster_is_found(tmp_path: Path) -> None:
    create(".ontologia/store", "v2")
    commit(".ontologia/store", Customer(id="c1", name="Ann"))

    assert onto("info", "--json").json["uri"] == f"file://{tmp_path}/.ontologia/store"
    with Session() as session:
        assert session.storage_info()["head_commit_id"] == 1

    create("onto.db", "v2")  # as people have it who began with SQLite
    both = onto("info", "--json")
    assert both.json["backend"] == "sqlite"
    assert both.err.startswith(f"warning: {tmp_path} has two storages, onto.db and .ontologia/sto")
    assert both.err.count("\n") == 1


def test_rfc0004_07_db_means_sqlite_whatever_the_path(tmp_path: Path) -> None:
    for name in ("plain", "with.suffix"):
        path = tmp_path / name
        assert onto("init", "--db", path).code == 0
        assert path.is_file()
        assert onto("info", "--db", path, "--json").json["backend"] == "sqlite"
    refused = onto("info", "--db", "s3://bucket/prefix")
    assert refused.code == 2
    assert "--storage-uri" in refused.error()
    directory = onto("info", "--db", tmp_path)
    assert directory.code == 5
    assert "directory, not a SQLite file" in directory.error()


def test_the_environment_names_the_storage(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONTOLOGIA_STORAGE_URI", shop)

    assert onto("info", "--json").json["uri"] == shop


def test_an_option_beats_the_environment(
    shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONTOLOGIA_STORAGE_URI", "s3://elsewhere/x")
    monkeypatch.setenv("ONTOLOGIA_DB", str(tmp_path / "elsewhere.db"))

    assert onto("info", "--storage-uri", shop, "--json").json["uri"] == shop
    assert onto("info", "--db", tmp_path / "a.db", "--json").json["backend"] == "sqlite"
    both = onto("info")
    assert both.code == 2
    assert "name different storages" in both.error()


def test_the_config_file_is_read(
    shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, broken = (tmp_path / f"{name}.toml" for name in ("good", "bad", "broken"))
    good.write_text("[ontologia]\ns3_lock_timeout_ms = 10\n")
    bad.write_text("s3_lease = 1\n")
    broken.write_text("= nonsense")

    assert onto("info", "--config", good, "--storage-uri", shop).code == 0
    assert "unknown option 's3_lease'" in onto("info", "--config", bad).error()
    assert "not valid TOML" in onto("info", "--config", broken).error()
    assert "cannot read config file" in onto("info", "--config", tmp_path / "none").error()
    assert onto("info", "--config", bad).code == 2

    monkeypatch.setenv("ONTOLOGIA_CONFIG", str(bad))
    assert onto("info", "--storage-uri", shop).code == 2
    assert onto("info", "--config", good, "--storage-uri", shop).code == 0


def test_bad_uris_are_usage_errors() -> None:
    for uri in ("gs://bucket/x", "sqlite:relative.db", "s3://", "", "file://host/x"):
        refused = onto("info", "--storage-uri", uri)

        assert refused.code == 2, uri
        assert refused.error()
    assert onto("info", "--db", "").code == 2


def test_the_log_level(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONTOLOGIA_LOG_LEVEL", "debug")
    assert onto("info", "--storage-uri", shop).code == 0

    monkeypatch.setenv("ONTOLOGIA_LOG_LEVEL", "loud")
    refused = onto("info", "--storage-uri", shop)
    assert refused.code == 2
    assert "ONTOLOGIA_LOG_LEVEL is 'LOUD'" in refused.error()


def test_version() -> None:
    assert onto("--version").out == f"onto {__version__}\n"
    assert onto("info", "--version").out == f"onto {__version__}\n"
    assert onto("--version", "--json").json == {"version": __version__}


def test_configuration_errors_are_of_one_class() -> None:
    error = onto("info", "--storage-uri", "gs://b/x", "--json").json["error"]

    assert error["type"] == ConfigurationError.__name__
