"""Are the indices what the log says? Every type index compared with the truth, entry by entry.

Read-only. What is found never makes a latest read wrong by lag alone (readers take the rest from
the chain), but an index that is wrong inside its watermark would; both are reported. Each
examination also says what the index should be, which is all that repair needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.ranges import CommitRange
from storage_engine.commitlog.records import CommitFile, Entry, Head, TypeHead, TypeRef
from storage_engine.index.maintain import described
from storage_engine.index.record import (
    UNREADABLE,
    IndexObjects,
    IndexVersion,
    TypeIndex,
    same_commit,
)
from storage_engine.index.resolve import belongs
from storage_engine.wording import counted

CountRows = Callable[[CommitFile], int | None]
"""The rows that a file really has; None when it is missing or no Parquet file."""


@dataclass(frozen=True, slots=True)
class IndexFinding:
    """One thing that is wrong with one index."""

    kind: str
    type_name: str
    reason: str
    message: str
    commit_id: int | None = None
    path: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "type_name": self.type_name,
            "reason": self.reason,
            "message": self.message,
            "commit_id": self.commit_id,
            "path": self.path,
        }


@dataclass(frozen=True, slots=True)
class Examination:
    """One index as it is, what is wrong with it, and what it should be."""

    ref: TypeRef
    version: IndexVersion
    needed: int  # the watermark that counts as fresh
    findings: tuple[IndexFinding, ...]
    correct: TypeIndex

    @property
    def lag(self) -> int:
        return max(0, self.needed - self.version.value.max_indexed_commit)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.ref[0],
            "type_name": self.ref[1],
            "max_indexed_commit": self.version.value.max_indexed_commit,
            "needed_commit": self.needed,
            "lag": self.lag,
            "entries": len(self.version.value.entries),
            "findings": len(self.findings),
        }


@dataclass(frozen=True, slots=True)
class IndexReport:
    """The state of all indices at one head."""

    head_commit_id: int
    types: tuple[Examination, ...]

    @property
    def findings(self) -> list[IndexFinding]:
        return [finding for examined in self.types for finding in examined.findings]

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        return {
            "head_commit_id": self.head_commit_id,
            "ok": self.ok,
            "types": [examined.as_dict() for examined in self.types],
            "findings": [finding.as_dict() for finding in self.findings],
        }


class IndexVerifier:
    """Examines the indices of one storage.

    `known_types` lists the types of types.json and raises SchemaMetadataError when it cannot be
    read: without it nobody can say which indices there should be. `watermark_is_head`: v1.
    """

    def __init__(
        self,
        chain: Chain,
        indices: IndexObjects,
        *,
        known_types: Callable[[], Sequence[TypeRef]],
        watermark_is_head: bool,
        count_rows: CountRows,
    ) -> None:
        self.chain = chain
        self.indices = indices
        self._known = known_types
        self._watermark_is_head = watermark_is_head
        self._count_rows = count_rows

    def verify(self) -> IndexReport:
        refs = self._known()  # first: fails fast
        head = self.chain.read_head().head
        return self.examine(head, refs)

    def examine(self, head: Head, known_types: Iterable[TypeRef] | None = None) -> IndexReport:
        """All indices against the log as of `head`."""
        known_types = self._known() if known_types is None else known_types
        refs = sorted({*known_types, *self.chain.type_heads_at(head)})
        return IndexReport(head.commit_id, tuple(self.examine_types(head, refs)))

    def examine_types(self, head: Head, refs: Sequence[TypeRef]) -> list[Examination]:
        """The indices of some types; a branch has none of those that it inherits."""
        heads = self.chain.type_heads_at(head)
        versions = self.chain.parallel.map(
            lambda ref: self.indices.read(ref, log_id=head.log_id), refs
        )
        named = {f.path for v in versions for e in v.value.entries for f in e.files}
        present = self._present(named)
        return [
            self._examine(head, ref, heads.get(ref), version, present)
            for ref, version in zip(refs, versions, strict=True)
            if not _is_inherited(head, heads.get(ref), version)
        ]

    def examine_type(self, head: Head, ref: TypeRef, version: IndexVersion) -> Examination:
        """One index, as just read, against the log as of `head`."""
        present = self._present({f.path for e in version.value.entries for f in e.files})
        top = self.chain.type_heads_at(head).get(ref)
        return self._examine(head, ref, top, version, present)

    def _present(self, named: set[str]) -> set[str]:
        """Which of these files are there: listed, as that is one request for a thousand."""
        present: set[str] = set()
        for prefix in layout.DATA_PREFIXES:
            if any(path.startswith(prefix) for path in named):
                present |= {i.key for i in self.chain.store.list(prefix) if i.key in named}
        return present

    # -- one type -----------------------------------------------------------------------------

    def _examine(
        self,
        head: Head,
        ref: TypeRef,
        top: TypeHead | None,
        version: IndexVersion,
        present: set[str],
    ) -> Examination:
        index = version.value
        if top is not None and top.empty:
            needed = 0  # there is nothing to index yet
        elif self._watermark_is_head:
            needed = head.commit_id
        else:
            needed = top.commit_id if top is not None and not top.empty else 0
        truth = state.entries(self.chain, head, ref, top=top)
        upto = [e for e in index.entries if e.min_commit_id <= head.commit_id]
        proven, unproven = self._snapshots(index, head, upto, truth, present)
        right = _replaced(truth, proven)
        findings: list[IndexFinding] = []

        def note(reason: str, message: str, commit: int | None = None, path: str = "") -> None:
            findings.append(IndexFinding(*ref, reason, message, commit, path or None))

        self._check_object(ref, version, head, needed, note)
        _check_overlaps(upto, note)
        by_range = {e.commits: e for e in right}
        for entry in upto:
            for file in entry.files:
                if file.path not in present:
                    note("absent_file", "names a file that is not there", _at(entry), file.path)
            expected = by_range.get(entry.commits)
            if expected is not None:
                _compare(entry, expected, note, versioned=not self._watermark_is_head)
            elif entry.is_snapshot:
                why = unproven.get(entry.commits, "it overlaps")
                span = f"{entry.min_commit_id}-{entry.max_commit_id}"
                path = entry.files[0].path
                note("unproven_snapshot", f"snapshot {span} is not the log's: {why}", None, path)
            else:
                self._check_stray(head, ref, entry, right, note)
        for entry in right:
            if any(e.contains(entry.max_commit_id) for e in upto):
                continue
            if top is not None and entry.max_commit_id >= top.commit_id:
                note("missing_latest_entry", "has no entry for the latest commit", top.commit_id)
            elif entry.max_commit_id <= index.max_indexed_commit:
                note("missing_entry", "has no entry for this commit", entry.max_commit_id)
        if index.problem and not findings:
            note("altered", index.problem)
        correct = described(ref, right, commit_id=head.commit_id, log_id=head.log_id, top=top)
        if not correct.historical_versions:
            correct = replace(correct, historical_versions=index.historical_versions)
        examined = index.entries and index.max_indexed_commit <= head.commit_id
        if examined and not findings and not self._watermark_is_head:
            self._check_versions(index, correct, note)
        return Examination(ref, version, needed, tuple(findings), correct)

    def _check_versions(
        self, index: TypeIndex, correct: TypeIndex, note: Callable[..., None]
    ) -> None:
        """A migration or a drop that wrote no rows of the type moves nothing else in its index."""
        stated, right = index.current_schema_version_id, correct.current_schema_version_id
        if stated != right:
            now = f"version {right}" if right is not None else "dropped"
            note("wrong_schema_version", f"says that version {stated} is current, it is {now}")
        elif list(index.historical_versions) != list(correct.historical_versions):
            note("wrong_schema_version", "tells of other schema versions than the log")

    def _check_object(
        self,
        ref: TypeRef,
        version: IndexVersion,
        head: Head,
        needed: int,
        note: Callable[..., None],
    ) -> None:
        at = version.value.max_indexed_commit
        if at < needed:
            note("lag", f"is at commit {at}, needs {needed}", needed)
        seen = self.indices.seen(ref)
        stored = seen.value.log_id if seen is not None and seen.etag is not None else ""
        if stored == UNREADABLE:
            note("unreadable", "the object cannot be parsed")
        elif stored and head.log_id and stored != head.log_id:
            note("other_log", "belongs to a log that was erased")
        else:
            self._check_history(version.value, head, note)

    def _check_history(self, index: TypeIndex, head: Head, note: Callable[..., None]) -> None:
        """Whether the index tells of this log: not of one that went on from an older head."""
        reached = max([index.max_indexed_commit, *(e.max_commit_id for e in index.entries[-1:])])
        if reached > head.commit_id:
            now = self.chain.read_head().head  # the index may have been read after more commits
            if reached > now.commit_id or (
                index.max_indexed_manifest and not belongs(self.chain, index, now)
            ):
                message = f"reaches to commit {reached}, the log to {now.commit_id}"
                note("other_history", message, now.commit_id)
        elif index.max_indexed_manifest is not None and not belongs(self.chain, index, head):
            message = f"ends with {index.max_indexed_manifest}, which the log does not have"
            note("other_history", message, index.entries[-1].max_commit_id)

    def _check_stray(
        self,
        head: Head,
        ref: TypeRef,
        entry: Entry,
        right: Sequence[Entry],
        note: Callable[..., None],
    ) -> None:
        """A per-commit entry that the log has not: replaced by a snapshot, or never committed."""
        commit_id, path = entry.min_commit_id, entry.files[0].path
        located = self.chain.locate(head, commit_id)
        committed = self.chain.manifest(located).files_of(ref) if located is not None else ()
        if not committed:
            note("orphan_file", "no commit of the log wrote this file", commit_id, path)
        elif {f.path for f in entry.files} != {f.path for f in committed}:
            note("path_mismatch", f"the log has {committed[0].path}", commit_id, path)
        elif any(e.contains(commit_id) for e in right):
            note("superseded", "the log has this commit in a snapshot", commit_id, path)

    def _snapshots(
        self,
        index: TypeIndex,
        head: Head,
        entries: Sequence[Entry],
        truth: Sequence[Entry],
        present: set[str],
    ) -> tuple[list[Entry], dict[CommitRange, str]]:
        """Snapshots that only the index knows (the first implementation's): those that can take
        the place of what the log has, and why the others cannot."""
        logged = {e.commits: sorted(f.path for f in e.files) for e in truth}
        proven: list[Entry] = []
        unproven: dict[CommitRange, str] = {}
        # As many rows as the log has are no proof where the index tells of another history.
        strange = index.problem or any(
            logged.get(e.commits) != sorted(f.path for f in e.files)
            for e in entries
            if e.is_single and e.max_commit_id <= head.commit_id
        )
        if index.max_indexed_manifest is not None:
            strange = not belongs(self.chain, index, head)
        for entry in entries:
            if entry.is_single or entry.commits in logged:
                continue
            if any(entry.overlaps(other) for other in proven):
                continue
            if strange:
                unproven[entry.commits] = "the index is not the log's"
                continue
            reason = self._refuted(entry, truth, present)
            if reason is None:
                proven.append(entry)
            else:
                unproven[entry.commits] = reason
        return proven, unproven

    def _refuted(self, entry: Entry, truth: Sequence[Entry], present: set[str]) -> str | None:
        replaced = [e for e in truth if entry.overlaps(e)]
        if not replaced:
            return "nothing was committed in its range"
        if not all(entry.covers(e) for e in replaced):
            return "it cuts a snapshot of the log in two"
        if any(file.path not in present for file in entry.files):
            return "its file is not there"
        rows = self._rows(entry)
        expected = self._rows_of(replaced)
        if rows is None or expected is None:
            return "its rows cannot be counted"
        return None if rows == expected else f"it has {counted(rows, 'row')}, the log {expected}"

    def _rows(self, entry: Entry) -> int | None:
        counted = [self._count_rows(file) for file in entry.files]
        counts = [count for count in counted if count is not None]
        return sum(counts) if len(counts) == len(counted) else None

    def _rows_of(self, entries: Sequence[Entry]) -> int | None:
        total = 0
        for entry in entries:
            stated = [f.row_count for f in entry.files]
            rows = sum(stated) if min(stated) >= 0 else self._rows(entry)
            if rows is None:
                return None
            total += rows
        return total


def _is_inherited(head: Head, top: TypeHead | None, version: IndexVersion) -> bool:
    """Whether a branch has no index of its own of a type, nor needs one: it wrote none of it."""
    if head.fork is None or top is None or version.etag is not None:
        return False
    return top.commit_id <= head.fork.base_commit


def _replaced(truth: Sequence[Entry], snapshots: Sequence[Entry]) -> list[Entry]:
    kept = [e for e in truth if not any(e.overlaps(s) for s in snapshots)]
    return sorted([*kept, *snapshots], key=lambda e: e.min_commit_id)


def _check_overlaps(entries: Sequence[Entry], note: Callable[..., None]) -> None:
    reached, by = 0, ""
    for entry in entries:
        if entry.min_commit_id <= reached:
            path = entry.files[0].path
            note("overlap", f"covers commits that {by} covers too", _at(entry), path)
        if entry.max_commit_id > reached:
            reached, by = entry.max_commit_id, entry.files[0].path


def _compare(entry: Entry, expected: Entry, note: Callable[..., None], *, versioned: bool) -> None:
    paths = [file.path for file in entry.files]
    right = [file.path for file in expected.files]
    if sorted(paths) != sorted(right):
        wrong = next((p for p in paths if p not in right), paths[0])
        note("path_mismatch", f"the log has {', '.join(right)}", _at(entry), wrong)
        return
    facts = {file.path: file for file in expected.files}
    for file in entry.files:
        if file.row_count < 0 and not file.content_sha256:
            continue  # an entry of the first implementation: a path and nothing else
        before = facts[file.path].previous
        if file.previous is not None and (before is None or not same_commit(file.previous, before)):
            message = f"says that commit {file.previous.commit_id} was before it"
            note("wrong_facts", message, _at(entry), file.path)
        if _file_facts(file, versioned) != _file_facts(facts[file.path], versioned):
            note("wrong_facts", "says other facts of the file than the log", _at(entry), file.path)


def _file_facts(file: CommitFile, versioned: bool) -> tuple[Any, ...]:
    """What readers prune and decode by; v1 entries do not tell the schema version."""
    return (
        file.path,
        file.row_count,
        file.bytes,
        file.content_sha256,
        file.schema_version_id if versioned else None,
        file.commit_id_source,
        file.role,
        file.upto,
        {name: list(bounds) for name, bounds in file.key_range.items()},
        {name: list(bounds) for name, bounds in file.stats.items()},
    )


def _at(entry: Entry) -> int | None:
    return entry.min_commit_id if entry.is_single else None
