"""What is done to a storage with a damaged object, and which objects each operation reads.

An operation that reads no byte of an object, nor lists it, ends as if nothing were damaged: the
simulated store answers the same requests in the same way, and nothing else is asked. So what was
recorded of a whole storage tells which operations have to be tried on which damage.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any
from unittest import mock

from storage_engine.commitlog import state, type_heads
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.maintenance.metrics import collect
from storage_engine.maintenance.restore import restore
from storage_engine.maintenance.schema_catalogs import repair_catalogs
from storage_engine.maintenance.usage import usage
from storage_engine.model import Entity, Field, spec_of
from storage_engine.objectstore.memory import RequestRecord
from storage_engine.repository import ReadWindow
from storage_engine.schema.migration import MigrationRequest, plan_migration
from storage_engine.transfer.copy import copy_repository
from tests.commitlog.support import HISTORY, World, Writer, made_world
from tests.engines import CUSTOMER, PRODUCT, SUBSCRIPTION, customer, edge, product, rows_of
from tests.maintenance.support import copied

Objects = dict[str, bytes]
Operation = Callable[[World], Any]
Storage = Callable[[str], Objects]  # by engine


@cache
def stored(engine_version: str) -> Objects:
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
def stored_and_held(engine_version: str) -> Objects:
    """The same under a lock whose holder is no more."""
    with copied(stored(engine_version), engine_version) as world:
        world.open("holder").repo.lock.acquire()
        return world.backend.objects()


def versions(reader: Writer, window: ReadWindow | None = None) -> Any:
    return [reader.rows(spec, window) for spec in (CUSTOMER, PRODUCT)]


def everything(world: World) -> Any:
    reader = world.open("reader")
    return versions(reader), versions(reader, HISTORY)


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


def migrate(world: World) -> Any:
    """A new version of a type, which its catalogs are told of."""

    class Customer(Entity):
        id: Field[str] = Field(primary_key=True)
        name: Field[str]
        age: Field[int | None] = Field(default=None)
        tier: Field[str] = Field(default="basic")

    spec = spec_of(Customer)
    operator = world.open("operator")
    plan = plan_migration([spec], operator.repo.type_histories(), {})
    operator.repo.migrate(MigrationRequest(plan.migrations))
    operator.repo.flush()
    reader = world.open("reader")
    histories = reader.repo.type_histories([CUSTOMER.ref])
    return reader.rows(spec), [v.version for v in histories[CUSTOMER.ref].versions]


def index_repair(world: World) -> Any:
    repair_indices(world.open("operator").repo, apply=True)
    return everything(world)


def schema_repair(world: World) -> Any:
    """Afterwards there is nothing to be repaired."""
    repair_catalogs(world.open("operator").repo, apply=True)
    return repair_catalogs(world.open("operator").repo).catalogs, everything(world)


def compaction(world: World) -> Any:
    compact(world.open("operator").repo, CompactionPolicy(min_entries=2))
    return versions(world.open("reader"), HISTORY)


def restoring(world: World) -> Any:
    restore(world.open("operator").repo, 3, apply=True)
    return everything(world)


def collection(world: World) -> Any:
    """Of all that a compaction has replaced, long after it."""
    world.backend.clock.sleep(timedelta(days=90).total_seconds())
    operator = world.open("operator").repo
    sweep(operator, plan_gc(operator, purge_compacted=True))
    return everything(world)


def copy(world: World) -> Any:
    with made_world(world.engine_version) as target:
        copy_repository(world.open().repo, target.open().repo, verify=False)
        return everything(target)


OPERATIONS: dict[str, Operation] = {
    "latest": lambda w: versions(w.open()),
    "history": lambda w: versions(w.open(), HISTORY),
    "as_of": lambda w: [versions(w.open(), ReadWindow(as_of=c)) for c in (1, 4)],
    "as_of tag": lambda w: w.open().repo.require_commit("v1"),
    "log": lambda w: [r.id for r in w.open().repo.list_commits(10)],
    "changes": lambda w: len(w.open().repo.list_commit_changes(2)),
    "info": lambda w: w.open().repo.storage_info()["head_commit_id"],
    "tags": lambda w: [tag.name for tag in w.open().repo.list_tags()],
    "schemas": lambda w: [h.as_dict() for h in w.open().repo.type_histories().values()],
    "metrics": lambda w: [(t.type_name, t.rows) for t in collect(w.open().repo).types],
    "commit": commit,
    "register": register,
    "migrate": migrate,
    "index repair": index_repair,
    "schema repair": schema_repair,
    "compact": compaction,
    "restore preview": lambda w: restore(w.open().repo, 3).commit_id,
    "restore": restoring,
    "gc plan": lambda w: [doomed.key for doomed in plan_gc(w.open().repo).doomed],
    "gc": collection,
    "copy": copy,
    # What they find is theirs to say; here, that they say something.
    "index verify": lambda w: verify_indices(w.open().repo).head_commit_id,
    "verify": lambda w: verify_storage(w.open().repo).uri is not None,
    "usage": lambda w: bool(usage(w.open().repo)),
}


def right_answer(engine_version: str, name: str) -> Any:
    return _undisturbed(stored, engine_version, name)[0]


def readers(storage: Storage, engine_version: str, key: str) -> list[str]:
    """The operations that read an object, or list it."""
    return [name for name in OPERATIONS if _reads(storage, engine_version, name, key)]


def _reads(storage: Storage, engine_version: str, name: str, key: str) -> bool:
    return any(
        key.startswith(request.key) if request.kind == "LIST" else key == request.key
        for request in _undisturbed(storage, engine_version, name)[1]
    )


@cache
def _undisturbed(
    storage: Storage, engine_version: str, name: str
) -> tuple[Any, list[RequestRecord]]:
    """What an operation says where nothing is damaged, and what it asks of the store."""
    with copied(storage(engine_version), engine_version) as world:
        world.pass_lease()
        return OPERATIONS[name](world), world.backend.log
