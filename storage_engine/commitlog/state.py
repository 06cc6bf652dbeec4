"""What the chain says, worked out from the head's checkpoint and the manifests since.

These are the questions a writer or reader may put to the truth itself when a projection (index,
catalog) is missing, behind or in doubt.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from storage_engine.commitlog import layout, schema_log
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import (
    Checkpoint,
    CheckpointRef,
    CommitPoint,
    Entry,
    Head,
    Manifest,
    ManifestLink,
    PageRef,
    TypeHead,
    TypeRef,
    UnitVersion,
    entry_of,
    sha256,
    timestamp,
    to_json,
)
from storage_engine.errors import ConfigurationError, IntegrityError

PAGE_COMMITS = 1000
_FORMAT_OF_POINTERS = 2  # manifests of earlier formats do not name the carriers before them
_RANGES = 32  # of the log that are followed at once
_ACKS_KEPT = 20_000  # in memory, of commits that are looked at again and again
_PER_SPLIT = 8  # manifests read before what is left is split once more


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    """The last unit of work that an application recorded; `commit_id` is None when it changed
    nothing."""

    version: UnitVersion
    commit_id: int | None

    def covers(self, version: UnitVersion) -> bool:
        """Integer versions grow, so a lower one has been applied; strings must be equal."""
        if isinstance(version, int) and isinstance(self.version, int):
            return version <= self.version
        return version == self.version


def entries(
    chain: Chain, head: Head, ref: TypeRef, *, top: TypeHead | None, above: int = 0
) -> list[Entry]:
    """The files of a type in commits beyond `above`, oldest first, from the truth alone.

    `top` is the type's head: the walk starts there, so a type that was last touched long ago
    costs no walk over what others wrote since.
    """
    if top is None or top.empty or top.commit_id <= above:
        return []
    collected: list[Entry] = []
    floor = above
    if head.checkpoint is not None and head.checkpoint.commit_id > above:
        floor = head.checkpoint.commit_id
        if top.commit_id > floor:
            chain.fetch_together(head.checkpoint, _start(chain, head, top))
        covered = chain.checkpoint(head.checkpoint).entries.get(ref, ())
        collected = [entry for entry in covered if entry.max_commit_id > above]
    if top.commit_id > floor:
        walked = reversed(chain.stretch(_start(chain, head, top), above=floor))
        collected += [entry for _, m in walked if (entry := entry_of(m, ref)) is not None]
    return collected


def _start(chain: Chain, head: Head, top: TypeHead) -> ManifestLink:
    """Where a walk over a type's commits begins: at its newest one, if that can be proven. In a
    bucket its hash may be missing; from head there is a way that proves it."""
    assert head.link is not None
    if top.commit_id == head.commit_id:
        return head.link
    newest = chain.manifest(head.link)
    in_bucket = newest.type_head_buckets is not None
    return head.link if in_bucket and not top.manifest_sha256 else top.link


def last_applied(chain: Chain, head: Head, app_id: str) -> IdempotencyRecord | None:
    """The newest unit of work that an application recorded."""
    return next(_applied(chain, head, app_id), None)


def applied(
    chain: Chain, head: Head, app_id: str, version: UnitVersion
) -> IdempotencyRecord | None:
    """What recorded this unit of work: the application's newest one, or one that merges since have
    brought beside it."""
    records = _applied(chain, head, app_id)
    return next((record for record in records if record.covers(version)), None)


def _applied(chain: Chain, head: Head, app_id: str) -> Iterator[IdempotencyRecord]:
    """Back to the application's own last one."""
    if app_id in head.marks:
        yield IdempotencyRecord(head.marks[app_id], None)
        return
    floor = head.checkpoint.commit_id if head.checkpoint else 0
    for _, manifest in chain.stretch(head.link, above=floor):
        mark = manifest.idempotency
        if mark is not None and mark["app_id"] == app_id:
            yield IdempotencyRecord(mark["version"], manifest.commit_id)
            return
        for version in manifest.merged_marks.get(app_id, ()):
            yield IdempotencyRecord(version, manifest.commit_id)
        if app_id in manifest.marks:
            yield IdempotencyRecord(manifest.marks[app_id], None)
            return
    if head.checkpoint is None:
        return
    mark = chain.checkpoint(head.checkpoint).idempotency.get(app_id)
    for each in [*mark.get("merged", ()), mark] if mark else ():
        yield IdempotencyRecord(each["version"], each["commit_id"])


AckName = tuple[str, str, str]  # namespace, event, handler


def acked_since(
    chain: Chain, head: Head, above: int, among: Iterable[AckName] | None = None
) -> set[AckName]:
    """The events that commits beyond `above` have handled; `among`: which of these.

    What was found is kept, so that whoever asks commit after commit, as those of a group do, reads
    what is new. It counts where the manifest that it goes up to is one of the log.
    """
    acked = chain.acked
    with acked.mutex:
        if above < acked.above or not (acked.path and chain.has(head, acked.path)):
            acked.begin(above)
        for _, manifest in carriers(chain, head, "acks", above=acked.upto):
            together = manifest.acked_together
            for ack in (*manifest.acks, *(together.acks if together is not None else ())):
                name = ack["namespace"], ack["event_id"], ack["handler_id"]
                commit_id = ack.get("commit_id", manifest.commit_id)
                acked.commits[name] = max(commit_id, acked.commits.get(name, 0))
        acked.upto, acked.path = max(head.commit_id, acked.upto), head.manifest_path or ""
        if len(acked.commits) > _ACKS_KEPT:
            acked.forget(above)
        names = acked.commits if among is None else among
        return {name for name in names if acked.commits.get(name, 0) > above}


def carriers(
    chain: Chain, head: Head, what: Literal["events", "acks"], *, above: int
) -> list[tuple[ManifestLink, Manifest]]:
    """The manifests beyond `above` that carry events or acks, newest first.

    Each names the one before it, so that no others need be read, but one after the other. Where
    there are many, skip pointers split what is left into ranges that are followed at once: at most
    one more manifest is read for every `_PER_SPLIT`. Below a manifest that was written before
    there were such pointers, all are read. Of commits that were published together, the last one
    has the acks of all, and may stand for the others.
    """
    carrying: dict[str, tuple[ManifestLink, Manifest]] = {}
    ranges: list[tuple[ManifestLink, int]] = []  # from a manifest down to the one after a commit
    if head.link is not None and head.commit_id > above:
        ranges.append((head.link, above))
    read = splits = 0
    while ranges:
        manifests = chain.parallel.map(chain.manifest, [link for link, _ in ranges])
        read += len(manifests)
        following: list[tuple[ManifestLink, int, ManifestLink | None]] = []
        for (link, floor), manifest in zip(ranges, manifests, strict=True):
            if manifest.format < _FORMAT_OF_POINTERS:
                for older in chain.stretch(link, above=floor):
                    if _carried(older[1], what)[0]:
                        carrying[older[0].path] = older
                continue
            carried, before = _carried(manifest, what)
            if carried:
                carrying[link.path] = link, manifest
            if before is not None and before.commit_id > floor:
                following.append((before, floor, _middle(manifest, floor, before.commit_id)))
        ranges, room = [], _RANGES - len(following)
        for link, floor, middle in sorted(following, key=lambda r: r[1] - r[0].commit_id):
            if middle is not None and room > 0 and splits < read // _PER_SPLIT:
                splits, room = splits + 1, room - 1
                ranges += [(link, middle.commit_id), (middle, floor)]
            else:
                ranges.append((link, floor))
    return sorted(carrying.values(), key=lambda item: -item[0].commit_id)


def _carried(
    manifest: Manifest, what: Literal["events", "acks"]
) -> tuple[Sequence[Mapping[str, Any]], ManifestLink | None]:
    if what == "events":
        return manifest.events, manifest.events_before
    if (together := manifest.acked_together) is not None:
        return together.acks, together.before
    return manifest.acks, manifest.acks_before


def _middle(manifest: Manifest, above: int, below: int) -> ManifestLink | None:
    """The skip pointer that leads nearest to the middle between two commits."""
    between = [link for link in manifest.skip if above < link.commit_id < below]
    return min(between, key=lambda link: abs(2 * link.commit_id - above - below), default=None)


def commit_at(chain: Chain, head: Head, moment: datetime) -> int:
    """The last commit at or before an instant, 0 when there is none."""
    manifest = chain.head_manifest(head)
    if manifest is None:
        return 0
    wanted = timestamp(moment)  # as the log writes them: the texts are in the order of time
    if manifest.created_at <= wanted:
        return manifest.commit_id
    floor = head.checkpoint.commit_id if head.checkpoint is not None else 0
    for _, older in chain.stretch(head.link, above=floor):
        if older.created_at <= wanted:
            return older.commit_id
    if head.checkpoint is None:
        return 0
    checkpoint = chain.checkpoint(head.checkpoint)
    points: Sequence[CommitPoint] = checkpoint.commits
    if not points or points[0].created_at > wanted:
        in_page = bisect_right(checkpoint.pages, wanted, key=lambda page: page.created_at)
        points = chain.page(checkpoint.pages[in_page - 1]) if in_page else ()
    after = bisect_right(points, wanted, key=lambda point: point.created_at)
    return points[after - 1].commit_id if after else 0


def schema_record(chain: Chain, head: Head, ref: TypeRef, at: TypeHead) -> Mapping[str, Any] | None:
    """The stored schema of a type's current version; None in logs that never recorded it."""
    if head.checkpoint is not None:
        versions = chain.checkpoint(head.checkpoint).schemas.get(ref, {})
        if at.schema_version_id in versions:
            return versions[at.schema_version_id]
    activation = chain.locate(head, at.activation_commit_id)
    if activation is None:
        return None
    for record in chain.manifest(activation).schema.get("registered", ()):
        same = (record["kind"], record["type_name"]) == ref
        if same and record["schema_version_id"] == at.schema_version_id:
            return dict(record)
    return None


def schema_records(
    chain: Chain, head: Head, refs: Iterable[TypeRef] | None = None
) -> schema_log.SchemaRecords:
    """All recorded versions of these types, or of all, by number."""
    base = chain.checkpoint(head.checkpoint) if head.checkpoint is not None else None
    wanted = set(refs) if refs is not None else None
    records = schema_log.recorded(base, wanted)
    since = chain.stretch(head.link, above=base.commit_id if base else 0)
    for _, step in reversed(since):
        if step.schema:
            schema_log.fold(records, step)
    return records if wanted is None else {r: v for r, v in records.items() if r in wanted}


def next_checkpoint(chain: Chain, head: Head, manifest: Manifest, path: str) -> Checkpoint:
    """What head's checkpoint says, plus the manifests since, plus the commit being written."""
    own = ManifestLink(manifest.commit_id, path)  # the checkpoint is named in it: no hash yet
    return _extended(chain, head, (own, manifest), manifest.commit_id, manifest.log_id)


def current_checkpoint(chain: Chain, head: Head) -> Checkpoint:
    """What head's checkpoint says, plus the manifests since: the state as of head."""
    return _extended(chain, head, None, head.commit_id, head.log_id)


def _extended(
    chain: Chain,
    head: Head,
    own: tuple[ManifestLink, Manifest] | None,
    commit_id: int,
    log_id: str,
) -> Checkpoint:
    base = chain.checkpoint(head.checkpoint) if head.checkpoint is not None else None
    since = chain.stretch(head.link, above=base.commit_id if base else 0)
    by_type = {ref: list(older) for ref, older in base.entries.items()} if base else {}
    schemas = schema_log.recorded(base)
    marks = dict(base.idempotency) if base else {}
    points = list(_proven_points(head, base, since)) if base else []
    for link, step in [*reversed(since), *([own] if own is not None else ())]:
        points.append(CommitPoint(step.commit_id, step.created_at, link.path, link.sha256))
        for ref in step.touched():
            by_type.setdefault(ref, []).append(
                Entry(step.commit_id, step.commit_id, step.files_of(ref))
            )
        schema_log.fold(schemas, step)
        marks |= _unchanged(step.marks)
        for app_id, versions in step.merged_marks.items():
            marks[app_id] = _beside(marks.get(app_id), versions, step.commit_id)
        if step.idempotency is not None:
            mark = step.idempotency
            marks[mark["app_id"]] = {"version": mark["version"], "commit_id": step.commit_id}
    if own is None:
        marks |= _unchanged(head.marks)  # else the commit being written carries them
    return Checkpoint(
        commit_id=commit_id,
        log_id=log_id,
        entries={ref: tuple(run) for ref, run in by_type.items()},
        schemas=schemas,
        idempotency=marks,
        commits=tuple(points),
        pages=base.pages if base else (),
    )


def checkpoint_at(chain: Chain, head: Head, link: ManifestLink) -> Checkpoint:
    """The state as of an older commit, in the files that hold it now: those that held it then may
    have been replaced, and collected. Of a file that reaches further, only the rows up to the
    commit count. Refuses a commit whose rows were purged since."""
    at = link.commit_id
    then = replace(
        head,
        commit_id=at,
        manifest_path=link.path,
        commit_sha256=link.sha256 or None,
        checkpoint=_if_there(chain, chain.manifest(link).checkpoint),
        marks={},
    )
    state_then = current_checkpoint(chain, then)
    now = current_checkpoint(chain, head)
    for ref, upto in schema_log.purged_upto(now.schemas).items():
        if upto > at and state_then.entries.get(ref):
            raise ConfigurationError(
                f"commit {at} is from before {ref[1]} was purged (commit {upto}): its rows are gone"
            )
    return replace(
        state_then, entries={ref: _upto(now.entries[ref], at) for ref in state_then.entries}
    )


def _upto(entries: Sequence[Entry], at: int) -> tuple[Entry, ...]:
    return tuple(
        entry
        if entry.max_commit_id <= at
        else replace(entry, max_commit_id=at, files=tuple(f.clipped(at) for f in entry.files))
        for entry in entries
        if entry.min_commit_id <= at
    )


def _if_there(chain: Chain, ref: CheckpointRef | None) -> CheckpointRef | None:
    """An older checkpoint, which may have been collected."""
    if ref is None:
        return None
    try:
        chain.checkpoint(ref)
    except IntegrityError:
        return None
    return ref


def without_rows(checkpoint: Checkpoint, refs: Sequence[TypeRef]) -> Checkpoint:
    """A checkpoint that names no files of these types."""
    if not refs:
        return checkpoint
    entries = {ref: () if ref in refs else run for ref, run in checkpoint.entries.items()}
    return replace(checkpoint, entries=entries)


def _proven_points(
    head: Head, base: Checkpoint, since: Sequence[tuple[ManifestLink, Manifest]]
) -> tuple[CommitPoint, ...]:
    """The points of a checkpoint. The last one may lack its hash, having been written with its
    commit: the next commit's manifest has it, or head."""
    if not base.commits or base.commits[-1].manifest_sha256:
        return base.commits
    *older, last = base.commits
    child = since[-1][1].parent if since else head.link
    if child is None or child.path != last.manifest_path:
        return base.commits
    return (*older, replace(last, manifest_sha256=child.sha256))


def _beside(
    own: Mapping[str, Any] | None, versions: Sequence[UnitVersion], commit_id: int
) -> dict[str, Any]:
    """An application's own last unit of work, with those that a merge has brought, newest first."""
    brought = [{"version": version, "commit_id": commit_id} for version in versions]
    if own is None:
        first, *rest = brought
        return {**first, "merged": rest} if rest else first
    return {**own, "merged": [*brought, *own.get("merged", ())]}


def _unchanged(marks: Mapping[str, UnitVersion]) -> dict[str, dict[str, Any]]:
    return {app_id: {"version": version, "commit_id": None} for app_id, version in marks.items()}


def with_pages(checkpoint: Checkpoint) -> tuple[Checkpoint, list[tuple[str, bytes]]]:
    """A checkpoint to be written, with all but its newest commits in pages, and the objects of
    the pages that are new. Whoever writes a page of the same commits writes the same bytes."""
    points, pages = checkpoint.commits, list(checkpoint.pages)
    uploads: list[tuple[str, bytes]] = []
    while len(points) > PAGE_COMMITS:  # the last one, whose hash may be missing, never goes
        page, points = points[:PAGE_COMMITS], points[PAGE_COMMITS:]
        data = to_json({"commits": [point.to_list() for point in page]})
        digest = sha256(data)
        pages.append(PageRef(page[0].commit_id, page[-1].commit_id, page[0].created_at, digest))
        uploads.append((layout.commit_page(digest), data))
    return replace(checkpoint, commits=points, pages=tuple(pages)), uploads
