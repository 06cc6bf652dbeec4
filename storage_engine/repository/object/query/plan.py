"""Which files a query opens, and why it leaves the others out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.records import Entry, TypeHead
from storage_engine.index.resolve import Resolution
from storage_engine.model.spec import TypeSpec
from storage_engine.query.executor import Diagnostic
from storage_engine.query.statements import Conjunct
from storage_engine.repository.object.query.pruning import KeyRanges, may_hold, may_match
from storage_engine.repository.object.scan import DataFile


@dataclass(frozen=True, slots=True)
class CommitWindow:
    """Commits after `since`, up to `upto`; all versions, or the newest of each identity."""

    upto: int
    since: int = 0
    history: bool = False

    def condition(self, entries: Sequence[Entry]) -> str:
        """What of it the entries alone do not say."""
        parts = []
        if any(entry.max_commit_id > self.upto for entry in entries):
            parts.append(f"q.commit_id <= {self.upto:d}")
        if any(entry.min_commit_id <= self.since for entry in entries):
            parts.append(f"q.commit_id > {self.since:d}")
        return " AND ".join(parts)


@dataclass(frozen=True)
class TypePlan:
    """The files of one type that a query opens.

    rows:    may hold rows of the answer
    newer:   may hold newer versions of identities in `rows`; their keys and commits are read, to
             confirm that a row is the newest of its identity. Empty when that needs no proof.
    pruned:  how many files were left out, by reason
    """

    spec: TypeSpec
    window: CommitWindow
    rows: tuple[DataFile, ...]
    newer: tuple[DataFile, ...] = ()
    entries: int = 0
    pruned: Mapping[str, int] = field(default_factory=dict)
    fallback: bool = False
    warning: str | None = None
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def files(self) -> tuple[DataFile, ...]:
        """All that is opened; some may be there twice."""
        return self.rows + self.newer

    def facts(self) -> dict[str, Any]:
        files = {item.file.path: item.file for item in self.files}
        return {
            "type": self.spec.name,
            "entries": self.entries,
            "files": [item.file.path for item in self.rows],
            "files_checked_for_newer_versions": [item.file.path for item in self.newer],
            "pruned": dict(self.pruned),
            "rows_at_most": sum(item.file.row_count for item in self.rows),
            "bytes_at_most": sum(file.bytes for file in files.values()),
            "fallback": self.fallback,
            "warning": self.warning,
        }


def plan_type(
    spec: TypeSpec,
    top: TypeHead | None,
    found: Resolution,
    window: CommitWindow,
    *,
    conjuncts: Sequence[Conjunct] = (),
    keys: pa.Table | None = None,
    v1: bool = False,
) -> TypePlan:
    """`conjuncts` are those that may leave files out; `keys` limits the read to identities."""
    within = found.within(since=window.since, upto=window.upto)
    pruned: Counter[str] = Counter()
    pruned["commit window"] = _count(found.entries) - _count(within)
    files = []
    for entry in within:
        kept = entry.files if window.history else entry.newest_files(window.upto)
        pruned["superseded"] += len(entry.files) - len(kept)
        files += [DataFile(entry, file) for file in kept]
    ranges = _ranges(keys)
    by_key = [c.expression for c in conjuncts if c.reach == "identity"]
    by_value = [c.expression for c in conjuncts if c.reach == "typed"]
    reachable = [
        item
        for item in files
        if may_hold(item.file, ranges) and all(may_match(c, item.file) for c in by_key)
    ]
    rows = [item for item in reachable if all(may_match(c, item.file) for c in by_value)]
    pruned["key range"] = len(files) - len(reachable)
    pruned["column statistics"] = len(reachable) - len(rows)
    return TypePlan(
        spec,
        window,
        tuple(rows),
        () if window.history else tuple(may_supersede(reachable, rows, window.upto)),
        entries=len(found.entries),
        pruned={reason: count for reason, count in pruned.items() if count},
        fallback=found.fallback,
        warning=found.warning,
        diagnostics=() if v1 else _before_activation(top, window),
    )


def may_supersede(
    reachable: Sequence[DataFile], rows: Sequence[DataFile], upto: int
) -> list[DataFile]:
    """The files with a newer version of some row in `rows`, as far as key ranges tell."""
    wanted = {item.file.path for item in rows}
    older = KeyRanges()
    found: list[DataFile] = []
    for entry, items in groupby(reachable, key=lambda item: item.entry):
        together = list(items)
        own = [item.file for item in together if item.file.path in wanted]
        repeats = not entry.unique(upto)
        if repeats:
            older.add(own)
        found += [item for item in together if older.overlap(item.file)]
        if not repeats:
            older.add(own)
    return found


def _count(entries: Iterable[Entry]) -> int:
    return sum(len(entry.files) for entry in entries)


def _ranges(keys: pa.Table | None) -> dict[str, tuple[str, str]]:
    if keys is None or not keys.num_rows:
        return {}
    bounds = {name: pc.min_max(keys.column(name)).as_py() for name in keys.column_names}
    return {name: (b["min"], b["max"]) for name, b in bounds.items()}


def _before_activation(top: TypeHead | None, window: CommitWindow) -> tuple[Diagnostic, ...]:
    """Typed reads cover the current schema version, of which there was nothing yet."""
    if top is None or window.upto >= top.activation_commit_id:
        return ()
    return (
        {
            "reason": "commit_before_activation",
            "activation_commit_id": top.activation_commit_id,
        },
    )
