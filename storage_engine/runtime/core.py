"""What a session is made of: its storage and types, its intents, and the commits they become.

`Session` is what users hold, and delegates to this. What else works with a session (Spark's writer,
which stages rows itself; the worker, whose handlers commit and ack at once) gets hold of it through
`internals`, and nothing else does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import pyarrow as pa

from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    ClosedError,
    ConcurrentWriteError,
    ConfigurationError,
    OntologiaError,
)
from storage_engine.model.declarations import Event
from storage_engine.model.spec import TypeSpec
from storage_engine.process import renew_after_fork
from storage_engine.repository.commit_queue import PendingCommit
from storage_engine.repository.protocol import (
    Ack,
    CommitCounters,
    CommitRequest,
    CommitResult,
    Idempotency,
    Identity,
    Repository,
    Snapshot,
    TypeInput,
    TypeRef,
)
from storage_engine.runtime import arguments
from storage_engine.runtime.arguments import BoundTypes, StoredClass
from storage_engine.runtime.intents import Intents

if TYPE_CHECKING:
    from storage_engine.runtime.session import Session
    from storage_engine.runtime.worker import EventWorker

log = logging.getLogger(__name__)
# What states intents, and looks at nothing: it need not wait for what handlers have on their way.
_BLIND = frozenset({"add_commit_meta", "bind", "commit", "discard", "emit", "ensure", "ingest"})


class _HasCommit(Protocol):
    @property
    def commit_id(self) -> int | None: ...


OwnCommit = TypeVar("OwnCommit", bound=_HasCommit)
_ROWS_REMEMBERED = 100_000
_OWN_SPANS = 1_000


def internals(session: Session) -> SessionCore:
    """For the writers and workers of this library; users have no need of it."""
    return session._core


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What a session was opened with, checked."""

    types: BoundTypes
    config: OntologiaConfig
    namespace: str
    instance_metadata: dict[str, str]
    commit_metadata: Mapping[str, str] = field(default_factory=dict)  # of each of its commits

    @classmethod
    def of(
        cls,
        config: OntologiaConfig,
        types: BoundTypes | None = None,
        namespace: str = "default",
        instance_metadata: Mapping[str, str] | None = None,
    ) -> Self:
        return cls(
            types or BoundTypes(),
            config,
            arguments.checked_namespace(namespace),
            arguments.texts("instance_metadata", instance_metadata),
        )

    def fresh(self) -> Self:
        """For another session that is to be the same."""
        return replace(self, types=self.types.fresh())


@dataclass(frozen=True, slots=True)
class Terms:
    """What one `commit()` asks for beside the intents."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    expect: Mapping[tuple[str, str], int] = field(default_factory=dict)
    idempotency: Idempotency | None = None
    isolated: bool = False
    events: Sequence[Mapping[str, Any]] = ()
    acks: Sequence[Ack] = ()


@dataclass(frozen=True, slots=True)
class SubmittedCommit:
    """A handler's commit on its way. `notes` are on what was stated."""

    pending: PendingCommit
    notes: Sequence[str] = ()

    def result(self) -> CommitResult | None:
        """Wait for it; raises what has refused it."""
        return _with_notes(self.pending.result(), self.notes)


def _with_notes(result: CommitResult | None, notes: Sequence[str]) -> CommitResult | None:
    if result is None or result.already_applied:
        return result
    return replace(result, notes=(*notes, *result.notes))


class _HandedOut(NamedTuple):
    """Identities that one read handed out; they stay Arrow data until somebody asks."""

    unit: int
    head: int
    columns: list[pa.Array | pa.ChunkedArray]

    def identities(self) -> Iterable[Identity]:
        return zip(*(column.to_pylist() for column in self.columns), strict=True)


class _TypeReads:
    """The rows of one type."""

    def __init__(self) -> None:
        self.count = 0  # of what is remembered, repetitions included
        self._reads: list[_HandedOut] = []
        self._heads: dict[Identity, tuple[int, int]] = {}  # unit and head

    def add(self, read: _HandedOut) -> None:
        self._reads.append(read)
        self.count += len(read.columns[0])

    def heads(self) -> dict[Identity, int]:
        self.settle()
        return {identity: head for identity, (_, head) in self._heads.items()}

    def settle(self) -> None:
        """Make each identity count once."""
        for read in self._reads:
            for identity in read.identities():
                earlier = self._heads.get(identity)
                if earlier is None or earlier[0] < read.unit:
                    self._heads[identity] = (read.unit, read.head)
        self._reads.clear()
        self.count = len(self._heads)


class ReadSet:
    """What a session has read of the latest state, so that a commit can ask whether it stands.

    `isolation="snapshot"` refuses to write an identity that another commit has changed since this
    session looked at it. When that was is kept here: for rows that queries handed out, by
    identity; for what was only counted, summed or not found, by type; for SQL, for all types.

        unit of work   from a commit (or its refusal) to the next
        a row          counts from its first read in the unit; a read in a later unit replaces it
        a type         counts from its first read in the session, until `clear`
        own commits    are no conflict, whatever was read before them

    Promise: forgetting (only so many rows and own commits are remembered) can refuse a write that
    might have passed, and never lets one pass that must not. Safe to use from several threads.
    """

    def __init__(self, rows_remembered: int = _ROWS_REMEMBERED) -> None:
        self._limit = rows_remembered
        self._mutex = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Begin anew: what was read is of no account any more."""
        with self._mutex:
            self._unit = 0
            self.first: int | None = None  # head of the first read
            self._everything: int | None = None  # head of the first SQL
            self._types: dict[TypeRef, int] = {}
            self._rows: dict[TypeRef, _TypeReads] = {}
            self._forgotten: dict[TypeRef, int] = {}  # the unit in which its rows were
            self._own: list[tuple[int, int]] = []  # ranges of commits, ascending

    def next_unit(self) -> None:
        """From here on, what is read replaces what was read before."""
        with self._mutex:
            self._unit += 1

    def add_own(self, commit_id: int) -> None:
        with self._mutex:
            if self._own and self._own[-1][1] == commit_id - 1:
                self._own[-1] = (self._own[-1][0], commit_id)
            else:
                self._own.append((commit_id, commit_id))
            if len(self._own) > _OWN_SPANS:
                self._forget_own(commit_id)

    def _forget_own(self, commit_id: int) -> None:
        """Half of them at least: those before everything that was read, which nobody asks for, and
        then the oldest."""
        first = min([*self._types.values(), commit_id])
        if self._everything is not None:
            first = min(first, self._everything)
        needed = [span for span in self._own if span[1] > first]
        self._own = needed[-_OWN_SPANS // 2 :]

    def add_everything(self, head: int) -> None:
        with self._mutex:
            if self._everything is None:
                self._everything = head
            if self.first is None:
                self.first = head

    def add_type(self, ref: TypeRef, head: int) -> None:
        with self._mutex:
            self._types.setdefault(ref, head)
            if self.first is None:
                self.first = head

    def add_rows(self, spec: TypeSpec, head: int, rows: pa.RecordBatch | pa.Table) -> None:
        """Rows of a type, which has been added."""
        if not rows.num_rows:
            return
        with self._mutex:
            if self._forgotten.get(spec.ref) == self._unit:
                return  # who knows whether it is their first read in the unit
            columns = [rows.column(name) for name in spec.identity]
            kept = self._rows.setdefault(spec.ref, _TypeReads())
            kept.add(_HandedOut(self._unit, head, columns))
            self._make_room()

    def _make_room(self) -> None:
        if sum(rows.count for rows in self._rows.values()) <= self._limit:
            return
        for rows in self._rows.values():
            rows.settle()
        # Half full at most: to settle at every read would cost more than the reads.
        while sum(rows.count for rows in self._rows.values()) > self._limit // 2:
            largest = max(self._rows, key=lambda ref: self._rows[ref].count)
            del self._rows[largest]  # from now on the first read of the type counts
            self._forgotten[largest] = self._unit

    def snapshot(self, base: int, *, refuses: bool = True) -> Snapshot:
        """As of when a commit knows what it targets; `base` where nothing was read."""
        with self._mutex:
            if self._everything is not None:
                base = min(base, self._everything)
            types = {ref: min(head, base) for ref, head in self._types.items()}
            if self._everything is None:
                types = dict(self._types)
            own = tuple(self._own)
            if not refuses:  # most commits meet nobody else, and need not pay for what was read
                return Snapshot(base, types, cache(self._row_heads), own, refuses=False)
            rows = {ref: kept.heads() for ref, kept in self._rows.items()}
            return Snapshot(base, types, lambda ref: rows.get(ref, {}), own)

    def _row_heads(self, ref: TypeRef) -> Mapping[Identity, int]:
        with self._mutex:
            kept = self._rows.get(ref)
            return kept.heads() if kept is not None else {}


def _pending(type_names: Sequence[str]) -> str:
    return (
        f"what was stated of {', '.join(type_names)} is still pending: commit() again, or "
        "discard() it"
    )


def _asks_for_something(request: CommitRequest) -> bool:
    return bool(request.inputs or request.events or request.expect or request.idempotency)


class SessionCore:
    """The state of one session. Who reads or changes it says so with `use`."""

    def __init__(
        self,
        repository: Repository,
        settings: SessionSettings,
        *,
        owns_repository: bool,
        catch_up: Callable[[], None] | None = None,
    ) -> None:
        """`catch_up`, of a handler's session: waits for the commits of handlers before it."""
        self.repository = repository
        self.settings = settings
        self.types = settings.types
        self.intents = Intents(settings.types)
        self.read_set = ReadSet()
        self.metadata: dict[str, str] = {}
        self.last_commit: CommitResult | None = None
        self.counters = CommitCounters()
        self._owns_repository = owns_repository
        self._unfinished: Terms | None = None  # of a commit that failed
        self._snapshot: int | None = None
        self._worker: EventWorker | None = None
        self._catch_up = catch_up
        self._mutex = threading.RLock()
        self._committing = False
        self._closed = False
        renew_after_fork(self)
        if repository.objects is not None:
            from storage_engine.maintenance.compaction.background import keep_compact

            keep_compact(repository.objects)

    def after_fork(self) -> None:
        """Whoever had the session at the fork is not here to give it back."""
        self._mutex = threading.RLock()
        self._committing = False

    # --- who may use it -------------------------------------------------------------------------

    @contextmanager
    def use(self, operation: str) -> Iterator[None]:
        """Refuse a session that is closed or busy; other threads wait. Whoever may look at what is
        stored sees what handlers have left: here every look begins."""
        with self._mutex:
            self.check_open(operation)
            self._refuse_reentry(operation)
            if operation not in _BLIND:
                self.catch_up()
            yield

    def catch_up(self) -> None:
        """Wait for the commits of handlers that have ended; nothing to do where none is on its
        way."""
        if self._catch_up is not None:
            self._catch_up()
        elif self._worker is not None:
            self._worker.catch_up()

    def check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError("session", operation)

    def _refuse_reentry(self, operation: str) -> None:
        if self._committing:
            raise ConfigurationError(
                f"{operation}() was called while commit() or migrate() of the same session is at "
                "work; use another session there"
            )

    # --- intents and what they are based on -----------------------------------------------------

    @property
    def has_intents(self) -> bool:
        """Whether something was stated since the last commit."""
        return bool(self.intents)

    def bind(self, type: StoredClass) -> TypeSpec:
        """The spec of a class, which becomes one of this session's types."""
        with self.use("bind"):
            return self.types.bind(type)

    def base(self) -> int:
        """The commit on which the session is based."""
        if self._snapshot is None:
            first = self.read_set.first
            self._snapshot = self.repository.head_commit_id() if first is None else first
        return self._snapshot

    def state(self) -> None:
        """Intents are stated: from here on the session has a base. A handler's has none before it
        looks: to find out would cost each of them a request, and a wait for those before it."""
        if self._catch_up is None:
            self.base()

    def discard(self) -> None:
        """Drop what was not committed, and what was read: the next use begins anew."""
        self.forget()
        self.read_set.clear()
        self._snapshot = None

    def forget(self) -> None:
        """Drop what was not committed."""
        self.intents.clear()
        self.metadata.clear()
        self._unfinished = None

    # --- committing -----------------------------------------------------------------------------

    def commit(self, terms: Terms, *, again: bool = True) -> int | None:
        """Publish the intents; they stay, and the terms with them, when that fails: the error
        says so if it can be tried `again`."""
        self._unfinished = terms
        try:
            result = self._publish(self._request(terms))
        except OntologiaError as error:
            if again and self.intents:
                error.args = (f"{error}; {_pending(self.intents.type_names)}", *error.args[1:])
            raise
        result = _with_notes(result, self.intents.notes)
        self.forget()
        self.read_set.next_unit()
        if result is None:
            return None
        self.last_commit = result
        self._snapshot = max(self._snapshot or 0, result.commit_id)
        return result.commit_id

    def _request(self, terms: Terms) -> CommitRequest:
        return CommitRequest(
            inputs=self.intents.inputs(limit=self.settings.config.max_batch_size),
            metadata={**self.settings.commit_metadata, **self.metadata, **terms.metadata},
            expect=terms.expect,
            idempotency=terms.idempotency,
            snapshot=self._known(terms.isolated),
            events=terms.events,
            acks=terms.acks,
            holder=self.settings.instance_metadata,
        )

    def _known(self, isolated: bool) -> Snapshot | None:
        """As of when this unit of work knows what it writes."""
        if not (isolated or self.intents):
            return None  # to find the base may take a request
        blind = self._snapshot is None and self.read_set.first is None
        if self._catch_up is not None and blind and not isolated:
            return None  # who has not looked is not told what came after
        return self.read_set.snapshot(self.base(), refuses=isolated)

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
        """Publish parts that were staged for `repository.begin_staged`, on the terms of
        `Session.commit`. The intents have no part in it."""
        with self.use("commit"):
            result = self._publish(
                CommitRequest(
                    inputs=[staged],
                    metadata=arguments.texts("meta", meta),
                    expect=arguments.expectations(expect, self.types),
                    idempotency=arguments.unit_of_work(idempotency),
                    events=arguments.events(event, self.settings.namespace),
                    holder={
                        **self.settings.instance_metadata,
                        **arguments.texts("holder", holder),
                    },
                )
            )
            if result is not None:
                self.last_commit = result
            return result

    def commit_request(self, request: CommitRequest) -> CommitResult | None:
        """Publish what another part of the library asks for, within `use`. The intents have no
        part in it."""
        result = self._publish(request)
        if result is not None:
            self.last_commit = result
        return result

    def migrate(self, work: Callable[[], OwnCommit], operation: str = "migrate") -> OwnCommit:
        """Do what makes a commit of its own, without the intents."""
        if self.intents:
            raise ConfigurationError(
                f"{operation}(): what was stated of {', '.join(self.intents.type_names)} is still "
                "pending: commit() it before, or discard() it"
            )
        self._committing = True
        try:
            result = work()
        except BaseException:
            self.counters.failure()
            raise
        finally:
            self._committing = False
        if result.commit_id is not None:
            self.last_commit = CommitResult(result.commit_id)
            self.counters.succeeded(self.last_commit)
            self.read_set.add_own(result.commit_id)
            self.read_set.next_unit()
            self._snapshot = max(self._snapshot or 0, result.commit_id)
        return result

    def submit_handled(
        self,
        ack: Ack,
        events: Sequence[Mapping[str, Any]],
        *,
        expect: Mapping[StoredClass | str, int] | None = None,
        idempotency: tuple[str, int | str] | None = None,
    ) -> SubmittedCommit | None:
        """Send the commit of an event handler, which is also its ack, on its way; None if nothing
        was asked for."""
        with self.use("commit"):
            terms = Terms(
                expect=arguments.expectations(expect, self.types),
                idempotency=arguments.unit_of_work(idempotency),
                events=events,
                acks=(ack,),
            )
            request = self._request(terms)
            if not _asks_for_something(request):
                return None
            pending = self.repository.submit(request)
            if pending.alone:  # its rows may be for this thread alone to read
                with pending, pending:
                    pending.result()
            return SubmittedCommit(pending, self.intents.notes)

    def _publish(self, request: CommitRequest) -> CommitResult | None:
        if not _asks_for_something(request):
            return None
        self._committing = True
        try:
            result = self.repository.commit(request)
        except BaseException as error:
            self.counters.failure()
            if isinstance(error, ConcurrentWriteError):
                self.read_set.next_unit()  # who reads again now knows that it is again
            raise
        finally:
            self._committing = False
        self.counters.succeeded(result)
        if result is not None and not result.already_applied:
            self.read_set.add_own(result.commit_id)
        return result

    # --- events ---------------------------------------------------------------------------------

    @property
    def worker(self) -> EventWorker:
        """The event side of the session, made when it is first asked for."""
        if self._worker is None:
            from storage_engine.runtime.worker import EventWorker

            self._worker = EventWorker(self.repository, self.settings)
        return self._worker

    def stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Session.close`."""
        with self._mutex:
            if self._closed:
                return
            self._refuse_reentry("close")
            if self._worker is not None and self._worker.running:
                raise ConfigurationError("close(): this session is running; stop() it first")
            if self.intents:
                log.warning("%s: session closed with uncommitted intents", self.repository.uri)
            self.forget()
            self._closed = True
            if self._owns_repository:
                self.repository.close()
            else:
                self.repository.flush()

    def leave(self, *, failed: bool) -> None:
        """The end of a `with` block: commit and close, or drop everything and close."""
        if failed:
            self._abandon()
            return
        try:
            if not self._closed and (self.intents or self._unfinished):
                with self.use("commit"):
                    self.commit(self._unfinished or Terms(), again=False)
        except BaseException:
            self._abandon()
            raise
        self.close()

    def end_handler(self) -> None:
        """Close without waiting for the work that follows commits: others go on with it."""
        with self._mutex:
            self.forget()
            self._closed = True

    def _abandon(self) -> None:
        """Close while an exception is on its way, which nothing here may replace."""
        with self._mutex:
            self.forget()
            try:
                self.close()
            except OntologiaError as error:
                log.warning("%s: while closing: %s", self.repository.uri, error)
