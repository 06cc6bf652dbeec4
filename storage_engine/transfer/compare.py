"""Two storages compared: every commit, every row by count and content, tags, units of work.

Rows are read on both sides in runs of commits and digested, so memory is bounded by a run. It is
what a copy ends with, and can be asked for at any time: commits never change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from storage_engine.errors import SchemaMetadataError
from storage_engine.repository.history import RecordedCommit
from storage_engine.repository.protocol import Repository
from storage_engine.repository.row_digests import RowDigest, RowDigests
from storage_engine.transfer.runs import TypeSpan, rows_of, runs, spans
from storage_engine.wording import counted

Progress = Callable[[str, int, int], None]  # what is being done, how far, of how much

_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not the same in the two storages."""

    what: str  # commit, rows, schema, tag or unit
    name: str
    commit_id: int | None
    source: str
    target: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "name": self.name,
            "commit_id": self.commit_id,
            "source": self.source,
            "target": self.target,
        }


@dataclass(frozen=True, slots=True)
class StorageComparison:
    """What was compared, and what differs: `total` differences, of which some are kept. `ahead`:
    commits that the target has beyond those."""

    source: str
    target: str
    upto: int
    commits: int
    rows: int
    tags: int
    total: int
    differences: tuple[Difference, ...]
    ahead: int = 0

    @property
    def ok(self) -> bool:
        return self.total == 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "upto": self.upto,
            "ok": self.ok,
            "commits": self.commits,
            "rows": self.rows,
            "tags": self.tags,
            "ahead": self.ahead,
            "total": self.total,
            "differences": [difference.as_dict() for difference in self.differences],
        }


def compare_storages(
    source: Repository,
    target: Repository,
    *,
    upto: int | None = None,
    progress: Progress | None = None,
) -> StorageComparison:
    """Compare up to a commit, by default all that the source has."""
    upto = source.head_commit_id() if upto is None else upto
    return _Comparing(source, target, upto, progress or (lambda *_: None)).run()


class _Comparing:
    def __init__(
        self, source: Repository, target: Repository, upto: int, progress: Progress
    ) -> None:
        self._source = source
        self._target = target
        self._upto = upto
        self._progress = progress
        self._rows = 0
        self._total = 0
        self._differences: list[Difference] = []

    def run(self) -> StorageComparison:
        head = self._target.head_commit_id()
        if head < self._upto:
            self._note("commit", "head", None, str(self._upto), str(head))
        shared = min(self._upto, head)
        self._progress("compare", 0, shared)
        with closing(RowDigests()) as digests:
            for run in runs(self._source.history, 0, shared):
                self._compare_commits(run)
                for span in spans(run):
                    self._compare_rows(digests, span)
                self._progress("compare", run[-1].id, shared)
        tags = self._compare_tags()
        return StorageComparison(
            self._source.uri,
            self._target.uri,
            self._upto,
            shared,
            self._rows,
            tags,
            self._total,
            tuple(self._differences),
            ahead=max(head - self._upto, 0),
        )

    def _compare_commits(self, run: list[RecordedCommit]) -> None:
        first, last = run[0].id, run[-1].id
        theirs = {c.id: c for c in self._target.history.commits(first - 1, last)}
        for commit in run:
            copy = theirs.get(commit.id)
            if copy is None:
                self._note("commit", "is missing", commit.id, "there", "missing")
                continue
            for name, value, other in _differing(commit.facts(), copy.facts()):
                self._note("commit", name, commit.id, str(value), str(other))

    def _compare_rows(self, digests: RowDigests, span: TypeSpan) -> None:
        ours = rows_of(self._source.history, span)
        try:
            theirs = rows_of(self._target.history, span)
        except SchemaMetadataError as error:
            self._note("schema", span.ref[1], span.first, str(span.schema_version_id), str(error))
            return
        if ours.spec.schema_sha256 != theirs.spec.schema_sha256:
            self._note(
                "schema",
                f"{span.ref[1]} version {span.schema_version_id}",
                span.first,
                ours.spec.schema_sha256,
                theirs.spec.schema_sha256,
            )
            return
        expected = digests.of(ours.spec, ours.batches)
        stored = digests.of(theirs.spec, theirs.batches)
        self._rows += sum(digest.rows for digest in expected.values())
        for commit_id in sorted(expected.keys() | stored.keys()):
            wanted, there = expected.get(commit_id), stored.get(commit_id)
            if wanted != there:
                self._note("rows", span.ref[1], commit_id, _shown(wanted), _shown(there))

    def _compare_tags(self) -> int:
        """Tags of the source; the target may have more of its own."""
        theirs = {tag.name: tag for tag in self._target.list_tags()}
        tags = [tag for tag in self._source.list_tags() if tag.commit_id <= self._upto]
        for tag in tags:
            copy = theirs.get(tag.name)
            if copy is None:
                self._note("tag", tag.name, tag.commit_id, str(tag.commit_id), "missing")
            elif copy.commit_id != tag.commit_id:
                self._note("tag", tag.name, tag.commit_id, str(tag.commit_id), str(copy.commit_id))
        return len(tags)

    def _note(self, what: str, name: str, commit_id: int | None, source: str, target: str) -> None:
        self._total += 1
        if len(self._differences) < _SHOWN:
            self._differences.append(Difference(what, name, commit_id, source, target))


def _differing(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for name, value in ours.items():
        if theirs[name] != value:
            yield name, value, theirs[name]


def _shown(digest: RowDigest | None) -> str:
    if digest is None:
        return "no rows"
    return f"{counted(digest.rows, 'row')} (content {digest.content:x})"
