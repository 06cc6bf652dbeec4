"""Every durable request of a migration, and of a drop, is a point to crash at: all are tried.

Whatever went wrong, a fresh reader sees all of the old or all of the new; what a dead process has
left to do is finished by the next one, or by repair. A writer of old code beside a migration gets
its rows in, or an error, and nothing that was acknowledged is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import (
    CommitStateUnknownError,
    LeaseExpiredError,
    MigrationError,
    MigrationTokenError,
    MissingUpgraderError,
    OntologiaError,
    SchemaOutdatedError,
    StorageBackendError,
    TypeDroppedError,
)
from storage_engine.maintenance.indices import repair_indices
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.maintenance.schema_catalogs import repair_catalogs
from storage_engine.model import Field
from storage_engine.objectstore.memory import MemoryBackend, SimulatedCrash
from storage_engine.repository import Repository
from storage_engine.testing.faults import READS, Fault, FaultKind, FaultPlan, FaultRule
from tests.commitlog.support import LEASE_TTL_MS, World, Writer, at, new_world
from tests.conformance.test_rfc0009_migration import (
    V1,
    V2,
    drop,
    entity,
    latest,
    migrate,
    row,
    write,
)
from tests.engines import commit, rows_of
from tests.simulation.harness import index_problems

pytestmark = pytest.mark.simulation

THING = entity("Thing", n=Field[int])
THING2 = entity("Thing", n=Field[int | None], m=(Field[str], Field(default="-")))
EMPTY = entity("Empty", n=Field[int])
CLIENT = entity("Client", renamed_from="Customer", name=Field[str], age=Field[int])

OLD = [("a", "Anna", 1), ("b", "Bob", 2)]


def _old(repository: Repository) -> bool:
    """Whether a reader of old code sees the rows as they were; all of them, or an error."""
    try:
        customers = [(r["id"], r["name"], r["age"]) for r in latest(repository, V1)]
        things = [r["n"] for r in latest(repository, THING)]
    except SchemaOutdatedError:
        return False
    if not customers:
        return False  # dropped: typed reads are empty
    assert customers == OLD
    assert things == [1]
    return True


def _migrated(repository: Repository) -> bool:
    try:
        customers = [(r["id"], r["name"], r["age"], r["tier"]) for r in latest(repository, V2)]
        things = [(r["n"], r["m"]) for r in latest(repository, THING2)]
    except SchemaOutdatedError:
        return False
    assert customers == [(key, name, float(age), "basic") for key, name, age in OLD]
    assert things == [(1, "-")]
    assert latest(repository, EMPTY) == []
    return True


def _dropped(repository: Repository) -> bool:
    return repository.type_refs() == [THING.ref] and latest(repository, V1) == []


def _renamed(repository: Repository) -> bool:
    if CLIENT.ref not in repository.type_refs():
        return False
    assert [(r["id"], r["name"], r["age"]) for r in latest(repository, CLIENT)] == OLD
    assert V1.ref not in repository.type_refs()
    return True


@dataclass(frozen=True)
class Scenario:
    name: str
    engine_version: str
    change: Callable[[Repository], object]
    done: Callable[[Repository], bool]

    def __str__(self) -> str:
        return f"{self.name}-{self.engine_version}"


SCENARIOS = [
    Scenario(name, engine, change, done)
    for engine in ("v2", "v1")
    for name, change, done in (
        ("migrate", lambda r: migrate(r, V2, THING2, EMPTY), _migrated),
        ("rename", lambda r: migrate(r, CLIENT), _renamed),
        ("drop", lambda r: drop(r, "Customer"), _dropped),
        ("purge", lambda r: drop(r, "Customer", purge=True), _dropped),
    )
    if engine == "v2" or name in ("migrate", "purge")
]


class Stage:
    """The state before the migration, made once and copied for every run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        with closing(new_world(scenario.engine_version)) as world:
            repository = world.open("before").repo
            write(repository, V1, row("a", name="Ann", age=1), row("b", name="Bob", age=2))
            write(repository, THING, row("t", n=1))
            write(repository, V1, row("a", name="Anna", age=1))
            repository.flush()
            self.objects = world.backend.objects()
        self.requests: list[tuple[str, str]] = []
        with closing(self.world()) as world:
            writer = world.open("writer")
            writer.store.on_request(lambda kind, key: self.requests.append((kind, key)))
            scenario.change(writer.repo)
            writer.repo.flush()
            assert scenario.done(writer.repo)
            assert not _old(writer.repo)
            purged = scenario.name == "purge"
            assert world.orphans() == [] or purged
        self.cas = self.requests.index(("PUT_IF", layout.HEAD)) + 1
        self.acquired = self.requests.index(("PUT_IF", layout.LOCK)) + 1

    def world(self) -> World:
        backend = MemoryBackend("simulation")
        for key, data in self.objects.items():
            backend.write(key, data)
        return World(backend, self.scenario.engine_version)

    @property
    def writes(self) -> list[int]:
        return [n for n, (kind, _) in enumerate(self.requests, start=1) if kind not in READS]


@pytest.fixture(scope="module", params=SCENARIOS, ids=str)
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(request.param)


def attempt(scenario: Scenario, writer: Writer) -> BaseException | None:
    try:
        scenario.change(writer.repo)
        writer.repo.publisher.flush()
    except (SimulatedCrash, OntologiaError) as error:
        return error
    return None


def settle(world: World, stage: Stage, *, landed: bool, thorough: bool) -> None:
    """A fresh reader sees one of the two states; the next process goes on from there."""
    world.pass_lease()
    reader = world.open("reader")
    assert _old(reader.repo) is not landed
    assert stage.scenario.done(reader.repo) is landed
    if not landed:
        again = world.open("again", s3_lock_timeout_ms=2 * LEASE_TTL_MS)
        assert attempt(stage.scenario, again) is None
        assert stage.scenario.done(again.repo)
        if not thorough:
            return
    fresh = world.open("fresh", s3_lock_timeout_ms=2 * LEASE_TTL_MS)
    repair_catalogs(fresh.repo, apply=True)
    assert repair_catalogs(fresh.repo).catalogs == ()
    repair_indices(fresh.repo, apply=True)
    assert index_problems(world) == []
    assert repair_indices(fresh.repo).types == ()
    if thorough:
        assert verify_storage(fresh.repo, deep=True).findings == []


@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_crash_at_every_durable_request(stage: Stage, kind: FaultKind) -> None:
    for number in stage.writes:
        with closing(stage.world()) as world:
            writer = world.open("writer")
            writer.store.faults = FaultPlan([FaultRule(Fault(kind), nth=number)])
            attempt(stage.scenario, writer)
            assert writer.store.crashed, f"request {number} was never made"
            landed = number > stage.cas or (number == stage.cas and kind is FaultKind.CRASH_AFTER)
            settle(world, stage, landed=landed, thorough=abs(number - stage.cas) <= 1)


def test_the_next_writer_goes_on_after_a_crash_behind_the_swap(stage: Stage) -> None:
    """Without any repair: it reads and writes rightly, and mends the index of what it touches."""
    with closing(stage.world()) as world:
        writer = world.open("writer")
        writer.store.faults = FaultPlan([FaultRule(Fault(FaultKind.CRASH_AFTER), nth=stage.cas)])
        attempt(stage.scenario, writer)
        world.pass_lease()
        fresh = world.open("fresh")
        refused: type[OntologiaError] = SchemaOutdatedError
        if stage.scenario.name == "migrate":
            write(fresh.repo, V2, row("c", name="Cid", age=1.5, tier="x"))
            assert [r["id"] for r in latest(fresh.repo, V2)] == ["a", "b", "c"]
        else:
            refused = TypeDroppedError
            write(fresh.repo, THING, row("u", n=2))
            if stage.scenario.name == "rename":
                write(fresh.repo, CLIENT, row("c", name="Cid", age=3))
                assert [r["id"] for r in latest(fresh.repo, CLIENT)] == ["a", "b", "c"]
        with pytest.raises(refused):
            write(fresh.repo, V1, row("d", name="Dan", age=4))
        fresh.repo.flush()
        repair_indices(fresh.repo, apply=True)
        assert verify_storage(fresh.repo, deep=True).findings == []


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.DELAYED])
def test_an_unanswered_write_is_told_truly(stage: Stage, kind: FaultKind) -> None:
    for number in [n for n in stage.writes if n <= stage.cas]:  # later ones are asked of nobody
        with closing(stage.world()) as world:
            writer = world.open("writer")
            fault = Fault(kind, seconds=3600)
            writer.store.faults = FaultPlan([FaultRule(fault, nth=number)])
            error = attempt(stage.scenario, writer)
            assert error is None or isinstance(error, StorageBackendError | LeaseExpiredError)
            world.pass_lease()
            reader = world.open("reader")
            assert stage.scenario.done(reader.repo) is (error is None)
            assert _old(reader.repo) is (error is not None)
            world.backend.land_all()  # what was delayed comes on top of it
            assert stage.scenario.done(reader.repo) is (error is None)


@pytest.mark.parametrize("landed", [True, False])
def test_an_unknown_swap_says_so_and_deletes_nothing(stage: Stage, landed: bool) -> None:
    lost = FaultKind.RESPONSE_LOST if landed else FaultKind.TIMEOUT
    with closing(stage.world()) as world:
        writer = world.open("writer")
        writer.fail(lost, "PUT_IF", layout.HEAD, times=None)
        at(
            writer.store,
            "PUT_IF",
            layout.HEAD,
            lambda: writer.fail(FaultKind.UNAVAILABLE, "GET", layout.HEAD, times=None),
        )
        assert isinstance(attempt(stage.scenario, writer), CommitStateUnknownError)
        writer.heal()
        settle(world, stage, landed=landed, thorough=True)


def test_a_writer_of_old_code_at_any_request(stage: Stage) -> None:
    """It gets in before the swap, and is in the new rows, or is told; never lost."""
    scenario = stage.scenario
    if scenario.name not in ("migrate", "rename"):
        pytest.skip("there are no rows to bring along")
    for number in range(1, stage.cas + 3):
        with closing(stage.world()) as world:
            writer, rival = world.open("writer"), world.open("rival", s3_lock_timeout_ms=0)
            left, told = [number], list[str]()

            def meanwhile(
                _kind: str,
                _key: str,
                left: list[int] = left,
                rival: Writer = rival,
                told: list[str] = told,
            ) -> None:
                left[0] -= 1
                if left[0]:
                    return
                try:
                    write(rival.repo, V1, row("b", name="Bert", age=5), row("r", name="R", age=9))
                    told.append("in")
                except (SchemaOutdatedError, TypeDroppedError):
                    told.append("refused")
                except OntologiaError:
                    told.append("locked out")

            writer.store.on_request(meanwhile)
            error = attempt(scenario, writer)
            assert error is None or isinstance(error, OntologiaError), error
            if not told:
                continue  # of a run in which others have kept something back
            reader = world.open("reader")
            spec: Any = {"migrate": V2, "rename": CLIENT}.get(scenario.name)
            if error is not None:
                assert told == ["in"]
                world.pass_lease()
                assert [r["name"] for r in latest(reader.repo, V1)][1:] == ["Bert", "R"]
            elif told == ["in"] and spec is not None:
                rows = {r["id"]: r["name"] for r in latest(reader.repo, spec)}
                assert rows == {"a": "Anna", "b": "Bert", "r": "R"}, stage.requests[number - 1]
            elif spec is not None:
                assert {r["id"] for r in latest(reader.repo, spec)} == {"a", "b"}


def test_of_two_migrations_at_any_request_one_wins(stage: Stage) -> None:
    if stage.scenario.name != "migrate":
        pytest.skip("one kind is enough")
    other = entity(name=Field[str], age=Field[int], note=Field[str | None])
    for number in range(1, stage.cas + 3, 3):
        with closing(stage.world()) as world:
            writer, rival = world.open("writer"), world.open("rival", s3_lock_timeout_ms=0)
            left, outcome = [number], list[BaseException | None]()

            def meanwhile(
                _kind: str,
                _key: str,
                left: list[int] = left,
                rival: Writer = rival,
                outcome: list[BaseException | None] = outcome,
            ) -> None:
                left[0] -= 1
                if left[0] == 0:
                    try:
                        migrate(rival.repo, other)
                        outcome.append(None)
                    except OntologiaError as refusal:
                        outcome.append(refusal)

            writer.store.on_request(meanwhile)
            error = attempt(stage.scenario, writer)
            assert (error is None) is not (outcome == [None]), (error, outcome)
            if error is not None:
                # The winner was there before it had planned, or after.
                assert isinstance(error, MigrationTokenError | MissingUpgraderError), error
            reader = world.open("reader")
            winner = V2 if error is None else other
            assert [(r["id"], r["name"]) for r in latest(reader.repo, winner)] == [
                (key, name) for key, name, _ in OLD
            ]


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_an_upgrader_that_fails_on_the_last_row_leaves_nothing(engine_version: str) -> None:
    def careful(old: dict[str, Any]) -> dict[str, Any]:
        if old["id"] == "k0499":
            raise ValueError("cannot")
        return {**old, "tier": "x"}

    with closing(new_world(engine_version)) as world:
        writer = world.open("writer", target_part_bytes=64 * 1024)
        write(writer.repo, V1, *(row(f"k{n:04d}", name="n" * 500, age=n) for n in range(500)))
        writer.repo.flush()
        before = world.backend.objects()
        with pytest.raises(MigrationError, match=r"'k0499'.*careful.*cannot") as caught:
            migrate(writer.repo, V2, upgraders={("Customer", 1): careful})
        assert caught.value.identity == "k0499"
        assert world.backend.objects() == before
        assert [r["age"] for r in latest(writer.repo, V1)] == list(range(500))


def test_more_types_than_a_manifest_holds() -> None:
    """Their heads are in buckets: those that change without rows, too."""
    with closing(new_world("v2")) as world:
        repository = world.open("writer").repo
        types = [entity(f"Type{n}", a=Field[int]) for n in range(130)]
        commit(repository, *(rows_of(t, row("x", a=1)) for t in types))
        changed = entity("Type7", a=Field[float], b=Field[str | None])
        migrate(repository, changed, EMPTY)
        drop(repository, "Type8")
        drop(repository, "Type9", purge=True)
        write(repository, types[1], row("x", a=2))
        repository.flush()
        fresh = world.open("fresh").repo
        assert len(fresh.type_refs()) == 129
        assert [(r["a"], r["b"]) for r in latest(fresh, changed)] == [(1.0, None)]
        assert latest(fresh, types[8]) == latest(fresh, EMPTY) == []
        with pytest.raises(TypeDroppedError):
            write(fresh, types[9], row("x", a=1))
        assert repair_catalogs(fresh).catalogs == ()
        assert verify_storage(fresh, deep=True).findings == []
