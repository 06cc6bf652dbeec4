"""Tags that name a commit of another history, and objects that are no tags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import IntegrityError, UnknownTagError
from storage_engine.maintenance.integrity import verify_storage
from tests.commitlog.support import World, at
from tests.engines import customer


def put_back(world: World) -> None:
    """Two commits and a tag on the second, then head as it was after the first."""
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    early = world.backend.objects()[layout.HEAD]
    writer.put(customer("a", age=2))
    writer.repo.create_tag("v1")
    writer.repo.flush()
    world.backend.write(layout.HEAD, early)


@pytest.mark.parametrize("later", [0, 1, 2], ids=["ahead", "replaced", "passed"])
def test_a_tag_of_another_history_names_no_commit(either_world: World, later: int) -> None:
    world = either_world
    put_back(world)
    for age in range(later):
        world.open("another").put(customer("a", age=50 + age))
    repo = world.open("reader").repo
    with pytest.raises(IntegrityError, match="commit 2 of another history") as caught:
        repo.resolve_tag("v1")
    assert caught.value.key == layout.tag("v1")
    with pytest.raises(IntegrityError, match="onto tag delete v1"):
        repo.require_commit("v1")
    assert [tag.name for tag in repo.list_tags()] == ["v1"], "so that it can be seen and deleted"
    assert ("tag", "wrong_commit") in {
        (f.area, f.reason) for f in verify_storage(world.open("auditor").repo).findings
    }


def test_a_tag_of_another_history_is_not_taken_for_the_same(either_world: World) -> None:
    world = either_world
    put_back(world)
    writer = world.open("another")
    writer.put(customer("a", age=50))
    with pytest.raises(IntegrityError, match="another history"):
        writer.repo.create_tag("v1", 2)
    writer.repo.delete_tag("v1")
    tag = writer.repo.create_tag("v1", 2)
    assert world.open("reader").repo.resolve_tag("v1") == tag


def test_a_tag_newer_than_the_head_at_hand_is_one(either_world: World) -> None:
    """Head was read, then a commit came and was tagged, then the tag was read."""
    world = either_world
    writer, reader = world.open("writer"), world.open("reader")
    writer.put(customer("a", age=1))

    def meanwhile() -> None:
        writer.put(customer("a", age=2))
        writer.repo.create_tag("v1")

    at(reader.store, "GET", layout.tag("v1"), meanwhile)
    assert reader.repo.resolve_tag("v1").commit_id == 2


WRONG: list[Any] = [None, True, -1, 0, 2**70, 1.5, "", [], {}, {"a": {}}]
FIELDS = ["commit_id", "manifest_path", "created_at", "runtime_id", "log_id", "checkpoint"]


@pytest.mark.parametrize("field", FIELDS)
def test_an_object_that_is_no_tag_is_named_and_can_be_deleted(world: World, field: str) -> None:
    writer = world.open("writer", checkpoint_interval=1)
    writer.put(customer("a", age=1))
    writer.repo.create_tag("v1", 1)
    key = layout.tag("v1")
    right = world.document(key)
    refused = 0
    for value in [..., *WRONG]:
        document = {n: v for n, v in right.items() if n != field or value is not ...}
        if value is not ...:
            document[field] = value
        world.backend.write(key, json.dumps(document).encode())
        try:
            tag = world.open("reader").repo.resolve_tag("v1")
        except IntegrityError as error:
            refused += 1
            named = error.key
            assert named == key, value
        except UnknownTagError:
            assert field == "log_id", "of an erased log"
        else:
            assert tag.commit_id == 1, value
    assert refused >= 5
    world.backend.write(key, b"[]")
    writer.repo.delete_tag("v1")
    assert writer.repo.list_tags() == []
