"""What `storage_engine` exports, and that it says so to people and type checkers alike."""

from __future__ import annotations

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

import storage_engine
from storage_engine import Session, errors

ROOT = Path(storage_engine.__file__).parent


def test_every_public_name_can_be_imported() -> None:
    for name in storage_engine.__all__:
        assert getattr(storage_engine, name) is not None
    assert set(storage_engine.__all__) <= set(dir(storage_engine))


def test_every_error_class_is_public() -> None:
    members = vars(errors).items()
    defined = {
        n for n, v in members if isinstance(v, type) and issubclass(v, errors.OntologiaError)
    }
    assert defined <= set(storage_engine.__all__)
    assert all(getattr(storage_engine, name) is getattr(errors, name) for name in defined)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    seen = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert set(seen) == set(storage_engine.__all__) - {"__version__"}
    for name, module in seen.items():
        assert module is not None
        assert getattr(importlib.import_module(module), name) is getattr(storage_engine, name)
    assert (ROOT / "py.typed").exists()


SESSION = {
    "intents": {"ensure", "ingest", "add_commit_meta", "discard"},
    "commits": {"commit", "last_commit", "snapshot"},
    "reads": {"query", "sql", "at"},
    "history": {"diff", "changes", "list_commits", "get_commit", "list_commit_changes"},
    "files": {"export", "import_files"},
    "schema": {"validate", "migrate"},
    "events": {"emit", "run", "drain", "stop", "namespace"},
    "branches": {"branch", "create_branch", "list_branches", "protect_branch", "delete_branch"}
    | {"merge", "update_branch"},
    "storage": {"repository", "storage_info", "compact", "metrics"},
    "lifetime": {"flush", "close"},
}


def test_a_session_shows_what_users_need_and_explains_it() -> None:
    with Session(":memory:") as session:
        shown = {name for name in dir(session) if not name.startswith("_")}
    assert shown == set().union(*SESSION.values())
    assert [name for name in shown if not getattr(Session, name).__doc__] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sesion'"):
        _ = storage_engine.Sesion  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    assert storage_engine.__version__ == project["version"]
