"""Every stored JSON object with one thing wrong, over every operation: a typed error that names
what is wrong, or the right answer. Never a raw error, never another answer.

What the log names by hash is found out by that. So it is also tried with every hash on the way
from head made to fit, as by a writer with a fault of its own: then other answers may be right, and
raw errors are not.

A sample each time; ONTOLOGIA_LONG=1 tries all (with --timeout=0). Objects of the event bus have
their own operations, in tests/events.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from typing import Any
from unittest import mock

import pytest

from storage_engine.commitlog import layout, state, type_heads
from storage_engine.commitlog.records import sha256
from storage_engine.errors import LockContentionError, OntologiaError, UnknownTagError
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.maintenance.restore import restore
from storage_engine.repository import ReadWindow
from tests.commitlog.support import HISTORY, World, Writer, made_world
from tests.engines import CUSTOMER, PRODUCT, SUBSCRIPTION, customer, edge, product, rows_of
from tests.fuzz.mutations import mutations
from tests.maintenance.support import copied

LONG = bool(os.environ.get("ONTOLOGIA_LONG"))
SAMPLE = 12  # of each kind and engine

# By kind, the keys of its objects; the last one that fits is changed.
KINDS: dict[str, str] = {
    "head": layout.HEAD,
    "engine": layout.ENGINE,
    "manifest of head": "commits/6-*/manifest.json",
    "older manifest": "commits/5-*/manifest.json",
    "checkpoint": "meta/checkpoints/*.json",
    "index": "meta/indices/entities/Customer.json",
    "tag": "meta/tags/*.json",
    "types": layout.TYPES,
    "registry": layout.REGISTRY,
    "layouts": layout.LAYOUT_CATALOG,
    "versions": "meta/schema/versions/entities/Customer.json",
    "lock": layout.LOCK,
    "buckets of type heads": "commits/6-*/type_heads/*.json",
    "page of commits": f"{layout.PAGES}*.json",
}
# Named by hash along the chain.
SEALED = (
    "manifest of head",
    "older manifest",
    "checkpoint",
    "buckets of type heads",
    "page of commits",
)
V2_ONLY = {"layouts"}
# Which make another valid object, of which another answer is right.
PLAUSIBLE = {  # tags of another log do not count
    (kind, f"log_id: {other}") for kind in ("head", "tag") for other in ("text", "path out")
}

Operation = Callable[[World], Any]


@cache
def stored(engine_version: str) -> dict[str, bytes]:
    """Six commits, a compaction, a checkpoint and two manifests after it, a tag. Two types are
    many here, and two commits fill a page."""
    with (
        mock.patch.object(type_heads, "INLINE_TYPES", 1),
        mock.patch.object(state, "PAGE_COMMITS", 2),
        made_world(engine_version) as world,
    ):
        writer = world.open("writer", checkpoint_interval=4)
        for age in (1, 2, 3):
            writer.put(customer("a", age=age), customer(f"c{age}"))
        compact(world.open("compactor").repo, CompactionPolicy(min_entries=2))
        writer.commit(rows_of(PRODUCT, product("p", 1.0)))
        writer.put(customer("a", age=5))
        writer.put(customer("b", age=6))
        writer.repo.create_tag("v1", 5)
        writer.repo.flush()
        return world.backend.objects()


@cache
def held(engine_version: str) -> bytes:
    """A lock whose holder is no more."""
    with made_world(engine_version) as world:
        world.open("holder").repo.lock.acquire()
        return world.backend.objects()[layout.LOCK]


def objects_with(kind: str, engine_version: str) -> dict[str, bytes]:
    objects = stored(engine_version)
    return {**objects, layout.LOCK: held(engine_version)} if kind == "lock" else objects


def key_of(kind: str, objects: dict[str, bytes]) -> str:
    return [key for key in sorted(objects) if fnmatchcase(key, KINDS[kind])][-1]


def sealed(objects: dict[str, bytes], key: str, data: bytes) -> dict[str, bytes]:
    """With other bytes under a key, and all hashes from there up to head made to fit."""
    before, after = sha256(objects[key]), sha256(data)
    made = {**objects, key: data}
    for other, content in objects.items():
        if other != key and before.encode() in content:
            made = sealed(made, other, made[other].replace(before.encode(), after.encode()))
    # A page is named by its hash.
    return {name.replace(before, after): content for name, content in made.items()}


# -- operations -----------------------------------------------------------------------------------


def versions(reader: Writer, window: ReadWindow | None = None) -> Any:
    return [reader.rows(spec, window) for spec in (CUSTOMER, PRODUCT)]


def commit(world: World) -> Any:
    """What everybody sees afterwards."""
    writer = world.open("committer")
    writer.put(customer("new", age=9), customer("a", age=9))
    writer.repo.flush()
    again = world.open("again")
    assert again.commit(rows_of(CUSTOMER, customer("new", age=9))) is None
    return versions(again), versions(again, HISTORY)


def register(world: World) -> Any:
    """A commit that brings a new type, which all catalogs are told of."""
    writer = world.open("committer")
    writer.commit(rows_of(SUBSCRIPTION, edge("a", "p", seats=1)))
    writer.repo.flush()
    return [(r["left_key"], r["right_key"]) for r in world.open("reader").rows(SUBSCRIPTION)]


def repair(world: World) -> Any:
    repair_indices(world.open("operator").repo, apply=True)
    return versions(world.open("reader")), versions(world.open("reader"), HISTORY)


def compaction(world: World) -> Any:
    compact(world.open("operator").repo, CompactionPolicy(min_entries=2))
    return versions(world.open("reader"), HISTORY)


OPERATIONS: dict[str, Operation] = {
    "latest": lambda w: versions(w.open()),
    "history": lambda w: versions(w.open(), HISTORY),
    "as_of": lambda w: [versions(w.open(), ReadWindow(as_of=c)) for c in (1, 4)],
    "as_of tag": lambda w: w.open().repo.require_commit("v1"),
    "log": lambda w: [r.id for r in w.open().repo.list_commits(10)],
    "changes": lambda w: len(w.open().repo.list_commit_changes(2)),
    "info": lambda w: w.open().repo.storage_info()["head_commit_id"],
    "tags": lambda w: [tag.name for tag in w.open().repo.list_tags()],
    "commit": commit,
    "register": register,
    "index repair": repair,
    "compact": compaction,
    "restore preview": lambda w: restore(w.open().repo, 3).commit_id,
    "gc plan": lambda w: [doomed.key for doomed in plan_gc(w.open().repo).doomed],
    # What they find is theirs to say; here, that they say something.
    "index verify": lambda w: verify_indices(w.open().repo).head_commit_id,
    "verify": lambda w: verify_storage(w.open().repo).uri is not None,
}


@cache
def right_answers(engine_version: str) -> dict[str, Any]:
    answers = {}
    for name, operation in OPERATIONS.items():
        with copied(stored(engine_version), engine_version) as world:
            answers[name] = operation(world)
    return answers


def attempt(
    objects: dict[str, bytes], engine_version: str, name: str, *, any_answer: bool = False
) -> str | None:
    """What is wrong with how an operation ends; None: nothing."""
    with copied(objects, engine_version) as world:
        if layout.LOCK in objects:
            world.pass_lease()
        try:
            answer = OPERATIONS[name](world)
        except (UnknownTagError, LockContentionError):
            return None
        except OntologiaError as error:
            named = bool(getattr(error, "key", "")) or ".json" in str(error)
            return None if named or any_answer else f"names no object: {error!r}"
        except Exception as error:  # noqa: BLE001 (this is what must not happen)
            return f"raw error: {error!r}"[:500]
    right = any_answer or answer == right_answers(engine_version)[name]
    return None if right else f"another answer: {answer}"[:500]


def chosen(kind: str, engine_version: str) -> list[tuple[str, bytes]]:
    objects = objects_with(kind, engine_version)
    every = [
        (label, data)
        for label, data in mutations(objects[key_of(kind, objects)])
        if (kind, label) not in PLAUSIBLE
    ]
    if LONG:
        return every
    return random.Random(f"{kind} {engine_version}").sample(every, SAMPLE)


def tried(number: int) -> list[str]:
    names = list(OPERATIONS)
    return names if LONG else [names[(number + step) % len(names)] for step in (0, 5, 10)]


@pytest.mark.simulation
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_typed_error_or_the_right_answer(kind: str, engine_version: str) -> None:
    if kind in V2_ONLY and engine_version == "v1":
        return
    objects = objects_with(kind, engine_version)
    key = key_of(kind, objects)
    problems = [
        f"{kind} with {label}, {name}: {wrong}"
        for number, (label, data) in enumerate(chosen(kind, engine_version))
        for name in tried(number)
        if (wrong := attempt({**objects, key: data}, engine_version, name)) is not None
    ]
    assert not problems, "\n".join([f"{len(problems)} problems", *problems[:40]])


# What trying all has shown once: kind, what was done, operation, with all hashes made to fit.
SHOWN = [
    ("engine", "format: negative", "commit", False),
    ("engine", "format: huge", "latest", False),
    ("manifest of head", "parent_manifest_path: empty text", "verify", False),
    ("manifest of head", "parent_manifest_path: path out", "log", True),
    ("manifest of head", "type_head_buckets.buckets.63 missing", "verify", False),
    ("manifest of head", "type_head_buckets.buckets.63 missing", "info", True),
    ("manifest of head", "files.0.type_name: path out", "compact", True),
    ("manifest of head", "type_head_buckets.types: largest", "restore preview", True),
]


@pytest.mark.parametrize(("kind", "label", "name", "sealing"), SHOWN)
def test_what_was_shown_once_stays_mended(kind: str, label: str, name: str, sealing: bool) -> None:
    objects = stored("v2")
    key = key_of(kind, objects)
    data = dict(mutations(objects[key]))[label]
    changed = sealed(objects, key, data) if sealing else {**objects, key: data}
    assert attempt(changed, "v2", name, any_answer=sealing) is None


@pytest.mark.simulation
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
@pytest.mark.parametrize("kind", SEALED)
def test_no_raw_error_where_all_hashes_fit(kind: str, engine_version: str) -> None:
    objects = stored(engine_version)
    key = key_of(kind, objects)
    problems = []
    for number, (label, data) in enumerate(chosen(kind, engine_version)):
        changed = sealed(objects, key, data)
        for name in tried(number):
            wrong = attempt(changed, engine_version, name, any_answer=True)
            if wrong is not None:
                problems.append(f"{kind} with {label}, {name}: {wrong}")
    assert not problems, "\n".join([f"{len(problems)} problems", *problems[:40]])
