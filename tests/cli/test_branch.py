"""`onto branch`, and `--branch` on other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Session
from storage_engine.commitlog import layout
from storage_engine.repository import initialize_storage
from storage_engine.repository.protocol import Idempotency
from tests.cli.support import Customer, Product, files, onto


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
    ensure(uri, "run", Customer(id="b", name="Bob"))
    ensure(uri, None, Customer(id="b", name="Boris"))
    for line in ("merge run", "update run", "merge run --apply", "update run --apply"):
        told = onto("branch", *line.split(), "--limit", "1", *where, "--json").json
        told = told["error"]["facts"] if "error" in told else told
        assert (len(told["conflicts"]), told["conflicts_total"]) == (1, 2), line
    assert onto("branch", "update", "run", *where).code == 6
    said = onto("branch", "update", "run", "--on-conflict", "theirs", "--apply", *where)
    assert "Brought main (commit 3) into run as commit 4" in said.out
    assert onto("branch", "merge", "run", "--on-conflict", "mine", *where).code == 2


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("branch create run", 4, "is there already"),
        ("branch create Run", 2, "no name for a branch"),
        ("branch delete ran --apply", 4, "did you mean run"),
        ("branch delete main", 2, "cannot be deleted"),
        ("branch delete run", 2, "has children"),
        ("branch merge main", 2, "has no parent"),
        ("branch create other --at run@1", 2, "of another branch than 'main'"),
        ("query entities Customer --as-of ran@1", 4, "no branch 'ran'; did you mean run"),
        ("--branch ran info", 4, "did you mean run"),
        ("--branch run gc", 2, "on main"),
        ("--branch run compact", 2, "is not compacted"),
        ("--branch run init", 2, "leave --branch out"),
        ("--branch run events show", 2, "leave --branch out"),
        ("--branch run migrate-engine", 2, "leave --branch out"),
        # What --branch says is not passed over.
        ("--branch run schema repair --apply", 2, "on main"),
        ("--branch run du", 2, "leave --branch out"),
        ("--branch run branch list", 2, "leave --branch out"),
        ("--branch run branch delete run/child --apply", 2, "leave --branch out"),
        ("--branch run branch protect run/child", 2, "leave --branch out"),
        ("--branch run/child branch merge run --apply", 2, "is a branch of 'main'"),
        ("--branch main branch merge run/child --apply", 2, "is a branch of 'run'"),
        ("--branch run/child branch update run --apply", 2, "leave --branch out"),
    ],
)
def test_mistakes(uri: str, line: str, code: int, words: str) -> None:
    where = ("--storage-uri", uri)
    onto("branch", "create", "run", "--storage-uri", uri)
    onto("branch", "create", "run/child", "--branch", "run", "--storage-uri", uri)
    ensure(uri, "run", Product(sku="p"))  # a type that main has not
    before = everything(uri)
    said = onto(*line.split(), *where)
    assert said.code == code
    assert words in said.err
    assert everything(uri) == before


def everything(uri: str) -> dict[str, bytes]:
    folder = Path(uri)
    return {name: (folder / name).read_bytes() for name in files(folder)}


def test_rules_and_their_file(uri: str, tmp_path: Path) -> None:
    where = ("--storage-uri", uri)
    onto("branch", "create", "run", *where)
    ensure(uri, "run", Customer(id="x", name="Xen"))
    ensure(uri, None, Customer(id="y", name="Xen"))
    rules = tmp_path / "rules.json"
    rules.write_text('{"Customer": [{"unique": "name"}]}')
    said = onto("branch", "merge", "run", "--expectations", rules, *where)
    assert said.code == 6
    assert "broken_expectation" in said.out
    assert "name" in said.out
    failed = onto("branch", "merge", "run", "--expectations", rules, "--apply", *where, "--json")
    assert (failed.code, failed.json["error"]["type"]) == (6, "MergeConflictError")
    assert onto("branch", "update", "run", "--expectations", rules, *where).code == 6
    rules.write_text('{"Customer": [{"unikue": "name"}]}')
    assert onto("branch", "merge", "run", "--expectations", rules, *where).code == 2
    rules.write_text('["Customer"]')
    said = onto("branch", "merge", "run", "--expectations", rules, *where)
    assert (said.code, "by type" in said.err) == (2, True)
    assert onto("branch", "merge", "run", "--expectations", "none.json", *where).code == 2
    assert onto("branch", "merge", "run", "--apply", *where).code == 0


def test_tools_work_on_a_branch(uri: str, tmp_path: Path) -> None:
    """Export, import, tag, restore, verify, index: the branch's own state, and main's is as it
    was."""
    where = ("--storage-uri", uri)
    onto("branch", "create", "run", *where)
    ensure(uri, "run", Customer(id="a", name="Anna"))
    on = ("--branch", "run")
    exported = tmp_path / "exported"
    assert onto(*on, "export", "--output", exported, *where).code == 0
    (file,) = exported.glob("**/Customer.jsonl")
    assert "Anna" in file.read_text()
    assert onto("export", "--output", tmp_path / "main", *where).code == 0
    file.write_text(file.read_text().replace('"Anna"', '"Imported"'))
    summary = exported / "export.json"
    summary.unlink()
    said = onto(*on, "import", "--input", file, "--on-conflict", "upsert", "--apply", *where)
    assert said.code == 0, said.err
    assert "Imported" in onto(*on, "query", "entities", "Customer", *where).out
    assert "Imported" not in onto("query", "entities", "Customer", *where).out
    assert onto(*on, "tag", "create", "tried", *where).code == 0
    ensure(uri, "run", Customer(id="a", name="Later"))
    assert onto(*on, "restore", "tried", "--apply", *where).code == 0
    assert "Imported" in onto(*on, "query", "entities", "Customer", *where).out
    assert [c["kind"] for c in onto(*on, "commits", "--json", *where).json["commits"]][-1] == "data"
    for line in ("verify --deep", "index verify", "index repair --apply", "schema list", "log"):
        said = onto(*on, *line.split(), *where)
        assert said.code == 0, (line, said.err)
    assert "Ann" in onto("query", "entities", "Customer", *where).out
    assert onto("verify", *where).code == 0
    # A tag of the branch is none of main's.
    assert "run@3" in onto("tag", "list", *where).out
    asked = ("query", "entities", "Customer", "--as-of", "tried", *where)
    assert "open that branch" in onto(*asked).err
    onto("branch", "delete", "run", "--apply", *where)
    assert "is gone" in onto(*asked).err


def test_a_type_that_a_branch_has_ended(uri: str) -> None:
    where = ("--storage-uri", uri)
    onto("branch", "create", "run", *where)
    dropping = ("--branch", "run", "schema", "drop", "Customer", *where)
    token = onto(*dropping, "--json").json["token"]
    assert onto(*dropping, "--apply", "--token", token).code == 0
    assert "the type has ended" in onto("branch", "diff", "run", *where).out
    onto("branch", "merge", "run", "--apply", *where)
    assert "the type has ended" in onto("diff", "1", *where).out


def test_info_du_and_doctor_tell_of_branches(uri: str) -> None:
    where = ("--storage-uri", uri)
    plain = onto("info", "--json", *where).json
    assert "branches" not in plain
    onto("branch", "create", "run/1", "--owner", "ann", *where)
    onto("branch", "create", "run/2", "--expires-in", "1h", *where)
    ensure(uri, "run/1", Customer(id="x", name="Xen"))
    told = onto("info", "--json", *where).json["branches"]
    assert [(b["name"], b["owner"], b["commit_id"]) for b in told] == [
        ("run/1", "ann", 2),
        ("run/2", told[1]["owner"], 1),
    ]
    assert "2: run/1, run/2" in onto("info", *where).out
    assert "2 branches beside main" in onto("doctor", *where).out
    used = onto("du", "--json", *where).json["usage"]
    assert {u["what"] for u in used if u["branch"] == "run/1"} >= {"staged parts", "manifests"}
    assert "run/1" in onto("du", *where).out
    onto("branch", "delete", "run/1", "--apply", *where)
    assert "a deleted branch" in onto("du", *where).out


@pytest.mark.parametrize("engine", ["v2", "v1", "sqlite"])
def test_copies_of_a_storage_with_branches(uri: str, tmp_path: Path, engine: str) -> None:
    """One chain is copied; the others are named."""
    where = ("--storage-uri", uri)
    onto("branch", "create", "run", *where)
    onto("branch", "create", "other", *where)
    ensure(uri, "run", Customer(id="a", name="Anna"), Product(sku="p"))
    ensure(uri, None, Customer(id="m", name="Mia"))
    with Session(uri, branch="run") as session:
        session.ensure(Customer(id="u", name="Uma"))
        session.commit(idempotency=("loader", 7))
        session.update_branch()
    assert onto("branch", "merge", "run", "--apply", *where).code == 0
    ensure(uri, "run", Customer(id="later", name="Lea"))
    as_engine = ("--engine-version", engine) if engine != "sqlite" else ()
    target = str(tmp_path / ("copy.db" if engine == "sqlite" else "copy"))
    said = onto("copy", uri, target, *as_engine)
    assert "2 branches not copied with it (other, run)" in said.out
    done = onto("copy", uri, target, *as_engine, "--apply", "--json")
    assert done.code == 0, done.err
    assert done.json["comparison"]["ok"]
    assert done.json["branches_left"] == ["other", "run"]
    with Session(target) as session:
        assert {c.id: c.name for c in session.query().entities(Customer).collect()} == {
            "a": "Anna",
            "b": "Bo",
            "m": "Mia",
            "u": "Uma",
        }
        assert (
            session.repository.applied(Idempotency("loader", 7)) is not None
        )  # it is not done again there
    assert onto("copy", uri, target, "--verify").code == 0
    # A branch, as what is main's there.
    whole = str(tmp_path / ("branch.db" if engine == "sqlite" else "branch"))
    done = onto("--branch", "run", "copy", uri, whole, *as_engine, "--apply", "--json")
    assert done.code == 0, done.err
    assert (done.json["branch"], done.json["branches_left"]) == ("run", ["other"])
    assert done.json["comparison"]["ok"]
    with Session(whole) as session:
        assert session.query().entities(Customer).count() == 5
    assert onto("--branch", "run", "copy", uri, whole, "--verify").code == 0
    assert onto("copy", uri, whole, "--apply").code != 0  # it is a copy of something else


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
