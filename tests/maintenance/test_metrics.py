"""Figures of a session and its storage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from storage_engine import Session
from storage_engine.commitlog import layout
from storage_engine.errors import ClosedError, ExpectedVersionMismatchError
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.metrics import Metrics, collect
from storage_engine.repository import CommitResult, TypeChange
from storage_engine.repository.protocol import CommitCounters
from tests.commitlog.support import World
from tests.engines import CUSTOMER, Customer, Product, Storage, customer
from tests.index.support import lag_behind, put_product

SAMPLE = re.compile(r'ontologia_[a-z_]+(\{([a-z]+="(?:[^"\\]|\\.)*",?)+\}) -?[0-9.e+-]+')


def samples(metrics: Metrics) -> dict[str, float]:
    found = {}
    for line in metrics.prometheus().splitlines():
        if not line.startswith("#"):
            assert SAMPLE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            assert name not in found
            found[re.sub(r'storage="[^"]*",?', "", name).replace("{}", "")] = float(value)
    return found


def test_commits_of_a_session_are_counted(storage: Storage) -> None:
    with Session(storage.uri, config=storage.config()) as session:
        session.ensure([Customer(id="a", name="A"), Customer(id="b", name="B")])
        session.commit()
        session.ensure([Customer(id="a", name="AA"), Product(sku="p", price=1.0)])
        session.commit()
        session.ensure(Customer(id="a", name="AA"))
        assert session.commit() is None
        session.ensure(Customer(id="a", name="AAA"))
        with pytest.raises(ExpectedVersionMismatchError):
            session.commit(expect={Customer: 1})
        session.discard()
        session.flush()  # what follows commits counts too
        metrics = session.metrics()
        assert metrics.head_commit_id == 2
        counted = dict(metrics.session)
        assert counted.pop("lock_wait_ms") >= 0
        assert counted == {
            "commits": 2,
            "empty": 1,
            "failed": 1,
            "attempts": 2,
            "rows_inserted": 3,
            "rows_updated": 1,
        }
        json.dumps(metrics.as_dict())
        found = samples(metrics)
        assert found["ontologia_commits_total"] == 2
        assert found["ontologia_head_commit_id"] == 2
        if storage.backend == "sqlite":
            assert metrics.types == ()
            return
        meter = session.storage_info()["requests"]
        assert metrics.requests["PUT_IF"] == meter["PUT_IF"]
        assert found['ontologia_requests_total{kind="PUT_IF"}'] == meter["PUT_IF"]
        assert metrics.bytes_written == meter["bytes_written"] > 0
        assert found['ontologia_type_files{kind="entity",type="Customer"}'] == 2
        assert found['ontologia_type_identities{kind="entity",type="Customer"}'] == 2
        assert found['ontologia_type_read_amplification{kind="entity",type="Customer"}'] == 1.5


def test_a_closed_session_has_no_metrics(tmp_path: Path) -> None:
    session = Session(tmp_path / "onto.db")
    session.close()
    with pytest.raises(ClosedError):
        session.metrics()


def test_an_empty_storage(storage: Storage) -> None:
    with Session(storage.uri, config=storage.config()) as session:
        metrics = session.metrics()
        assert (metrics.head_commit_id, metrics.types) == (0, ())
        assert samples(metrics)["ontologia_commits_total"] == 0


def test_index_lag_and_files_follow_the_storage(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    for age in range(4):
        writer.put(customer("a", age=age), customer(f"k{age}", age=age))
    put_product(writer, "p", 1.0)
    writer.repo.flush()

    def customers() -> dict[str, object]:
        found = collect(world.open().repo)
        return next(t.as_dict() for t in found.types if t.type_name == "Customer")

    before = customers()
    assert (before["files"], before["index_lag"], before["snapshots"]) == (4, 0, 0)
    assert (before["identities"], before["latest_rows"]) == (5, 8)
    lag_behind(world, 2)
    assert customers()["index_lag"] == (3 if world.engine_version == "v1" else 2)
    compact(writer.repo, CompactionPolicy(min_entries=2))
    after = customers()
    assert (after["entries"], after["snapshots"], after["rows"]) == (1, 1, 8)
    if world.engine_version == "v2":
        assert (after["latest_rows"], after["identities"]) == (5, 5)
        assert after["read_amplification"] == 1.0
    else:
        assert after["identities"] is None


def test_counters_add_up() -> None:
    counters = CommitCounters()
    changes = (TypeChange("entity", "T", 2, 3),)
    counters.succeeded(CommitResult(1, changes, attempts=3, lock_wait_ms=12.5))
    counters.succeeded(CommitResult(1, already_applied=True))
    counters.succeeded(None)
    counters.failure()
    assert counters.as_dict() == {
        "commits": 1,
        "empty": 2,
        "failed": 1,
        "attempts": 3,
        "lock_wait_ms": 12.5,
        "rows_inserted": 2,
        "rows_updated": 3,
    }


def test_labels_are_escaped() -> None:
    text = Metrics('a"b\\c\nd', "s3", "v2", 1, CommitCounters().as_dict()).prometheus()
    assert 'storage="a\\"b\\\\c\\nd"' in text
    assert all(SAMPLE.fullmatch(line) for line in text.splitlines() if line[0] != "#")


def test_cache_figures_are_passed_on(world: World) -> None:
    repo = world.open().repo

    class Cache:
        def stats(self) -> dict[str, int]:
            return {"hits": 3, "misses": 1}

    repo.cache = Cache()  # type: ignore[assignment]
    found = samples(collect(repo))
    assert found["ontologia_cache_hits_total"] == 3
    assert found["ontologia_cache_misses_total"] == 1


def test_an_index_of_another_history_is_all_behind(world: World) -> None:
    """Its watermark says that it has everything, of a log that is not this one."""
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    kept = dict(world.backend.objects())
    writer.put(customer("a", age=2))
    theirs = world.backend.objects()[layout.index(*CUSTOMER.ref)]
    for key in world.backend.objects():
        if key not in kept:
            world.backend.remove([key])
    for key, data in kept.items():
        world.backend.write(key, data)
    world.open("another").put(customer("a", age=3))
    world.backend.write(layout.index(*CUSTOMER.ref), theirs)
    (figures,) = collect(world.open("reader").repo, CommitCounters()).types
    assert figures.index_lag == 2
