"""Compaction changes which files hold the rows and nothing that a reader can see."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage_engine
from storage_engine import Session
from storage_engine.commitlog.records import Entry
from storage_engine.config import MIB, OntologiaConfig
from storage_engine.errors import ClosedError, ConfigurationError, IntegrityError, LeaseExpiredError
from storage_engine.maintenance.compaction import (
    CompactionPolicy,
    CompactionProgress,
    build,
    compact,
    plan_compaction,
    run,
)
from storage_engine.repository import ReadWindow, Repository, initialize_storage
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.object.write.parquet import SnapshotPart, SnapshotSettings
from tests.engines import (
    CUSTOMER,
    EMPLOYMENT,
    EVERYTHING,
    PRODUCT,
    Customer,
    Storage,
    commit,
    customer,
    edge,
    on_servers,
    product,
    put,
    rows_of,
    stream_of,
    table_of,
)
from tests.maintenance.reads import entries_of, seen

EAGER = CompactionPolicy(min_entries=2)
ZSTD_FRAME = bytes.fromhex("28b52ffd")  # each page is one


@contextmanager
def opened(storage: Storage, **settings: Any) -> Iterator[ObjectRepository]:
    with closing(storage.open(**settings)) as repository:
        assert isinstance(repository, ObjectRepository)
        yield repository


# -- what it does -------------------------------------------------------------------------------


@on_servers
def test_rows_stay_the_same_and_files_become_few(objects: Storage) -> None:
    with opened(objects) as repository:
        for n in range(6):
            put(repository, customer("a", age=n), customer(f"k{n}", age=n))
        before = seen(repository)
        report = compact(repository, EAGER)
        assert [(r.outcome, r.entries, r.rows) for r in report.runs] == [("published", 6, 12)]
        [entry] = entries_of(repository)
        assert (entry.min_commit_id, entry.max_commit_id) == (1, 6)
        assert seen(repository) == before
    with opened(objects) as fresh:
        assert seen(fresh) == before
        assert fresh.index_warnings() == []
        assert fresh.storage_info()["last_index_warning"] is None
        put(fresh, customer("a", age=99))
        assert fresh.read(CUSTOMER).num_rows == 7


def test_rfc0004_06_snapshot_keys_and_roles_of_each_engine(objects: Storage) -> None:
    with opened(objects) as repository:
        for n in range(3):
            put(repository, customer("a", age=n))
        compact(repository, EAGER)
        [entry] = entries_of(repository)
        index = objects.document("meta/indices/entities/Customer.json")
        assert index["max_indexed_commit"] == 3
        if objects.engine_version == "v1":
            assert [f.path for f in entry.files] == ["snapshots/entities/Customer-1-3.parquet"]
            assert [f.role for f in entry.files] == [None]
            assert index["entries"][0]["path"] == "snapshots/entities/Customer-1-3.parquet"
        else:
            current, superseded = entry.files
            assert (current.role, current.row_count) == ("current", 1)
            assert (superseded.role, superseded.row_count) == ("superseded", 2)
            stem, _, name = current.path.rpartition("/")
            assert name == "current.parquet"
            assert stem.startswith("snapshots/entities/Customer-1-3-")
            assert current.key_range == {"entity_key": ["a", "a"]}
            assert entry.unique(3)
            assert not entry.unique(2)
        assert len(index["entries"]) == 1


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_sqlite_answers_that_there_is_nothing_to_compact(
    tmp_path: Path, engine_version: str
) -> None:
    storage = Storage(f"sqlite:///{tmp_path / 'onto.db'}", "sqlite", engine_version)
    initialize_storage(storage.uri, engine_version)
    with closing(storage.open()) as repository:
        put(repository, customer("a"))
        plan = plan_compaction(repository)
        assert plan.empty
        assert "nothing to compact" in str(plan.note)
        assert compact(repository, plan).note == plan.note
        assert compact(repository).runs == ()


def test_every_field_type_and_kind_of_type_survives(objects: Storage) -> None:
    rows = [
        {
            "entity_key": key,
            "id": key,
            "text": text,
            "number": 2**62 + n,
            "real": real,
            "flag": bool(n % 2),
            "moment": "2024-05-01T12:00:00.123456+00:00",
            "day": "2024-02-29",
            "raw": bytes([0, n, 255]),
            "maybe": None,
            "maybe_number": n or None,
            "tags": json.dumps([text]),
            "counts": "{}",
            "mixed": json.dumps(n),
            "anything": None,
        }
        for n, (key, text, real) in enumerate(
            [("", "", 0.0), ("ä", "\U0001f600", float("inf")), ("z'", "'; --", 1e-300)]
        )
    ]
    schema = table_of(EVERYTHING, []).schema
    with opened(objects) as repository:
        for n, row in enumerate(rows):
            typed = {
                **row,
                "moment": pa.scalar(row["moment"]).cast(schema.field("moment").type).as_py(),
                "day": pa.scalar(row["day"]).cast(schema.field("day").type).as_py(),
            }
            commit(
                repository,
                rows_of(EVERYTHING, typed),
                rows_of(EMPLOYMENT, edge("a", "b", f"i{n % 2}", role=f"r{n}")),
            )
        before = [seen(repository, spec) for spec in (EVERYTHING, EMPLOYMENT)]
        report = compact(repository, EAGER)
        assert [run.outcome for run in report.runs] == ["published"] * 2
        assert [seen(repository, spec) for spec in (EVERYTHING, EMPLOYMENT)] == before


def test_staged_parts_get_their_commit_id_written_out(objects: Storage) -> None:
    with opened(objects) as repository:
        for n in range(3):
            rows = [customer(f"k{i}", age=n) for i in range(4)]
            commit(repository, stream_of(CUSTOMER, rows[:2], rows[2:]))
        before = seen(repository)
        compact(repository, EAGER)
        assert seen(repository) == before
        [entry] = entries_of(repository)
        assert {file.commit_id_source for file in entry.files} == {"column"}


@pytest.mark.parametrize("objects", ["directory-v2"], indirect=True)
def test_parts_have_disjoint_identities_and_a_target_size(objects: Storage) -> None:
    rng = random.Random(4)
    small = {"snapshot_part_bytes": 64 * 1024, "snapshot_row_group_rows": 1000}
    with opened(objects, **small) as repository:
        for n in range(3):
            rows = [customer(f"k{i:05d}", name=rng.randbytes(12).hex(), age=n) for i in range(9000)]
            commit(repository, stream_of(CUSTOMER, rows))
        before = repository.read(CUSTOMER, ReadWindow(history=True))
        compact(repository, EAGER)
        assert repository.read(CUSTOMER, ReadWindow(history=True)).equals(before)
        [entry] = entries_of(repository)
        for role, rows_expected in (("current", 9000), ("superseded", 18000)):
            files = [file for file in entry.files if file.role == role]
            assert len(files) > 1
            assert [file.part for file in files] == list(range(len(files)))
            ranges = [file.key_range["entity_key"] for file in files]
            assert all(a[1] < b[0] for a, b in pairwise(ranges))
            assert sum(file.row_count for file in files) == rows_expected
            assert max(file.bytes for file in files) < 3 * 64 * 1024


def test_files_are_laid_out_for_object_storage(objects: Storage) -> None:
    with opened(objects) as repository:
        for n in range(3):
            put(repository, customer("a", age=n), customer("b", age=n))
        compact(repository, EAGER)
        [entry, *_] = entries_of(repository)
        metadata = pq.read_metadata(repository.store.local_path(entry.files[0].path))
        group = metadata.row_group(0)
        columns = {group.column(i).path_in_schema: group.column(i) for i in range(7)}
        assert {c.compression for c in columns.values()} == {"UNCOMPRESSED"}  # so few rows
        assert all(c.has_offset_index and c.has_column_index for c in columns.values())
        assert entry.files[0].stats["age"][2] == 0
        assert [name for name, bloom in blooms(repository, entry).items() if bloom] == [
            "entity_key"
        ]
    with opened(objects, snapshot_bloom_fpp=0.0) as without:
        for n in range(3):
            put(without, customer("a", age=10 + n))
        compact(without, CompactionPolicy(min_entries=2, ratio=99))
        assert not any(blooms(without, entries_of(without)[0]).values())


def blooms(repository: ObjectRepository, entry: Entry) -> dict[str, bool]:
    """Which columns have a Bloom filter, as DuckDB sees it."""
    with closing(repository.duck.cursor()) as cursor:
        rows = cursor.execute(
            "SELECT path_in_schema, bloom_filter_offset IS NOT NULL FROM parquet_metadata(?)",
            [str(repository.store.local_path(entry.files[0].path))],
        ).fetchall()
    return dict(rows)


@pytest.mark.parametrize(("expected_bytes", "pages"), [(0, 3), (1 << 30, 1)])
def test_large_files_have_large_pages(tmp_path: Path, expected_bytes: int, pages: int) -> None:
    """Small files have pages of 20,000 rows, to prune by; large ones pages of megabytes."""
    settings = SnapshotSettings.of(OntologiaConfig())
    rows = pa.table({"entity_key": [f"k{i:06d}" for i in range(50_000)]})
    part = SnapshotPart(
        tmp_path / "part.parquet",
        rows.schema,
        identity=("entity_key",),
        settings=settings,
        expected_rows=rows.num_rows,
        expected_bytes=expected_bytes,
    )
    part.write(rows)
    encoded = part.close()
    column = pq.read_metadata(part.path).row_group(0).column(0)
    with part.path.open("rb") as file:
        file.seek(column.data_page_offset)
        chunk = file.read(column.total_compressed_size)
    assert chunk.count(ZSTD_FRAME) == pages
    assert pq.read_table(part.path).equals(rows)
    assert (encoded.rows, encoded.size) == (50_000, part.path.stat().st_size)
    assert encoded.key_range == {"entity_key": ["k000000", "k049999"]}


def test_pages_fit_into_the_readers_memory() -> None:
    assert SnapshotSettings.of(OntologiaConfig()).page_bytes == 2_000_000
    for limit, expected in (("64MB", MIB), ("512MiB", 4 * MIB), ("2GB", 8 * MIB)):
        config = OntologiaConfig(s3_duckdb_memory_limit=limit)
        assert SnapshotSettings.of(config).page_bytes == expected
    config = OntologiaConfig(s3_duckdb_memory_limit="1.5 GiB", snapshot_page_bytes=16 * MIB)
    assert SnapshotSettings.of(config).page_bytes == 12 * MIB


@pytest.mark.parametrize("objects", ["directory-v2"], indirect=True)
def test_a_merge_that_does_not_fit_says_what_to_do(
    objects: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starve(*_: object) -> None:
        raise duckdb.OutOfMemoryException("Out of Memory Error: no block\nlong advice")

    with opened(objects) as repository:
        for n in range(2):
            put(repository, customer("a", age=n))
        monkeypatch.setattr(build, "merge", starve)
        with pytest.raises(ConfigurationError, match=r"s3_duckdb_memory_limit .* no block$"):
            compact(repository, EAGER)
        assert not list(repository.store.list("meta/attempts/"))
        assert not list(repository.store.list("meta/compaction/"))


# -- reads meanwhile ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_reads_are_the_same_with_commits_and_compactions_in_random_order(
    objects: Storage, seed: int
) -> None:
    """Against a plain model, by a warm reader that caches and by fresh ones."""
    rng = random.Random(seed)
    model: list[tuple[int, str, int]] = []
    with opened(objects, checkpoint_interval=5) as writer, opened(objects) as reader:
        with opened(objects) as compactor:
            for step in range(28):
                match rng.choice(["put", "put", "put", "bulk", "compact", "other"]):
                    case "put" | "bulk" as how:
                        keys = rng.sample("abcdefgh", rng.randint(1, 3))
                        rows = [customer(key, age=step) for key in sorted(keys)]
                        put_ = rows_of(CUSTOMER, *rows)
                        if how == "bulk":
                            put_ = stream_of(CUSTOMER, rows)
                        result = commit(writer, put_)
                        assert result is not None
                        model += [(result.commit_id, row["entity_key"], step) for row in rows]
                    case "other":
                        commit(writer, rows_of(PRODUCT, product("p", float(step))))
                    case "compact":
                        policy = CompactionPolicy(rng.randint(2, 4), rng.choice([0.5, 1.5, 4]))
                        compact(compactor, policy)
                check_against(reader if step % 2 else writer, model, rng)
        compact(writer, EAGER)
        with opened(objects) as fresh:
            check_against(fresh, model, rng)
            assert fresh.index_warnings() == []


def check_against(
    repository: Repository, model: list[tuple[int, str, int]], rng: random.Random
) -> None:
    head = repository.head_commit_id()
    at = rng.randint(0, head + 1)

    def versions(window: ReadWindow) -> list[tuple[int, str, int]]:
        rows = repository.read(CUSTOMER, window).to_pylist()
        return [(r["commit_id"], r["entity_key"], r["age"]) for r in rows]

    def latest(upto: int) -> list[tuple[int, str, int]]:
        found = {key: (c, key, age) for c, key, age in model if c <= upto}
        return [found[key] for key in sorted(found)]

    assert versions(ReadWindow()) == latest(head)
    assert versions(ReadWindow(as_of=at)) == latest(at)
    assert versions(ReadWindow(history=True)) == model
    assert versions(ReadWindow(history=True, since=at)) == [v for v in model if v[0] > at]


@on_servers
def test_rfc0004_16_history_order_is_the_same_after_compaction(objects: Storage) -> None:
    """Several identities in one commit: by commit, then by identity."""
    with opened(objects) as repository:
        for n in range(3):
            put(repository, *(customer(key, age=n) for key in "cab"))
            commit(
                repository,
                rows_of(EMPLOYMENT, *(edge(k, "x", i, role=f"{n}") for k in "ba" for i in "21")),
            )
        windows = [ReadWindow(history=True), ReadWindow(history=True, since=2)]
        before = [
            repository.read(s, w).to_pylist() for s in (CUSTOMER, EMPLOYMENT) for w in windows
        ]
        compact(repository, EAGER)
        after = [repository.read(s, w).to_pylist() for s in (CUSTOMER, EMPLOYMENT) for w in windows]
        assert after == before
        order = [(r["commit_id"], r["entity_key"]) for r in after[0]]
        assert order == sorted(order)
        assert len(order) == 9


@on_servers
def test_rfc0004_12_a_snapshot_covers_the_head_commit(objects: Storage) -> None:
    """No warning after compaction, none after the next commit, and no row twice."""
    with opened(objects) as repository:
        for n in range(4):
            put(repository, customer("a", age=n))
        compact(repository, EAGER)
    with opened(objects) as fresh:
        assert fresh.index_warnings() == []
        assert fresh.read(CUSTOMER, ReadWindow(history=True)).num_rows == 4
        put(fresh, customer("a", age=9))
        fresh.flush()
        assert fresh.index_warnings() == []
        assert fresh.read(CUSTOMER, ReadWindow(history=True)).num_rows == 5
        assert fresh.storage_info()["last_index_warning"] is None


def test_reads_need_no_original_once_the_index_has_the_snapshot(objects: Storage) -> None:
    """What a later purge may delete: inspection, history and the next commit work without."""
    with opened(objects) as repository:
        for n in range(5):
            put(repository, customer("a", age=n), customer(f"k{n}"))
        before = seen(repository)
        originals = [f.path for e in entries_of(repository) for f in e.files]
        compact(repository, EAGER)
        repository.store.delete_many(originals)
    with opened(objects) as fresh:
        assert seen(fresh) == before
        assert put(fresh, customer("a", age=77), customer("new")).changes[0].inserted == 1
    with opened(objects) as without_index:
        without_index.store.delete_many(["meta/indices/entities/Customer.json"])
        assert without_index.read(CUSTOMER, ReadWindow(history=True)).num_rows == 12


# -- plans --------------------------------------------------------------------------------------


def test_a_plan_writes_nothing_and_says_what_would_happen(objects: Storage) -> None:
    with opened(objects) as repository:
        for n in range(5):
            put(repository, customer("a", age=n))
        commit(repository, rows_of(PRODUCT, product("p")))
        repository.flush()
        written = repository.store.meter.snapshot()
        plan = plan_compaction(repository, EAGER)
        counts = repository.store.meter.snapshot()
        assert {k: counts.get(k) for k in ("PUT", "PUT_IF")} == {
            k: written.get(k) for k in ("PUT", "PUT_IF")
        }
        by_name = {item.type_name: item for item in plan.types}
        [run] = by_name["Customer"].runs
        assert (run.min_commit_id, run.max_commit_id, run.rows, len(run.paths)) == (1, 5, 5, 5)
        assert run.bytes == sum(f.bytes for e in entries_of(repository) for f in e.files)
        assert run.expected_bytes > 0
        assert by_name["Customer"].entries_after == 1
        assert not by_name["Product"].work
        assert "1 of at least 2" in by_name["Product"].reason
        assert json.loads(json.dumps(plan.as_dict()))["total"]["rows"] == 5


def test_types_are_chosen_by_name(objects: Storage) -> None:
    with opened(objects) as repository:
        for n in range(3):
            commit(
                repository,
                rows_of(CUSTOMER, customer("a", age=n)),
                rows_of(PRODUCT, product("p", float(n))),
            )
        assert [p.type_name for p in plan_compaction(repository, EAGER, ["Product"]).types] == [
            "Product"
        ]
        with pytest.raises(ConfigurationError, match="did you mean Customer"):
            plan_compaction(repository, EAGER, ["Custmer"])
        compact(repository, EAGER, types=["Product"])
        assert len(entries_of(repository, PRODUCT)) == 1
        assert len(entries_of(repository)) == 3


def test_an_old_plan_leaves_alone_what_no_longer_stands(objects: Storage) -> None:
    with opened(objects) as repository:
        for n in range(3):
            put(repository, customer("a", age=n))
        plan = plan_compaction(repository, EAGER)
        compact(repository, EAGER)
        etag = repository.chain.read_head().etag
        report = compact(repository, plan)
        assert [run.outcome for run in report.runs] == ["superseded"]
        assert repository.chain.read_head().etag == etag


def test_progress_is_told(objects: Storage) -> None:
    told: list[CompactionProgress] = []
    with opened(objects) as repository:
        for n in range(3):
            put(repository, customer("a", age=n))
        compact(repository, EAGER, told.append)
    stages = list(dict.fromkeys(p.stage for p in told))
    assert stages == ["read", "merge", "prove", "upload", "publish"]
    assert max(p.done for p in told if p.stage == "merge") == 3
    assert {p.total for p in told} == {3}


def test_damage_stays_visible(objects: Storage) -> None:
    with opened(objects) as repository:
        for n in range(3):
            put(repository, customer("a", age=n))
        path = entries_of(repository)[1].files[0].path
        other = entries_of(repository)[2].files[0].path
        repository.store.put(path, repository.store.get(other).data)
        etag = repository.chain.read_head().etag
        with pytest.raises(IntegrityError, match="other content"):
            compact(repository, EAGER)
        assert repository.chain.read_head().etag == etag
        assert not list(repository.store.list("snapshots/"))


def test_a_session_compacts(objects: Storage) -> None:
    with Session(objects.uri) as session:
        for n in range(3):
            session.ensure(Customer(id="a", name="Ann", age=n))
            session.commit()
        policy = storage_engine.CompactionPolicy(min_entries=2)
        assert session.compact(types=["Customer"]).runs == ()  # not worth it by default
        [run] = session.compact(policy, types=[Customer]).runs
        assert (run.outcome, run.rows) == ("published", 3)
        session.ensure(Customer(id="a", name="Ann", age=9))
        assert session.commit() == 4
    with pytest.raises(ClosedError, match="compact"):
        session.compact()


@on_servers
def test_rfc0004_17_a_commit_before_the_publish_stays_and_reads_never_differ(
    objects: Storage,
) -> None:
    """Another process commits while the snapshot is being made, and reads at every stage."""
    with opened(objects) as compactor, opened(objects) as other:
        for n in range(4):
            put(other, customer("a", age=n), customer(f"k{n}"))
        other.flush()
        before = other.read(CUSTOMER, ReadWindow(history=True)).to_pylist()
        at_head = other.read(CUSTOMER, ReadWindow(as_of=4)).to_pylist()
        stages: list[str] = []

        def look(now: CompactionProgress) -> None:
            stages.append(now.stage)
            if now.stage == "publish":
                put(other, customer("late"))
                other.flush()
            assert other.read(CUSTOMER, ReadWindow(as_of=4)).to_pylist() == at_head

        [done] = compact(compactor, EAGER, look).runs
        assert done.outcome == "published"
        assert "publish" in stages
        spans = [(e.min_commit_id, e.max_commit_id) for e in entries_of(other)]
        assert spans == [(1, 4), (5, 5)]
        after = other.read(CUSTOMER, ReadWindow(history=True)).to_pylist()
        assert after[:-1] == before
        assert (after[-1]["commit_id"], after[-1]["entity_key"]) == (5, "late")
        assert other.head_commit_id() == 5


@on_servers
def test_rfc0004_17_a_lease_that_is_not_safe_aborts(
    objects: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(objects) as compactor, opened(objects) as other:
        for n in range(3):
            put(other, customer("a", age=n))
        other.flush()
        head = other.chain.read_head()
        clock = compactor.store.now

        def stall(*_: object) -> None:
            monkeypatch.setattr(compactor.store, "now", lambda: clock() + timedelta(hours=1))

        monkeypatch.setattr(run, "check_present", stall)
        with pytest.raises(LeaseExpiredError):
            compact(compactor, EAGER)
        assert other.chain.read_head().etag == head.etag
        assert len(entries_of(other)) == 3
        monkeypatch.undo()
        assert [r.outcome for r in compact(other, EAGER).runs] == ["published"]
