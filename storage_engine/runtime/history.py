"""What changed: between two commits, and as a feed that can be followed.

Both go across migrations: rows of older schema versions are brought up to the present one, and the
commit of a migration is a change only where its rows say something else than the old ones, brought
up. Where nothing leads up from a version, an entry says so (`not_upgraded`) in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.errors import MissingUpgraderError
from storage_engine.model.spec import TypeSpec
from storage_engine.query.spec import When
from storage_engine.repository.protocol import ReadWindow, Repository, TypeRef
from storage_engine.runtime.stage_rows import Change, TypeLine, described, differing
from storage_engine.schema.lineage import Stage, lives
from storage_engine.schema.upgraders import Upgrader, UpgraderKey


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


_END = 2**62  # after all rows of a commit


class _Placed(NamedTuple):
    """A change with its place in the feed: by the name that its type had when it was written, so
    that a cursor means the same after a rename."""

    place: tuple[int, str, str, int]
    line: TypeLine
    stage: Stage
    change: Change


def type_lines(
    repository: Repository,
    declared: Mapping[TypeRef, TypeSpec],
    upgraders: Mapping[UpgraderKey, Upgrader],
) -> list[TypeLine]:
    """All types that a storage has or had."""
    return [
        TypeLine(repository, line, upgraders, declared.get(line.last.ref))
        for line in lives(repository.type_histories())
    ]


def changes(
    repository: Repository,
    since: int | str,
    limit: int,
    declared: Mapping[TypeRef, TypeSpec],
    upgraders: Mapping[UpgraderKey, Upgrader],
) -> Changes:
    """The oldest changes after `since`, by commit, type and identity."""
    if limit < 1:
        raise ValueError(f"limit takes a number from 1 on, not {limit}")
    start = FeedCursor.parse(_place_on_chain(repository, since))
    head = repository.head_commit_id()
    if start.commit_id >= head:
        return Changes([], _named(repository, start))
    lines = type_lines(repository, declared, upgraders)
    placed: list[_Placed] = []
    for line in lines:
        for stage in line.line.between(start.commit_id, head):
            placed += _written(line, stage, start, head, limit)
        placed += _ended(line, start, head)
    placed.sort(key=_place)
    for line, stage in _migrations(lines, start, head):
        # To tell what a migration changed, all its rows are looked at: only if a page gets there.
        if len(placed) >= limit and placed[limit - 1].place[0] < stage.since:
            break
        placed += islice(_migrated(line, stage, start), limit)
        placed.sort(key=_place)
    page = placed[:limit]
    _tell_operations(page, start)
    shown = [item.change for item in page]
    if len(page) < limit:
        return Changes(shown, _named(repository, FeedCursor(head)))
    commit_id, kind, name, place = page[-1].place
    return Changes(shown, _named(repository, FeedCursor(commit_id - 1, kind, name, place + 1)))


def _named(repository: Repository, cursor: FeedCursor) -> str:
    """The cursor as a text; that of a branch names it, by its incarnation."""
    chain = _incarnation(repository)
    return f"{chain}:{cursor}" if chain else str(cursor)


def _place_on_chain(repository: Repository, since: int | str) -> int | str:
    """The place that a cursor names, which must be of the chain that is read."""
    if not isinstance(since, str):
        return since
    chain, _, place = since.rpartition(":")
    if chain != _incarnation(repository) and (chain or "/" in place):
        raise ValueError(
            f"{since!r} is a cursor of another branch than {repository.branch!r}: begin anew, "
            "with a commit id"
        )
    return place


def _incarnation(repository: Repository) -> str:
    objects = repository.objects
    return objects.chain.incarnation if objects is not None else ""


def _place(item: _Placed) -> tuple[int, str, str, int]:
    return item.place


def _migrations(
    lines: Iterable[TypeLine], start: FeedCursor, head: int
) -> list[tuple[TypeLine, Stage]]:
    """The stages that began with rows of others after the cursor, oldest first."""
    begun = [
        (line, stage)
        for line in lines
        for stage in line.line.stages
        if stage.continued and start.commit_id < stage.since <= head
    ]
    return sorted(begun, key=lambda item: item[1].since)


def _ended(line: TypeLine, start: FeedCursor, head: int) -> Iterator[_Placed]:
    last = line.line.last
    if last.until is not None and last.until <= head and _before(start, last.ref, last.until, 0):
        change = _marker(line, last.until, "drop")
        yield _Placed((last.until, *last.ref, 0), line, last, change)


def _before(start: FeedCursor, ref: TypeRef, commit_id: int, place: int) -> bool:
    """Whether a place of the feed is still to come."""
    if not start.kind:
        return commit_id > start.commit_id
    return (start.commit_id + 1, start.kind, start.name, start.rows) <= (commit_id, *ref, place)


def _begin(start: FeedCursor, ref: TypeRef) -> tuple[int, int]:
    """The commit after which a type is to be read, and how many rows of the next one are behind."""
    here = (start.kind, start.name)
    if start.kind and ref < here:
        return start.commit_id + 1, 0
    return start.commit_id, start.rows if ref == here else 0


def _written(
    line: TypeLine, stage: Stage, start: FeedCursor, head: int, limit: int
) -> Iterator[_Placed]:
    """What commits wrote under a version, but for the rows that were brought into it."""
    since, skipped = _begin(start, stage.ref)
    if stage.continued and stage.since > since:
        since, skipped = stage.since, 0
    if stage.since > start.commit_id + 1:
        skipped = 0  # the cursor is in an earlier version
    if since >= head:
        return
    when = When(history=True, since=since)
    commit, place = start.commit_id + 1, skipped
    for table in line.batches(stage, when, head, limit=limit, offset=skipped):
        for change in line.described(stage, table):
            if change["commit_id"] != commit:
                commit, place = change["commit_id"], 0
            yield _Placed((commit, *stage.ref, place), line, stage, change)
            place += 1


def _migrated(line: TypeLine, stage: Stage, start: FeedCursor) -> Iterator[_Placed]:
    """Of the rows that a migration brought into a version those that it changed: what the upgraded
    old row equals is no change."""
    commit = stage.since
    since, skipped = _begin(start, stage.ref)
    if commit <= since:
        return
    place = skipped if commit == start.commit_id + 1 else 0
    if place > _END:
        return
    before = line.line.before(stage)
    assert before is not None
    when = When(history=True, since=commit - 1)
    for table in line.batches(stage, when, commit, offset=place):
        try:
            compared = line.compared(stage, table, before, commit - 1)
        except MissingUpgraderError as error:
            change = _marker(line, commit, "migrate") | {
                "schema_version": before.number,
                "not_upgraded": str(error),
            }
            yield _Placed((commit, *stage.ref, _END), line, stage, change)
            return
        numbers = compared.numbers()
        differing = line.described(stage, table.take(numbers)) if numbers else []
        for number, change in zip(numbers, differing, strict=True):
            change["operation"] = "update"
            reason = compared.failed.get(_identity(stage.spec, change))
            if reason is not None:
                change["not_upgraded"] = reason
            yield _Placed((commit, *stage.ref, place + number), line, stage, change)
        place += table.num_rows


def _marker(line: TypeLine, commit_id: int, operation: str) -> Change:
    """What is told of a type as a whole."""
    kind, name = line.line.last.ref
    return {"commit_id": commit_id, "kind": kind, "type_name": name, "operation": operation}


def _tell_operations(page: Sequence[_Placed], start: FeedCursor) -> None:
    """A change is an update when an earlier commit has its identity, else an insert. `start` is
    where the page begins."""
    versions: dict[tuple[TypeRef, int], list[_Placed]] = {}
    for item in page:
        if "operation" not in item.change:
            versions.setdefault((item.stage.ref, item.stage.number), []).append(item)
    for items in versions.values():
        line, stage = items[0].line, items[0].stage
        first = items[0].change["commit_id"]
        now = [item.change for item in items if item.change["commit_id"] == first]
        later = [item.change for item in items if item.change["commit_id"] > first]
        stored = line.stored(stage, first - 1, _distinct(stage, [*now, *later]))
        _mark(stage, now, stored)
        if (start.commit_id + 1, start.kind, start.name) == (first, *stage.ref):
            # The page begins within a commit, of which an earlier page has had a part.
            stored |= line.stored(stage, first, _distinct(stage, later))
        _mark(stage, later, stored)


def _mark(stage: Stage, page: Iterable[Change], stored: set[tuple[str, ...]]) -> None:
    for change in page:
        identity = _identity(stage.spec, change)
        change["operation"] = "update" if identity in stored else "insert"
        stored.add(identity)


def _distinct(stage: Stage, page: Sequence[Change]) -> list[tuple[str, ...]]:
    return sorted({_identity(stage.spec, change) for change in page})


# --- between two commits ------------------------------------------------------------------------


def diff(
    repository: Repository,
    before: int,
    after: int,
    declared: Mapping[TypeRef, TypeSpec],
    upgraders: Mapping[UpgraderKey, Upgrader],
) -> list[Change]:
    """What differs between two commits, by type and identity.

    A row that was changed and changed back does not differ.
    """
    if before > after:
        raise ValueError(f"diff goes from the older commit to the newer: diff({after}, {before})")
    return list(differences(repository, before, after, declared, upgraders))


def differences(
    repository: Repository,
    before: int,
    after: int,
    declared: Mapping[TypeRef, TypeSpec],
    upgraders: Mapping[UpgraderKey, Upgrader],
    type_name: str | None = None,
) -> Iterator[Change]:
    """The same one by one, of one type where it is named: what comes later is read later."""
    for line in type_lines(repository, declared, upgraders):
        if type_name is None or line.name == type_name:
            yield from _differences(line, before, after)


def _differences(line: TypeLine, before: int, after: int) -> Iterable[Change]:
    old, new = line.line.at(before), line.line.at(after)
    if new is None:
        ended = line.line.last.until
        return [_marker(line, ended, "drop")] if old is not None and ended is not None else []
    if line.simple or (old is new is line.line.last and new.until is None):
        return _of_one_version(line, before, after)
    return _of_versions(line, old, new, before, after)


def _of_one_version(line: TypeLine, before: int, after: int) -> list[Change]:
    spec, repository = line.final, line.repository
    changed = repository.read(spec, ReadWindow(as_of=after, since=before))
    if not changed.num_rows:
        return []
    keys = changed.select(list(spec.identity))
    earlier = repository.read(spec, ReadWindow(as_of=before), keys=keys)
    return _field_differences(line, changed, earlier)


def _of_versions(
    line: TypeLine, old: Stage | None, new: Stage, before: int, after: int
) -> Iterator[Change]:
    """Batch by batch, so that only what differs is held."""
    for table in line.batches(new, When(as_of=after), after):
        rows = table.filter(pc.greater(table.column("commit_id"), before))
        if not rows.num_rows:
            continue
        try:
            changed, failed = line.upgraded(new, rows)
            was, unclear = changed.slice(0, 0), failed
            if old is not None:
                was, unclear = line.upgraded(old, line.within(old, before, rows))
        except MissingUpgraderError as error:
            yield _marker(line, new.since, "migrate") | {
                "schema_version": (old or new).number,
                "not_upgraded": str(error),
            }
            return
        for change in _field_differences(line, *differing(line.final, changed, was)):
            reason = unclear.get(_identity(line.final, change))
            yield change if reason is None else _unclear(change, change["after"], reason)
        for change in line.described(new, rows) if failed else ():
            if "not_upgraded" in change:
                yield _unclear(change, change.pop("fields"), change["not_upgraded"])


def _unclear(change: Change, fields: Mapping[str, Any], reason: str) -> Change:
    """Of a row that cannot be compared."""
    told = {"operation": "update", "before": None, "after": fields, "not_upgraded": reason}
    return {**change, **told}


def _field_differences(line: TypeLine, changed: pa.Table, earlier: pa.Table) -> list[Change]:
    spec = line.final
    stored_rows = {
        _identity(spec, change): (row, change["fields"])
        for row, change in zip(
            earlier.to_pylist(), described(spec, line.name, earlier), strict=True
        )
    }
    differences = []
    for row, change in zip(changed.to_pylist(), described(spec, line.name, changed), strict=True):
        new = change.pop("fields")
        stored, old = stored_rows.get(_identity(spec, change), (None, None))
        # As stored: in JSON 1, 1.0 and true are three values, which Python takes for one.
        names = [name for name in new if stored is None or stored[name] != row[name]]
        if stored is not None and not names:
            continue
        change["operation"] = "insert" if stored is None else "update"
        change["before"] = {name: old[name] for name in names} if old is not None else None
        change["after"] = {name: new[name] for name in names}
        differences.append(change)
    return differences


def _identity(spec: TypeSpec, change: Change) -> tuple[str, ...]:
    names = ("key",) if spec.kind == "entity" else spec.identity
    return tuple(change[name] for name in names)
