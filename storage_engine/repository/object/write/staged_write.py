"""Parts that are uploaded before the lock, under `staged/{attempt}/`, and published after it.

A long load holds the lock for the publish only. Until a manifest names them the parts are
invisible; a heartbeat tells garbage collection that their writer lives, and keeps the writer from
publishing parts that were given up. `Staging` is the parts of one attempt to publish.

A `StagedWrite` is one whose parts others stage (Spark's executors): begun before the job, published
after it. Only parts whose descriptions are handed to `add` can be published. Promise: `close`
deletes what was certainly not published and, after an unknown outcome, nothing.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.heartbeat import GivenUp, Heartbeat
from storage_engine.commitlog.records import CommitFile, Entry, Head, TypeHead, timestamp
from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    ConcurrentWriteError,
    OvertakenExtractError,
    ProtectedBranchError,
    StorageBackendError,
    UnknownBranchError,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStore, ObjectStoreError
from storage_engine.repository.object.commit_history import applied
from storage_engine.repository.object.read.latest import Versions, newest
from storage_engine.repository.object.stored_schema import FIRST_VERSION, aligned, check_schema
from storage_engine.repository.object.write.bulk import (
    BulkPart,
    BulkParts,
    encode_part,
    version_moved,
)
from storage_engine.repository.object.write.staged_conflicts import (
    Overtaken,
    differing,
    held_bytes,
    overtaken,
    repeated,
    without,
)
from storage_engine.repository.protocol import AppliedUnit, Idempotency, Snapshot, TypeInput

log = logging.getLogger(__name__)


class Staging:
    """The staged parts of one write attempt."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        schema_versions: Mapping[tuple[str, str], int],
        beat_s: float,
        attempt: str | None = None,
    ) -> None:
        """`attempt`: one under which others have staged already; a new one when left out."""
        self._store = store
        self._schema_versions = schema_versions
        self._beat_s = beat_s
        self.attempt = attempt or layout.new_id()
        self._numbers = itertools.count()
        self._sizes: dict[str, int] = {}
        self._heartbeat: Heartbeat | None = None

    def begin(self, holder: Mapping[str, Any], on_lost: Callable[[], None] | None = None) -> None:
        """Announce the attempt and keep it announced until `end`. Again, it does nothing."""
        if self._heartbeat is not None:
            return
        self._heartbeat = Heartbeat(
            self._store, self.attempt, holder=holder, beat_s=self._beat_s, on_lost=on_lost
        )
        self._heartbeat.start()

    def stage(self, spec: TypeSpec, part: BulkPart) -> CommitFile:
        """Upload one part; safe to call from several threads."""
        version = self._schema_versions[spec.ref]
        number = next(self._numbers)
        key = layout.data_file(
            layout.staged_prefix(self.attempt), spec.kind, spec.name, "v2", version, number
        )
        assert isinstance(part.encoded.content, Path)
        self._store.put_file(key, part.encoded.content)
        self._sizes[key] = part.encoded.size
        return part.encoded.describe(
            spec,
            key,
            schema_version_id=version,
            part=number,
            inserted=part.inserted,
            commit_id_source="manifest",
        )

    def check(self, files: Iterable[CommitFile]) -> None:
        """Under the lock, before the CAS: all parts are still ours, and there, whole."""
        assert self._heartbeat is not None
        present, _ = self._store.parallel.both(self._present, self._heartbeat.beat)
        for file in files:
            if present.get(file.path) != file.bytes:
                raise StorageBackendError(
                    f"staged part {file.path} is gone or changed; nothing was published, "
                    "ingest the data again",
                    operation="publish",
                    key=file.path,
                    retryable=True,
                )

    def _present(self) -> dict[str, int]:
        return {
            info.key: info.size
            for info in self._store.list(f"{layout.staged_prefix(self.attempt)}/")
        }

    def end(self, published: Iterable[CommitFile], *, listed: bool = False) -> None:
        """Withdraw the announcement and whatever was staged but not published.

        `listed`: others staged under this attempt too, so look what is there.
        """
        self.leave()
        kept = {file.path for file in published}
        try:
            staged = self._present() if listed else self._sizes
            doomed = [key for key in staged if key not in kept]
            self._store.delete_many([*doomed, layout.attempt_heartbeat(self.attempt)])
        except (ObjectStoreError, StorageBackendError) as error:
            log.info("staged leftovers stay for garbage collection: %s", error)

    def leave(self) -> None:
        """Stop the heartbeat and touch nothing: the outcome of the publish is unknown."""
        if self._heartbeat is not None:
            self._heartbeat.stop()


@dataclass(frozen=True)
class PartFolder:
    """Where others stage the parts of an attempt. Plain data: it travels to whoever does."""

    uri: str
    config: OntologiaConfig
    attempt: str
    spec: TypeSpec
    schema_version_id: int

    def stage(
        self, store: ObjectStore, label: str, rows: pa.Table, scratch: Path, *, inserted: int
    ) -> dict[str, Any]:
        """Encode rows (in the row schema) to a scratch file and upload it under a name that
        nobody else uses. Returns the part's description, as JSON knows it, and `ascending`:
        whether order tells that no identity is in it twice."""
        version = self.schema_version_id
        part = encode_part(self.spec, rows, scratch, schema_version_id=version, inserted=inserted)
        key = layout.staged_part(self.attempt, self.spec.kind, self.spec.name, version, label)
        store.put_file(key, scratch)
        file = part.encoded.describe(
            self.spec,
            key,
            schema_version_id=version,
            part=None,
            inserted=inserted,
            commit_id_source="manifest",
        )
        return {**asdict(file), "ascending": part.ascending}


class StagedWrite:
    """One type's staged write. It is announced while it is used as a context manager:

        with attempt, attempt:

    Twice, as Ctrl-C may come at the first instruction of leaving; entering or leaving again does
    nothing.
    """

    def __init__(
        self,
        chain: Chain,
        versions: Versions,
        config: OntologiaConfig,
        spec: TypeSpec,
        *,
        idempotency: Idempotency | None,
        order_by: str | None,
        holder: Mapping[str, Any] | None = None,
        on_lost: Callable[[], None] | None = None,
        attempt: str | None = None,
    ) -> None:
        """`on_lost` is called once nothing of it can be published."""
        head = chain.read_head().head
        if attempt is not None and layout.attempt_incarnation(attempt) != chain.incarnation:
            raise UnknownBranchError(chain.branch, gone=True)  # it was staged for another one
        if head.protected:
            raise ProtectedBranchError(chain.branch)  # before the work, not after
        heads = chain.type_heads_at(head)
        top = heads.get(spec.ref)
        self._chain = chain
        self._versions = versions
        self.config = config
        self.base = head
        self.top = top
        self.order_by = order_by
        self.schema_version_id = top.schema_version_id if top is not None else FIRST_VERSION
        self.applied: AppliedUnit | None = None
        if idempotency is not None:
            self.applied = applied(chain, head, idempotency)
        check_schema(chain, head, spec, top)
        self.spec = aligned(chain, head, spec, top)
        self._staging = Staging(
            chain.store,
            schema_versions={spec.ref: self.schema_version_id},
            beat_s=config.s3_lease_ttl_ms / 3000,
            attempt=attempt or layout.on_chain(layout.new_id(), chain.incarnation),
        )
        self._files: tuple[CommitFile, ...] = ()
        self._upto = head.commit_id  # our rows take account of what was written until then
        self._published: Sequence[CommitFile] = ()
        self._unknown = False
        self._publishing = False
        self._lost = False
        self._closed = False
        self._holder = dict(holder or {})
        self._on_lost = on_lost
        self._unit = idempotency
        self._last_version: tuple[int | str | None] | None = None
        self.kept = 0  # rows that another commit had changed: left as it made them

    # -- while others stage -------------------------------------------------------------------

    @property
    def uri(self) -> str:
        return self._chain.store.uri

    @property
    def local(self) -> bool:
        """Whether the driver reads parts from its own disk."""
        return self._chain.store.local_path(layout.HEAD) is not None

    @cached_property
    def began_at(self) -> datetime:
        """One moment for the whole write, by the store's clock."""
        return self._chain.store.now().astimezone(UTC)

    def timestamp(self) -> str:
        """The store's clock, as records have it."""
        return timestamp(self._chain.store.now())

    @property
    def quarantine_prefix(self) -> str:
        """Where in the storage rows go that are set aside, if they go nowhere else."""
        return layout.quarantine(self.spec.kind, self.spec.name, self.attempt)

    @property
    def attempt(self) -> str:
        return self._staging.attempt

    @property
    def lost(self) -> bool:
        return self._lost

    def check_alive(self) -> None:
        """GivenUp when what was staged can no longer be published."""
        if self._lost:
            raise GivenUp(layout.attempt_heartbeat(self.attempt))

    def entries(self) -> list[Entry]:
        """The files that hold the type's latest rows as of the base."""
        resolution = self._versions.resolve(self.spec, self.base)
        return newest(resolution.entries, self.base.commit_id)

    def add(self, files: Iterable[CommitFile]) -> None:
        """Take parts into the write: they are in the store, and each row differs from the base."""
        first = len(self._files)
        numbered = [replace(f, part=n) for n, f in enumerate(files, start=first)]
        self._files = (*self._files, *numbered)

    def add_described(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """`add`, by the descriptions that `PartFolder.stage` has returned elsewhere."""
        self.add(CommitFile.parse(dict(part)) for part in parts)

    def require_no_other_unit(self) -> None:
        """Publish only if no other unit of work of the same application was, since the base: what
        this one lacks, another extract may have, though it has no row to tell of it."""
        self._last_version = (self._version_at(self.base),)

    def _version_at(self, head: Head) -> int | str | None:
        if self._unit is None:
            return None
        mark = state.last_applied(self._chain, head, self._unit.app_id)
        return mark.version if mark is not None else None

    def keep_differing(self, *, since: int, part_bytes: int) -> None:
        """For parts that hold rows as they came: put in their place what differs from the base.

        `since` is the head when their writer began: what later commits made of an identity stays.
        """
        arrived, self._files = self._files, ()
        if not arrived:
            return

        def keep() -> None:
            self._files = ()
            kept = differing(
                self._versions,
                self.spec,
                self.base,
                arrived,
                since=since,
                order_by=self.order_by,
                part_bytes=part_bytes,
            )
            for rows, inserted in kept:
                self.stage(rows, inserted=inserted)

        self._versions.duck.within_memory(held_bytes(self.spec, arrived), keep)

    def stage(self, rows: pa.Table, *, inserted: int) -> None:
        """Make a part of rows at hand (in the row schema) and take it in."""
        with tempfile.TemporaryDirectory(prefix="ontologia-part-") as folder:
            part = encode_part(
                self.spec,
                rows,
                Path(folder) / "part.parquet",
                schema_version_id=self.schema_version_id,
                inserted=inserted,
            )
            self.add([self._staging.stage(self.spec, part)])

    @property
    def files(self) -> tuple[CommitFile, ...]:
        return self._files

    def as_entry(self) -> Entry:
        """The parts as a reader names files; their rows have no commit yet."""
        return Entry(0, 0, self._files)

    def repeated(self) -> list[object]:
        """Identities that are in the parts more than once (three at most)."""
        return repeated(self._versions, self.spec, self._files)

    def as_input(self) -> TypeInput:
        return TypeInput(self.spec, staged=self)

    # -- under the lock -----------------------------------------------------------------------

    def parts(self, head: Head, top: TypeHead | None, *, snapshot: Snapshot | None) -> BulkParts:
        """The parts without rows that other commits have overtaken since.

        Called without the lock first, so that under it only what came after is looked at.
        """
        self._check_same_schema(head, top)
        self._check_same_unit(head)
        since = self._upto
        if snapshot is not None:
            since = min(since, snapshot.since(self.spec.ref))
        if self._files and top is not None and top.commit_id > since:
            fresh = state.entries(self._chain, head, self.spec.ref, top=top, above=since)
            lost = overtaken(
                self._versions, self.spec, self._files, fresh, since=since, order_by=self.order_by
            )
            if snapshot is not None:
                _refuse(self.spec, lost.identities(), since)
            self._give_way(head, lost, since)
        self._upto = head.commit_id
        return BulkParts((), self._files)

    def _check_same_schema(self, head: Head, top: TypeHead | None) -> None:
        now = top.schema_version_id if top is not None else FIRST_VERSION
        if head.log_id != self.base.log_id or now != self.schema_version_id:
            raise version_moved(self.spec, now, self.schema_version_id)

    def _check_same_unit(self, head: Head) -> None:
        if self._last_version is None or self._unit is None:
            return
        published = self._version_at(head)
        if published is None or (published,) == self._last_version:
            return
        # Of numbers it is an older one: had it been newer, this one would count as applied.
        if not (isinstance(published, int) and isinstance(self._unit.version, int)):
            raise OvertakenExtractError(
                type=self.spec.name,
                app_id=self._unit.app_id,
                version=self._unit.version,
                published=published,
            )

    def _give_way(self, head: Head, newer: Overtaken, since: int) -> None:
        if not newer:
            return
        earlier = newer.known_before(
            self._versions,
            head,
            since if self.top is not None or since > self.base.commit_id else 0,
        )
        files = list(self._files)
        for number in newer.parts():
            lost, lost_new, won_new = newer.counts(number, earlier)
            file = files[number]
            inserted = (file.inserted or 0) - lost_new - won_new
            if not lost:
                files[number] = replace(file, inserted=inserted, updated=file.row_count - inserted)
                continue
            left = file.row_count - lost
            self.kept += lost
            if left == 0:
                files[number] = replace(file, row_count=0)
                continue
            with without(self._versions, self.spec, file, newer.losing(number)) as part:
                staged = self._staging.stage(self.spec, replace(part, inserted=inserted))
            files[number] = replace(staged, part=file.part)
        self._files = tuple(file for file in files if file.row_count)

    def check(self, files: Iterable[CommitFile]) -> None:
        """Before the CAS: all parts are still ours, and there, whole."""
        self._staging.check(files)

    def publishing(self) -> None:
        """Said before each publish: until it is settled, it may have landed."""
        if self._publishing:
            self._unknown = True  # the one before was stopped on its way
        self._publishing = True

    def settle(self, published: Sequence[CommitFile] | None) -> None:
        """What became of a publish: the published files, or None when it cannot be told."""
        if published is None:
            self._unknown = True
        else:
            self._published = published
            self._publishing = False

    @property
    def unknown(self) -> bool:
        """Whether a publish may have landed."""
        return self._unknown or self._publishing

    # -- lifetime -----------------------------------------------------------------------------

    def close(self) -> None:
        self._staging.leave()
        if not (self.unknown or self._closed):
            self._staging.end(self._published, listed=True)
        self._closed = True

    def _note_loss(self) -> None:
        self._lost = True
        if self._on_lost is not None:
            self._on_lost()

    def __enter__(self) -> Self:
        try:
            self._staging.begin(self._holder, self._note_loss)
            return self
        except BaseException:
            self._staging.leave()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _refuse(spec: TypeSpec, identities: list[object], since: int) -> None:
    if identities:
        raise ConcurrentWriteError(type=spec.name, identities=identities, snapshot=since)


def attempt_beside(name: str, other: str) -> str:
    """An attempt of a name that one has, on the chain that another attempt is meant for."""
    return layout.on_chain(name, layout.attempt_incarnation(other))


def head_commit_id(uri: str, config: OntologiaConfig, branch: str | None, attempt: str) -> int:
    """Of the head now, by one request: for tasks that only note where they began.

    UnknownBranchError when the branch is another one by now than that of the attempt.
    """
    store = open_store(uri, config)
    try:
        name, incarnation = branch or layout.MAIN, layout.attempt_incarnation(attempt)
        key = layout.branch_head(name) if incarnation else layout.HEAD
        chain = Chain(store, store.parallel, head_key=key, branch=name, incarnation=incarnation)
        return chain.read_head().head.commit_id
    finally:
        store.close()


def discard_staged(chain: Chain, attempt: str, *, since: int) -> None:
    """Delete what was staged under an attempt that nobody will publish.

    Nothing is deleted when the log names it (commits after `since` are looked at), nor while there
    is a heartbeat: its writer lives, or has ended without knowing whether it published. Nor when
    the chain is not that of the attempt any more: the branch may have been merged before it was
    deleted.
    """
    if layout.attempt_incarnation(attempt) != chain.incarnation:
        return
    prefix = f"{layout.staged_prefix(attempt)}/"
    head = chain.read_head().head
    for _, manifest in chain.stretch(head.link, above=since):
        if any(file.path.startswith(prefix) for file in manifest.files):
            return
    if any(True for _ in chain.store.list(layout.attempt_heartbeat(attempt))):
        return
    chain.store.delete_many([info.key for info in chain.store.list(prefix)])
