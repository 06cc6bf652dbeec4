"""Rows by their identities: never fewer than a plain comparison finds, however little is read."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine.commitlog.records import CommitFile
from storage_engine.config import OntologiaConfig
from storage_engine.errors import IntegrityError
from storage_engine.objectstore.memory import MemoryStore
from storage_engine.objectstore.open import open_store
from storage_engine.repository.object.read import key_lookup
from storage_engine.repository.object.read.bloom import BloomFilter, xxh64
from storage_engine.repository.object.read.key_lookup import Effort, WantedKeys, look_up
from tests.campaigns import examples

ODD = [
    "",
    "\x00",
    "a",
    "a\x00",
    "a\x00b",
    "A",
    "b",
    "é",
    "e\u0301",
    "\ud7ff",
    "\ue000",
    "\uffff",
    "\U00010000",  # less than U+FFFF in UTF-16, greater in UTF-8
    "\U0010ffff",
    "k" * 63,
    "k" * 64,
    "k" * 64 + "a",
    "k" * 64 + "z",
    "z" * 5000,  # statistics of such a value are left out
    "z" * 5001,
    "z" * 31,
    "z" * 32,
    "z" * 33,
    *(f"r{number:04}" for number in range(150)),
]
LAYOUTS: Sequence[dict[str, Any]] = (
    {"row_group_size": 16},
    {"row_group_size": 1000},
    {"row_group_size": 16, "write_statistics": False},
    {"row_group_size": 32, "blooms": True},
    {"row_group_size": 64, "blooms": True, "write_statistics": False, "sorted": True},
    {"row_group_size": 8, "sorted": True},
    {"row_group_size": 64, "use_dictionary": False, "blooms": True, "sorted": True},
)


def write(path: Path, rows: pa.Table, identity: Sequence[str], **layout: Any) -> None:
    """As some release, or another writer, would have laid it out."""
    blooms = {name: {"ndv": 64, "fpp": 0.01} for name in identity}
    options = dict(layout)
    if options.pop("sorted", False):
        rows = rows.sort_by([(name, "ascending") for name in identity])
    if options.pop("blooms", False):
        options["bloom_filter_options"] = blooms
    pq.write_table(rows, path, compression="none", **options)


def found(folder: Path, keys: pa.Table, columns: Sequence[str]) -> tuple[list[Any], Effort]:
    store = open_store(str(folder), OntologiaConfig())
    effort = Effort()
    try:
        size = (folder / "rows.parquet").stat().st_size
        tables = look_up(store, "rows.parquet", size, WantedKeys(keys), columns, effort)
        rows = [row for table in tables for row in table.to_pylist()]
    finally:
        store.close()
    return sorted(rows, key=str), effort


def as_bytes(identities: Sequence[Sequence[str]], names: Sequence[str]) -> pa.Table:
    columns = list(zip(*identities, strict=True)) or [() for _ in names]
    encoded = [pa.array([key.encode() for key in column], pa.binary()) for column in columns]
    return pa.table(dict(zip(names, encoded, strict=True)))


def check(folder: Path, draw: random.Random, names: Sequence[str]) -> int:
    """One file of random keys, looked up by random keys, beside a plain model."""
    pool = [tuple(draw.choice(ODD) for _ in names) for _ in range(draw.randint(0, 200))]
    stored = [dict(zip(names, key, strict=True), n=n) for n, key in enumerate(pool)]
    schema = pa.schema([*((name, pa.string()) for name in names), ("n", pa.int64())])
    layout = draw.choice(LAYOUTS)
    write(folder / "rows.parquet", pa.Table.from_pylist(stored, schema), names, **layout)
    strange = [tuple(draw.choice(ODD) for _ in names) for _ in range(draw.choice([0, 1, 5, 90]))]
    asked = strange + draw.sample(pool, min(len(pool), draw.choice([0, 1, 3, 90])))
    rows, effort = found(folder, as_bytes(asked, names), ["n", *names])
    wanted = set(asked)
    expected = [row for row in stored if tuple(row[name] for name in names) in wanted]
    said = sorted(({"n": row["n"], **row} for row in expected), key=str)
    assert rows == said, (layout, asked)
    return effort.row_groups_left_out


@pytest.mark.parametrize("names", [["entity_key"], ["left_key", "right_key", "instance_key"]])
def test_the_same_rows_as_a_plain_comparison(tmp_path: Path, names: list[str]) -> None:
    draw = random.Random(1)
    left_out = sum(check(tmp_path, draw, names) for _ in range(examples(60)))
    assert left_out > 0


@pytest.mark.parametrize("lie", [False, True])
def test_rows_that_differ_from_what_is_said_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: bool
) -> None:
    """As many columns are read as it takes; and one that says so too early is found out."""
    if lie:
        monkeypatch.setattr(key_lookup, "distinct_from", lambda a, _: pa.repeat(True, len(a)))
    draw = random.Random(2)
    names = ["b", "a", "at"]
    values: dict[str, list[Any]] = {
        "a": [None, 0, 1],
        "b": ["", "x" * 500, None],
        "at": [0.0, -0.0, None, 2.5],
    }
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("at", pa.float64())])
    spared = 0

    def differing() -> None:
        nonlocal spared
        stored: dict[str, Any]
        said: dict[str, Any]
        stored, said = (
            {key: {name: draw.choice(values[name]) for name in schema.names} for key in keys}
            for keys in (ODD, draw.sample(ODD, draw.choice([1, 30])))
        )
        if draw.random() < 0.5:
            said = {key: {**row, "a": 7} for key, row in said.items()}
        rows = pa.Table.from_pylist(list(stored.values()), schema)
        rows = rows.add_column(0, "entity_key", pa.array(list(stored)))
        write(tmp_path / "rows.parquet", rows, ["entity_key"], **draw.choice(LAYOUTS))
        table = pa.Table.from_pylist(list(said.values()), schema)
        keys = as_bytes([(key,) for key in said], ["entity_key"])
        wanted, effort, plain = WantedKeys(keys, table), Effort(), Effort()
        with closing(open_store(str(tmp_path), OntologiaConfig())) as store:
            size = (tmp_path / "rows.parquet").stat().st_size
            place = (store, "rows.parquet", size)
            tables = list(look_up(*place, wanted, ["entity_key", *names], effort))
            deque(look_up(*place, WantedKeys(keys), ["entity_key", *names], plain), maxlen=0)
        found = {r.pop("entity_key"): r for made in tables for r in made.to_pylist()}
        assert set(found) == set(said)
        same = {key for key in said if stored[key] == said[key]}
        assert {key for key in said if found[key] == said[key]} == same
        assert all(found[key] == stored[key] for key in same)
        assert effort.bytes_read <= plain.bytes_read
        spared += effort.bytes_read < plain.bytes_read

    monkeypatch.setattr(key_lookup, "SMALL_FILE", 0)
    if lie:
        with pytest.raises(AssertionError):
            deque((differing() for _ in range(200)), maxlen=0)
        return
    deque((differing() for _ in range(examples(40))), maxlen=0)
    assert spared > 0


def _too_narrow(right: Callable[..., Any]) -> Callable[..., Any]:
    def bounds(chunk: Any) -> Any:
        low, high = right(chunk)
        return low, high[:-1] if high else high

    return bounds


@pytest.mark.parametrize("defect", ["range", "order", "bloom", "hash"])
def test_what_leaves_out_too_much_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    """The comparison with the model is worth something: it fails once a range or filter lies."""
    if defect == "range":
        monkeypatch.setattr(key_lookup, "_bounds", _too_narrow(key_lookup._bounds))
    elif defect == "order":  # as another order of texts would have it
        utf16 = {"key": lambda key: key.decode().encode("utf-16-be")}
        monkeypatch.setattr(
            key_lookup,
            "bisect_left",
            lambda keys, low: sum(utf16["key"](k) < utf16["key"](low) for k in keys),
        )
    elif defect == "bloom":
        right = BloomFilter.may_hold
        monkeypatch.setattr(BloomFilter, "may_hold", lambda s, h: right(s, h) and h % 3 > 0)
    else:
        monkeypatch.setattr(key_lookup, "xxh64", lambda key: xxh64(key[:40]))
    draw = random.Random(1)
    with pytest.raises(AssertionError):
        deque((check(tmp_path, draw, ["entity_key"]) for _ in range(400)), maxlen=0)


def test_filters_of_others_say_nothing_and_ours_hold_every_value(tmp_path: Path) -> None:
    keys = [(key,) for key in ODD]
    rows = as_bytes(keys, ["entity_key"]).append_column("n", pa.array(range(len(keys))))
    write(tmp_path / "rows.parquet", rows, ["entity_key"], blooms=True)
    chunk = pq.read_metadata(tmp_path / "rows.parquet").row_group(0).column(0)
    at, size = chunk.bloom_filter_offset, chunk.bloom_filter_length
    data = (tmp_path / "rows.parquet").read_bytes()[at : at + size]
    bloom = BloomFilter.parse(data)
    assert bloom is not None
    assert all(bloom.may_hold(xxh64(key.encode())) for key in ODD)
    absent = [bloom.may_hold(xxh64(f"absent {number}".encode())) for number in range(200)]
    assert sum(absent) < 100
    assert xxh64(b"") == 0xEF46DB3751D8E999
    for damaged in (b"", b"\x15", data[:-1], data[:3] + b"\x2c" + data[4:], b"\x00" + data[1:]):
        assert BloomFilter.parse(damaged) is None


def test_only_what_can_hold_a_key_is_read(tmp_path: Path) -> None:
    rows = pa.table({"entity_key": [f"r{n:06}" for n in range(40_000)], "n": range(40_000)})
    rows = rows.append_column(
        "note", pa.array([f"{n * 7919 % 40_000} of many" for n in range(40_000)])
    )
    layout: dict[str, Any] = {"row_group_size": 4_000, "use_dictionary": False}
    columns = ["entity_key", "n", "note"]
    write(tmp_path / "rows.parquet", rows, ["entity_key"], **layout)
    size = (tmp_path / "rows.parquet").stat().st_size
    near, effort = found(tmp_path, as_bytes([("r012000",), ("r012001",)], ["entity_key"]), columns)
    assert [row["n"] for row in near] == [12_000, 12_001]
    assert (effort.row_groups, effort.row_groups_left_out) == (10, 9)
    assert effort.bytes_read < size / 5
    # In no order, ranges tell nothing: a filter does, and without one only the keys are read.
    mixed = rows.take(pa.array([n * 7919 % 40_000 for n in range(40_000)]))
    blooms = {"entity_key": {"ndv": 4_000, "fpp": 0.01}}
    asked = as_bytes([("r012000",), ("r012000x",)], ["entity_key"])
    costs = []
    for filters in (blooms, None):
        pq.write_table(
            mixed,
            tmp_path / "rows.parquet",
            compression="none",
            bloom_filter_options=filters,
            **layout,
        )
        one, effort = found(tmp_path, asked, columns)
        assert [row["n"] for row in one] == [12_000]
        costs.append(effort.bytes_read)
        assert (effort.row_groups_left_out > 5) == (filters is not None)
    assert costs[0] < costs[1] < size / 2


def test_files_by_the_ranges_in_the_log() -> None:
    def file(**bounds: Any) -> CommitFile:
        return CommitFile("relation", "R", "p", 1, 1, "", key_range=bounds)

    wanted = WantedKeys(as_bytes([("b", "1"), ("d", "9")], ["left_key", "right_key"]))
    assert wanted.in_file(file())
    assert wanted.in_file(file(left_key=["b", "b"]))
    assert wanted.in_file(file(left_key=["a", "b"], right_key=["1", "1"]))
    assert wanted.in_file(file(left_key=["d", None], right_key=[None, "9"]))
    assert not wanted.in_file(file(left_key=["b\x00", "c\U0010ffff"]))
    assert not wanted.in_file(file(left_key=["a", "c"], right_key=["2", "9"])), "not together"
    assert wanted.in_file(file(left_key=["\ud800", "b"])), "no text that can be stored: no bound"
    assert not WantedKeys(as_bytes([], ["left_key", "right_key"])).in_file(file())


def test_large_objects_are_read_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an object elsewhere; and one that is gone is named."""
    monkeypatch.setattr(key_lookup, "FETCH_WHOLE", 0)
    rows = pa.table({"entity_key": [f"r{n:06}" for n in range(20_000)], "n": range(20_000)})
    write(tmp_path / "rows.parquet", rows, ["entity_key"], row_group_size=1_000)
    data = (tmp_path / "rows.parquet").read_bytes()
    store = MemoryStore()
    store.put("rows.parquet", data)
    wanted = WantedKeys(as_bytes([("r000007",), ("r019999",)], ["entity_key"]))
    before = store.meter.snapshot()["bytes_read"]
    effort = Effort()
    tables = look_up(store, "rows.parquet", len(data), wanted, ["entity_key", "n"], effort)
    assert [n for table in tables for n in table.column("n").to_pylist()] == [7, 19_999]
    assert store.meter.snapshot()["bytes_read"] - before == effort.bytes_read < len(data) / 2
    assert effort.row_groups_left_out == 18
    with pytest.raises(IntegrityError, match=r"gone\.parquet was named by the log"):
        list(look_up(store, "gone.parquet", 100, wanted, ["n"], Effort()))
