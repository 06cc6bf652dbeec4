"""`onto branch`, and `--branch` on other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Session
from storage_engine.commitlog import layout
from storage_engine.repository import initialize_storage
from tests.cli.support import Customer, Product, onto


@pytest.fixture
def uri(tmp_path: Path) -> str:
    place = str(tmp_path / "onto")
    initialize_storage(place, "v2")
    with Session(place) as session:
        session.ensure([Customer(id="a", name="Ann"), Customer(id="b", name="Bo")])
    return place


def ensure(uri: str, branch: str | None, *objects: Any) -> None:
    with Session(uri, branch=branch) as session:
        session.ensure(objects)


def test_a_branch_from_fork_to_merge(uri: str) -> None:
    said = onto("branch", "create", "run/42", "--owner", "ann", "--storage-uri", uri)
    assert "goes on from commit 1 of main" in said.out
    ensure(uri, "run/42", Customer(id="a", name="Anna"), Product(sku="p"))
    where = ("--storage-uri", uri)
    listed = onto("branch", "list", *where, "--json").json["branches"]
    assert [(b["name"], b["parent"], b["commit_id"]) for b in listed] == [
        ("main", None, 1),
        ("run/42", "main", 2),
    ]
    assert "main@1" in onto("branch", "list", *where).out
    rows = onto("--branch", "run/42", "query", "entities", "Customer", "--json", *where)
    assert "Anna" in rows.out
    assert "Anna" not in onto("query", "entities", "Customer", "--json", *where).out
    assert onto("commits", "--branch", "run/42", *where, "--json").json["commits"][0]["id"] == 2
    differing = onto("branch", "diff", "run/42", *where, "--json").json
    assert (differing["before"], differing["after"]) == ("main", "run/42")
    assert [c["operation"] for c in differing["changes"]] == ["update", "insert"]
    assert "Anna" in onto("branch", "diff", "run/42", *where).out
    preview = onto("branch", "merge", "run/42", *where)
    assert "Nothing was written. To bring run/42 (commit 2) into main: --apply" in preview.out
    merged = onto("branch", "merge", "run/42", "--apply", *where, "--json").json
    assert (merged["commit_id"], merged["conflicts"]) == (2, [])
    assert "Nothing to bring" in onto("branch", "merge", "run/42", "--apply", *where).out
    assert (
        "To delete run/42, with 1 commit of its own"
        in onto("branch", "delete", "run/42", *where).out
    )
    assert "is gone" in onto("branch", "delete", "run/42", "--apply", *where).out
    assert "Anna" in onto("query", "entities", "Customer", "--json", *where).out
    assert onto("verify", *where).code == 0


def test_conflicts_have_an_exit_code_of_their_own(uri: str) -> None:
    where = ("--storage-uri", uri)
    onto("branch", "create", "run", *where)
    ensure(uri, "run", Customer(id="a", name="Anna"))
    ensure(uri, None, Customer(id="a", name="Annie"))
    for more in ((), ("--apply",)):
        said = onto("branch", "merge", "run", *more, *where)
        assert said.code == 6
    assert "divergent_update" in onto("branch", "merge", "run", *where).out
    preview = onto("branch", "merge", "run", *where, "--json")
    assert (preview.code, preview.json["conflicts_total"]) == (6, 1)
    failed = onto("branch", "merge", "run", "--apply", *where, "--json")
    assert failed.json["error"]["type"] == "MergeConflictError"
    assert failed.json["error"]["facts"]["conflicts"][0]["identity"] == ["a"]
    assert onto("branch", "update", "run", *where).code == 6
    said = onto("branch", "update", "run", "--on-conflict", "theirs", "--apply", *where)
    assert "Brought main (commit 2) into run as commit 3" in said.out
    assert onto("branch", "merge", "run", "--on-conflict", "mine", *where).code == 2


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("branch create run", 4, "is there already"),
        ("branch create Run", 2, "no name for a branch"),
        ("branch delete ran --apply", 4, "did you mean run"),
        ("branch merge main", 2, "has no parent"),
        ("--branch ran info", 4, "did you mean run"),
        ("--branch run gc", 2, "on main"),
        ("--branch run compact", 2, "is not compacted"),
        ("--branch run init", 2, "leave --branch out"),
        ("--branch run events show", 2, "leave --branch out"),
        ("--branch run copy a b", 2, "leave --branch out"),
    ],
)
def test_mistakes(uri: str, line: str, code: int, words: str) -> None:
    where = ("--storage-uri", uri) if " copy " not in line else ()
    onto("branch", "create", "run", "--storage-uri", uri)
    said = onto(*line.split(), *where)
    assert said.code == code
    assert words in said.err


def test_protection(uri: str) -> None:
    where = ("--storage-uri", uri)
    assert "main takes merges only" in onto("branch", "protect", "main", *where).out
    ensure_refused = onto("restore", "1", "--apply", *where)
    assert ensure_refused.code == 0  # nothing differs, so nothing is committed
    assert "commits and merges" in onto("branch", "protect", "main", "--off", *where).out
    assert onto("branch", "list", "--db", "none.db").code == 5


def test_expired_branches_are_told_by_gc(uri: str) -> None:
    where = ("--storage-uri", uri)
    onto("branch", "create", "old", "--expires-in", "1h", *where)
    assert "Expired" not in onto("gc", *where).out
    head = Path(uri, layout.branch_head("old"))
    document = json.loads(head.read_text())
    head.write_text(json.dumps({**document, "expires_at": document["created_at"]}))
    assert "Expired branches, to be deleted: old" in onto("gc", *where).out
    assert "Expired branches, deleted: old" in onto("gc", "--apply", *where).out
    assert [b["name"] for b in onto("branch", "list", *where, "--json").json["branches"]] == [
        "main"
    ]
