"""The stored objects of branches with one thing wrong, over every operation that reads them: a
typed error that names what is wrong, or the right answer; and never another answer on main.

A sample each time; ONTOLOGIA_LONG=1 tries all (with --timeout=0).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import IntegrityError, LockContentionError, OntologiaError
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository.object.merge import MergeTerms
from storage_engine.runtime.branches import diff_branches
from tests.commitlog.support import World, made_world
from tests.engines import PRODUCT, customer, product, rows_of
from tests.fuzz.mutations import mutations
from tests.fuzz.operations import Objects, versions
from tests.fuzz.test_stored_objects import LONG, SAMPLE, require_none, sealed
from tests.maintenance.support import copied

KINDS: dict[str, str] = {
    "head of a branch": layout.branch_head("run"),
    "head of a child": layout.branch_head("run/child"),
    "index of a branch": "meta/branches/run/*/indices/entities/Customer.json",
    "manifest of a branch": "commits/5-*/manifest.json",
    "manifest of a merge": "commits/4-*/manifest.json",
    "head of main": layout.HEAD,
}
SEALED = ("manifest of a branch", "manifest of a merge")
_FOREIGN = ("text", "path out")
# Which make another valid object, of which another answer is right.
PLAUSIBLE = {  # branches of another log do not count
    (kind, f"log_id: {other}")
    for kind in ("head of main", "head of a branch", "head of a child")
    for other in _FOREIGN
}


@cache
def stored() -> Objects:
    """Main with a commit, a merge and one after it; a branch that goes on; a child of that."""
    with made_world("v2") as world:
        main = world.open("main")
        main.put(customer("a", age=1), customer("b", age=1))
        main.repo.branches.create("run", owner="me", expires_in=timedelta(days=3650))
        branch = world.open("branch", branch="run")
        branch.put(customer("a", age=2))
        branch.commit(rows_of(PRODUCT, product("p", 1.0)))
        main.put(customer("c", age=3))
        main.put(customer("d", age=4))
        main.repo.branches.merge("run", MergeTerms({None: "fail"}))
        branch.put(customer("b", age=5))
        branch.repo.branches.create("run/child")
        child = world.open("child", branch="run/child")
        child.put(customer("e", age=6))
        branch.put(customer("f", age=7))
        for writer in (main, branch, child):
            writer.repo.flush()
        return world.backend.objects()


def names(world: World) -> list[str]:
    return [branch.name for branch in world.open().repo.branches.list()]


def on_branch(world: World, name: str = "run") -> Any:
    reader = world.open(branch=name)
    return versions(reader)


def commit(world: World) -> Any:
    writer = world.open("committer", branch="run")
    writer.put(customer("new", age=9), customer("a", age=9))
    writer.repo.flush()
    return on_branch(world), versions(world.open())


def create(world: World) -> Any:
    world.open(branch="run").repo.branches.create("run/second")
    return on_branch(world, "run/second")


def merge(world: World) -> Any:
    world.open().repo.branches.merge("run", MergeTerms({None: "theirs"}))
    return versions(world.open())


def merge_child(world: World) -> Any:
    world.open(branch="run").repo.branches.merge("run/child", MergeTerms({None: "theirs"}))
    return on_branch(world)


def update(world: World) -> Any:
    world.open(branch="run").repo.branches.update(MergeTerms({None: "theirs"}))
    return on_branch(world)


def delete(world: World) -> Any:
    world.open().repo.branches.delete("run/child")
    return on_branch(world), versions(world.open())


def collect(world: World) -> Any:
    """A branch that cannot be read is a branch: what it may need stays, and main is as it was."""
    world.backend.clock.sleep(timedelta(days=90).total_seconds())
    operator = world.open("operator").repo
    sweep(operator, plan_gc(operator, purge_compacted=True))
    return versions(world.open()), on_branch(world), on_branch(world, "run/child")


def collect_beside(world: World) -> Any:
    """Garbage is collected, or not, and then the child is still whole."""
    world.backend.clock.sleep(timedelta(days=90).total_seconds())
    operator = world.open("operator").repo
    with suppress(OntologiaError):
        sweep(operator, plan_gc(operator, purge_compacted=True))
    return versions(world.open())


def verify(world: World) -> Any:
    return verify_storage(world.open(branch="run").repo).uri is not None


OPERATIONS: dict[str, Callable[[World], Any]] = {
    "list": names,
    "latest": on_branch,
    "latest of the child": lambda w: on_branch(w, "run/child"),
    "main": lambda w: versions(w.open()),
    "log": lambda w: [r.id for r in w.open(branch="run").repo.list_commits(10)],
    "commit": commit,
    "create": create,
    "merge": merge,
    "merge the child": merge_child,
    "update": update,
    "delete": delete,
    "diff": lambda w: diff_branches(w.open().repo, "main", "run"),
    "gc": collect,
    "gc, then main": collect_beside,
    "verify": verify,
    "verify main": lambda w: verify_storage(w.open().repo).uri is not None,
}


# What trying all has shown once.
SHOWN = [
    ("log_id missing", "list"),
    ("log_id missing", "gc"),
    ("parent: text", "update"),
    ("parent: path out", "diff"),
    ("base.commit_id: largest", "merge"),
    ("base.commit_id: largest", "update"),
]


def key_of(kind: str) -> str:
    return [key for key in sorted(stored()) if fnmatchcase(key, KINDS[kind])][-1]


@cache
def right_answer(name: str) -> Any:
    with copied(stored(), "v2") as world:
        world.pass_lease()
        return OPERATIONS[name](world)


def attempt(objects: Objects, name: str, *, any_answer: bool = False) -> str | None:
    with copied(objects, "v2") as world:
        world.pass_lease()
        try:
            answer = OPERATIONS[name](world)
        except LockContentionError:
            return None
        except OntologiaError as error:
            named = bool(getattr(error, "key", "")) or ".json" in str(error) or "run" in str(error)
            return None if named or any_answer else f"names no object: {error!r}"
        except Exception as error:  # noqa: BLE001 (this is what must not happen)
            return f"raw error: {error!r}"[:500]
    right = any_answer or answer == right_answer(name)
    return None if right else f"another answer: {answer}"[:500]


def chosen(kind: str) -> Iterator[tuple[str, bytes]]:
    some = [(label, make) for label, make in mutations(stored()[key_of(kind)])]
    some = [(label, make) for label, make in some if (kind, label) not in PLAUSIBLE]
    if not LONG:
        some = random.Random(kind).sample(some, SAMPLE)
    return ((label, make()) for label, make in some)


def tried(number: int) -> list[str]:
    every = list(OPERATIONS)
    return every if LONG else [every[(4 * number + step) % len(every)] for step in range(4)]


@pytest.mark.simulation
@pytest.mark.parametrize("kind", KINDS)
def test_a_typed_error_or_the_right_answer(kind: str) -> None:
    key = key_of(kind)

    def problems() -> Iterator[str]:
        for number, (label, data) in enumerate(chosen(kind)):
            for name in tried(number):
                wrong = attempt({**stored(), key: data}, name)
                if wrong is not None:
                    yield f"{kind} with {label}, {name}: {wrong}"

    require_none(problems)


@pytest.mark.parametrize(("label", "name"), SHOWN)
def test_what_was_shown_once_stays_mended(label: str, name: str) -> None:
    key = key_of("head of a branch")
    data = dict(mutations(stored()[key]))[label]()
    with copied({**stored(), key: data}, "v2") as world, pytest.raises(IntegrityError) as refused:
        OPERATIONS[name](world)
    assert refused.value.key == key


@pytest.mark.simulation
@pytest.mark.parametrize("kind", SEALED)
def test_no_raw_error_where_all_hashes_fit(kind: str) -> None:
    key = key_of(kind)

    def problems() -> Iterator[str]:
        for number, (label, data) in enumerate(chosen(kind)):
            changed = sealed(stored(), key, data)
            for name in tried(number):
                wrong = attempt(changed, name, any_answer=True)
                if wrong is not None:
                    yield f"{kind} with {label}, {name}: {wrong}"

    require_none(problems)
