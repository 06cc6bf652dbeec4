"""An index as a value: what a writer leaves is whole or recognised, what the chain adds fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest

from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import CommitFile, Entry, Head, Previous
from storage_engine.errors import IntegrityError
from storage_engine.index import resolve
from storage_engine.index.record import EntryEncoder, TypeIndex, sealed

KEY = "meta/indices/entities/Customer.json"
REF = ("entity", "Customer")


def manifest(commit_id: int) -> str:
    return f"commits/{commit_id}-x/manifest.json"


def entry(first: int, last: int | None = None, *, after: int = 0) -> Entry:
    path = f"commits/{first}.parquet" if last is None else f"snapshots/{first}-{last}.parquet"
    previous = Previous(after, manifest(after)) if after else None
    file = CommitFile(
        "entity",
        "Customer",
        path,
        row_count=1,
        schema_version_id=1,
        content_sha256="00",
        bytes=10,
        stats={"age": [1, 2, 0]},
        key_range={"entity_key": ["a", "b"]},
        previous=previous,
    )
    return Entry(first, last or first, (file,))


def index_of(*ranges: tuple[int, int]) -> TypeIndex:
    entries = made(ranges)
    newest = manifest(entries[-1].max_commit_id) if entries else None
    return TypeIndex("Customer", 9, entries, log_id="log", max_indexed_manifest=newest)


def made(ranges: Any) -> tuple[Entry, ...]:
    before = 0
    entries = []
    for first, last in ranges:
        entries.append(entry(first, last if last != first else None, after=before))
        before = last
    return tuple(entries)


def stored(index: TypeIndex) -> dict[str, Any]:
    return dict(json.loads(index.to_bytes("w", EntryEncoder("v2"))))


def parsed(document: dict[str, Any], *, seal: bool = True) -> TypeIndex:
    document = {name: value for name, value in document.items() if name != "sha256"}
    data = json.dumps(document).encode()
    return TypeIndex.parse(sealed(data) if seal else data, REF, key=KEY)


INDEX = index_of((1, 1), (2, 2), (3, 5), (7, 7))


def test_what_was_written_is_read() -> None:
    assert TypeIndex.parse(INDEX.to_bytes("w", EntryEncoder("v2")), REF, key=KEY) == INDEX


@pytest.mark.parametrize("missing", range(4))
def test_an_index_without_one_of_its_entries_proves_nothing(missing: int) -> None:
    """Sealed or not. Without its newest it is an older one, which names another manifest."""
    document = stored(INDEX)
    del document["entries"][missing]
    assert parsed(document, seal=False).max_indexed_manifest is None
    index = parsed(document)
    if missing < 3:
        assert index.max_indexed_manifest is None
        assert index.problem.startswith("has not all entries")
    else:
        assert index.upto(100)[1] == Previous(5, manifest(7)), "of which the log has no such"


@pytest.mark.parametrize("at", range(60, 400, 17))
def test_a_changed_byte_proves_nothing(at: int) -> None:
    data = bytearray(INDEX.to_bytes("w", EntryEncoder("v2")))
    data[at] = data[at] + 1 if data[at] < 126 else data[at] - 1
    with suppress(IntegrityError):
        assert TypeIndex.parse(bytes(data), REF, key=KEY).max_indexed_manifest is None


def test_entries_that_overlap_prove_nothing() -> None:
    document = stored(INDEX)
    document["entries"][1] = {**document["entries"][1], "max_commit_id": 4}
    assert parsed(document).max_indexed_manifest is None


def test_an_index_from_before_proves_nothing_and_is_no_damage() -> None:
    document = {n: v for n, v in stored(INDEX).items() if n != "max_indexed_manifest"}
    index = parsed(document, seal=False)
    assert (index.max_indexed_manifest, index.problem) == (None, "")
    assert index.entries == INDEX.entries


# -- wrong shapes -----------------------------------------------------------------------------

WRONG: list[Any] = [None, True, -1, 2**70, 1.5, "text", [], {}, [[[]]], {"a": {"b": {}}}]


def mutations() -> Iterator[tuple[str, dict[str, Any]]]:
    document = stored(INDEX)
    for name in document:
        for value in [..., *WRONG]:
            yield f"{name}={value}", _with(document, name, value)
    for name in document["entries"][1]:
        for value in [..., *WRONG]:
            changed = _with(document["entries"][1], name, value)
            entries = [document["entries"][0], changed, *document["entries"][2:]]
            yield f"entries.{name}={value}", {**document, "entries": entries}
    for value in WRONG:
        yield f"entries[1]={value}", {**document, "entries": [document["entries"][0], value]}


def _with(document: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    if value is ...:
        return {n: v for n, v in document.items() if n != name}
    return {**document, name: value}


@pytest.mark.parametrize("seal", [True, False], ids=["sealed", "unsealed"])
def test_a_wrong_shape_is_refused_by_name_or_proves_nothing(seal: bool) -> None:
    refused: list[str] = []
    for label, document in mutations():
        try:
            index = parsed(document, seal=seal)
        except IntegrityError as error:
            refused.append(str(error))
            continue
        assert seal or index.max_indexed_manifest is None, label
        assert isinstance(index.max_indexed_commit, int), label
        assert index.to_bytes("w", EntryEncoder("v2")), label
        for item in index.entries:
            assert 1 <= item.min_commit_id <= item.max_commit_id, label
            assert item.files, label
    assert len(refused) > 100
    assert all(message.startswith(f"{KEY} is not a valid index: ") for message in refused)


# -- what the chain adds ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indexed", "missing", "expected"),
    [
        ([], [(1, 1), (3, 3)], [(1, 1), (3, 3)]),
        ([(1, 1)], [(3, 3)], [(1, 1), (3, 3)]),
        ([(1, 4)], [(6, 6)], [(1, 4), (6, 6)]),
        # a snapshot in the checkpoint takes the place of the entries that it was made of
        ([(1, 1), (2, 2)], [(1, 5)], [(1, 5)]),
        ([(1, 1), (2, 2)], [(1, 5), (7, 7)], [(1, 5), (7, 7)]),
        ([(1, 3), (4, 4)], [(1, 6)], [(1, 6)]),
        ([(1, 1), (2, 2)], [(2, 5)], [(1, 1), (2, 5)]),
        # one that cuts an entry in two is none that this index was made of
        ([(1, 3), (4, 6)], [(5, 8)], None),
        ([(1, 1)], [], None),
    ],
)
def test_missing_entries_neither_overlap_nor_get_lost(
    indexed: list[tuple[int, int]],
    missing: list[tuple[int, int]],
    expected: list[tuple[int, int]] | None,
) -> None:
    index = index_of(*indexed)
    before = max([last for _, last in indexed if missing and last < missing[0][0]], default=0)
    added = [
        entry(first, last if last != first else None, after=before if number == 0 else 1)
        for number, (first, last) in enumerate(missing)
    ]
    assert ranges(_joined(index, added)) == expected


def test_what_does_not_follow_is_not_joined() -> None:
    """An entry between them is missing, or the commit before is another history's."""
    index = index_of((1, 1), (2, 2))
    assert _joined(index, [entry(5, after=4)]) is None
    strange = entry(3)
    link = Previous(2, "commits/2-other/manifest.json")
    file = CommitFile("entity", "Customer", "commits/3.parquet", 1, 1, "", previous=link)
    assert _joined(index, [Entry(strange.min_commit_id, 3, (file,))]) is None
    assert _joined(index, [entry(3, after=2)]) is not None


def _joined(index: TypeIndex, missing: list[Entry]) -> tuple[Entry, ...] | None:
    nobody = cast("Chain", None)  # is asked only where an entry does not say what was before it
    head = cast("Head", None)
    return resolve._joined(nobody, head, index, index.entries, missing)


def ranges(entries: tuple[Entry, ...] | None) -> list[tuple[int, int]] | None:
    return None if entries is None else [(e.min_commit_id, e.max_commit_id) for e in entries]
