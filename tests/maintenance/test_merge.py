"""Merging itself, on files in every order and in little memory; and what its proof finds.

Storages around it are in `test_compaction.py`; crashes in `test_compaction_crashes.py`.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine.errors import IntegrityError
from storage_engine.maintenance.compaction import inputs as reading
from storage_engine.maintenance.compaction import merge as merging
from storage_engine.maintenance.compaction import workspace
from storage_engine.maintenance.compaction.inputs import Inputs, read_input
from storage_engine.maintenance.compaction.merge import IDENTITY, MergedFile, MergeOrder, merge
from storage_engine.maintenance.compaction.proof import prove
from storage_engine.maintenance.compaction.sorted_runs import (
    FileRun,
    HeldRun,
    RowOrder,
    RunMaker,
    SpilledRun,
    merged,
)
from storage_engine.maintenance.compaction.workspace import Workspace, open_workspace
from storage_engine.model.columns import EngineVersion
from storage_engine.repository.object.write.parquet import SnapshotPart, SnapshotSettings

Row = dict[str, Any]

ODD = ["", "\0", "a", "a\0", "a\0b", "A", "Z", "ä", "z", "ß", "\u0301", "\uffff", "\U0001f600", "'"]
SETTINGS = SnapshotSettings(
    part_bytes=1 << 14, row_group_rows=1000, page_bytes=1 << 16, bloom_fpp=0.01
)
TINY = 256 * 1000
ENOUGH = 64 * 1000**2

SCHEMAS = {
    kind: pa.schema(
        [
            pa.field("commit_id", pa.int64(), nullable=False),
            pa.field(f"{kind}_type", pa.string(), nullable=False),
            *(pa.field(name, pa.string(), nullable=False) for name in IDENTITY[kind]),
            pa.field("value", pa.string()),
            pa.field("real", pa.float64()),
        ]
    )
    for kind in IDENTITY
}


def table(kind: str, rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist([{f"{kind}_type": "T", **row} for row in rows], SCHEMAS[kind])


def stored(folder: Path, tables: Sequence[pa.Table], *, commit_ids: bool = True) -> Inputs:
    """Files of one commit each; without `commit_ids` the file does not say which."""
    files = []
    for number, rows in enumerate(tables):
        path = folder / f"given-{number:04d}.parquet"
        given = None if commit_ids else rows.column("commit_id")[0].as_py()
        written = rows if commit_ids else rows.drop_columns(["commit_id"])
        pq.write_table(written, path, row_group_size=700)
        # Every other one as a small file is: decoded at once.
        source = path.read_bytes() if number % 2 else path
        files.append(read_input(source, path.name, given)[0])
    return Inputs(tuple(files), tables[0].schema)


def order(kind: str, engine_version: EngineVersion = "v2") -> MergeOrder:
    return MergeOrder(kind, engine_version, SETTINGS, 1000, 1 << 20, mark="test")


@contextmanager
def at_work(memory_bytes: int = TINY) -> Iterator[Workspace]:
    """Little memory for the merge; DuckDB needs some more to begin with."""
    with open_workspace("256MB") as made:
        made.memory_bytes = memory_bytes
        yield made


def proven(made: Workspace, inputs: Inputs, how: MergeOrder) -> list[MergedFile]:
    outputs, digest = merge(made, inputs, how, lambda _: None)
    by_role: dict[str | None, list[Path]] = {}
    for output in outputs:
        by_role.setdefault(output.role, []).append(output.path)
    prove(
        made,
        digest,
        by_role,
        columns=inputs.varying.names,
        identity=IDENTITY[how.kind],
        constants=inputs.constants,
    )
    return outputs


def content(outputs: Sequence[MergedFile], role: str | None) -> list[Row]:
    tables = [pq.read_table(output.path) for output in outputs if output.role == role]
    return pa.concat_tables(tables).to_pylist() if tables else []


def in_bytes(row: Row, keys: Sequence[str]) -> tuple[Any, ...]:
    values = (row[key] for key in keys)
    return tuple(v.encode() if isinstance(v, str) else v for v in values)


def commits(kind: str, rng: random.Random, *, sizes: Sequence[int]) -> list[pa.Table]:
    """Rows of one commit each: identities once, some of them as before, sorted or not."""
    tables = []
    for commit_id, size in enumerate(sizes, start=1):
        keys = {
            tuple(rng.choice(ODD) + str(rng.randrange(size * 2 or 1)) for _ in IDENTITY[kind])
            for _ in range(size)
        } | {tuple(rng.choice(ODD) for _ in IDENTITY[kind]) for _ in range(min(size, 5))}
        ordered = list(keys)
        if rng.random() < 0.6:
            ordered.sort(key=lambda key: tuple(part.encode() for part in key))
        values = [None, "", "x" * rng.randrange(60), "\0"]
        rows = [
            {
                "commit_id": commit_id,
                **dict(zip(IDENTITY[kind], key, strict=True)),
                "value": rng.choice(values),
                "real": rng.choice([None, -0.0, math.inf, 1e-300, 0.1]),
            }
            for key in ordered
        ]
        tables.append(table(kind, rows))
    return tables


@pytest.mark.parametrize("memory_bytes", [TINY, ENOUGH])
@pytest.mark.parametrize("kind", ["entity", "relation"])
@pytest.mark.parametrize("seed", range(2))
def test_all_rows_come_out_in_order_each_in_its_role(
    tmp_path: Path, kind: str, seed: int, memory_bytes: int
) -> None:
    """By a plain model; files of all sizes, of commits that are in the file or not."""
    rng = random.Random(f"{kind}{seed}")
    sizes = [0, 1, 3000, 20, 20, 4000, 1, 20, 2500, 0, 7]
    tables = commits(kind, rng, sizes=sizes)
    keys = [*IDENTITY[kind], "commit_id"]
    rows = [row for each in tables for row in each.to_pylist()]
    rows.sort(key=lambda row: in_bytes(row, keys))
    newest = {in_bytes(row, IDENTITY[kind]): row["commit_id"] for row in rows}
    held = [t for t in tables if t.num_rows] if seed else tables
    with at_work(memory_bytes) as made:
        outputs = proven(made, stored(tmp_path, held, commit_ids=not seed), order(kind))
        is_newest = [newest[in_bytes(row, IDENTITY[kind])] == row["commit_id"] for row in rows]
        for role, wanted in (("current", True), ("superseded", False)):
            expected = [row for row, new in zip(rows, is_newest, strict=True) if new is wanted]
            assert content(outputs, role) == expected
        parts = [output for output in outputs if output.role == "current"]
        assert len(parts) > 1  # of the target size, and no identity is in two of them


def test_v1_goes_by_commit_first(tmp_path: Path) -> None:
    tables = commits("entity", random.Random(5), sizes=[30, 2000, 4, 4, 1500])
    rows = [row for each in tables for row in each.to_pylist()]
    rows.sort(key=lambda row: in_bytes(row, ["commit_id", "entity_key"]))
    with at_work() as made:
        [whole] = proven(made, stored(tmp_path, tables), order("entity", "v1"))
        assert content([whole], None) == rows


def test_a_file_of_several_commits_in_any_order_is_merged(tmp_path: Path) -> None:
    """Newer rows before older ones, and what is superseded after what is current."""
    rows = [{"commit_id": c, "entity_key": k, "value": f"{c}{k}"} for c in (3, 1, 2) for k in "ba"]
    with at_work() as made:
        outputs = proven(
            made, stored(tmp_path, [table("entity", rows), table("entity", [])]), order("entity")
        )
        assert [r["value"] for r in content(outputs, "current")] == ["3a", "3b"]
        assert [r["value"] for r in content(outputs, "superseded")] == ["1a", "2a", "1b", "2b"]


def test_one_huge_row_among_small_ones(tmp_path: Path) -> None:
    """Far more than the limit: it is taken alone."""
    rows = [{"commit_id": 1, "entity_key": f"k{n:04d}", "value": "x"} for n in range(3000)]
    rows[1500]["value"] = "y" * (8 << 20)
    late = {"commit_id": 2, "entity_key": "k1500", "value": "z" * (4 << 20)}
    with at_work(1000**2) as made:
        inputs = stored(tmp_path, [table("entity", rows), table("entity", [late])])
        outputs = proven(made, inputs, order("entity"))
        assert sum(output.part.rows for output in outputs) == 3001
        assert [len(row["value"]) for row in content(outputs, "superseded")] == [8 << 20]


def test_every_kind_of_column_has_the_same_digest_in_memory_and_in_files(tmp_path: Path) -> None:
    moment = datetime(2024, 5, 1, 12, 0, 0, 123456, UTC)
    columns: dict[str, pa.Array] = {
        "commit_id": pa.array([1, 1, 1]),
        "entity_key": pa.array(["a", "b", "c"]),
        "nothing": pa.array([None, None, None], pa.string()),
        "real": pa.array([math.nan, -0.0, None]),
        "flag": pa.array([True, None, False]),
        "moment": pa.array([moment, None, moment], pa.timestamp("us", tz="UTC")),
        "day": pa.array([date(1, 1, 1), date(9999, 12, 31), None]),
        "hour": pa.array([time(23, 59, 59, 999999), time(0), None], pa.time64("us")),
        "raw": pa.array([b"", b"\0\xff", None], pa.binary()),
        "small": pa.array([Decimal("1.5"), Decimal("-9.9"), None], pa.decimal128(2, 1)),
        "wide": pa.array([Decimal(10**37), None, Decimal(-1)], pa.decimal128(38, 0)),
        "json": pa.array(['{"a":[1,{"b":null}]}', "[]", None], pa.string()),
    }
    rows = pa.table(columns)
    with at_work() as made:
        [output] = proven(made, stored(tmp_path, [rows]), order("entity"))
        assert str(pq.read_table(output.path).to_pylist()) == str(rows.to_pylist())


# -- planted defects ----------------------------------------------------------------------------

Wrong = Callable[[pa.Table], pa.Table]


def _lost(rows: pa.Table) -> pa.Table:
    return rows.slice(1)


def _doubled(rows: pa.Table) -> pa.Table:
    return pa.concat_tables([rows.slice(0, 1), rows])


def _changed(rows: pa.Table) -> pa.Table:
    values = [*rows.column("value").to_pylist()[:-1], "other"]
    return rows.set_column(rows.schema.get_field_index("value"), "value", pa.array(values))


def _swapped(rows: pa.Table) -> pa.Table:
    """Two values change places: each of them is still there."""
    values = rows.column("value").to_pylist()
    values[0], values[-1] = values[-1], values[0]
    return rows.set_column(rows.schema.get_field_index("value"), "value", pa.array(values))


def _in_sorting(wrong: Wrong, patch: pytest.MonkeyPatch) -> None:
    right = RowOrder.of
    patch.setattr(RowOrder, "of", lambda self, rows: wrong(right(self, rows)))


def _in_spilling(wrong: Wrong, patch: pytest.MonkeyPatch) -> None:
    right = SpilledRun.blocks

    def blocks(self: SpilledRun, size: int) -> Iterator[pa.Table]:
        yield from (wrong(block) for block in right(self, size))

    patch.setattr(SpilledRun, "blocks", blocks)


def _in_merging(wrong: Wrong, patch: pytest.MonkeyPatch) -> None:
    right = merged
    patch.setattr(merging, "merged", lambda *args: (wrong(rows) for rows in right(*args)))


def _in_encoding(wrong: Wrong, patch: pytest.MonkeyPatch) -> None:
    right = SnapshotPart.write
    # A full part may be given no row more.
    patch.setattr(
        SnapshotPart, "write", lambda self, rows: right(self, wrong(rows) if len(rows) else rows)
    )


@pytest.mark.parametrize("where", [_in_sorting, _in_spilling, _in_merging, _in_encoding])
@pytest.mark.parametrize("wrong", [_lost, _doubled, _changed, _swapped])
def test_a_row_that_is_lost_doubled_or_changed_anywhere_is_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Callable[[Wrong, pytest.MonkeyPatch], None],
    wrong: Wrong,
) -> None:
    """In runs in no order that do not stay in memory: so rows take every step there is."""
    rng = random.Random(3)
    keys = [f"k{n:05d}" for n in range(3000)]
    rng.shuffle(keys)
    tables = [
        table(
            "entity",
            [{"commit_id": c, "entity_key": key, "value": f"{c}{key}"} for key in keys[c::2]],
        )
        for c in (1, 2)
    ]
    with at_work() as made:
        where(wrong, monkeypatch)
        with pytest.raises(IntegrityError, match="compaction is refused: the rows of the inputs"):
            proven(made, stored(tmp_path, tables), order("entity"))


@pytest.mark.parametrize(
    "split",
    [
        lambda newest, older: (older, newest),
        lambda newest, older: (pa.concat_tables([newest, older]), older.slice(0, 0)),
        lambda newest, older: (newest.slice(0, 0), pa.concat_tables([newest, older])),
        lambda newest, older: (newest.slice(1), pa.concat_tables([newest.slice(0, 1), older])),
    ],
    ids=["swapped", "all current", "none current", "one current row is missing"],
)
def test_rows_in_the_wrong_role_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: Callable[..., Any]
) -> None:
    right = merging.split
    monkeypatch.setattr(merging, "split", lambda *args: (split(*pair) for pair in right(*args)))
    tables = [
        table("entity", [{"commit_id": c, "entity_key": k, "value": k} for k in "abc"])
        for c in (1, 2)
    ]
    with at_work() as made, pytest.raises(IntegrityError, match="the newest rows by identity"):
        proven(made, stored(tmp_path, tables), order("entity"))


def test_what_all_rows_share_is_not_sorted_but_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MANY_ROWS", 1)
    rows = [{"commit_id": 1, "entity_key": key} for key in "ab"]
    inputs = stored(tmp_path, [table("entity", rows), table("entity", [])])
    assert inputs.constants == {"entity_type": "T"}
    assert "entity_type" not in inputs.varying.names
    other = [{**rows[0], "entity_type": "U"}, rows[1]]
    mixed = stored(tmp_path, [table("entity", other), table("entity", rows)])
    assert mixed.constants == {}
    with at_work() as made:
        outputs = proven(made, inputs, order("entity"))
        assert [row["entity_type"] for row in content(outputs, "current")] == ["T", "T"]
    right = merging.RoleWriter._whole

    def wrong(self: Any, given: pa.Table) -> pa.Table:
        whole = right(self, given)
        at = whole.schema.get_field_index("entity_type")
        return whole.set_column(
            at, whole.schema.field(at), pa.array(["U"] * whole.num_rows, pa.string())
        )

    monkeypatch.setattr(merging.RoleWriter, "_whole", wrong)
    with at_work() as made, pytest.raises(IntegrityError, match="do not have entity_type 'T'"):
        proven(made, inputs, order("entity"))


def test_hashes_of_identities_that_collide_refuse_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = commits("entity", random.Random(1), sizes=[5, 5])
    with at_work() as made:
        with made.cursor() as cursor:  # the proof looks again, at the identities themselves
            cursor.execute("CREATE MACRO hash(a, b := 0, c := 0, d := 0, e := 0) AS 1::UBIGINT")
            assert cursor.execute("SELECT hash('a'), hash('b', 1)").fetchall() == [(1, 1)]
        proven(made, stored(tmp_path, tables), order("entity"))


# -- order and interruptions --------------------------------------------------------------------


def test_runs_are_kept_in_memory_while_there_is_room_and_streamed_when_in_order(
    tmp_path: Path,
) -> None:
    keys = [f"k{n:05d}" for n in range(4000)]
    ascending = [{"commit_id": 1, "entity_key": key, "value": "v" * 50} for key in keys]
    shuffled = [{**row, "commit_id": 2} for row in ascending]
    random.Random(2).shuffle(shuffled)
    tables = [table("entity", ascending), table("entity", []), table("entity", shuffled)]
    inputs = stored(tmp_path, tables)
    by = RowOrder(("entity_key", "commit_id"))
    kinds: dict[int, list[type]] = {}
    seen: list[int] = []
    for memory_bytes in (TINY, ENOUGH):
        with at_work(memory_bytes) as made:
            maker = RunMaker(made, inputs.schema, by, lambda rows: seen.append(rows.num_rows))
            runs = maker.runs(inputs.files, lambda: None)
            kinds[memory_bytes] = [type(run) for run in runs]
            assert sum(rows.num_rows for rows in merged(made, runs, by)) == 8000
    assert sum(seen) == 2 * 8000  # each row once
    assert kinds[ENOUGH] == [HeldRun]
    assert kinds[TINY][0] is FileRun
    assert set(kinds[TINY][1:]) == {HeldRun, SpilledRun}


def test_an_interrupted_merge_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    tables = commits("entity", random.Random(4), sizes=[3000, 3000])
    inputs = stored(tmp_path, tables)

    def interrupt(rows: int) -> None:
        if rows:
            raise KeyboardInterrupt

    with at_work() as made, pytest.raises(KeyboardInterrupt):
        merge(made, inputs, order("entity"), interrupt)
    assert not made.folder.exists()
    assert not [t for t in threading.enumerate() if t.name.startswith("onto-merge_")]


def test_work_ahead_comes_in_order_and_its_failure_is_raised() -> None:
    with at_work() as made:
        gate = threading.Event()

        def slow() -> int:
            gate.wait(60)
            return 0

        def quick() -> int:
            gate.set()  # in another thread, while the first one waits
            return 1

        assert list(made.ahead([slow, quick])) == [0, 1]
        with pytest.raises(ZeroDivisionError):
            list(made.ahead([lambda: 1, lambda: 1 // 0]))
    assert workspace.THREADS > 1
