"""Tiers: how often rows are rewritten, how many files a latest read opens, what is left alone."""

from __future__ import annotations

import random

import pytest

from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.config import MIB
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.compaction.plan import rows
from tests.commitlog.support import World
from tests.engines import CUSTOMER, customer


def entry(low: int, high: int, count: int, *, size: int = 0, version: int = 1) -> Entry:
    file = CommitFile("entity", "T", f"{low}-{high}", count, version, "", bytes=size or count * 20)
    return Entry(low, high, (file,))


def commits(*counts: int) -> list[Entry]:
    return [entry(n, n, count) for n, count in enumerate(counts, start=1)]


def spans(policy: CompactionPolicy, entries: list[Entry]) -> list[tuple[int, int]]:
    return [(run[0].min_commit_id, run[-1].max_commit_id) for run in policy.verdict(entries).runs]


EAGER = CompactionPolicy(min_entries=2)


def test_commits_are_merged_whatever_their_sizes() -> None:
    assert spans(EAGER, commits(1, 500, 3, 40, 1)) == [(1, 5)]


def test_a_much_larger_snapshot_is_left_alone_and_a_similar_one_is_merged() -> None:
    newer = [entry(n, n, 10) for n in range(101, 111)]
    assert spans(EAGER, [entry(1, 100, 151), *newer]) == [(101, 110)]
    assert spans(EAGER, [entry(1, 100, 150), *newer]) == [(1, 110)]


def test_a_bulk_load_counts_by_its_size() -> None:
    """It is a good file as it is: a few small commits after it do not have it rewritten."""
    bulk = entry(1, 1, 1_000_000, size=40 * MIB)
    small = [entry(n, n, 10) for n in range(2, 12)]
    assert spans(EAGER, [bulk, *small]) == [(2, 11)]


def test_no_snapshot_in_the_middle_is_swallowed() -> None:
    """Runs are adjacent entries and cover each entry once."""
    rng = random.Random(1)
    for _ in range(200):
        made: list[Entry] = []
        at = 1
        for _ in range(rng.randint(0, 30)):
            width = rng.choice([1, 1, 1, 5, 50])
            made.append(
                entry(
                    at,
                    at + width - 1,
                    rng.randint(1, 10 ** rng.randint(0, 6)),
                    version=1 + (at > 60),
                )
            )
            at += width + rng.randint(0, 3)
        runs = EAGER.runs(made)
        assert [e for run in runs for e in run] == made
        assert all(len({e.schema_version_id for e in run}) == 1 for run in runs)
        merged = [
            entry(
                r[0].min_commit_id,
                r[-1].max_commit_id,
                sum(map(rows, r)),
                size=32 * MIB,
                version=r[0].schema_version_id,
            )
            for r in runs
        ]
        assert not EAGER.verdict(merged).worth or len(merged) > len(EAGER.runs(merged))


def test_schema_versions_are_not_mixed() -> None:
    old = [entry(n, n, 5) for n in range(1, 4)]
    new = [entry(n, n, 5, version=2) for n in range(4, 7)]
    assert spans(EAGER, [*old, *new]) == [(1, 3), (4, 6)]


def test_a_verdict_says_why() -> None:
    policy = CompactionPolicy(min_entries=4)
    assert policy.verdict([]).reason == "0 of at least 4 entries"
    assert policy.verdict(commits(1, 1, 1)).reason == "3 of at least 4 entries"
    assert policy.verdict(commits(1, 1, 1, 1)).reason == "4 of 4 entries can become 1 snapshot"
    tiers = [entry(n * 10, n * 10 + 9, 10 ** (7 - n)) for n in range(1, 6)]
    verdict = policy.verdict(tiers)
    assert (verdict.worth, verdict.reason) == (False, "no run of 4 entries of similar size")


@pytest.mark.parametrize("wrong", [{"min_entries": 1}, {"ratio": 0}, {"small_bytes": -1}])
def test_policies_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="min_entries >= 2"):
        CompactionPolicy(**wrong)  # type: ignore[arg-type]


def simulate(
    total: int, every: int, policy: CompactionPolicy, seed: int | None
) -> tuple[float, int]:
    """Average rewrites of a row, and entries at the end."""
    rng = random.Random(seed)
    entries: list[Entry] = []
    written = rewritten = 0
    for commit_id in range(1, total + 1):
        count = 20 if seed is None else rng.randint(1, 100)
        entries.append(entry(commit_id, commit_id, count))
        written += count
        if commit_id % every:
            continue
        for run in policy.verdict(entries).runs:
            count = sum(map(rows, run))
            rewritten += count
            at = entries.index(run[0])
            merged = entry(run[0].min_commit_id, run[-1].max_commit_id, count)
            entries[at : at + len(run)] = [merged]
    return rewritten / written, len(entries)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_2000_commits_compacted_at_every_50th(seed: int | None) -> None:
    rewrites, left = simulate(2000, 50, CompactionPolicy(), seed)
    assert rewrites <= 4
    assert left <= 4


def test_rewriting_grows_with_the_logarithm() -> None:
    few, many = (simulate(50 * n, 50, CompactionPolicy(), None)[0] for n in (64, 1024))
    assert many - few <= 2.5  # four doublings more


def test_write_amplification_of_real_commits(world: World) -> None:
    """A tenth of the size, with what was really written and what a latest read really opens."""
    writer = world.open("writer", checkpoint_interval=50)
    rng = random.Random(5)
    rewritten = 0
    for n in range(1, 201):
        keys = rng.sample(range(300), 4)
        writer.put(*(customer(f"k{key}", age=n) for key in sorted(keys)))
        if n % 10 == 0:
            report = compact(writer.repo, CompactionPolicy())
            rewritten += report.rows_rewritten
    assert rewritten / 800 <= 4
    reader = world.open("reader")
    head = reader.repo.chain.read_head().head
    entries = reader.repo._versions.resolve(CUSTOMER, head).entries
    opened = [f for e in entries for f in e.newest_files(head.commit_id)]
    assert len(opened) <= 4
    assert {f.role for f in opened} == {"current"}
    before = reader.store.meter.snapshot()["GET"]
    assert len(reader.ages()) == len({r["entity_key"] for r in writer.rows()})
    assert reader.store.meter.snapshot()["GET"] - before <= 2 + sum(len(e.files) for e in entries)
    assert len(reader.history()) == 800
