"""What a compaction would do: by type and run, with what goes in and what is expected to come out.

Planning reads the log's truth (the checkpoint that head names and the manifests since), never the
indices, and writes nothing. A plan is only advice: whoever carries it out looks again at what
stands.

Entries are merged in size tiers. Going back from the newest, an entry joins the run of those after
it while it is not much larger than they are together. So what stays unmerged is always more than
`ratio` times as large as all that is newer: a type has a logarithmic number of entries after a
compaction, and a row is rewritten only when its entry grows by a constant factor, which is
logarithmically often. Runs are always adjacent entries, so no snapshot is ever swallowed by a
range that it is not part of.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage_engine.commitlog import state
from storage_engine.commitlog.records import CommitFile, Entry, Head, TypeRef
from storage_engine.config import MIB
from storage_engine.errors import ConfigurationError
from storage_engine.index.maintain import follows

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.protocol import Repository

SPARK_ABOVE = 1024 * MIB  # of a run: what is less, one machine merges well


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to compact a type now, why, and which runs of adjacent entries to merge."""

    worth: bool
    reason: str
    runs: tuple[tuple[Entry, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """`min_entries`: fewer in a run are left alone. `ratio`: an entry of up to this many times
    the rows of those after it is merged with them: more means fewer files and more rewriting.
    `small_bytes`: commits of less join each other whatever their sizes, as each must be rewritten
    once anyway; a larger one (a bulk load) is a good file as it is, and counts by its size."""

    min_entries: int = 8
    ratio: float = 1.5
    small_bytes: int = 16 * MIB

    def __post_init__(self) -> None:
        if self.min_entries < 2 or self.ratio <= 0 or self.small_bytes < 0:
            raise ValueError("a policy needs min_entries >= 2, ratio > 0 and small_bytes >= 0")

    def verdict(self, entries: Sequence[Entry]) -> Verdict:
        """What to do with the entries of a type, oldest first."""
        runs = tuple(run for run in self.runs(entries) if len(run) >= self.min_entries)
        if runs:
            merged = sum(len(run) for run in runs)
            into = f"{len(runs)} snapshot{'s' if len(runs) > 1 else ''}"
            return Verdict(True, f"{merged} of {len(entries)} entries can become {into}", runs)
        if len(entries) < self.min_entries:
            return Verdict(False, f"{len(entries)} of at least {self.min_entries} entries")
        return Verdict(False, f"no run of {self.min_entries} entries of similar size")

    def runs(self, entries: Sequence[Entry]) -> list[tuple[Entry, ...]]:
        """All entries in adjacent runs, oldest first; one of a single entry is to be kept."""
        runs: list[list[Entry]] = []
        newer, all_small = 0, True  # of the run at hand: its rows, and whether all are small
        for entry in reversed(entries):
            small, count = self._is_small(entry), rows(entry)
            if (
                runs
                and entry.schema_version_id == runs[-1][0].schema_version_id  # the same columns
                and ((small and all_small) or count <= self.ratio * newer)
            ):
                runs[-1].append(entry)
                newer, all_small = newer + count, all_small and small
            else:
                runs.append([entry])
                newer, all_small = count, small
        return [tuple(reversed(run)) for run in reversed(runs)]

    def _is_small(self, entry: Entry) -> bool:
        return entry.is_single and size(entry) < self.small_bytes


def rows(entry: Entry) -> int:
    return sum(max(0, file.row_count) for file in entry.files)


def size(entry: Entry) -> int:
    return sum(file.bytes for file in entry.files)


def times_rewritten(entry: Entry) -> int:
    """Snapshots of versions that did not count have been written anew at least once."""
    return max(entry.rewrites, int(entry.is_snapshot))


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """What a writer merges by itself, a little at a time.

    Commits are tier 0, and a snapshot is a tier above the highest that went into it. When a tier
    of the newest entries is full (`tail`), it becomes one entry of the next with all that is newer.
    So there are fewer than `tail` entries of each tier, and as nothing above `tiers` is touched, a
    row is written anew that often at most. Entries of `large_bytes` are good files as they are.
    What they (or another schema version) cut off from the newest entries can grow no more, and is
    merged from `cut_off` entries on.
    """

    tail: int = 48
    tiers: int = 3
    large_bytes: int = 8 * MIB
    cut_off: int = 8
    run_entries: int = 1_000  # of one merge: a storage that was never compacted has many
    run_bytes: int = 512 * MIB

    def full(self, entries: Sequence[Entry]) -> bool:
        """Whether it is worth looking at the log: by an index, which does not know tiers."""
        small = (e.is_single and size(e) < self.large_bytes for e in entries)
        return sum(small) >= self.tail

    def due(self, entries: Sequence[Entry]) -> tuple[Entry, ...] | None:
        """The adjacent entries to merge next, of a type's entries, oldest first."""
        if any(file.row_count < 0 for entry in entries for file in entry.files):
            return None
        for number, group in enumerate(reversed(self._groups(entries))):
            is_newest = number == 0 and group[-1] is entries[-1]
            run = self._full_tier(group)
            if run is None and not is_newest and len(group) >= self.cut_off:
                run = group
            if run is not None:
                return self._bounded(run)
        return None

    def _groups(self, entries: Sequence[Entry]) -> list[tuple[Entry, ...]]:
        """Adjacent entries that may be merged with each other."""
        groups: list[list[Entry]] = []
        previous: Entry | None = None
        for entry in entries:
            if size(entry) >= self.large_bytes or times_rewritten(entry) >= self.tiers:
                previous = None
                continue
            if previous is None or previous.schema_version_id != entry.schema_version_id:
                groups.append([])
            groups[-1].append(entry)
            previous = entry
        return [tuple(group) for group in groups]

    def _full_tier(self, group: Sequence[Entry]) -> tuple[Entry, ...] | None:
        """The highest full tier, with all that is newer: then what is newer is written once."""
        for tier in reversed(range(self.tiers)):
            start = len(group)
            while start > 0 and times_rewritten(group[start - 1]) <= tier:
                start -= 1
            run = tuple(group[start:])
            if sum(times_rewritten(entry) == tier for entry in run) >= self.tail:
                return run
        return None

    def _bounded(self, run: Sequence[Entry]) -> tuple[Entry, ...]:
        total = 0
        for count, entry in enumerate(run):
            total += size(entry)
            if count >= self.run_entries or (count >= 2 and total > self.run_bytes):
                return tuple(run[:count])
        return tuple(run)


NOT_NEEDED = "a SQLite storage keeps its rows in tables: there is nothing to compact"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Adjacent entries that become one snapshot."""

    kind: str
    type_name: str
    entries: tuple[Entry, ...]
    expected_bytes: int
    expected_files: int

    @property
    def ref(self) -> TypeRef:
        return (self.kind, self.type_name)

    @property
    def min_commit_id(self) -> int:
        return self.entries[0].min_commit_id

    @property
    def max_commit_id(self) -> int:
        return self.entries[-1].max_commit_id

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for entry in self.entries for file in entry.files)

    @property
    def rows(self) -> int:
        return sum(rows(entry) for entry in self.entries)

    @property
    def bytes(self) -> int:
        return sum(size(entry) for entry in self.entries)

    def snapshot(self, files: Iterable[CommitFile]) -> Entry:
        """What the entries become, of these files."""
        rewrites = 1 + max(times_rewritten(entry) for entry in self.entries)
        return Entry(self.min_commit_id, self.max_commit_id, tuple(files), rewrites)

    def as_dict(self) -> dict[str, Any]:
        return {
            "min_commit_id": self.min_commit_id,
            "max_commit_id": self.max_commit_id,
            "entries": len(self.entries),
            "files": len(self.paths),
            "rows": self.rows,
            "bytes": self.bytes,
            "expected_files": self.expected_files,
            "expected_bytes": self.expected_bytes,
        }


@dataclass(frozen=True, slots=True)
class TypeCompaction:
    """What is to be done with one type, and why."""

    kind: str
    type_name: str
    entries: int
    reason: str
    runs: tuple[RunPlan, ...] = ()
    index_behind: bool = False  # an earlier compaction did not get to rewrite the index

    @property
    def ref(self) -> TypeRef:
        return (self.kind, self.type_name)

    @property
    def work(self) -> bool:
        return bool(self.runs) or self.index_behind

    @property
    def entries_after(self) -> int:
        return self.entries - sum(len(run.entries) - 1 for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "type_name": self.type_name,
            "entries": self.entries,
            "entries_after": self.entries_after,
            "reason": self.reason,
            "index_behind": self.index_behind,
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """All types that were looked at, those without work included."""

    uri: str
    head_commit_id: int
    log_id: str
    types: tuple[TypeCompaction, ...]
    note: str | None = None

    @property
    def runs(self) -> tuple[RunPlan, ...]:
        return tuple(run for plan in self.types for run in plan.runs)

    @property
    def empty(self) -> bool:
        return not any(plan.work for plan in self.types)

    def as_dict(self) -> dict[str, Any]:
        return {
            "storage": self.uri,
            "head_commit_id": self.head_commit_id,
            "note": self.note,
            "types": [plan.as_dict() for plan in self.types],
            "total": {
                "runs": len(self.runs),
                "files": sum(len(run.paths) for run in self.runs),
                "rows": sum(run.rows for run in self.runs),
                "bytes": sum(run.bytes for run in self.runs),
                "expected_files": sum(run.expected_files for run in self.runs),
                "expected_bytes": sum(run.expected_bytes for run in self.runs),
            },
        }


def plan_compaction(
    repository: Repository,
    policy: CompactionPolicy | None = None,
    types: Iterable[str] | None = None,
) -> CompactionPlan:
    """Plan for the types with these names (of either kind), or for all."""
    opened = repository.objects
    if opened is None:
        return CompactionPlan(repository.uri, repository.head_commit_id(), "", (), NOT_NEEDED)
    if opened.fork is not None:
        raise ConfigurationError(
            f"branch {opened.branch!r} is not compacted: it shares its files with the parent. "
            "Merge it often, and compact main"
        )
    head = opened.chain.read_head().head
    truth = state.current_checkpoint(opened.chain, head).entries
    policy = policy or CompactionPolicy()
    chosen = _chosen(truth, types)
    plans = opened.store.parallel.map(
        lambda ref: plan_type(opened, head, ref, truth, policy), chosen
    )
    return CompactionPlan(opened.uri, head.commit_id, head.log_id, tuple(plans))


def types_worth_compacting(
    repository: ObjectRepository, policy: CompactionPolicy | None = None
) -> list[str]:
    """Names of the types that a plan would have work for, by the log alone: no index is read."""
    head = repository.chain.read_head().head
    truth = state.current_checkpoint(repository.chain, head).entries
    chosen = policy or CompactionPolicy()
    return sorted(name for (_, name), entries in truth.items() if _verdict(entries, chosen).worth)


def plan_type(
    repository: ObjectRepository,
    head: Head,
    ref: TypeRef,
    truth: Mapping[TypeRef, Sequence[Entry]],
    policy: CompactionPolicy,
) -> TypeCompaction:
    entries = truth.get(ref, ())
    verdict = _verdict(entries, policy)
    index = repository.indices.read(ref, log_id=head.log_id).value
    behind = not follows(index, entries)
    reason = verdict.reason
    if behind and not verdict.worth:
        reason = "its index does not have the snapshots of an earlier compaction"
    return TypeCompaction(
        *ref,
        entries=len(entries),
        reason=reason,
        runs=tuple(planned_run(repository, ref, run) for run in verdict.runs),
        index_behind=behind,
    )


def _verdict(entries: Sequence[Entry], policy: CompactionPolicy) -> Verdict:
    if any(file.row_count < 0 for entry in entries for file in entry.files):
        return Verdict(False, "the log does not say how many rows its files have")
    return policy.verdict(entries)


def planned_run(repository: ObjectRepository, ref: TypeRef, entries: tuple[Entry, ...]) -> RunPlan:
    """With what is expected to come out."""
    files = [file for entry in entries for file in entry.files]
    total = sum(file.row_count for file in files)
    # The largest file is the one in which a row costs least: small ones are mostly footer.
    largest = max(files, key=lambda file: file.row_count)
    each = largest.bytes / max(1, largest.row_count)
    expected = round(total * each)
    parts = max(1, -(-expected // repository.config.snapshot_part_bytes))
    roles = 1 if repository.engine_version == "v1" else 2
    return RunPlan(*ref, entries, expected, parts if roles == 1 else max(roles, parts))


def _chosen(truth: Mapping[TypeRef, Sequence[Entry]], types: Iterable[str] | None) -> list[TypeRef]:
    stored = sorted(truth)
    if types is None:
        return stored
    chosen: list[TypeRef] = []
    for name in dict.fromkeys(types):
        refs = [ref for ref in stored if ref[1] == name]
        if not refs:
            names = sorted({ref[1] for ref in stored})
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names)}"
            raise ConfigurationError(f"no type {name!r} in this storage; {hint}")
        chosen += refs
    return chosen
