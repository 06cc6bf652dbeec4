"""`onto schema` and `onto migrate`. What they ask of engines is tested on all four elsewhere
(tests/runtime/test_migrate.py): two storages are enough here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.runtime.migration import apply_drop, preview_drop
from tests.cli.conftest import Place
from tests.cli.support import ROOT, Done, create, onto, opened


@pytest.fixture(params=["directory-v2", "sqlite-v1"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    backend, engine = request.param.split("-")
    uri = f"sqlite:///{tmp_path}/shop.db" if backend == "sqlite" else f"file://{tmp_path}/shop"
    return Place(backend, engine, uri)


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def told(uri: str, *args: str) -> Done:
    return onto(*args, "--storage-uri", uri)


def asked(uri: str, *args: str, code: int = 0) -> Any:
    done = told(uri, *args, "--json")
    assert done.code == code, done
    assert done.err == ""
    return done.json


def migrated(uri: str, models: str = "tests.cli.shop_2", *more: str) -> Any:
    return asked(uri, "migrate", "--models", models, "--force", *more)


# --- migrate ------------------------------------------------------------------------------------


def test_a_preview_shows_the_next_command_and_its_token_works(uri: str) -> None:
    preview = told(uri, "migrate", "--models", "tests.cli.shop_2")
    assert preview.code == 0
    assert preview.err == ""
    lines = preview.out.splitlines()
    assert "email" in preview.out
    assert "str | None" in preview.out
    assert any(line.split() == ["Customer", "2"] for line in lines)
    command = lines[-1].split()
    assert command[:2] == ["onto", "migrate"]
    done = onto(*command[1:])
    assert done.code == 0, done
    assert "Migrated as commit 3" in done.out
    again = told(uri, "migrate", "--models", "tests.cli.shop_2")
    assert again.out.startswith("Nothing to migrate")
    assert told(uri, "schema", "diff", "--models", "tests.cli.shop_2").code == 0


def test_the_json_of_a_preview_and_of_a_migration(uri: str) -> None:
    preview = asked(uri, "migrate", "--models", "tests.cli.shop_2")
    token = preview.pop("token")
    assert token.startswith("2-")
    (diff,) = preview.pop("diffs")
    assert diff == {
        "kind": "entity",
        "type_name": "Customer",
        "from_version": 1,
        "to_version": 2,
        "renamed_from": None,
        "additive": True,
        "refusal": None,
        "changes": [
            {
                "path": "email",
                "change": "added",
                "before": None,
                "after": "str | None",
                "additive": True,
            }
        ],
    }
    assert preview == {
        "has_changes": True,
        "possible": True,
        "estimated_rows": {"Customer": 2},
        "types_requiring_upgraders": [],
        "types_schema_only": [],
        "missing_upgraders": [],
        "applied": False,
    }
    done = asked(uri, "migrate", "--models", "tests.cli.shop_2", "--apply", "--token", token)
    assert done.pop("duration_s") >= 0
    assert done == {
        "success": True,
        "types_migrated": ["Customer"],
        "rows_migrated": {"Customer": 2},
        "new_schema_versions": {"Customer": 2},
        "commit_id": 3,
        "applied": True,
    }
    again = asked(uri, "migrate", "--models", "tests.cli.shop_2", "--apply", "--token", token)
    assert (again["commit_id"], again["applied"]) == (None, False)


def test_missing_upgraders_are_named_and_the_exit_code_says_so(uri: str) -> None:
    preview = told(uri, "migrate", "--models", "tests.cli.shop_3")
    assert preview.code == 3
    assert "@upgrader('Customer', from_version=1)" in preview.out
    assert "--upgraders MODULE" in preview.out
    failed = told(uri, "migrate", "--models", "tests.cli.shop_3", "--force")
    assert failed.code == 3
    assert "no upgrader for Customer from version 1" in failed.error()
    upgraders = ["--upgraders", "tests.cli.shop_upgraders"]
    assert told(uri, "migrate", "--models", "tests.cli.shop_3", *upgraders).code == 0
    assert migrated(uri, "tests.cli.shop_3", *upgraders)["new_schema_versions"] == {"Customer": 2}
    rows = asked(uri, "query", "entities", "Customer")["rows"]
    assert [row["initial"] for row in rows] == ["A", "B"]


def test_what_cannot_be_migrated_is_said_by_the_preview(uri: str) -> None:
    preview = told(uri, "migrate", "--models", "tests.cli.shop_keys")
    assert preview.code == 3
    assert "what identifies an entity cannot change" in preview.out
    failed = told(uri, "migrate", "--models", "tests.cli.shop_keys", "--force")
    assert failed.code == 4


def test_a_token_that_has_drifted_is_refused(uri: str) -> None:
    token = asked(uri, "migrate", "--models", "tests.cli.shop_2")["token"]
    with opened(uri) as repository:
        preview = preview_drop(repository, "Employment")
        apply_drop(repository, "Employment", token=preview.token)
    failed = told(uri, "migrate", "--models", "tests.cli.shop_2", "--apply", "--token", token)
    assert failed.code == 4
    assert (
        "head moved from commit 2 to 3 since the preview (Employment was dropped)" in failed.error()
    )


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (["--models", "tests.cli.shop_2", "--apply"], "--apply needs the token"),
        (["--models", "tests.cli.shop_2", "--token", "x"], "--token is for --apply"),
        (["--models", "tests.cli.shop_2", "--force", "--token", "x"], "use one of them"),
        ([], "--models MODULE"),
        (["--models", "tests.cli.shop_2", "--upgraders", "no.such"], "--upgraders no.such: cannot"),
    ],
)
def test_mistakes_on_the_line(line: list[str], what: str, tmp_path: Path) -> None:
    failed = onto("migrate", *line, "--db", tmp_path / "x.db")
    assert failed.code == 2
    assert what in failed.error()


# --- looking ------------------------------------------------------------------------------------


def test_types_are_listed_with_their_versions(uri: str) -> None:
    migrated(uri)
    listed = told(uri, "schema", "list")
    assert [line.split()[:4] for line in listed.out.splitlines()[1:]] == [
        ["Customer", "entity", "2", "3"],
        ["Product", "entity", "1", "1"],
        ["Employment", "relation", "1", "2"],
    ]
    types = asked(uri, "schema", "list")["types"]
    assert {k: v for k, v in types[0].items() if k != "schema_sha256"} == {
        "type_kind": "entity",
        "type_name": "Customer",
        "current_schema_version_id": 2,
        "latest_schema_version_id": 2,
        "activation_commit_id": 3,
        "versions": [1, 2],
        "dropped_commit_id": None,
        "purged": False,
        "renamed_to": None,
        "renamed_from": None,
    }


def test_an_empty_storage_has_no_types(place: Place) -> None:
    create(place.uri, place.engine)
    assert told(place.uri, "schema", "list").out.startswith("No types yet")
    assert asked(place.uri, "schema", "list")["types"] == []
    assert asked(place.uri, "schema", "export")["types"] == []


def test_one_version_is_shown_with_its_fields(uri: str) -> None:
    migrated(uri)
    shown = told(uri, "schema", "show", "Customer")
    assert [line.split()[:2] for line in shown.out.splitlines()[-3:]] == [
        ["id", "str"],
        ["name", "str"],
        ["email", "str"],
    ]
    first = asked(uri, "schema", "show", "Customer", "--schema-version", "1")
    assert [field["name"] for field in first["schema"]["fields"]] == ["id", "name"]
    assert (first["activation_commit_id"], first["superseded_at_commit_id"]) == (1, 3)
    failed = told(uri, "schema", "show", "Customer", "--schema-version", "7")
    assert failed.code == 2
    assert "has no schema version 7: the storage has 1, 2" in failed.error()
    failed = told(uri, "schema", "show", "Custom")
    assert failed.code == 2
    assert "did you mean 'Customer'" in failed.error()


def test_a_class_tells_what_the_storage_does_not_know(uri: str) -> None:
    migrated(uri)
    shown = told(uri, "schema", "show", "Customer", "--models", "tests.cli.shop_2")
    assert shown.code == 0, shown
    assert "Who buys." in shown.out
    assert "team:sales" in shown.out
    assert "domain=crm" in shown.out
    assert "sensitive; where bills go" in shown.out
    document = asked(uri, "schema", "show", "Customer", "--models", "tests.cli.shop_2")
    assert document["declared"] == {
        "description": "Who buys.",
        "owners": ["team:sales"],
        "tags": {"domain": "crm"},
        "sensitive": False,
        "fields": {
            "id": {"description": None, "sensitive": False},
            "name": {"description": None, "sensitive": False},
            "email": {"description": "where bills go", "sensitive": True},
        },
    }
    assert "declared" not in asked(uri, "schema", "show", "Customer")


def test_the_history_of_a_type(uri: str) -> None:
    migrated(uri)
    history = told(uri, "schema", "history", "Customer")
    assert "1 to 2" in history.out
    assert "from 3 on" in history.out
    assert "field 'email' added (str | None)" in history.out
    document = asked(uri, "schema", "history", "Customer")
    assert [version["schema_version_id"] for version in document["versions"]] == [1, 2]
    assert [change["path"] for change in document["changes"]["2"]] == ["email"]


def test_classes_and_versions_are_compared(uri: str) -> None:
    differs = told(uri, "schema", "diff", "--models", "tests.cli.shop_2")
    assert differs.code == 3
    assert differs.err == ""
    assert "email" in differs.out
    assert told(uri, "schema", "diff", "Product", "--models", "tests.cli.shop_2").code == 0
    migrated(uri)
    (between,) = asked(uri, "schema", "diff", "Customer", "1", "2")["diffs"]
    assert [change["path"] for change in between["changes"]] == ["email"]
    assert told(uri, "schema", "diff").code == 2
    assert told(uri, "schema", "diff", "Customer", "1").code == 2
    failed = told(uri, "schema", "diff", "Nobody", "--models", "tests.cli.shop_2")
    assert "declares no Nobody: there are Customer, Employment, Product" in failed.error()


def test_schemas_are_exported(uri: str, tmp_path: Path) -> None:
    migrated(uri)
    current = asked(uri, "schema", "export")
    assert [(t["type_name"], t["schema_version_id"]) for t in current["types"]] == [
        ("Customer", 2),
        ("Product", 1),
        ("Employment", 1),
    ]
    assert current["commit_id"] == 3
    # Always JSON, with or without --json.
    assert json.loads(told(uri, "schema", "export").out) == current
    file = tmp_path / "schemas.json"
    done = told(uri, "schema", "export", "--history", "--output", str(file))
    assert done.out == f"Wrote the schemas of 3 types to {file}.\n"
    everything = json.loads(file.read_text())
    assert [v["schema_version_id"] for v in everything["types"][0]["versions"]] == [1, 2]
    failed = told(uri, "schema", "export", "--output", str(tmp_path / "no" / "file"))
    assert failed.code == 2


# --- dropping -----------------------------------------------------------------------------------


def test_a_drop_is_previewed_applied_and_shown(uri: str) -> None:
    failed = told(uri, "schema", "drop", "Customer")
    assert failed.code == 7
    assert "Customer is an end of Employment: drop them too (`--cascade`)" in failed.error()
    preview = told(uri, "schema", "drop", "Customer", "--cascade")
    assert preview.code == 0
    done = onto(*preview.out.splitlines()[-1].split()[1:])
    assert "Dropped 2 types as commit 3." in done.out
    asked_for = told(uri, "query", "entities", "Customer")
    assert asked_for.code == 0
    assert asked_for.out == "No rows.\n"
    assert "was dropped by commit 3" in asked_for.err
    document = told(uri, "query", "entities", "Customer", "--json").json
    assert document["diagnostics"] == [{"reason": "type_dropped", "dropped_commit_id": 3}]
    old = asked(uri, "query", "entities", "Customer", "--schema-version", "1")
    assert [row["name"] for row in old["rows"]] == ["Anna", "Bob"]
    assert "dropped by commit 3" in told(uri, "schema", "list").out
    again = told(uri, "schema", "drop", "Customer")
    assert again.code == 2
    assert "was dropped by commit 3 already" in again.error()
    assert told(uri, "schema", "diff", "--models", "tests.cli.shop").code in (0, 3)


def test_what_is_purged_is_gone(uri: str) -> None:
    token = asked(uri, "schema", "drop", "Employment")["token"]
    dropped = asked(uri, "schema", "drop", "Employment", "--apply", "--token", token)
    assert dropped == {
        "token": token,
        "types": [
            {
                "type_kind": "relation",
                "type_name": "Employment",
                "schema_version_id": 1,
                "rows": 1,
                "purge": False,
            }
        ],
        "dependents": [],
        "applied": True,
        "commit_id": 3,
    }
    stale = told(uri, "schema", "drop", "Employment", "--purge", "--apply", "--token", token)
    assert stale.code == 4
    assert "head moved from commit 2 to 3" in stale.error()
    token = asked(uri, "schema", "drop", "Employment", "--purge")["token"]
    done = told(uri, "schema", "drop", "Employment", "--purge", "--apply", "--token", token)
    assert "Removed the data of 1 type as commit 4." in done.out
    assert "dropped by commit 3, data removed" in told(uri, "schema", "list").out
    again = told(uri, "schema", "drop", "Employment", "--purge")
    assert again.code == 2
    assert "its data is gone" in again.error()


def test_rows_of_an_older_version_can_be_asked_for(uri: str) -> None:
    migrated(uri)
    old = asked(uri, "query", "entities", "Customer", "--schema-version", "1", "--with-history")
    assert [(row["commit_id"], row["name"]) for row in old["rows"]] == [
        (1, "Ann"),
        (2, "Anna"),
        (2, "Bob"),
    ]
    filtered = ["--filter", "name", "==", '"Bob"', "--count"]
    assert asked(uri, "query", "entities", "Customer", "--schema-version", "1", *filtered) == {
        "kind": "entity",
        "type": "Customer",
        "commit_id": 3,
        "diagnostics": [],
        "count": 1,
    }
    failed = told(uri, "query", "entities", "Customer", "--schema-version", "9")
    assert failed.code == 2


def test_catalogs_are_repaired_from_the_log(uri: str, place: Place) -> None:
    migrated(uri)
    whole = asked(uri, "schema", "repair")
    assert (whole["catalogs"], whole["applied"]) == ([], False)
    assert told(uri, "schema", "repair").out.startswith("Nothing to repair")
    if place.backend == "sqlite":
        return
    types = Path(place.uri.removeprefix("file://")) / layout.TYPES
    before = types.read_text()
    types.unlink()
    preview = told(uri, "schema", "repair")
    assert "onto schema repair --apply" in preview.out
    assert not types.exists()
    done = asked(uri, "schema", "repair", "--apply")
    assert done["catalogs"] == [{"key": layout.TYPES, "reason": "missing"}]
    assert done["applied"]
    assert json.loads(types.read_text())["entities"] == json.loads(before)["entities"]
