"""Histories in runs of commits: few enough rows for memory, enough commits for one swap of head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from storage_engine.commitlog.records import TypeRef
from storage_engine.config import MIB
from storage_engine.repository.history import AdoptedRows, RecordedCommit, RecordedHistory, drops

RUN_COMMITS = 256
_RUN_ROWS = 100_000
_RUN_BYTES = 32 * MIB  # of files, where the log tells


@dataclass(frozen=True, slots=True)
class TypeSpan:
    """Commits of a run that wrote a type under one schema version, from the first to the last."""

    ref: TypeRef
    schema_version_id: int
    first: int
    last: int


def runs(history: RecordedHistory, since: int, upto: int) -> Iterator[list[RecordedCommit]]:
    """Commits after `since` up to `upto`. One that is larger than a run is a run of its own: its
    rows are streamed."""
    run: list[RecordedCommit] = []
    rows = size = 0
    for start in range(since, upto, RUN_COMMITS):
        for commit in history.commits(start, min(start + RUN_COMMITS, upto)):
            more_rows = sum(change.rows or 0 for change in commit.changes)
            more_bytes = sum(change.bytes for change in commit.changes)
            full = rows + more_rows > _RUN_ROWS or size + more_bytes > _RUN_BYTES
            if run and (full or len(run) == RUN_COMMITS):
                yield run
                run, rows, size = [], 0, 0
            run.append(commit)
            rows, size = rows + more_rows, size + more_bytes
            if any(drop.get("purge") for drop in drops(commit)):
                yield run  # what is forgotten with it is of the commits before
                run, rows, size = [], 0, 0
    if run:
        yield run


def spans(run: Sequence[RecordedCommit]) -> list[TypeSpan]:
    """The types of a run, each schema version by itself."""
    commits: dict[tuple[TypeRef, int], list[int]] = {}
    for commit in run:
        for change in commit.changes:
            commits.setdefault((change.ref, change.schema_version_id), []).append(commit.id)
    return [
        TypeSpan(ref, version, ids[0], ids[-1]) for (ref, version), ids in sorted(commits.items())
    ]


def rows_of(history: RecordedHistory, span: TypeSpan) -> AdoptedRows:
    """The rows of a span, read as they are asked for."""
    spec = history.schema(span.ref, span.schema_version_id)
    batches = history.rows(spec, span.schema_version_id, since=span.first - 1, upto=span.last)
    return AdoptedRows(spec, span.schema_version_id, batches)
