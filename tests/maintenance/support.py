"""Crashing a maintenance operation at each of its durable writes, on the simulated store."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from storage_engine.errors import OntologiaError
from storage_engine.objectstore.memory import MemoryBackend, SimulatedCrash
from storage_engine.repository import ReadWindow
from storage_engine.testing.faults import READS, Fault, FaultKind, FaultPlan, FaultRule
from tests.commitlog.support import HISTORY, LEASE_TTL_MS, World, Writer
from tests.engines import CUSTOMER, PRODUCT

DAY_S = 24 * 3600.0
INTERRUPTIONS = (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER, FaultKind.RESPONSE_LOST)

Operation = Callable[[Writer], object]


@contextmanager
def copied(objects: dict[str, bytes], engine_version: str, *, days: float = 0) -> Iterator[World]:
    """A storage of its own with these objects, `days` after they were written."""
    backend = MemoryBackend(f"copy-{uuid.uuid4().hex}")
    for key, data in objects.items():
        backend.write(key, data)
    backend.clock.sleep(days * DAY_S)
    world = World(backend, engine_version)
    try:
        yield world
    finally:
        world.close()


def everything(reader: Writer) -> dict[str, Any]:
    """What every temporal mode says now."""
    head = reader.repo.head_commit_id()
    said: dict[str, Any] = {"commits": [r.id for r in reader.repo.list_commits(head + 1)]}
    for spec in (CUSTOMER, PRODUCT):
        said[f"{spec.name} history"] = reader.rows(spec, HISTORY)
        for commit_id in range(head + 1):
            said[f"{spec.name} as of {commit_id}"] = reader.rows(spec, ReadWindow(as_of=commit_id))
    return said


def earlier(said: dict[str, Any], head: int) -> dict[str, Any]:
    """The part that commits after `head` must not change."""
    kept = {k: v for k, v in said.items() if " as of " in k and int(k.split()[-1]) <= head}
    for name in ("Customer", "Product"):
        kept[f"{name} history"] = [r for r in said[f"{name} history"] if r["commit_id"] <= head]
    kept["commits"] = [c for c in said["commits"] if c <= head]
    return kept


@dataclass
class Crashes:
    """All ways to interrupt `operation` on `objects`; what each run must leave is up to `after`.

    `after(world, before)` gets the storage with all leases run out; it reruns and checks.
    """

    objects: dict[str, bytes]
    engine_version: str
    operation: Operation
    days: float = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def writes(self) -> list[tuple[str, str]]:
        """The durable requests of an undisturbed run."""
        seen: list[tuple[str, str]] = []
        with self._world() as world:
            writer = world.open("operator", **self.settings)
            writer.store.on_request(lambda kind, key: seen.append((kind, key)))
            self.operation(writer)
            writer.repo.flush()
        return [(kind, key) for kind, key in seen if kind not in READS]

    def each(self, after: Callable[[World, dict[str, Any]], None]) -> int:
        """Interrupt at every write in every way; how many runs that were."""
        with self._world() as world:
            before = everything(world.open("reader"))
        count = len(self.writes())
        assert count, "the operation writes nothing"
        runs = 0
        for nth in range(1, count + 1):
            for kind in INTERRUPTIONS:
                with self._world() as world:
                    rule = FaultRule(Fault(kind), "WRITE", "*", nth=nth)
                    writer = world.open("operator", faults=FaultPlan([rule]), **self.settings)
                    try:
                        self.operation(writer)
                        writer.repo.flush()
                    except SimulatedCrash:
                        pass
                    except OntologiaError as error:  # said to have failed, and to be repeatable
                        if not error.retryable:
                            raise
                    world.backend.clock.sleep(LEASE_TTL_MS / 1000 + 1)
                    try:
                        after(world, before)
                    except BaseException as error:
                        error.add_note(f"after {kind.value} at write {nth}")
                        raise
                runs += 1
        return runs

    def _world(self) -> Any:
        return copied(self.objects, self.engine_version, days=self.days)
