"""What may go, and why: objects that nothing names and that are older than the grace.

Planning writes nothing and takes no lock. It looks at the log, lists the store, and looks at the
log again, so that what was published meanwhile is not mistaken for garbage. Age alone proves
nothing (a stalled writer may wake after any time), so each object also says how it has to be
fenced off before it is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.branches import Branch
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Head, TypeRef, from_json, parse_timestamp
from storage_engine.errors import ConfigurationError, IntegrityError
from storage_engine.index.record import IndexObjects
from storage_engine.maintenance.gc.reach import (
    Reach,
    RetainedCheckpoint,
    files_of_checkpoint,
    never_published,
    reach,
    retained,
)
from storage_engine.objectstore.protocol import ObjectInfo, ObjectNotFound
from storage_engine.repository.object.engine import ObjectRepository

DEFAULT_GRACE = timedelta(days=7)

ORPHAN_COMMIT = "orphan of a failed commit"
ORPHAN_STAGED = "staged by a writer that is silent"
ORPHAN_SNAPSHOT = "snapshot that nothing needs"
OLD_CHECKPOINT = "checkpoint that nothing needs"
SILENT_ATTEMPT = "heartbeat of a silent writer"
GONE_BRANCH = "of a branch that is gone"
OF_BRANCH = "of a branch that lives"
EXPIRED_LEASE = "lease of a compaction that has ended"
EXPIRED_TICKET = "ticket of a writer that waits no more"
COMPACTED = "replaced by a snapshot"
PURGED = "of a type that was purged"

# Objects that say themselves until when somebody needs them.
EXPIRING = {layout.LEASES: EXPIRED_LEASE, layout.LINES: EXPIRED_TICKET}

Progress = Callable[[int], None]  # objects looked at


class Fence(Enum):
    """What must be done before the object may go, so that no stalled writer can still name it."""

    NONE = "none"  # it can never be published: its commit id is taken
    HEAD = "head"  # head is rewritten: the attempt for the next commit must fail
    ATTEMPT = "attempt"  # the writer's heartbeat is deleted, then head is rewritten
    INDEX = "index"  # and the type's index is rewritten
    UNCHANGED = "unchanged"  # it goes in the version that was judged: a new holder keeps it


@dataclass(frozen=True, slots=True)
class GarbageObject:
    """One object to delete."""

    key: str
    size: int
    modified: datetime
    reason: str
    fence: Fence = Fence.NONE
    attempt: str | None = None
    ref: TypeRef | None = None
    # Whose head must be rewritten where a fence needs that: a branch's, by its incarnation; main's
    # (empty), or all of them (None), as a stalled merge of anybody's may name it.
    chain: str | None = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "bytes": self.size,
            "modified": self.modified.isoformat(),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What a sweep would delete, and what it leaves although nothing needs it."""

    uri: str
    head: Head
    grace: timedelta
    purge_compacted: bool
    doomed: tuple[GarbageObject, ...]
    kept: Mapping[str, int] = field(default_factory=dict)  # why -> objects
    notes: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()  # branches past their time, children first

    @property
    def bytes(self) -> int:
        return sum(doomed.size for doomed in self.doomed)

    def by_reason(self) -> dict[str, tuple[int, int]]:
        """Objects and bytes."""
        objects: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for doomed in self.doomed:
            objects[doomed.reason] += 1
            sizes[doomed.reason] += doomed.size
        return {reason: (objects[reason], sizes[reason]) for reason in sorted(objects)}

    def as_dict(self, limit: int | None = None) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "head_commit_id": self.head.commit_id,
            "older_than_s": self.grace.total_seconds(),
            "purge_compacted": self.purge_compacted,
            "objects": len(self.doomed),
            "bytes": self.bytes,
            "reasons": {
                reason: {"objects": count, "bytes": size}
                for reason, (count, size) in self.by_reason().items()
            },
            "kept": dict(self.kept),
            "notes": list(self.notes),
            **({"expired_branches": list(self.expired)} if self.expired else {}),
            "doomed": [doomed.as_dict() for doomed in self.doomed[:limit]],
        }


def plan_gc(
    repository: ObjectRepository,
    *,
    grace: timedelta = DEFAULT_GRACE,
    purge_compacted: bool = False,
    progress: Progress | None = None,
) -> GcPlan:
    """Find what may go. Raises IntegrityError when a root (chain, checkpoint, tag) cannot be
    read: then nothing can be said to be garbage."""
    if repository.fork is not None:
        raise ConfigurationError(
            f"garbage is what no branch needs: collect it on main, not on {repository.branch!r}"
        )
    repository.flush()
    indices = IndexObjects(repository.store, engine_version=repository.engine_version)
    return _Planner(repository, indices, grace, purge_compacted, progress).plan()


def silence(repository: ObjectRepository, grace: timedelta) -> timedelta:
    """How long a heartbeat must have stopped: one that beats is heard within a lease."""
    return max(grace, timedelta(milliseconds=repository.config.s3_lease_ttl_ms))


class _Planner:
    def __init__(
        self,
        repository: ObjectRepository,
        indices: IndexObjects,
        grace: timedelta,
        purge: bool,
        progress: Progress | None,
    ) -> None:
        self._uri = repository.uri
        self._chain: Chain = repository.chain
        self._indices = indices
        self._grace = grace
        self._purge = purge
        self._progress = progress
        self._cutoff = self._chain.store.now() - grace
        self._silence = self._chain.store.now() - silence(repository, grace)
        self._kept: Counter[str] = Counter()
        self._notes: list[str] = []

    def plan(self) -> GcPlan:
        first = reach(self._chain, self._indices)
        heartbeats = self._heartbeats()
        candidates = [info for info in self._listed() if not self._obviously_needed(info, first)]
        # Look again: what was published while we listed is in the log now.
        now = reach(self._chain, self._indices)
        checkpoints = [c for c in candidates if c.key.startswith(layout.CHECKPOINTS)]
        of_branches = [c for c in checkpoints if layout.checkpoint_incarnation(c.key)]
        checkpoints = [c for c in checkpoints if not layout.checkpoint_incarnation(c.key)]
        floor = retained(self._chain, now.head, checkpoints, self._cutoff)
        uploaded = {info.key: info.modified for info in checkpoints}
        dead = {
            info.key
            for info in checkpoints
            if (floor is None or info.modified >= floor.uploaded)
            and never_published(self._chain, now.head, info, uploaded)
        }
        doomed = [
            *self._commits(candidates, now, floor),
            *self._staged(candidates, now, floor, heartbeats),
            *self._snapshots(candidates, now, floor, heartbeats, checkpoints, dead),
            *self._checkpoints(checkpoints, now, floor, dead),
            *self._branch_checkpoints(of_branches, now),
            *self._branch_leftovers(now),
            *self._attempts(heartbeats),
            *self._expired(),
        ]
        if self._purge and floor is None:
            self._notes.append(
                "nothing is purged: no checkpoint has been published for as long as the grace"
            )
        return GcPlan(
            self._uri,
            now.head,
            self._grace,
            self._purge,
            tuple(sorted(doomed, key=lambda item: item.key)),
            dict(self._kept),
            tuple(self._notes),
            tuple(self._expired_branches(now)),
        )

    # -- looking ------------------------------------------------------------------------------

    def _listed(self) -> Iterator[ObjectInfo]:
        seen = 0
        for prefix in layout.REACHED_PREFIXES:
            for info in self._chain.store.list(prefix):
                seen += 1
                if self._progress is not None and seen % 1000 == 0:
                    self._progress(seen)
                yield info
        if self._progress is not None:
            self._progress(seen)

    def _obviously_needed(self, info: ObjectInfo, first: Reach) -> bool:
        """Spares memory: most objects of a healthy storage end here."""
        if info.key.startswith(layout.CHECKPOINTS):
            return False  # needed or not, they are looked at together
        if first.needs(info.key):
            return True
        return layout.is_manifest(info.key) and layout.manifest_prefix(info.key) in first.attempts

    def _heartbeats(self) -> dict[str, GarbageObject | None]:
        """By attempt: the heartbeat if it is silent for the grace, None while its writer lives."""
        heartbeats: dict[str, GarbageObject | None] = {}
        for info in self._chain.store.list(layout.ATTEMPTS):
            attempt = layout.heartbeat_attempt(info.key)
            silent = info.modified <= self._silence and self._said(info, "heartbeat_at")
            heartbeats[attempt] = (
                GarbageObject(
                    info.key, info.size, info.modified, SILENT_ATTEMPT, Fence.ATTEMPT, attempt
                )
                if silent
                else None
            )
        return heartbeats

    def _said(self, info: ObjectInfo, name: str) -> bool:
        """Whether the time that the object tells is past the silence, as its age is."""
        try:
            data = self._chain.store.get(info.key).data
        except ObjectNotFound:
            return True
        return moment_in(data, name, info.modified) <= self._silence

    def _young(self, info: ObjectInfo) -> bool:
        young = info.modified > self._cutoff
        self._kept["younger than the grace"] += young
        return young

    # -- by prefix ----------------------------------------------------------------------------

    def _commits(
        self, candidates: Iterable[ObjectInfo], now: Reach, floor: RetainedCheckpoint | None
    ) -> Iterator[GarbageObject]:
        for info in candidates:
            if not info.key.startswith(layout.COMMITS) or now.needs(info.key):
                continue
            attempt = layout.commit_attempt(info.key)
            if attempt is None:
                self._kept["not ours"] += 1
                continue
            if attempt.incarnation:
                yield from self._branch_commit(info, attempt, now, floor)
                continue
            commit_id = attempt.commit_id
            if attempt.prefix in now.attempts:
                yield from self._replaced(info, commit_id, now, floor)
            elif commit_id > now.head.commit_id + 1:
                self._kept["of a commit beyond head"] += 1
            elif not self._young(info):
                fence = Fence.HEAD if commit_id > now.head.commit_id else Fence.NONE
                yield GarbageObject(info.key, info.size, info.modified, ORPHAN_COMMIT, fence)

    def _branch_commit(
        self,
        info: ObjectInfo,
        attempt: layout.CommitAttempt,
        now: Reach,
        floor: RetainedCheckpoint | None,
    ) -> Iterator[GarbageObject]:
        """An attempt is judged by the head that it was meant for: main's ids say nothing of it."""
        if attempt.prefix in now.attempts:
            self._kept[OF_BRANCH] += not layout.is_history(info.key)
            return
        merged = now.staged_in_chain(self._chain)
        if info.key in merged:
            yield from self._replaced(info, merged[info.key], now, floor)
            return
        head = now.branches.get(attempt.incarnation)
        if head is not None and attempt.commit_id > head.commit_id + 1:
            self._kept["of a commit beyond head"] += 1
        elif not self._young(info):
            if head is None:
                yield GarbageObject(
                    info.key, info.size, info.modified, GONE_BRANCH, Fence.HEAD, chain=None
                )
            else:
                fence = Fence.HEAD if attempt.commit_id > head.commit_id else Fence.NONE
                yield GarbageObject(
                    info.key,
                    info.size,
                    info.modified,
                    ORPHAN_COMMIT,
                    fence,
                    chain=attempt.incarnation,
                )

    def _replaced(
        self, info: ObjectInfo, commit_id: int, now: Reach, floor: RetainedCheckpoint | None
    ) -> Iterator[GarbageObject]:
        """A file of the chain that the state as of head does not have: compaction replaced it, or
        its type was purged, and whoever did that has said already that the rows shall go."""
        if layout.is_history(info.key):
            return  # it stays
        ref = layout.data_file_type(info.key)
        purged = ref is not None and commit_id <= now.purged.get(ref, 0)
        reason = PURGED if purged else COMPACTED
        if not purged and not self._purge:
            self._kept[f"{COMPACTED} (--purge-compacted)"] += 1
        elif floor is None or commit_id > floor.commit_id or info.key in floor.files:
            self._kept[f"{reason}, within the grace"] += 1
        else:
            yield GarbageObject(info.key, info.size, info.modified, reason, Fence.INDEX, ref=ref)

    def _staged(
        self,
        candidates: Iterable[ObjectInfo],
        now: Reach,
        floor: RetainedCheckpoint | None,
        heartbeats: Mapping[str, GarbageObject | None],
    ) -> Iterator[GarbageObject]:
        by_attempt: dict[str, list[ObjectInfo]] = {}
        for info in candidates:
            if info.key.startswith(layout.STAGED) and not now.needs(info.key):
                by_attempt.setdefault(layout.staged_attempt(info.key), []).append(info)
        if not by_attempt:
            return
        published = now.staged_in_chain(self._chain)
        for attempt, infos in by_attempt.items():
            named = [info for info in infos if info.key in published]
            rest = [info for info in infos if info.key not in published]
            unnamed = [info for info in rest if info.key not in now.files_of_branches(self._chain)]
            self._kept[OF_BRANCH] += len(rest) - len(unnamed)
            incarnation = layout.attempt_incarnation(attempt)
            judged_by = incarnation if incarnation in now.branches else None
            for info in named:
                yield from self._replaced(info, published[info.key], now, floor)
            if attempt in heartbeats and heartbeats[attempt] is None:
                self._kept["of a writer that lives"] += len(unnamed)
            elif sum(self._young(info) for info in unnamed) == 0:  # a sum: each one is counted
                yield from (
                    GarbageObject(
                        info.key,
                        info.size,
                        info.modified,
                        ORPHAN_STAGED,
                        Fence.ATTEMPT,
                        attempt,
                        chain=judged_by,
                    )
                    for info in unnamed
                )

    def _snapshots(
        self,
        candidates: Iterable[ObjectInfo],
        now: Reach,
        floor: RetainedCheckpoint | None,
        heartbeats: Mapping[str, GarbageObject | None],
        checkpoints: Iterable[ObjectInfo],
        dead: Collection[str],
    ) -> Iterator[GarbageObject]:
        loose = [
            info
            for info in candidates
            if info.key.startswith(layout.SNAPSHOTS) and not now.needs(info.key)
        ]
        loose = [info for info in loose if not self._young(info)]
        if not loose:
            return
        in_use = set(floor.files) if floor is not None else set()
        for info in checkpoints:
            if info.key not in dead and (floor is None or info.modified >= floor.uploaded):
                in_use |= files_of_checkpoint(self._chain, info.key)
        anyone_lives = None in heartbeats.values()
        for info in loose:
            snapshot = layout.snapshot_of(info.key)
            if snapshot is None:
                self._kept["not ours"] += 1
            elif info.key in in_use:
                self._kept["in a checkpoint within the grace"] += 1
            elif (snapshot.attempt is None and anyone_lives) or heartbeats.get(
                snapshot.attempt or "", 0
            ) is None:
                # A key without an attempt (v1) may be anybody's who lives.
                self._kept["of a writer that lives"] += 1
            else:
                yield GarbageObject(
                    info.key,
                    info.size,
                    info.modified,
                    ORPHAN_SNAPSHOT,
                    Fence.INDEX,
                    attempt=snapshot.attempt,
                    ref=(snapshot.kind, snapshot.type_name),
                )

    def _checkpoints(
        self,
        checkpoints: Iterable[ObjectInfo],
        now: Reach,
        floor: RetainedCheckpoint | None,
        dead: Collection[str],
    ) -> Iterator[GarbageObject]:
        """Those written before the retained one (published before it, or never), and those that
        never were."""
        for info in checkpoints:
            if (
                info.key in now.checkpoints
                or info.key in now.pinned
                or (floor is not None and info.key == floor.key)
            ):
                continue
            older = floor is not None and info.modified < floor.uploaded
            if (older or info.key in dead) and not self._young(info):
                fence = Fence.HEAD if info.key in dead else Fence.NONE
                yield GarbageObject(info.key, info.size, info.modified, OLD_CHECKPOINT, fence)

    def _branch_checkpoints(
        self, checkpoints: Iterable[ObjectInfo], now: Reach
    ) -> Iterator[GarbageObject]:
        """A branch has the one that its head names; older ones are read within the grace."""
        for info in checkpoints:
            if info.key in now.checkpoints or info.key in now.pinned or self._young(info):
                continue
            incarnation = layout.checkpoint_incarnation(info.key)
            alive = incarnation in now.branches
            yield GarbageObject(
                info.key,
                info.size,
                info.modified,
                OLD_CHECKPOINT if alive else GONE_BRANCH,
                Fence.HEAD,
                chain=incarnation if alive else None,
            )

    def _branch_leftovers(self, now: Reach) -> Iterator[GarbageObject]:
        for info in now.leftovers:
            if not self._young(info):
                yield GarbageObject(info.key, info.size, info.modified, GONE_BRANCH)

    def _expired_branches(self, now: Reach) -> Iterator[str]:
        """Branches past their time, children before their parents. One with a child that lives on
        stays, and so does a protected one."""
        moment = self._chain.store.now()
        listed = {inc: Branch.of(head) for inc, head in now.branches.items()}
        parents = {
            inc: head.fork.parent_incarnation
            for inc, head in now.branches.items()
            if head.fork is not None
        }
        ended = {i for i, b in listed.items() if b.expired(moment) and not b.protected}
        while blocked := {parents[i] for i in listed if i not in ended} & ended:
            ended -= blocked

        def depth(incarnation: str) -> int:
            return 1 + depth(parents[incarnation]) if incarnation in parents else 0

        for incarnation in sorted(ended, key=lambda i: (-depth(i), listed[i].name)):
            yield listed[incarnation].name

    def _attempts(self, heartbeats: Mapping[str, GarbageObject | None]) -> Iterator[GarbageObject]:
        yield from (heartbeat for heartbeat in heartbeats.values() if heartbeat is not None)
        self._kept["heartbeat of a writer that lives"] += sum(
            heartbeat is None for heartbeat in heartbeats.values()
        )

    def _expired(self) -> Iterator[GarbageObject]:
        """A compactor that died left its lease, a writer its ticket at the lock; a compactor that
        lives has renewed it, and nobody waits for so long."""
        for prefix, reason in EXPIRING.items():
            for info in self._chain.store.list(prefix):
                if info.modified <= self._silence and self._said(info, "expires_at"):
                    yield GarbageObject(info.key, info.size, info.modified, reason, Fence.UNCHANGED)


def moment_in(data: bytes, name: str, modified: datetime) -> datetime:
    """A time that an object tells; of an unreadable one, only its age is known."""
    try:
        return parse_timestamp(from_json(data, key="")[name])
    except (IntegrityError, KeyError, TypeError, ValueError):
        return modified
