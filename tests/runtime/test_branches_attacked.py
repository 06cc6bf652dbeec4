"""Merges that somebody wants to go wrong: values that Python takes for alike, functions that change
what they are given, names and arguments that no branch can have."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Entity, Field, Session
from storage_engine.errors import (
    BranchExistsError,
    ConfigurationError,
    HeadMismatchError,
    MergeConflictError,
    UnknownBranchError,
)
from storage_engine.repository import initialize_storage


class Document(Entity):
    id: Field[str] = Field(primary_key=True)
    number: Field[int] = Field(default=0)
    body: Field[dict[str, Any]] = Field(default_factory=dict)
    marks: Field[list[int]] = Field(default_factory=list)


class Note(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]


def forked(*, base: Document, ours: Document | None, theirs: Document | None) -> str:
    uri = f"memory://{uuid.uuid4().hex}"
    initialize_storage(uri, "v2")
    with Session(uri) as main:
        main.ensure(base)
        main.commit()
        main.create_branch("run")
        if ours is not None:
            main.ensure(ours)
    if theirs is not None:
        with Session(uri, branch="run") as branch:
            branch.ensure(theirs)
    return uri


def document(uri: str, key: str = "a") -> Document:
    with Session(uri) as main:
        (found,) = [d for d in main.query().entities(Document).collect() if d.id == key]
        return found


# -- values ---------------------------------------------------------------------------------------


def bodies(base: Any, ours: Any, theirs: Any) -> str:
    """Each side's document, with that under `x`."""
    made = [Document(id="a", body={"x": value}) for value in (base, ours, theirs)]
    return forked(base=made[0], ours=made[1], theirs=made[2])


def test_what_json_tells_apart_is_taken_although_python_takes_it_for_the_same() -> None:
    uri = bodies(0, 1, True)
    with Session(uri) as main:
        with pytest.raises(MergeConflictError) as refused:
            main.merge("run")
        assert refused.value.conflicts[0]["fields"] == ["body"]
        assert main.merge("run", on_conflict="theirs").types[0].updated == 1
    assert document(uri).body["x"] is True


@pytest.mark.parametrize("values", [(1, True, 2), (1, 2, True), (1, 1.0, 2), (0, 1, True)])
def test_fields_that_both_sides_changed_are_contested_whatever_python_says(values: Any) -> None:
    uri = bodies(*values)
    with Session(uri) as main, pytest.raises(MergeConflictError) as refused:
        main.merge("run", on_conflict="fields")
    assert refused.value.conflicts[0]["fields"] == ["body"]


def test_fields_are_combined_beside_such_values() -> None:
    uri = forked(
        base=Document(id="a", body={"x": 1}),
        ours=Document(id="a", body={"x": True}),
        theirs=Document(id="a", body={"x": 1}, number=2),
    )
    with Session(uri) as main:
        assert main.merge("run", on_conflict="fields").types[0].updated == 1
    assert (document(uri).number, document(uri).body["x"]) == (2, True)


def _in_place(_base: Any, ours: Any, _theirs: Any) -> Any:
    ours["number"] = 99
    ours["body"]["x"] = 99
    return ours


def _taken_apart(base: Any, ours: Any, theirs: Any) -> Any:
    base.clear()
    theirs.clear()
    return {**ours, "number": 99, "body": {"x": 99}}


@pytest.mark.parametrize("decide", [_in_place, _taken_apart])
def test_a_function_may_change_the_rows_that_it_is_given(decide: Callable[..., Any]) -> None:
    uri = bodies(1, 2, 3)
    with Session(uri) as main:
        report = main.merge("run", on_conflict=decide)
        assert [(t.updated, t.resolved) for t in report.types] == [(1, 1)]
    assert (document(uri).number, document(uri).body) == (99, {"x": 99})


# -- arguments ------------------------------------------------------------------------------------


@pytest.fixture
def uri() -> str:
    return forked(base=Document(id="a"), ours=None, theirs=Document(id="a", number=2))


@pytest.mark.parametrize("name", [None, 5, b"run", ["run"]])
def test_what_is_no_text_names_no_branch(uri: str, name: Any) -> None:
    with Session(uri) as main:
        for call in (main.create_branch, main.merge, main.delete_branch, main.protect_branch):
            with pytest.raises(ConfigurationError, match="branch"):
                call(name)
    if name is not None:
        with pytest.raises(ConfigurationError, match="branch"), Session(uri, branch=name):
            pass


@pytest.mark.parametrize("name", ["x" * 201, "/".join(["x"] * 100), "x" * 2000])
def test_names_that_are_too_long_for_any_storage(tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "storage")
    initialize_storage(folder, "v2")
    with Session(folder) as main:
        with pytest.raises(ConfigurationError, match="no name for a branch"):
            main.create_branch(name)
        for call in (main.merge, main.delete_branch, main.protect_branch):
            with pytest.raises(UnknownBranchError):
                call(name)
    with pytest.raises(UnknownBranchError), Session(folder, branch=name):
        pass


@pytest.mark.parametrize("name", ["x" * 200, "/".join(["x"] * 50)])
def test_the_longest_names(tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "storage")
    initialize_storage(folder, "v2")
    with Session(folder) as main:
        main.create_branch(name)
        with pytest.raises(BranchExistsError):
            main.create_branch(name)
    with Session(folder, branch=name) as branch:
        branch.ensure(Document(id="a"))
    with Session(folder) as main:
        assert main.merge(name).commit_id == 1
        main.delete_branch(name)


@pytest.mark.parametrize("name", ["20260101t10", "2026-01-01t10", "20260101"])
def test_a_name_that_reads_as_a_time(uri: str, name: str) -> None:
    with Session(uri) as main, pytest.raises(ConfigurationError, match="or a time"):
        main.create_branch(name)


@pytest.mark.parametrize(
    "given",
    [{"expires_in": 5}, {"expires_in": timedelta.max}, {"owner": 5}, {"owner": "\udcff"}],
)
def test_what_no_branch_can_have_makes_none(uri: str, given: Any) -> None:
    with Session(uri) as main:
        with pytest.raises(ConfigurationError):
            main.create_branch("other", **given)
        assert [branch.name for branch in main.list_branches()] == ["main", "run"]


@pytest.mark.parametrize("expect", ["1", True, 1.0])
def test_an_expectation_is_a_commit_id(uri: str, expect: Any) -> None:
    with Session(uri) as main:
        for call in (main.merge, main.delete_branch):
            with pytest.raises(ConfigurationError, match="expect"):
                call("run", expect=expect)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_merge_that_brings_nothing_or_conflicts_refuses_another_head_too(dry_run: bool) -> None:
    empty = forked(base=Document(id="a"), ours=Document(id="a", number=2), theirs=None)
    torn = bodies(1, 2, 3)
    for uri in (empty, torn):
        with Session(uri) as main, pytest.raises(HeadMismatchError):
            main.merge("run", expect=1, dry_run=dry_run)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    "terms",
    [
        {"expectations": {"document": [{"unique": "number"}]}},
        {"on_conflict": {"Document": "ours", "document": "theirs"}},
    ],
)
def test_a_rule_or_policy_of_a_type_that_is_misspelt_is_told(
    uri: str, terms: Any, dry_run: bool
) -> None:
    """Everything would keep such a rule."""
    with Session(uri) as main, Session(uri, branch="run") as branch:
        with pytest.raises(ConfigurationError, match="did you mean Document"):
            main.merge("run", dry_run=dry_run, **terms)
        with pytest.raises(ConfigurationError, match="did you mean Document"):
            branch.update_branch(dry_run=dry_run, **terms)
        assert len(main.list_commits()) == 1


def test_a_rule_of_a_type_that_only_the_branch_has() -> None:
    uri = forked(base=Document(id="a"), ours=None, theirs=None)
    with Session(uri, branch="run") as branch:
        branch.ensure([Note(id="a", text="x"), Note(id="b", text="x")])
    with Session(uri) as main:
        with pytest.raises(MergeConflictError, match="breaks a rule"):
            main.merge("run", expectations={"Note": [{"unique": "text"}]})
        assert main.merge("run", on_conflict={"Note": "theirs"}).commit_id == 2
