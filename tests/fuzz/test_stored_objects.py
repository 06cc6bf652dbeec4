"""Every stored JSON object with one thing wrong, over every operation that reads it: a typed error
that names what is wrong, or the right answer. Never a raw error, never another answer.

What the log names by hash is found out by that. So it is also tried with every hash on the way
from head made to fit, as by a writer with a fault of its own: then other answers may be right, and
raw errors are not.

A sample each time; ONTOLOGIA_LONG=1 tries all (with --timeout=0). Objects of the event bus have
their own operations, in tests/events.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import cache

import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import sha256
from storage_engine.errors import LockContentionError, OntologiaError, UnknownTagError
from tests.fuzz.mutations import mutations
from tests.fuzz.operations import (
    OPERATIONS,
    Objects,
    Storage,
    readers,
    right_answer,
    stored,
    stored_and_held,
)
from tests.maintenance.support import copied

LONG = bool(os.environ.get("ONTOLOGIA_LONG"))
SAMPLE = 6  # of each kind and engine

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


def storage_of(kind: str) -> Storage:
    return stored_and_held if kind == "lock" else stored


def objects_with(kind: str, engine_version: str) -> Objects:
    return storage_of(kind)(engine_version)


def key_of(kind: str, objects: Objects) -> str:
    return [key for key in sorted(objects) if fnmatchcase(key, KINDS[kind])][-1]


def sealed(objects: Objects, key: str, data: bytes) -> Objects:
    """With other bytes under a key, and all hashes from there up to head made to fit."""
    before, after = sha256(objects[key]), sha256(data)
    made = {**objects, key: data}
    for other, content in objects.items():
        if other != key and before.encode() in content:
            made = sealed(made, other, made[other].replace(before.encode(), after.encode()))
    # A page is named by its hash.
    return {name.replace(before, after): content for name, content in made.items()}


@cache
def concerned(kind: str, engine_version: str) -> list[str]:
    """The operations that read an object of this kind."""
    key = key_of(kind, objects_with(kind, engine_version))
    return readers(storage_of(kind), engine_version, key)


def attempt(
    objects: Objects, engine_version: str, name: str, *, any_answer: bool = False
) -> str | None:
    """What is wrong with how an operation ends; None: nothing."""
    with copied(objects, engine_version) as world:
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
    right = any_answer or answer == right_answer(engine_version, name)
    return None if right else f"another answer: {answer}"[:500]


def chosen(kind: str, engine_version: str) -> Iterator[tuple[str, bytes]]:
    objects = objects_with(kind, engine_version)
    some = [
        (label, make)
        for label, make in mutations(objects[key_of(kind, objects)])
        if (kind, label) not in PLAUSIBLE
    ]
    if not LONG:
        some = random.Random(f"{kind} {engine_version}").sample(some, SAMPLE)
    return ((label, make()) for label, make in some)


def tried(number: int, kind: str, engine_version: str) -> list[str]:
    names = concerned(kind, engine_version)
    some = min(3, len(names))
    return names if LONG else [names[(some * number + step) % len(names)] for step in range(some)]


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
@pytest.mark.parametrize("kind", KINDS)
def test_operations_read_every_kind(kind: str, engine_version: str) -> None:
    if kind not in V2_ONLY or engine_version == "v2":
        assert concerned(kind, engine_version), "nothing that is tried would find out"


@pytest.mark.simulation
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_typed_error_or_the_right_answer(kind: str, engine_version: str) -> None:
    if kind in V2_ONLY and engine_version == "v1":
        return
    objects = objects_with(kind, engine_version)
    key = key_of(kind, objects)

    def problems() -> Iterator[str]:
        for number, (label, data) in enumerate(chosen(kind, engine_version)):
            for name in tried(number, kind, engine_version):
                wrong = attempt({**objects, key: data}, engine_version, name)
                if wrong is not None:
                    yield f"{kind} with {label}, {name}: {wrong}"

    require_none(problems)


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
    data = dict(mutations(objects[key]))[label]()
    changed = sealed(objects, key, data) if sealing else {**objects, key: data}
    assert attempt(changed, "v2", name, any_answer=sealing) is None


@pytest.mark.simulation
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
@pytest.mark.parametrize("kind", SEALED)
def test_no_raw_error_where_all_hashes_fit(kind: str, engine_version: str) -> None:
    objects = stored(engine_version)
    key = key_of(kind, objects)

    def problems() -> Iterator[str]:
        for number, (label, data) in enumerate(chosen(kind, engine_version)):
            changed = sealed(objects, key, data)
            # The others see another hash at most: once is enough.
            for name in tried(number, kind, engine_version) if number else OPERATIONS:
                wrong = attempt(changed, engine_version, name, any_answer=True)
                if wrong is not None:
                    yield f"{kind} with {label}, {name}: {wrong}"

    require_none(problems)


def require_none(problems: Callable[[], Iterator[str]]) -> None:
    """Not in the main thread, where each query has a thread of its own for the sake of Ctrl-C."""
    with ThreadPoolExecutor(1) as elsewhere:
        found = elsewhere.submit(lambda: list(problems())).result()
    assert not found, "\n".join([f"{len(found)} problems", *found[:40]])
