"""`Session`: state what should be, commit it, and look at what was committed.

A session collects intents and turns them into commits. Nothing is written before `commit()` (or
the end of the `with` block), and everything stated until then is published together or not at all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ClosedError, ConfigurationError, OntologiaError
from storage_engine.maintenance.metrics import CommitCounters
from storage_engine.model.declarations import Entity, Event, Relation
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.open import open_repository
from storage_engine.repository.protocol import (
    Ack,
    CommitRequest,
    CommitResult,
    Idempotency,
    Repository,
    TypeInput,
)
from storage_engine.runtime import arguments
from storage_engine.runtime.asking import Reading
from storage_engine.runtime.bound_types import BoundTypes, StoredClass
from storage_engine.runtime.intents import Intents
from storage_engine.runtime.sources import open_source
from storage_engine.runtime.working import Working

if TYPE_CHECKING:
    from storage_engine.maintenance.compaction import (
        CompactionPolicy,
        CompactionProgress,
        CompactionReport,
    )
    from storage_engine.maintenance.metrics import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What one `commit()` asks for beside the intents."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    expect: Mapping[tuple[str, str], int] = field(default_factory=dict)
    idempotency: Idempotency | None = None
    isolated: bool = False
    events: Sequence[Mapping[str, Any]] = ()
    acks: Sequence[Ack] = ()


class Session(Working, Reading):
    """Work on one storage.

        with Session("onto.db") as session:
            session.ensure(Customer(id="c1", name="Ann"))

    `uri_or_path` is a SQLite file (`onto.db` when left out), a directory or a storage URI. Given
    `entity_types` and `relation_types` are the only ones that the session takes; otherwise types
    are bound as they come. `namespace` is where events go. `instance_metadata` (text to text)
    tells others who this is, for example while they wait for the write lock.

    Leaving the `with` block commits what is pending and closes; an exception discards it. If a
    commit failed and the intents are still there, leaving tries it again under the terms that were
    given to it, so that a caught conflict never turns into an unconditional write. Calls from
    several threads wait for each other, but they share one set of intents: give each thread
    a session of its own.
    """

    def __init__(
        self,
        uri_or_path: str | Path | None = None,
        *,
        entity_types: Iterable[type[Entity]] = (),
        relation_types: Iterable[type[Relation[Any, Any]]] = (),
        config: OntologiaConfig | None = None,
        namespace: str = "default",
        instance_metadata: Mapping[str, str] | None = None,
    ) -> None:
        types = BoundTypes(entity_types, relation_types)
        config = config or OntologiaConfig()
        settings = (
            arguments.checked_namespace(namespace),
            arguments.texts("instance_metadata", instance_metadata),
        )
        self._start(open_repository(uri_or_path, config), True, types, config, *settings)

    @classmethod
    def sharing(
        cls,
        repository: Repository,
        *,
        types: BoundTypes,
        config: OntologiaConfig,
        namespace: str = "default",
        instance_metadata: Mapping[str, str] | None = None,
    ) -> Self:
        """A session on a repository that someone else opened and will close."""
        session = cls.__new__(cls)
        settings = (
            arguments.checked_namespace(namespace),
            arguments.texts("instance_metadata", instance_metadata),
        )
        session._start(repository, False, types, config, *settings)
        return session

    def _start(
        self,
        repository: Repository,
        owns_repository: bool,
        types: BoundTypes,
        config: OntologiaConfig,
        namespace: str,
        instance_metadata: dict[str, str],
    ) -> None:
        self._repository = repository
        self._owns_repository = owns_repository
        self._types = types
        self._config = config
        self._namespace = namespace
        self._instance_metadata = instance_metadata
        self._intents = Intents(types)
        self._metadata: dict[str, str] = {}
        self._unfinished: _Terms | None = None  # of a commit that failed
        self._snapshot: int | None = None
        self._last_commit: CommitResult | None = None
        self._events = None
        self._counters = CommitCounters()
        self._mutex = threading.RLock()
        self._committing = False
        self._closed = False

    # --- stating intents ------------------------------------------------------------------------

    def ensure(self, objects: Entity | Relation[Any, Any] | Iterable[Any]) -> None:
        """State that an object, or every object of an iterable, should be stored as it is.

        The last statement about an identity wins. A list with something else in it is refused as
        a whole. How many objects one commit takes is limited (`max_batch_size`).
        """
        with self._use("ensure"):
            self._base()
            self._intents.ensure(objects)

    def ingest(self, type: StoredClass, source: Any) -> None:
        """State that every row of a source should be stored, however many there are.

        A source is an Arrow table, record batch or RecordBatchReader, a pandas or Polars frame,
        anything with `__arrow_c_stream__`, the path of a Parquet, CSV or JSON lines file, or a
        list of these. Columns are the field names; a relation has `left_key`, `right_key` and
        its instance key under its own name. Columns are checked now; rows are read and checked
        by `commit()`, and a source that does not fit leaves nothing behind.
        """
        with self._use("ingest"):
            spec = self._types.bind(type)
            opened = open_source(spec, source)
            self._base()
            self._intents.ingest(spec, opened)

    def add_commit_meta(self, key: str, value: str) -> None:
        """Attach a text to the next commit; a later value for the same key replaces it."""
        with self._use("add_commit_meta"):
            self._metadata |= arguments.texts("add_commit_meta", {key: value})

    def discard(self) -> None:
        """Forget the intents and commit metadata that were not committed."""
        with self._use("discard"):
            self._forget()

    # --- committing -----------------------------------------------------------------------------

    def commit(
        self,
        event: Event | Iterable[Event] | None = None,
        *,
        meta: Mapping[str, str] | None = None,
        expect: Mapping[StoredClass | str, int] | None = None,
        idempotency: tuple[str, int | str] | None = None,
        isolation: Literal["snapshot"] | None = None,
    ) -> int | None:
        """Publish what differs from the stored state, and the events, as one commit.

        Returns the commit's id, or None when nothing differs and there is no event.

        meta:         texts kept with the commit, beside those of `add_commit_meta`
        expect:       for types, by class or name, the commit that must have changed them last
                      (0: none yet), else ExpectedVersionMismatchError
        idempotency:  (app id, version) of this unit of work; if it was applied before, nothing is
                      published and the id of the commit that did it is returned
        isolation:    "snapshot": ConcurrentWriteError if another commit changed one of the
                      identities after `snapshot`

        Whatever goes wrong, nothing is published (CommitStateUnknownError is the one exception)
        and the intents stay, BatchSizeExceededError included: call `commit()` again, or
        `discard()` them.
        """
        with self._use("commit"):
            return self._commit(
                _Terms(
                    metadata=arguments.texts("meta", meta),
                    expect=arguments.expectations(expect, self._types),
                    idempotency=arguments.unit_of_work(idempotency),
                    isolated=arguments.wants_snapshot(isolation),
                    events=arguments.events(event, self._namespace),
                )
            )

    def _commit(self, terms: _Terms) -> int | None:
        self._unfinished = terms
        result = self._publish(
            CommitRequest(
                inputs=self._intents.inputs(limit=self._config.max_batch_size),
                metadata={**self._metadata, **terms.metadata},
                expect=terms.expect,
                idempotency=terms.idempotency,
                snapshot=self._base() if terms.isolated else None,
                events=terms.events,
                acks=terms.acks,
                holder=self._instance_metadata,
            )
        )
        self._forget()
        if result is None:
            return None
        self._last_commit = result
        self._snapshot = max(self._snapshot or 0, result.commit_id)
        return result.commit_id

    def _publish(self, request: CommitRequest) -> CommitResult | None:
        stated = request.inputs or request.events or request.expect or request.idempotency
        if not stated:
            return None
        self._committing = True
        try:
            result = self._repository.commit(request)
        except BaseException:
            self._counters.failure()
            raise
        finally:
            self._committing = False
        self._counters.succeeded(result)
        return result

    # --- for writers that stage rows themselves ---------------------------------------------

    def bind(self, type: StoredClass) -> TypeSpec:
        """The spec of a class, which becomes one of this session's types."""
        with self._use("bind"):
            return self._types.bind(type)

    def commit_staged(
        self,
        staged: TypeInput,
        event: Event | Iterable[Event] | None = None,
        *,
        meta: Mapping[str, str] | None = None,
        expect: Mapping[StoredClass | str, int] | None = None,
        idempotency: tuple[str, int | str] | None = None,
        holder: Mapping[str, str] | None = None,
    ) -> CommitResult | None:
        """Publish parts that were staged for `repository.begin_staged`, on the terms of `commit`.

        The intents of this session have no part in it.
        """
        with self._use("commit"):
            result = self._publish(
                CommitRequest(
                    inputs=[staged],
                    metadata=arguments.texts("meta", meta),
                    expect=arguments.expectations(expect, self._types),
                    idempotency=arguments.unit_of_work(idempotency),
                    events=arguments.events(event, self._namespace),
                    holder={**self._instance_metadata, **arguments.texts("holder", holder)},
                )
            )
            if result is not None:
                self._last_commit = result
            return result

    # --- as an event handler's session ----------------------------------------------------------

    def for_handler(self) -> Session:
        """A session for one handler's intents, so that a failure drops no others."""
        return Session.sharing(
            self._repository,
            types=self._types.fresh(),
            config=self._config,
            namespace=self._namespace,
            instance_metadata=self._instance_metadata,
        )

    def commit_handled(
        self,
        ack: Ack,
        events: Sequence[Mapping[str, Any]],
        *,
        expect: Mapping[StoredClass | str, int] | None = None,
        idempotency: tuple[str, int | str] | None = None,
    ) -> bool:
        """The commit of an event handler, which is also its ack; False if nothing differs."""
        with self._use("commit"):
            terms = _Terms(
                expect=arguments.expectations(expect, self._types),
                idempotency=arguments.unit_of_work(idempotency),
                events=events,
                acks=(ack,),
            )
            return self._commit(terms) is not None

    @property
    def has_intents(self) -> bool:
        """Whether something was stated since the last commit."""
        return bool(self._intents)

    def end_handler(self) -> None:
        """Close without waiting for the work that follows commits: others go on with it."""
        with self._mutex:
            self._forget()
            self._closed = True

    # --- what it is based on --------------------------------------------------------------------

    @property
    def last_commit(self) -> CommitResult | None:
        """What this session's latest commit did: rows inserted and updated per type, attempts."""
        return self._last_commit

    @property
    def snapshot(self) -> int:
        """The commit on which this session is based: head when the session was first used (for
        intents or for this property), then the session's own latest commit."""
        with self._use("snapshot"):
            return self._base()

    def _base(self) -> int:
        if self._snapshot is None:
            self._snapshot = self._repository.head_commit_id()
        return self._snapshot

    def _forget(self) -> None:
        self._intents.clear()
        self._metadata.clear()
        self._unfinished = None

    # --- looking --------------------------------------------------------------------------------

    @property
    def repository(self) -> Repository:
        """The storage engine underneath: Arrow tables instead of objects."""
        return self._repository

    @property
    def namespace(self) -> str:
        return self._namespace

    def storage_info(self) -> dict[str, Any]:
        """Engine, head, known types and, on object stores, the requests made so far."""
        with self._use("storage_info"):
            return self._repository.storage_info()

    def compact(
        self,
        policy: CompactionPolicy | None = None,
        *,
        types: Iterable[StoredClass | str] | None = None,
        progress: Callable[[CompactionProgress], None] | None = None,
    ) -> CompactionReport:
        """Merge small files of these types (or all) where the policy finds it worth while.

        Reads stay the same meanwhile and after; other sessions may go on writing.
        """
        from storage_engine.maintenance.compaction import compact

        with self._use("compact"):
            repository = self._repository
            names = None
            if types is not None:
                names = [t if isinstance(t, str) else self._types.find(t).name for t in types]
        return compact(repository, policy, progress, types=names)

    def metrics(self) -> Metrics:
        """Figures of this session's commits and of the storage; `.prometheus()` as text."""
        from storage_engine.maintenance.metrics import collect

        with self._use("metrics"):
            return collect(self._repository, self._counters)

    # --- lifetime -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the work that follows a commit (indices, lock release) is done."""
        with self._use("flush"):
            self._repository.flush()

    def close(self) -> None:
        """Drop what was not committed, wait for the work that follows commits, and close.

        Closing again does nothing.
        """
        with self._mutex:
            if self._closed:
                return
            self._refuse_reentry("close")
            if self.is_working:
                raise ConfigurationError("close(): this session is running; stop() it first")
            if self._intents:
                log.warning("%s: session closed with uncommitted intents", self._repository.uri)
            self._forget()
            self._closed = True
            if self._owns_repository:
                self._repository.close()
            else:
                self._repository.flush()

    def __enter__(self) -> Self:
        with self._use("with"):
            return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            try:
                if not self._closed and (self._intents or self._unfinished):
                    with self._use("commit"):
                        self._commit(self._unfinished or _Terms())
            except BaseException:
                self._abandon()
                raise
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Close while an exception is on its way, which nothing here may replace."""
        with self._mutex:
            self._forget()
            try:
                self.close()
            except OntologiaError as error:
                log.warning("%s: while closing: %s", self._repository.uri, error)

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError("session", operation)

    @contextmanager
    def _use(self, operation: str) -> Iterator[None]:
        with self._mutex:
            self._check_open(operation)
            self._refuse_reentry(operation)
            yield

    def _refuse_reentry(self, operation: str) -> None:
        if self._committing:
            raise ConfigurationError(
                f"{operation}() was called while commit() of the same session reads a source; "
                "use another session there"
            )
