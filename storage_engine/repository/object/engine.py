"""`S3RepositoryV1` and `S3RepositoryV2`: the repository on any object store.

The two share everything but what the specification makes different: v1 keeps `fields_json` and
moves the watermark of every known type at each commit; v2 partitions by schema version, stages
bulk parts before the lock, and writes only the indices of touched types.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from operator import eq
from typing import Any, ClassVar, Protocol, Self

import pyarrow as pa

from storage_engine.commitlog import layout, state, tags
from storage_engine.commitlog.branches import Branch, chain_of
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import Documents
from storage_engine.commitlog.lock import WriteLock, break_lock
from storage_engine.commitlog.publisher import Publisher
from storage_engine.commitlog.records import Head, TypeHead, TypeRef, timestamp
from storage_engine.commitlog.series import FORMAT_OF_BRANCHES, MERGE, UPDATE, Draft
from storage_engine.commitlog.swap import Base, PublishedCommit
from storage_engine.commitlog.tags import Tag
from storage_engine.commitlog.type_heads import LiveTypes
from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    ConfigurationError,
    ProtectedBranchError,
    SchemaMetadataError,
    StorageBackendError,
    UnknownTagError,
    UnsupportedEngineError,
)
from storage_engine.index.maintain import index_writes
from storage_engine.index.record import IndexObjects, IndexVersion
from storage_engine.index.resolve import Early, resolve
from storage_engine.model.columns import EngineVersion
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.cache import cache_for
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.process import Owner, is_gone
from storage_engine.query.reference import Reference, check_tag
from storage_engine.query.spec import When
from storage_engine.repository.commit_queue import CommitQueue, PendingCommit, Turn
from storage_engine.repository.duck import Duck
from storage_engine.repository.duck_confined import ConfinedDuck
from storage_engine.repository.object import commit_history, stored_schema
from storage_engine.repository.object.branches import (
    Branches,
    branch_reference,
    lock_key,
    own_commit,
    type_indices,
)
from storage_engine.repository.object.history import ObjectHistory
from storage_engine.repository.object.outbox import projections
from storage_engine.repository.object.read.executor import Engine, ObjectExecutor
from storage_engine.repository.object.read.files import Scanner
from storage_engine.repository.object.read.latest import Resident, Versions
from storage_engine.repository.object.read.plan import CommitWindow
from storage_engine.repository.object.stamp import (
    Stamp,
    allow_branches,
    bring_forward,
    read_stamp,
    stamp_for,
)
from storage_engine.repository.object.write.commit import Parts
from storage_engine.repository.object.write.group import GroupRun
from storage_engine.repository.object.write.migrate import MigrationRun
from storage_engine.repository.object.write.staged_write import StagedWrite
from storage_engine.repository.protocol import (
    LATEST,
    AppliedUnit,
    CommitRecord,
    CommitRequest,
    CommitResult,
    Idempotency,
    ReadWindow,
    check_metadata,
    checked_commit,
    labels,
    no_staging,
)
from storage_engine.schema.catalogs import (
    catalog_writes,
    history_writes,
    known_types,
    write_types_anew,
)
from storage_engine.schema.history import TypeHistory
from storage_engine.schema.migration import SCHEMA_KINDS, MigrationOutcome, MigrationRequest

log = logging.getLogger(__name__)


class StorageUpkeep(Protocol):
    """What a storage does for itself beside commits. Nothing of it raises an `Exception`."""

    def after_commits(self, published: Sequence[PublishedCommit]) -> None:
        """Told in the background of commits that were published together; it starts what takes
        time, and returns."""

    def flush(self) -> None:
        """Bring to an end what was begun, as far as a bounded time allows."""

    def close(self) -> None:
        """The same, and give up what is left."""


class ObjectRepository(ABC):
    """What both engines share."""

    engine_version: ClassVar[EngineVersion]
    database: None = None

    def __init__(
        self,
        store: ObjectStore,
        config: OntologiaConfig,
        stamp: Stamp,
        log_id: str | None = None,
        opened_with: Head | None = None,
        branch: Head | None = None,
        beside: ObjectRepository | None = None,
    ) -> None:
        """`log_id`: of the log that was there when the stamp was read, and its head. `branch`: the
        head of the branch to work on, instead of main. `beside`: whose store it is, which closes
        it."""
        self.uri = store.uri
        self.backend = store.kind
        self.store = store
        self._config = config
        self._stamp = stamp
        self._owner = Owner(store.uri)
        self._beside = beside
        self._others: dict[str, ObjectRepository] = {}
        self.fork = branch.fork if branch is not None else None
        self.chain = chain_of(store, branch) if branch is not None else Chain(store, store.parallel)
        self._indices = type_indices(store, self.engine_version, branch)
        self._documents = Documents(store)
        self._duck = Duck(
            uri=store.uri,
            memory_limit=config.s3_duckdb_memory_limit,
            secret=store.duckdb_secret,
        )
        self.cache = cache_for(store, config)
        self._sql_duck = ConfinedDuck(
            uri=store.uri,
            memory_limit=config.s3_duckdb_memory_limit,
            secret=store.duckdb_secret,
            folders=self._data_folders,
        )
        scanner = Scanner(store, self._duck, self.cache)
        self._resident = Resident()
        self._versions = Versions(
            self.chain,
            self._indices,
            scanner,
            self._resident,
            engine_version=self.engine_version,
            warn=self._warn_of_lag,
        )
        self._query_engine = Engine(
            self.chain,
            self._versions,
            scanner,
            self._duck,
            self._sql_duck,
            self._type_refs,
            self._stored_types,
            self._commit_at,
            v1=self.engine_version == "v1",
            opened_with=opened_with,
        )
        self.lock = WriteLock(
            store,
            owner_id=config.runtime_id,
            lease_ttl_ms=config.s3_lease_ttl_ms,
            timeout_ms=config.s3_lock_timeout_ms,
            key=lock_key(self.fork),
            warn=self._warn,
        )
        self._holder = self.lock.holder
        self.publisher = Publisher(
            self.chain,
            self.lock,
            runtime_id=config.runtime_id,
            max_attempts=config.commit_max_attempts,
            checkpoint_interval=config.checkpoint_interval,
            project=self._project,
            warn=self._warn,
            queued=lambda: len(self._queue) > 0,
            foresee=lambda head: self._versions.foresee(self._queue.refs(), head),
        )
        self.upkeep: StorageUpkeep | None = None
        self._last_index_warning: str | None = None
        self._types_are_broken = False
        self._commit_mutex = threading.Lock()
        self._queue = CommitQueue(self._publish, lambda: store.now().timestamp())
        self._log_id = log_id
        self.history = ObjectHistory(self)

    # -- branches -----------------------------------------------------------------------------

    @property
    def branch(self) -> str:
        """The branch that this works on."""
        return self.chain.branch

    @property
    def branches(self) -> Branches:
        return Branches(self)

    @property
    def may_have_branches(self) -> bool:
        """False: it had none when it was opened, nor has this made any."""
        return self._stamp.format >= FORMAT_OF_BRANCHES

    def allow_branches(self, head: Head) -> None:
        """See to it that programs which know of no branches refuse this storage."""
        self._owner.check()
        if self._stamp.format < FORMAT_OF_BRANCHES or head.log_id != self._log_id:
            self._stamp = allow_branches(self.store, self._stamp)

    def on_branch(self, head: Head) -> ObjectRepository:
        """The same storage on another branch (main for a head without fork), opened beside this
        one: whoever asks closes it, and closes it first."""
        return type(self)(
            self.store,
            self._config,
            self._stamp,
            head.log_id,
            opened_with=head,
            branch=head if head.fork is not None else None,
            beside=self,
        )

    def beside(self, head: Head) -> ObjectRepository:
        """The same storage on another branch, for as long as this one is open."""
        with self._commit_mutex:
            opened = self._others.get(head.incarnation)
            if opened is None:
                opened = self._others[head.incarnation] = self.on_branch(head)
            return opened

    # -- what maintenance works with ----------------------------------------------------------

    @property
    def objects(self) -> Self:
        return self

    @property
    def config(self) -> OntologiaConfig:
        return self._config

    @property
    def indices(self) -> IndexObjects:
        return self._indices

    @property
    def versions(self) -> Versions:
        return self._versions

    @property
    def duck(self) -> Duck:
        return self._duck

    def warn(self, message: str) -> None:
        self._warn(message)

    # -- reading ------------------------------------------------------------------------------

    def head_commit_id(self) -> int:
        return self.chain.read_head().head.commit_id

    def type_head(self, spec: TypeSpec) -> int:
        top = self._versions.type_head(spec, self.chain.read_head().head)
        return top.changed_by if top is not None else 0

    def read(
        self, spec: TypeSpec, window: ReadWindow = LATEST, *, keys: pa.Table | None = None
    ) -> pa.Table:
        wanted = keys.select(list(spec.identity)) if keys is not None else None
        return ObjectExecutor(self._query_engine).read(spec, window, wanted)

    def executor(
        self, pinned: int | None = None, *, on_head: Callable[[int], None] | None = None
    ) -> ObjectExecutor:
        return ObjectExecutor(self._query_engine, pinned, on_head)

    def key_splits(self, spec: TypeSpec, when: When) -> Sequence[str]:
        return ObjectExecutor(self._query_engine).key_splits(spec, when)

    def commit_at(self, reference: Reference) -> int:
        return self._commit_at(self.chain.read_head().head, reference)

    def _commit_at(self, head: Head, reference: Reference) -> int:
        if isinstance(reference, datetime):
            return state.commit_at(self.chain, head, reference)
        if isinstance(reference, str):
            own = own_commit(self.chain, reference)
            if own is not None:
                return min(own, head.commit_id)
            try:
                return tags.resolve_tag(self.chain, reference, head).commit_id
            except UnknownTagError:
                self._refuse_other_branch(reference)
                raise
        return min(max(reference, 0), head.commit_id)

    def _refuse_other_branch(self, reference: str) -> None:
        """Say of `branch@id` that the branch is another one, or not there at all."""
        named = branch_reference(reference)
        if named is None or self.engine_version == "v1":
            return
        self.branches.head(named[0])
        raise ConfigurationError(
            f"{reference!r} is a commit of another branch than {self.branch!r}: open that branch "
            "(`branch=`, `--branch`)"
        )

    def require_commit(self, reference: Reference) -> int:
        head = self.chain.read_head().head
        return checked_commit(reference, self._commit_at(head, reference), head.commit_id)

    def list_tags(self) -> list[Tag]:
        return tags.list_tags(self.chain)

    def resolve_tag(self, name: str) -> Tag:
        return tags.resolve_tag(self.chain, name)

    def create_tag(self, name: str, commit_id: int | None = None) -> Tag:
        check_tag(name)
        self.flush()
        return tags.create_tag(self.chain, name, commit_id, runtime_id=self.lock.owner_id)

    def delete_tag(self, name: str) -> Tag:
        return tags.delete_tag(self.chain, name)

    def known_types(self) -> list[TypeSpec]:
        head = self.chain.read_head().head
        return self._stored_types(head, sorted(self._type_refs(head)))

    def type_refs(self) -> list[TypeRef]:
        return sorted(self._type_refs(self.chain.read_head().head))

    def stored_types(self, refs: Sequence[TypeRef]) -> list[TypeSpec]:
        return self._stored_types(self.chain.read_head().head, refs)

    def type_histories(self, refs: Sequence[TypeRef] | None = None) -> dict[TypeRef, TypeHistory]:
        head = self.chain.read_head().head
        return stored_schema.type_histories(self.chain, self._documents, head, refs)

    def _type_refs(self, head: Head) -> Set[TypeRef]:
        return stored_schema.type_refs(self.chain, head)

    def _stored_types(self, head: Head, refs: Sequence[TypeRef]) -> list[TypeSpec]:
        return stored_schema.stored_types(self.chain, self._documents, head, refs)

    def _data_folders(self) -> list[str]:
        """Where the files lie that DuckDB opens by itself, as it names them."""
        folders = [str(self.cache.directory)] if self.cache is not None else []
        for prefix in layout.DATA_PREFIXES:
            folder = prefix.rstrip("/")
            place = self.store.local_path(folder) or self.store.duckdb_url(folder)
            folders += [f"{place}/"] if place is not None else []
        return folders

    def list_commits(
        self, limit: int = 10, since_commit_id: int | None = None
    ) -> list[CommitRecord]:
        return commit_history.list_commits(self.chain, limit, since_commit_id or 0)

    def get_commit(self, commit_id: int) -> CommitRecord | None:
        return commit_history.get_commit(self.chain, commit_id)

    def sent_events(self, commit_id: int) -> Sequence[Mapping[str, Any]]:
        return commit_history.sent_events(self.chain, commit_id)

    def identity_counts(self) -> dict[TypeRef, int | None]:
        head = self.chain.read_head().head
        histories = stored_schema.type_histories(self.chain, self._documents, head, None)
        return commit_history.identity_counts(self.chain, head, histories)

    def commits_between(self, since: int, upto: int) -> list[CommitRecord]:
        return commit_history.commits_between(self.chain, since, upto)

    def written_values(
        self,
        spec: TypeSpec,
        field: str,
        *,
        since: int,
        upto: int,
        alike: Callable[[Any, Any], bool] = eq,
    ) -> Iterator[tuple[int, Any]]:
        executor = ObjectExecutor(self._query_engine)
        return executor.written_values(spec, field, CommitWindow(upto, since, True), alike)

    def list_commit_changes(self, commit_id: int) -> list[dict[str, Any]]:
        return commit_history.list_commit_changes(self.chain, self._versions, commit_id)

    # -- writing ------------------------------------------------------------------------------

    def commit(self, request: CommitRequest) -> CommitResult | None:
        self._check_request(request)
        return self._queue.commit(request)

    def submit(self, request: CommitRequest) -> PendingCommit:
        self._check_request(request)
        return self._queue.submit(request)

    def _check_request(self, request: CommitRequest) -> None:
        self._owner.check()
        check_metadata(request.metadata, self._config.max_commit_metadata_bytes)

    def _publish(self, turn: Turn) -> None:
        self._owner.check()
        with self._commit_mutex:
            self.prepare_writing()
            self._lock_for(turn.leader.request.holder, turn.waited_s)
            group = GroupRun(self._parts(), turn)
            try:
                with group, group:  # twice: Ctrl-C may come at the first instruction of leaving
                    group.run()
            finally:
                self.lock.timeout_ms = self._config.s3_lock_timeout_ms

    def _lock_for(self, holder: Mapping[str, Any], waited_s: float = 0.0) -> None:
        """What others who wait are shown; and how long to wait for them, of which some may be
        over."""
        self.lock.holder = {**self._holder, **holder}
        self.lock.timeout_ms = max(0, self._config.s3_lock_timeout_ms - round(1000 * waited_s))

    def prepare_writing(self) -> None:
        """Bring the storage to the current format, as the first commit does."""
        self._owner.check()
        self._stamp = bring_forward(self.store, self._stamp)

    def write_catalogs(self) -> None:
        """Bring the catalogs up to what the log says of all types. What fails is a warning: no
        reader needs them."""
        writes = history_writes(
            self._documents,
            self.type_histories(),
            types=self.type_refs(),
            engine_version=self.engine_version,
            now=self.store.now(),
        )
        for outcome in self.store.parallel.gather_outcomes(writes):
            if isinstance(outcome, Exception):
                self._warn(f"a catalog was not written: {outcome}")
            elif isinstance(outcome, BaseException):
                raise outcome

    def migrate(self, request: MigrationRequest) -> MigrationOutcome:
        self._owner.check()
        check_metadata(request.metadata, self._config.max_commit_metadata_bytes)
        with self._commit_mutex:
            self._stamp = bring_forward(self.store, self._stamp)
            self._lock_for(request.holder)
            executor = ObjectExecutor(self._query_engine)
            migration = MigrationRun(self._parts(), self._documents, executor, request)
            with migration, migration:
                return migration.run()

    def _parts(self) -> Parts:
        return Parts(
            self.chain,
            self.publisher,
            self._versions,
            self._resident,
            self._duck,
            self._config,
            self.engine_version,
            self._check_log,
        )

    def publish_merge(
        self, prepare: Callable[[Base], Draft | None], holder: Mapping[str, Any]
    ) -> PublishedCommit | None:
        """Publish what a merge or an update drafts, which protection does not refuse."""
        self._owner.check()
        with self._commit_mutex:
            self.prepare_writing()
            self._lock_for(holder)
            return self.publisher.publish(prepare)

    def reader(self) -> ObjectExecutor:
        """For reads as of a head that is at hand."""
        return ObjectExecutor(self._query_engine)

    def types_at(self, head: Head, refs: Sequence[TypeRef]) -> list[TypeSpec]:
        return self._stored_types(head, refs)

    def histories_at(self, head: Head, refs: Sequence[TypeRef]) -> dict[TypeRef, TypeHistory]:
        return stored_schema.type_histories(self.chain, self._documents, head, refs)

    def applied(self, unit: Idempotency) -> AppliedUnit | None:
        return commit_history.applied(self.chain, self.chain.read_head().head, unit)

    def last_version(self, app_id: str) -> int | str | None:
        """Of the last unit of work that an application has recorded here."""
        mark = state.last_applied(self.chain, self.chain.read_head().head, app_id)
        return mark.version if mark is not None else None

    def begin_staged(
        self,
        spec: TypeSpec,
        *,
        idempotency: Idempotency | None = None,
        order_by: str | None = None,
        holder: Mapping[str, Any] | None = None,
        on_lost: Callable[[], None] | None = None,
        attempt: str | None = None,
    ) -> StagedWrite:
        if self.engine_version != "v2":
            raise no_staging(self.uri, backend=self.backend, engine_version=self.engine_version)
        return StagedWrite(
            self.chain,
            self._versions,
            self._config,
            spec,
            idempotency=idempotency,
            order_by=order_by,
            holder={**self._holder, **(holder or {})},
            on_lost=on_lost,
            attempt=attempt,
        )

    def _check_log(self, head: Head) -> None:
        """Another process may have erased the storage and begun anew, with another engine."""
        if head.protected:
            raise ProtectedBranchError(self.branch)
        if self._log_id is not None and head.log_id != self._log_id:
            stamp = stamp_for(self.store, read_stamp(self.store), head)
            if stamp.engine_version != self.engine_version:
                raise UnsupportedEngineError(
                    f"{self.uri} was initialised anew with engine {stamp.engine_version} since it "
                    f"was opened with {self.engine_version}: open it again",
                    backend=stamp.backend,
                    engine_version=stamp.engine_version,
                    format=stamp.format,
                )
        self._log_id = head.log_id

    def flush(self) -> None:
        self._queue.flush()
        self.publisher.flush()
        if self.upkeep is not None:
            self.upkeep.flush()

    def close(self) -> None:
        if self._owner.elsewhere:
            return  # all of it is the parent's
        for other in self._others.values():
            other.close()
        self._queue.flush()
        self.publisher.flush()
        if self.upkeep is not None:
            self.upkeep.close()
        self._duck.close()
        self._sql_duck.close()
        if self._beside is None:
            self.store.close()

    # -- after a commit -----------------------------------------------------------------------

    def _project(self, published: Sequence[PublishedCommit]) -> Sequence[Callable[[], object]]:
        """Of commits that were published together, oldest first."""
        latest = published[-1]
        outbox: Sequence[Callable[[], object]] = ()
        catalogs: Sequence[Callable[[], object]] = ()
        if self.fork is None:  # of a branch, they are the merge's
            outbox = [
                write for each in published for write in projections(self.store.bulk, each.manifest)
            ]
            catalogs = self._catalog_writes(published)
        if not latest.base.lease.safe():
            self._warn(
                f"lease ran out after commit {latest.manifest.commit_id} was published; "
                "its index is left to the next commit"
            )
            return [*outbox, *catalogs]
        self._types_are_broken = False
        refs = self._types_to_index(published)
        if self._types_are_broken:
            catalogs = [*catalogs, *self._repairs(latest)]
        refs += [p.carried for p in published if p.carried is not None and p.carried not in refs]
        indices = index_writes(self.chain, self._indices, published, refs)
        if self.upkeep is not None:
            self.upkeep.after_commits(published)
        return [*outbox, *catalogs, *indices]

    def _catalog_writes(
        self, published: Sequence[PublishedCommit]
    ) -> Sequence[Callable[[], object]]:
        manifest = published[-1].manifest
        types = LiveTypes(self.chain.type_heads(manifest) or {})
        # Those that change schemas are published alone.
        if manifest.kind in SCHEMA_KINDS or (manifest.kind == MERGE and manifest.schema):
            histories = stored_schema.recorded_histories(
                self.chain, published[-1].head, manifest.schema_changed()
            )
            return history_writes(
                self._documents,
                histories,
                types=types,
                engine_version=self.engine_version,
                now=self.store.now(),
            )
        return catalog_writes(
            self._documents,
            [
                (each.manifest.commit_id, record)
                for each in published
                for record in each.manifest.schema.get("registered", ())
            ],
            types=types,
            engine_version=self.engine_version,
            now=self.store.now(),
        )

    @abstractmethod
    def _types_to_index(self, published: Sequence[PublishedCommit]) -> list[TypeRef]:
        """Whose index objects these commits write."""

    def _listed_types(self, published: PublishedCommit) -> list[TypeRef] | None:
        """What types.json lists; None, and a warning, when it cannot be read (RFC 0004 3.3)."""
        try:
            return known_types(self._documents)
        except (SchemaMetadataError, StorageBackendError) as error:
            self._types_are_broken = isinstance(error, SchemaMetadataError)
            self._warn(f"{error}; indices left unchanged by commit {published.manifest.commit_id}")
            return None

    def _repairs(self, published: PublishedCommit) -> list[Callable[[], object]]:
        """What a commit does for catalogs that it has found broken."""
        return []

    def _warn_of_lag(self, message: str) -> None:
        """An index that waits for our own write after a commit is not worth a word."""
        if not self.publisher.pending:
            self._warn(message)

    def _warn(self, message: str) -> None:
        self._last_index_warning = message
        log.warning("%s: %s", self.uri, message)

    # -- information --------------------------------------------------------------------------

    def storage_info(self) -> dict[str, Any]:
        version = self.chain.read_head()
        head = version.head
        all_heads = self.chain.type_heads_at(head)
        heads = sorted((ref, all_heads[ref]) for ref in self._type_refs(head))
        named = dict(zip(labels([ref for ref, _ in heads]), heads, strict=True))
        info: dict[str, Any] = {
            "backend": self.backend,
            "engine_version": self.engine_version,
            "store": self.backend,
            "uri": self.uri,
            "format": self._stamp.format,
            **self._branch_facts(head),
            "head_commit_id": head.commit_id,
            "head_updated_at": head.updated_at,
            "checkpoint_commit_id": head.checkpoint.commit_id if head.checkpoint else None,
            "types": {
                label: {
                    "type_kind": ref[0],
                    "schema_version_id": top.schema_version_id,
                    "last_commit_id": top.changed_by,
                }
                for label, (ref, top) in named.items()
            },
            "last_index_warning": self._last_index_warning,
            "requests": self.requests(),
        }
        info |= self.store.facts
        if self.engine_version == "v2":
            info["type_layouts"] = _type_layouts(all_heads)
        return info

    def _branch_facts(self, head: Head) -> dict[str, Any]:
        """What is to be said of a branch; nothing of an unprotected main."""
        if head.fork is None and not head.protected:
            return {}
        return {"branch": Branch.of(head).as_dict()}

    def requests(self) -> dict[str, int]:
        return dict(self.store.meter.snapshot())

    def read_indices(self, head: Head) -> dict[TypeRef, IndexVersion]:
        """The index of every type of a head, in one hop."""
        refs = sorted(self.chain.type_heads_at(head))
        read = self.store.parallel.map(
            lambda ref: self._indices.read(ref, log_id=head.log_id), refs
        )
        return dict(zip(refs, read, strict=True))

    def index_warnings(
        self, head: Head | None = None, indices: Mapping[TypeRef, IndexVersion] | None = None
    ) -> list[str]:
        """What is wrong with the indices now, or with those that were read after a head; reads are
        right all the same."""
        head = head or self.chain.read_head().head
        resolutions = resolve(
            self.chain,
            self._indices,
            head,
            sorted(self.chain.type_heads_at(head)),
            watermark_is_head=self.engine_version == "v1",
            early=Early(indices, settled=True) if indices is not None else None,
        )
        return [resolution.warning for resolution in resolutions if resolution.warning is not None]

    def lock_info(self) -> dict[str, Any] | None:
        """Who holds the write lock now."""
        held = self.lock.read()
        if held is None:
            return None
        return {
            "owner_id": held.owner_id,
            "acquired_at": held.acquired_at,
            "expires_at": timestamp(held.expires_at),
            "holder": dict(held.holder),
            "token": held.token,
            "offered": held.offered,
            "expired": held.expires_at <= self.store.now(),
            "gone": is_gone(held.holder),
        }

    def break_lock(self, token: str | None, *, apply: bool = True) -> dict[str, Any] | None:
        """Take the write lock away, as `commitlog.lock` says; what it was, None if unreadable."""
        state = break_lock(self.store, token, key=self.lock.key, apply=apply).state
        if state is None:
            return None
        return {"owner_id": state.owner_id, "token": state.token, "holder": dict(state.holder)}


def _type_layouts(heads: Mapping[TypeRef, TypeHead]) -> dict[str, dict[str, Any]]:
    """RFC 0009: dropped types have no current version."""
    layouts = {}
    for ref, top in sorted(heads.items()):
        past = top.succeeded(0) if top.is_dropped else top.past_versions
        layouts[ref] = {
            "type_kind": ref[0],
            "current_schema_version_id": None if top.is_dropped else top.schema_version_id,
            "activation_commit_id": None if top.is_dropped else top.activation_commit_id,
            "historical_versions": [version.schema_version_id for version in past],
        }
    return dict(zip(labels(list(layouts)), layouts.values(), strict=True))


class S3RepositoryV1(ObjectRepository):
    """Engine v1 on an object store."""

    engine_version = "v1"

    def _types_to_index(self, published: Sequence[PublishedCommit]) -> list[TypeRef]:
        """Every known type; none of them when types.json, which lists them, cannot be read.

        A writer that died after its CAS may have left a type out of it: the manifest has them all.
        """
        manifest = published[-1].manifest
        listed = self._listed_types(published[-1])
        if listed is None:
            return []
        heads = self.chain.type_heads(manifest) or {}
        refs = dict.fromkeys([*listed, *heads])
        ended = {(d["kind"], d["type_name"]) for d in manifest.schema.get("dropped", ())}
        return [
            ref for ref in refs if (top := heads.get(ref)) is None or not top.empty or ref in ended
        ]


class S3RepositoryV2(ObjectRepository):
    """Engine v2 on an object store."""

    engine_version = "v2"
    _catalog_read = False  # types.json, by this session, and it was good

    def _types_to_index(self, published: Sequence[PublishedCommit]) -> list[TypeRef]:
        """The touched types: `type_heads` in the manifest tell readers that others are complete.

        Nothing here needs types.json, so only a session's first commit looks at it, and those
        after it until it is good.
        """
        manifest = published[-1].manifest
        looked = self._catalog_read or self.fork is not None
        if not looked and self._listed_types(published[-1]) is None:
            return []
        self._catalog_read = True
        if not manifest.schema or manifest.kind not in (*SCHEMA_KINDS, MERGE, UPDATE):
            return list(dict.fromkeys(r for each in published for r in each.manifest.touched()))
        heads = self.chain.type_heads(manifest) or {}
        purged = {(d["kind"], d["type_name"]) for d in manifest.schema.get("dropped", ())}
        changed = [
            ref for ref in manifest.schema_changed() if not heads[ref].empty or ref in purged
        ]
        return list(dict.fromkeys([*manifest.touched(), *changed]))

    def _repairs(self, published: PublishedCommit) -> list[Callable[[], object]]:
        """types.json, from the manifest, which has all types; this commit's indices stay as the
        contract says, and the next commit fills them up."""
        types = LiveTypes(self.chain.type_heads(published.manifest) or {})
        return [lambda: write_types_anew(self._documents, types, self.store.now())]
