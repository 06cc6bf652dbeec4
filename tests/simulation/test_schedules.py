"""Three writers interleaved at every request under random faults: the invariants hold for each
seed, and a seed replays."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.swap import Swap
from storage_engine.maintenance.compaction.plan import TierPolicy
from storage_engine.objectstore.memory import MemoryStore
from storage_engine.objectstore.protocol import content_etag
from storage_engine.repository.object.write.group import GroupRows
from storage_engine.testing.faults import FaultKind
from tests.campaigns import examples
from tests.commitlog.support import at, new_world
from tests.simulation.harness import InvariantViolated, Ledger, index_problems, recover, verify
from tests.simulation.schedule import COMMITS, WRITERS, Outcome, simulate

pytestmark = pytest.mark.simulation

SEEDS = range(8)
TOGETHER = 3


def settle(outcome: Outcome) -> None:
    """Delayed writes land, leases run out, and a fresh process goes on."""
    outcome.world.backend.land_all()
    recover(
        outcome.world,
        outcome.ledger,
        "settled",
        {"Customer": {"z": 1}, "Product": {"z": 1}},
    )


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
@pytest.mark.parametrize("seed", SEEDS)
def test_acknowledged_means_in_the_chain_exactly_once(seed: int, engine_version: str) -> None:
    outcome = simulate(seed, engine_version=engine_version)
    with closing(outcome.world):
        ledger = outcome.ledger
        assert len(ledger.intents) == len(WRITERS) * COMMITS
        assert outcome.faults > 0
        verify(outcome.world, ledger)
        settle(outcome)
        assert index_problems(outcome.world) == []


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_with_writers_that_merge_the_tail(seed: int, engine_version: str) -> None:
    policy = TierPolicy(tail=2)
    outcome = simulate(seed, engine_version=engine_version, merges=policy)
    with closing(outcome.world):
        verify(outcome.world, outcome.ledger)
        settle(outcome)
        assert index_problems(outcome.world) == []


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
@pytest.mark.parametrize("seed", range(examples(8)))
def test_the_same_with_several_commits_by_one_swap(seed: int, engine_version: str) -> None:
    outcome = simulate(
        seed, engine_version=engine_version, merges=TierPolicy(tail=2), most_together=TOGETHER
    )
    with closing(outcome.world):
        assert len(outcome.ledger.intents) == len(WRITERS) * COMMITS
        verify(outcome.world, outcome.ledger)
        settle(outcome)
        assert index_problems(outcome.world) == []


def test_in_most_schedules_some_merge_is_published() -> None:
    """Or the test above says nothing of them."""
    outcome = simulate(3, chances={}, merges=TierPolicy(tail=2))
    with closing(outcome.world):
        head = outcome.world.head()
        assert head.checkpoint is not None
        types = outcome.world.document(head.checkpoint.path)["types"]
        assert any(entry["rewrites"] for known in types for entry in known["entries"])


def test_a_seed_replays() -> None:
    first, second, other = simulate(4), simulate(4), simulate(5)
    with closing(first.world), closing(second.world), closing(other.world):
        assert first.trace == second.trace
        assert first.ledger == second.ledger
        assert first.trace != other.trace


def test_without_faults_every_change_is_acknowledged() -> None:
    outcome = simulate(3, chances={})
    with closing(outcome.world):
        ledger = outcome.ledger
        assert ledger.unknown == set()
        # What was refused changed nothing: a rival had written the same before.
        assert len(ledger.acknowledged) + len(ledger.refused) == len(WRITERS) * COMMITS
        assert len(ledger.acknowledged) == len(outcome.world.chain())
        verify(outcome.world, ledger, queries=True)


def violated(seed: int, *, most_together: int = 1, **chances: float) -> bool:
    named = {FaultKind[name.upper()]: chance for name, chance in chances.items()}
    outcome = simulate(seed, chances=named, most_together=most_together)
    with closing(outcome.world):
        try:
            outcome.world.backend.land_all()
            verify(outcome.world, outcome.ledger)
        except InvariantViolated:
            return True
        return False


def test_planted_an_unconditional_cas_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MemoryStore.put_if_match

    def careless(self: MemoryStore, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        if key != layout.HEAD:
            return original(self, key, data, etag, write_id=write_id)
        self.put(key, data)
        return content_etag(data)

    monkeypatch.setattr(MemoryStore, "put_if_match", careless)
    assert any(violated(seed) for seed in range(40))


def test_planted_a_draft_that_sees_nothing_of_the_one_before_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GroupRows, "of", lambda self, ref: None)
    assert any(violated(seed, most_together=TOGETHER) for seed in range(20))


def test_planted_an_answer_before_the_swap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Swap._draft

    def hasty(self: Swap, committer: Any, carried: Any) -> None:
        original(self, committer, carried)
        committer.decide(self._answers[-1].outcome)

    monkeypatch.setattr(Swap, "_draft", hasty)
    lost = {"crash_before": 0.05}
    assert any(violated(seed, most_together=TOGETHER, **lost) for seed in range(20))


def rival_builds_on_ours_unheard(seen: str) -> None:
    """The answer to our CAS is lost, and a rival commits on top before we look."""
    world, ledger = new_world(), Ledger()
    with closing(world):
        ours, rival = world.open("ours"), world.open("rival")

        def rival_commits() -> None:
            world.pass_lease()
            ledger.commit(rival, "rival", {"Customer": {"b": 2}})

        ours.fail(FaultKind.RESPONSE_LOST, "PUT_IF", layout.HEAD)
        at(
            ours.store,
            "PUT_IF",
            layout.HEAD,
            lambda: at(ours.store, "GET", layout.HEAD, rival_commits),
        )
        ledger.commit(ours, "ours", {"Customer": {"a": 1}})
        assert ledger.acknowledged.get("rival") == 2, seen
        verify(world, ledger)


def test_planted_forgetting_ancestors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arranged: random schedules come to this once in a thousand seeds."""
    rival_builds_on_ours_unheard("as it is")
    monkeypatch.setattr(Swap, "_is_ancestor", lambda *_: False)
    with pytest.raises(InvariantViolated):
        rival_builds_on_ours_unheard("with the defect")
