"""What changed: between two commits, and as a feed that can be followed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson
import pyarrow as pa

from storage_engine.model.spec import TypeSpec
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.protocol import ReadWindow, Repository

Change = dict[str, Any]


class Changes(list[Change]):
    """A page of the change feed. `cursor` is where the next page begins; keep it and go on from
    there, in another process if need be. An empty page: there is nothing more yet."""

    def __init__(self, page: Iterable[Change], cursor: str) -> None:
        super().__init__(page)
        self.cursor = cursor


@dataclass(frozen=True, order=True)
class FeedCursor:
    """All changes up to commit `commit_id` are behind it, and of the next one those of the types
    before (kind, name) and the first `rows` of that type."""

    commit_id: int
    kind: str = ""
    name: str = ""
    rows: int = 0

    @classmethod
    def parse(cls, since: int | str) -> Self:
        if isinstance(since, int) and not isinstance(since, bool):
            return cls(max(since, 0))
        try:
            commit_id, *rest = str(since).split("/")
            if not rest:
                return cls(max(int(commit_id), 0))
            kind, name, rows = rest
            return cls(int(commit_id), kind, name, int(rows))
        except ValueError:
            raise ValueError(
                f"{since!r} is not a cursor: use a commit id, or the `cursor` of an earlier page"
            ) from None

    def __str__(self) -> str:
        if not self.kind:
            return str(self.commit_id)
        return f"{self.commit_id}/{self.kind}/{self.name}/{self.rows}"


def changes(repository: Repository, since: int | str, limit: int) -> Changes:
    """The oldest changes after `since`, by commit, type and identity."""
    if limit < 1:
        raise ValueError(f"limit takes a number from 1 on, not {limit}")
    start = FeedCursor.parse(since)
    head = repository.head_commit_id()
    placed: list[tuple[tuple[int, str, str, int], TypeSpec, Change]] = []
    for spec in repository.known_types():
        placed += _changes_of(repository, spec, start, head, limit)
    placed.sort(key=lambda item: item[0])
    page = placed[:limit]
    shown = _with_operations(repository, [(spec, change) for _, spec, change in page], start)
    if len(page) < limit or not page:
        return Changes(shown, str(FeedCursor(max(head, start.commit_id))))
    commit_id, kind, name, place = page[-1][0]
    return Changes(shown, str(FeedCursor(commit_id - 1, kind, name, place + 1)))


def _changes_of(
    repository: Repository, spec: TypeSpec, start: FeedCursor, head: int, limit: int
) -> list[tuple[tuple[int, str, str, int], TypeSpec, Change]]:
    """The first `limit` changes of one type after the cursor, each with its place."""
    since, skipped = start.commit_id, 0
    if start.kind:
        here = (start.kind, start.name)
        if spec.ref < here:
            since += 1
        elif spec.ref == here:
            skipped = start.rows
    if since >= head:
        return []
    asked = QuerySpec(spec, when=When(history=True, since=since), limit=limit, offset=skipped)
    rows = repository.executor(head).rows(asked)
    table = pa.Table.from_batches(rows.batches, schema=rows.schema)
    placed = []
    commit, place = start.commit_id + 1, skipped
    for change in _described(spec, table.to_pylist()):
        if change["commit_id"] != commit:
            commit, place = change["commit_id"], 0
        placed.append(((commit, *spec.ref, place), spec, change))
        place += 1
    return placed


def _with_operations(
    repository: Repository, page: Sequence[tuple[TypeSpec, Change]], start: FeedCursor
) -> list[Change]:
    """A change is an update when an earlier commit has its identity, else an insert. `start` is
    where the page begins."""
    by_type: dict[tuple[str, str], list[tuple[TypeSpec, Change]]] = {}
    for spec, change in page:
        by_type.setdefault(spec.ref, []).append((spec, change))
    for items in by_type.values():
        spec = items[0][0]
        first = items[0][1]["commit_id"]
        now = [change for _, change in items if change["commit_id"] == first]
        later = [change for _, change in items if change["commit_id"] > first]
        stored = _stored(repository, spec, first - 1, [*now, *later])
        _mark(spec, now, stored)
        if (start.commit_id + 1, start.kind, start.name) == (first, *spec.ref):
            # The page begins within a commit, of which an earlier page has had a part.
            stored |= _stored(repository, spec, first, later)
        _mark(spec, later, stored)
    return [change for _, change in page]


def _mark(spec: TypeSpec, page: Iterable[Change], stored: set[tuple[str, ...]]) -> None:
    for change in page:
        identity = _identity(spec, change)
        change["operation"] = "update" if identity in stored else "insert"
        stored.add(identity)


def _stored(
    repository: Repository, spec: TypeSpec, commit_id: int, page: Sequence[Change]
) -> set[tuple[str, ...]]:
    """The identities of these changes that were stored as of a commit."""
    identities = sorted({_identity(spec, change) for change in page})
    if not identities:
        return set()
    keys = pa.table(
        [pa.array(column, pa.string()) for column in zip(*identities, strict=True)],
        names=list(spec.identity),
    )
    rows = repository.read(spec, ReadWindow(as_of=commit_id), keys=keys)
    columns = [rows.column(name).to_pylist() for name in spec.identity]
    return set(zip(*columns, strict=True))


def diff(repository: Repository, before: int, after: int) -> list[Change]:
    """What differs between two commits, by type and identity.

    A row that was changed and changed back does not differ.
    """
    if before > after:
        raise ValueError(f"diff goes from the older commit to the newer: diff({after}, {before})")
    differences: list[Change] = []
    for spec in repository.known_types():
        differences += _differences(repository, spec, before, after)
    return differences


def _differences(repository: Repository, spec: TypeSpec, before: int, after: int) -> list[Change]:
    changed = repository.read(spec, ReadWindow(as_of=after, since=before))
    if not changed.num_rows:
        return []
    keys = changed.select(list(spec.identity))
    rows = repository.read(spec, ReadWindow(as_of=before), keys=keys).to_pylist()
    earlier = {
        _identity(spec, change): (row, change["fields"])
        for row, change in zip(rows, _described(spec, rows), strict=True)
    }
    rows = changed.to_pylist()
    differences = []
    for row, change in zip(rows, _described(spec, rows), strict=True):
        new = change.pop("fields")
        stored, old = earlier.get(_identity(spec, change), (None, None))
        # As stored: in JSON 1, 1.0 and true are three values, which Python takes for one.
        names = [name for name in new if stored is None or stored[name] != row[name]]
        if stored is not None and not names:
            continue
        change["operation"] = "insert" if stored is None else "update"
        change["before"] = {name: old[name] for name in names} if old is not None else None
        change["after"] = {name: new[name] for name in names}
        differences.append(change)
    return differences


def _described(spec: TypeSpec, rows: Iterable[Mapping[str, Any]]) -> Iterable[Change]:
    """Rows as commit, type, identity and fields; nested fields as they are in JSON."""
    nested = {field.name for field in spec.fields if field.storage == "json"}
    for row in rows:
        change = {"commit_id": row["commit_id"], "kind": spec.kind, "type_name": spec.name}
        names = ("key",) if spec.kind == "entity" else spec.identity
        change |= {name: row[column] for name, column in zip(names, spec.identity, strict=True)}
        change["fields"] = {
            field.name: orjson.loads(row[field.name])
            if field.name in nested and row[field.name] is not None
            else row[field.name]
            for field in spec.fields
        }
        yield change


def _identity(spec: TypeSpec, change: Change) -> tuple[str, ...]:
    names = ("key",) if spec.kind == "entity" else spec.identity
    return tuple(change[name] for name in names)
