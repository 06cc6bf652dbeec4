"""Copies a storage with its whole history into another, whichever engines the two have.

The progress of a copy is its target: commits are taken over in order, in runs, and each says from
which log it comes. So a copy that was interrupted goes on where the target stands, and one that
has ended brings what came since. The source may be written meanwhile: it is copied up to the head
that was read first. Nothing is written to the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from storage_engine.commitlog.layout import MAIN
from storage_engine.commitlog.records import TypeRef
from storage_engine.config import OntologiaConfig
from storage_engine.errors import SchemaMetadataError
from storage_engine.events.carried import CarriedEvent
from storage_engine.maintenance.compaction import compact
from storage_engine.maintenance.indices import repair_indices
from storage_engine.repository.history import (
    RecordedCommit,
    registration,
    registrations,
)
from storage_engine.repository.open import LATEST_ENGINE, Location
from storage_engine.repository.protocol import Repository
from storage_engine.transfer.compare import Progress, StorageComparison, compare_storages
from storage_engine.transfer.ends import (
    bus_of,
    check_target,
    events_of,
    locate,
    make_target,
    opened_source,
    opened_target,
)
from storage_engine.transfer.runs import rows_of, runs, spans

_COMPACT_EVERY = 2_000  # commits: checkpoints and indices of the target stay small meanwhile
_EVENTS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy would do, or (with `applied`) has done.

    `since`: the commit that the target had before; `behind`: commits that the source has made
    since the copy began; `events` are those that are not done, `letters` dead letters.
    """

    source: str
    target: str
    source_engine: str
    target_engine: str
    creates: bool
    since: int
    upto: int
    types: int
    rows: int
    bytes: int
    tags: int
    events: int
    letters: int
    applied: bool = False
    behind: int = 0
    comparison: StorageComparison | None = None
    branch: str = MAIN  # of the source
    branches: tuple[str, ...] = ()  # of the source, which are not copied with it

    @property
    def commits(self) -> int:
        return self.upto - self.since

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "source_engine": self.source_engine,
            "target_engine": self.target_engine,
            "creates": self.creates,
            "since": self.since,
            "upto": self.upto,
            "commits": self.commits,
            "types": self.types,
            "rows": self.rows,
            "bytes": self.bytes,
            "tags": self.tags,
            "events": self.events,
            "dead_letters": self.letters,
            "applied": self.applied,
            "behind": self.behind,
            "branch": self.branch,
            "branches_left": list(self.branches),
            "comparison": self.comparison.as_dict() if self.comparison is not None else None,
        }


def copy_storage(
    source: str | Path | Location,
    target: str | Path | Location,
    *,
    apply: bool = False,
    engine_version: str | None = None,
    upto: int | None = None,
    verify: bool = True,
    config: OntologiaConfig | None = None,
    target_config: OntologiaConfig | None = None,
    progress: Progress | None = None,
    branch: str | None = None,
) -> CopyReport:
    """Say what a copy would do or, with `apply`, do it and compare the two.

    `engine_version`: of a target that is made by the copy, by default the latest. `upto`: a commit
    at which to stop. `target_config`: where the target needs other settings than the source.
    One chain is copied, which is main's of the target: main's of the source or, with `branch`,
    that of a branch from the first commit that it inherits. The others stay behind, and the report
    names them. Raises CopyRefusedError when the target holds something else.
    """
    config = config or OntologiaConfig()
    target_config = target_config or config
    told = progress or (lambda *_: None)
    here, there = locate(source, target)
    with opened_source(here, config, branch) as origin:
        with opened_target(there, target_config) as existing:
            plan = _plan(origin, existing, there.uri, engine_version, upto, told)
        if not apply:
            return plan
        if plan.creates:
            make_target(there, plan.target_engine, target_config)
        with opened_target(there, target_config) as copy:
            assert copy is not None, "it was made"
            return copy_repository(
                origin,
                copy,
                upto=plan.upto,
                engine_version=engine_version,
                verify=verify,
                progress=told,
                plan=plan,
            )


def compare_uris(
    source: str | Path | Location,
    target: str | Path | Location,
    *,
    config: OntologiaConfig | None = None,
    target_config: OntologiaConfig | None = None,
    progress: Progress | None = None,
    branch: str | None = None,
) -> StorageComparison:
    """`compare_storages` of storages that are opened for it."""
    config = config or OntologiaConfig()
    here, there = locate(source, target)
    with (
        opened_source(here, config, branch) as origin,
        opened_source(there, target_config or config) as copy,
    ):
        return compare_storages(origin, copy, progress=progress)


def copy_repository(
    source: Repository,
    target: Repository,
    *,
    upto: int | None = None,
    engine_version: str | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    plan: CopyReport | None = None,
) -> CopyReport:
    """`copy_storage` of opened storages. `plan`: what was looked at just before."""
    told = progress or (lambda *_: None)
    if plan is None:
        plan = _plan(source, target, target.uri, engine_version, upto, told)
    # Again: somebody else may have come first.
    since = check_target(source, target, engine_version)
    report = _Copying(source, target, told).run(plan, since)
    if verify:
        comparison = compare_storages(source, target, upto=report.upto, progress=told)
        report = replace(report, comparison=comparison)
    return report


def _plan(
    source: Repository,
    target: Repository | None,
    target_uri: str,
    engine_version: str | None,
    upto: int | None,
    progress: Progress,
) -> CopyReport:
    head = source.head_commit_id()
    upto = head if not upto else source.require_commit(upto)
    since = 0
    if target is not None:
        since = check_target(source, target, engine_version)
    upto = max(upto, since)
    types: set[TypeRef] = set()
    rows = size = 0
    progress("look", 0, upto - since)
    for run in runs(source.history, since, upto):
        for change in (change for commit in run for change in commit.changes):
            types.add(change.ref)
            rows += change.rows or 0
            size += change.bytes
        progress("look", run[-1].id - since, upto - since)
    bus = list(events_of(source))
    return CopyReport(
        source=source.uri,
        target=target_uri,
        source_engine=source.engine_version,
        target_engine=target.engine_version if target else engine_version or LATEST_ENGINE,
        creates=target is None,
        since=since,
        upto=upto,
        types=len(types),
        rows=rows,
        bytes=size,
        tags=sum(tag.commit_id <= upto for tag in source.list_tags()),
        events=sum(event.pending for event in bus),
        letters=sum(len(event.letters) for event in bus),
        branch=source.branch,
        branches=_others(source),
    )


def _others(source: Repository) -> tuple[str, ...]:
    objects = source.objects
    if objects is None or objects.engine_version == "v1":
        return ()
    return tuple(b.name for b in objects.branches.list() if b.name not in (MAIN, source.branch))


class _Copying:
    """One copy at work."""

    def __init__(
        self,
        source: Repository,
        target: Repository,
        progress: Progress,
    ) -> None:
        self._source = source
        self._target = target
        self._progress = progress
        self._identity = source.history.identity()
        self._registered: set[tuple[TypeRef, int]] = set()

    def run(self, plan: CopyReport, since: int) -> CopyReport:
        total = plan.upto - since
        compacted = since
        self._progress("copy", 0, total)
        for run in runs(self._source.history, since, plan.upto):
            self._copy(run)
            self._progress("copy", run[-1].id - since, total)
            if run[-1].id - compacted >= _COMPACT_EVERY:
                self._compact()
                compacted = run[-1].id
        self._copy_tags(plan.upto)
        if self._source.head_commit_id() == plan.upto:
            # Units of later would claim what is not here yet.
            self._target.history.adopt_units(self._source.history.units())
        self._copy_events()
        self._settle()
        behind = self._source.head_commit_id() - plan.upto
        return replace(plan, since=since, applied=True, behind=behind)

    def _copy(self, run: Sequence[RecordedCommit]) -> None:
        history = self._source.history
        rows = [rows_of(history, span) for span in spans(run)]
        commits = [self._with_schemas(commit) for commit in run]
        self._target.history.adopt(commits, rows, origin=self._identity)

    def _with_schemas(self, commit: RecordedCommit) -> RecordedCommit:
        """A log of another implementation may not record schemas: then the first commit that has
        rows of a type brings its schema."""
        records = list(registrations(commit))
        for record in records:
            ref = (record["kind"], record["type_name"])
            self._registered.add((ref, record["schema_version_id"]))
        missing = [
            change
            for change in commit.changes
            if not self._is_registered(change.ref, change.schema_version_id)
        ]
        for change in missing:
            spec = self._source.history.schema(change.ref, change.schema_version_id)
            records.append(registration(spec, change.schema_version_id))
            self._registered.add((change.ref, change.schema_version_id))
        return (
            replace(commit, schema={**commit.schema, "registered": records}) if missing else commit
        )

    def _is_registered(self, ref: TypeRef, schema_version_id: int) -> bool:
        if (ref, schema_version_id) not in self._registered:
            try:
                self._target.history.schema(ref, schema_version_id)
            except SchemaMetadataError:
                return False
            self._registered.add((ref, schema_version_id))
        return True

    def _copy_tags(self, upto: int) -> None:
        for tag in self._source.list_tags():
            if tag.commit_id <= upto:
                self._target.history.adopt_tag(tag)

    def _copy_events(self) -> None:
        bus = bus_of(self._target)
        page: list[CarriedEvent] = []
        for event in events_of(self._source):
            page.append(event)
            if len(page) == _EVENTS_AT_ONCE:
                bus.adopt(page)
                page = []
        bus.adopt(page)

    def _compact(self) -> None:
        if self._target.objects is not None:
            compact(self._target)

    def _settle(self) -> None:
        """Catalogs, snapshots and indices: the log does not need them, readers are quicker."""
        if (objects := self._target.objects) is None:
            return
        objects.write_catalogs()
        self._compact()
        repair_indices(objects, apply=True)
