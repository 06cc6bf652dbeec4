"""Tags: names for commits that do not move, on every storage."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import ConfigurationError, TagExistsError, UnknownTagError
from storage_engine.query.reference import parse_reference
from storage_engine.repository import initialize_storage
from storage_engine.testing.faults import FaultKind
from tests.cli.support import onto
from tests.commitlog.support import World, at, made_world
from tests.engines import Storage, customer, on_servers, put
from tests.maintenance.support import Crashes, everything


@on_servers
def test_tags_are_created_listed_resolved_and_deleted(storage: Storage) -> None:
    repository = storage.open(runtime_id="tagger")
    for age in (1, 2, 3):
        put(repository, customer("a", age=age))
    assert repository.list_tags() == []
    made = repository.create_tag("release-1", 2)
    latest = repository.create_tag("latest.good")
    assert (made.commit_id, latest.commit_id, made.runtime_id) == (2, 3, "tagger")
    assert [t.name for t in repository.list_tags()] == ["latest.good", "release-1"]
    assert repository.resolve_tag("release-1") == made
    repository.close()

    again = storage.open()
    assert again.resolve_tag("release-1") == made
    assert again.create_tag("release-1", 2) == made, "saying the same again is no error"
    with pytest.raises(TagExistsError) as taken:
        again.create_tag("release-1", 3)
    assert (taken.value.commit_id, taken.value.asked) == (2, 3)
    assert again.delete_tag("release-1") == made
    assert [t.name for t in again.list_tags()] == ["latest.good"]
    with pytest.raises(UnknownTagError):
        again.delete_tag("release-1")
    assert again.create_tag("release-1", 1).commit_id == 1
    again.close()


def test_an_unknown_tag_is_a_value_error_with_the_nearest_names(storage: Storage) -> None:
    repository = storage.open()
    with pytest.raises(ValueError, match="no tags yet"):
        repository.resolve_tag("release-1")
    put(repository, customer("a", age=1))
    for name in ("release-1", "release-2", "nightly"):
        repository.create_tag(name)
    with pytest.raises(ValueError, match="did you mean release-") as unknown:
        repository.resolve_tag("relaese-1")
    assert unknown.value.nearest[0] == "release-1"  # type: ignore[attr-defined]
    with pytest.raises(UnknownTagError):
        repository.resolve_tag("../head")
    repository.close()


@pytest.mark.parametrize(
    "name",
    ["", "-x", ".x", "a/b", "a b", "ä", "x" * 101, "12", "2026-01-01", "20260101T10", "a\n"],
)
def test_names_that_cannot_be_kept_are_refused(storage: Storage, name: str) -> None:
    repository = storage.open()
    put(repository, customer("a", age=1))
    with pytest.raises(ConfigurationError, match="no name for a tag"):
        repository.create_tag(name)
    assert repository.list_tags() == []
    repository.close()


def test_there_must_be_a_commit_to_tag(storage: Storage) -> None:
    repository = storage.open()
    with pytest.raises(ConfigurationError, match="there are none yet"):
        repository.create_tag("v1")
    put(repository, customer("a", age=1))
    for commit_id in (0, -1, 2):
        with pytest.raises(ConfigurationError, match="1 to 1 are there"):
            repository.create_tag("v1", commit_id)
    repository.close()


def test_references_are_ids_times_and_tags(storage: Storage) -> None:
    repository = storage.open()
    for age in (1, 2, 3):
        put(repository, customer("a", age=age))
    repository.create_tag("two", 2)
    times = {r.id: r.created_at for r in repository.list_commits(3)}
    assert repository.require_commit(parse_reference("2")) == 2
    assert repository.require_commit(parse_reference("two")) == 2
    assert repository.require_commit(times[2]) == 2
    assert repository.require_commit(parse_reference(times[2].isoformat())) == 2
    assert repository.require_commit(times[3] + timedelta(days=1)) == 3
    with pytest.raises(ConfigurationError, match="no commit yet"):
        repository.require_commit(times[1] - timedelta(days=1))
    with pytest.raises(ConfigurationError, match="1 to 3 are there"):
        repository.require_commit(4)
    repository.close()


# -- on object stores -----------------------------------------------------------------------------


def test_a_tag_says_where_its_commit_is(world: World) -> None:
    writer = world.open("writer", checkpoint_interval=2)
    for age in (1, 2, 3):
        writer.put(customer("a", age=age))
    writer.repo.create_tag("v1", 1)
    stored = world.document(layout.tag("v1"))
    assert stored["commit_id"] == 1
    assert stored["manifest_path"] == world.chain()[0].files[0].path.split("/entities")[0] + (
        "/manifest.json"
    )
    assert stored["log_id"] == world.head().log_id
    assert stored["checkpoint"]["path"] == world.head().checkpoint.path  # type: ignore[union-attr]
    assert stored["write_id"]


def test_of_two_who_want_the_same_name_one_gets_it(world: World) -> None:
    one, other = world.open("one"), world.open("other")
    one.put(customer("a", age=1))
    one.put(customer("a", age=2))
    at(one.store, "PUT_IF", layout.tag("v"), lambda: other.repo.create_tag("v", 2))
    with pytest.raises(TagExistsError):
        one.repo.create_tag("v", 1)
    assert one.repo.resolve_tag("v").commit_id == 2


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT])
def test_an_unanswered_request_is_settled(world: World, kind: FaultKind) -> None:
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    writer.fail(kind, "PUT_IF", layout.tag("v"))
    assert writer.repo.create_tag("v").commit_id == 1
    writer.fail(kind, "DELETE_IF", layout.tag("v"))
    assert writer.repo.delete_tag("v").commit_id == 1
    assert writer.repo.list_tags() == []


def test_tags_of_an_erased_log_do_not_count(world: World) -> None:
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    writer.repo.create_tag("v")
    left = world.backend.objects()[layout.tag("v")]
    uri = f"memory://{world.backend.name}"
    token = initialize_storage(uri, "v2", force=True, dry_run=True).token
    initialize_storage(uri, "v2", force=True, token=token)
    world.backend.write(layout.tag("v"), left)
    fresh = world.open("fresh")
    assert fresh.repo.list_tags() == []
    with pytest.raises(UnknownTagError):
        fresh.repo.resolve_tag("v")
    fresh.put(customer("b", age=1))
    fresh.put(customer("b", age=2))
    assert fresh.repo.create_tag("v").commit_id == 2
    assert fresh.repo.resolve_tag("v").commit_id == 2


@pytest.mark.simulation
@pytest.mark.parametrize("what", ["create", "delete"])
def test_a_crash_at_any_write_changes_no_read_and_a_rerun_finishes(what: str) -> None:
    with made_world("v2") as world:
        writer = world.open("writer")
        writer.put(customer("a", age=1))
        if what == "delete":
            writer.repo.create_tag("v")
        objects = world.backend.objects()

    def act(repo: Any) -> None:
        if what == "create":
            repo.create_tag("v")
        elif repo.list_tags():
            repo.delete_tag("v")

    def after(world: World, before: dict[str, Any]) -> None:
        assert everything(world.open("reader")) == before
        act(world.open("again").repo)
        assert len(world.open().repo.list_tags()) == (1 if what == "create" else 0)
        assert everything(world.open("reader")) == before

    assert Crashes(objects, "v2", lambda w: act(w.repo)).each(after) == 3


# -- at the shell ---------------------------------------------------------------------------------


def test_the_commands(storage: Storage) -> None:
    repository = storage.open()
    put(repository, customer("a", age=1))
    put(repository, customer("a", age=2))
    repository.close()
    place = ("--storage-uri", storage.uri)
    assert "No tags yet" in onto("tag", "list", *place).out
    assert onto("tag", "create", "first", "1", *place).out == "Tag first names commit 1.\n"
    assert onto("tag", "create", "again", "first", "--json", *place).json["commit_id"] == 1
    for command in (
        ["tag", "create", "x", "2026-02-30"],
        ["restore", "2026-13-45"],
        ["restore", ""],
    ):
        mistyped = onto(*command, *place)
        assert (mistyped.code, "REF" in mistyped.err) == (2, True), mistyped
    taken = onto("tag", "create", "first", *place)
    assert taken.code == 4
    assert "names commit 1, not 2" in taken.error()
    listed = onto("tag", "list", "--json", *place).json["tags"]
    assert [t["name"] for t in listed] == ["again", "first"]
    newest = onto("commits", "--json", *place).json["commits"][0]
    for text in (listed[0]["created_at"], newest["created_at"]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", text), text
    for words in (["tag", "list"], ["commits"], ["commits", "examine", "1"]):
        shown = onto(*words, *place).out
        times = re.findall(r"\d{4}-\d\d-\d\d[^ \n]*", shown)
        assert times
        for time in times:
            assert re.fullmatch(r"[-0-9]{10}T\d\d:\d\d:\d\d(\.\d{6})?\+00:00", time), shown
    preview = onto("restore", times[-1], "--json", *place)
    assert preview.json["commit_id"] == 1, "what is shown can be given back"
    assert "first" in onto("tag", "list", *place).out
    unknown = onto("tag", "delete", "frist", *place)
    assert unknown.code == 4
    assert "did you mean first" in unknown.error()
    assert onto("tag", "create", "bad name", *place).code == 2
    assert onto("tag", "delete", "first", *place).out.startswith("Tag first is gone")
