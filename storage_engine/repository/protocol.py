"""What a storage engine offers to the runtime, whatever it stores its rows in.

Commits are asked for by `Repository.submit(request)`, which queues and returns a `PendingCommit` at
once; its `result()` waits and returns the CommitResult (None when nothing changed) or raises that
request's own error. `commit(request)` is both. There is no thread that publishes: the first who
waits (`result`, `commit`, `flush`, `close`) publishes all that is queued by then, each request as
a commit of its own, in the order in which they were submitted, with one swap of head (SQLite: in
one transaction); who comes meanwhile is published next. So whoever has many submits them all, and
then asks for the results. One that fails fails alone. What a request learns from those before it
(applied, refused, nothing to do) holds, as its answer comes only when these stand.

Rows cross this border as Arrow tables in a type's row schema (`model.arrow.row_schema`): identity
columns, then one column per field. Python objects stay on the other side.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from operator import eq
from typing import TYPE_CHECKING, Any, Literal, Protocol

import orjson
import pyarrow as pa

from storage_engine.errors import (
    CommitMetadataTooLargeError,
    ConcurrentWriteError,
    ConfigurationError,
    LeaseExpiredError,
    UnsupportedEngineError,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.query.reference import Reference
from storage_engine.query.results import SqlExecutor
from storage_engine.query.spec import When
from storage_engine.schema.history import TypeHistory
from storage_engine.schema.migration import MigrationOutcome, MigrationRequest

if TYPE_CHECKING:
    from storage_engine.commitlog.tags import Tag
    from storage_engine.repository.commit_queue import PendingCommit
    from storage_engine.repository.duck import Duck
    from storage_engine.repository.history import RecordedHistory
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.object.write.staged_write import StagedWrite
    from storage_engine.repository.sqlite.engine import SqliteRepository

CONFLICTS_SHOWN = 100
_IDENTITIES_NOTED = 3
Operation = Literal["insert", "update"]
TypeRef = tuple[str, str]  # kind, name
Identity = tuple[str, ...]  # values of the identity columns


@dataclass(frozen=True, slots=True)
class TypeInput:
    """One type's share of a commit: what the user states its rows should be.

    One of `table` (at hand, one row per identity), `stream` (bulk: read once, in the order of
    intent, identities may repeat and the last one counts) and `staged` (parts that were written
    to the store beforehand, of rows that were reconciled beforehand).
    """

    spec: TypeSpec
    table: pa.Table | None = None
    stream: Iterator[pa.RecordBatch] | None = None
    staged: StagedWrite | None = None


@dataclass(frozen=True, slots=True)
class Idempotency:
    """Names a unit of work so that repeating it publishes nothing."""

    app_id: str
    version: int | str


@dataclass(frozen=True, slots=True)
class Ack:
    """An event that a commit handles: the commit and the end of the claim are one step."""

    namespace: str
    event_id: str
    handler_id: str
    token: str  # of the claim
    since: int  # head when it was claimed: only later commits can have handled the event too

    def as_dict(self) -> dict[str, str]:
        """As manifests keep it."""
        return {
            "namespace": self.namespace,
            "event_id": self.event_id,
            "handler_id": self.handler_id,
            "token": self.token,
        }


class ClaimLost(LeaseExpiredError):
    """The event was taken over by another worker, or has been handled by one."""

    def __init__(self, ack: Ack) -> None:
        self.event_id = ack.event_id
        self.handler_id = ack.handler_id
        super().__init__(
            f"event {ack.event_id} is no longer claimed by this worker for {ack.handler_id}: "
            "another one took it over, so nothing was published; raise event_lease_ms if "
            "handlers are often paused that long"
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """As of which commit a unit of work knows each identity that it may target.

    By identity where rows were read, by type where only the type was, else `commit_id`.
    """

    commit_id: int
    types: Mapping[TypeRef, int] = field(default_factory=dict)
    rows: Callable[[TypeRef], Mapping[Identity, int]] = lambda ref: {}
    own: Sequence[tuple[int, int]] = ()  # ranges of commits that are no conflict, ascending
    refuses: bool = True  # else what was changed meanwhile is noted, and overwritten

    def concerns(self, ref: TypeRef, last: int) -> bool:
        """Whether somebody else may have changed rows of a type that was last changed by this
        commit; cheap."""
        since = self.since(ref) if self.refuses else self._of(ref)
        if last <= since:
            return False
        first, end = self.own[-1] if self.own else (last, 0)
        return not (first <= since + 1 and last <= end)

    def since(self, ref: TypeRef) -> int:
        """Nothing at or below this commit is a conflict."""
        return min([self._of(ref), *self.rows(ref).values()])

    def of_identity(self, ref: TypeRef, identity: Identity) -> int:
        return self.rows(ref).get(identity, self._of(ref))

    def _of(self, ref: TypeRef) -> int:
        return self.types.get(ref, self.commit_id)

    def check(self, ref: TypeRef, latest: Iterable[tuple[Identity, int]]) -> None:
        """ConcurrentWriteError if one of these identities, with the commits that last changed
        them, was changed by somebody else after it was known. Read no further than is told."""
        shown = [identity for identity, _ in islice(self.changed(ref, latest), CONFLICTS_SHOWN)]
        if shown:
            raise ConcurrentWriteError(
                type=ref[1],
                identities=[identity[0] if len(identity) == 1 else identity for identity in shown],
                snapshot=min(self.of_identity(ref, identity) for identity in shown),
            )

    def changed(
        self, ref: TypeRef, latest: Iterable[tuple[Identity, int]]
    ) -> Iterator[tuple[Identity, int]]:
        """Those that somebody else changed after they were known."""
        for identity, commit_id in latest:
            if commit_id > self.of_identity(ref, identity) and not self._is_own(commit_id):
                yield identity, commit_id

    def _is_own(self, commit_id: int) -> bool:
        position = bisect_right(self.own, commit_id, key=lambda span: span[0]) - 1
        return position >= 0 and commit_id <= self.own[position][1]


@dataclass(frozen=True, slots=True)
class CommitRequest:
    inputs: Sequence[TypeInput]
    metadata: Mapping[str, str] = field(default_factory=dict)
    expect: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (kind, name) -> commit
    idempotency: Idempotency | None = None
    snapshot: Snapshot | None = None  # fail (or note it) if a targeted identity changed since
    events: Sequence[Mapping[str, Any]] = ()  # outbox: full envelopes
    acks: Sequence[Ack] = ()  # LeaseExpiredError if another commit has handled one of them
    holder: Mapping[str, Any] = field(default_factory=dict)  # shown to whom waits for the lock


@dataclass(frozen=True, slots=True)
class TypeChange:
    """How many rows of one type a commit added."""

    kind: str
    type_name: str
    inserted: int
    updated: int


@dataclass(frozen=True, slots=True)
class CommitResult:
    commit_id: int
    changes: Sequence[TypeChange] = ()
    attempts: int = 1  # CAS attempts (1 on engines without CAS)
    lock_wait_ms: float = 0.0
    already_applied: bool = False  # the idempotency key had been applied by `commit_id`
    notes: Sequence[str] = ()  # what may surprise whoever made it


@dataclass(frozen=True, slots=True)
class AppliedUnit:
    """A unit of work that is done: by a commit, or without one because it changed nothing."""

    commit_id: int | None

    def result(self, *, lock_wait_ms: float = 0.0) -> CommitResult | None:
        """The answer to whoever asks for it again."""
        if self.commit_id is None:
            return None
        return CommitResult(self.commit_id, lock_wait_ms=lock_wait_ms, already_applied=True)


@dataclass(slots=True)
class CommitCounters:
    """What one session's commits came to. Safe to use from several threads."""

    commits: int = 0
    empty: int = 0  # nothing differed, or the unit of work had been applied
    failed: int = 0
    attempts: int = 0
    lock_wait_ms: float = 0.0
    rows_inserted: int = 0
    rows_updated: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def succeeded(self, result: CommitResult | None) -> None:
        with self._lock:
            if result is None or result.already_applied:
                self.empty += 1
                return
            self.commits += 1
            self.attempts += result.attempts
            self.lock_wait_ms += result.lock_wait_ms
            self.rows_inserted += sum(change.inserted for change in result.changes)
            self.rows_updated += sum(change.updated for change in result.changes)

    def failure(self) -> None:
        with self._lock:
            self.failed += 1

    def as_dict(self) -> dict[str, int | float]:
        with self._lock:
            return {
                "commits": self.commits,
                "empty": self.empty,
                "failed": self.failed,
                "attempts": self.attempts,
                "lock_wait_ms": self.lock_wait_ms,
                "rows_inserted": self.rows_inserted,
                "rows_updated": self.rows_updated,
            }


@dataclass(frozen=True, slots=True)
class ReadWindow:
    """Which versions a read sees.

    latest: ReadWindow(); as_of(c): ReadWindow(as_of=c); with_history: ReadWindow(history=True);
    history_since(c): ReadWindow(history=True, since=c).
    """

    as_of: int | None = None
    since: int | None = None
    history: bool = False


LATEST = ReadWindow()


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """How many rows of a type a commit wrote, and how many of them were new; None where the log
    does not tell."""

    kind: str
    type_name: str
    rows: int
    inserted: int | None

    @property
    def updated(self) -> int | None:
        return None if self.inserted is None else self.rows - self.inserted


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One commit as `list_commits` and `get_commit` show it. `types` are those that it wrote rows
    of, with how many in `rows`; a commit that changes schemas alone has none, and names its types
    in the metadata."""

    id: int
    parent_id: int | None
    created_at: datetime
    runtime_id: str
    kind: str
    metadata: Mapping[str, str]
    types: Sequence[str]
    written: Sequence[WrittenRows] = ()  # by kind and type
    # The events that it handled: namespace, event_id, handler_id. None where a storage does not
    # keep which commit did.
    handled: Sequence[Mapping[str, Any]] | None = field(default=None, compare=False)
    # By type, the names of the changes that it made, or that a merge or an update brought, oldest
    # first: a change keeps its name when it is merged. Object stores alone have them.
    changes: Mapping[TypeRef, Sequence[str]] = field(default_factory=dict, compare=False)

    @property
    def rows(self) -> dict[str, int]:
        """How many it wrote, by the name of the type."""
        rows: dict[str, int] = {}
        for each in self.written:
            rows[each.type_name] = rows.get(each.type_name, 0) + each.rows
        return rows

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "parent_id": self.parent_id,
            "created_at": self.created_at.isoformat(timespec="microseconds"),
            "runtime_id": self.runtime_id,
            "kind": self.kind,
            "metadata": dict(self.metadata),
            "types": list(self.types),
            "rows": dict(self.rows),
        }


def repetition_note(spec: TypeSpec, repeated: int) -> str:
    return (
        f"{spec.name}: {repeated:,} {'row repeats' if repeated == 1 else 'rows repeat'} an "
        "identity that was stated before in the same commit; the last statement counts"
    )


def overtaken_note(spec: TypeSpec, changed: Sequence[tuple[Identity, int]]) -> str:
    """`changed`: what this commit wrote over, with the commits that made it."""
    identities = [identity[0] if len(identity) == 1 else identity for identity, _ in changed]
    names = ", ".join(repr(identity) for identity in identities[:_IDENTITIES_NOTED])
    if len(changed) == 1:
        subject = f"{names} was changed by another commit ({changed[0][1]})"
    else:
        more = ", ..." if len(changed) > _IDENTITIES_NOTED else ""
        subject = f"{len(changed):,} identities ({names}{more}) were changed by other commits"
    return (
        f"{spec.name}: {subject} after this session had looked; what is stated last counts, the "
        'history has both, and commit(isolation="snapshot") refuses instead'
    )


def end_notes(spec: TypeSpec, is_stored: Callable[[TypeRef], bool]) -> list[str]:
    """Of relations: which of their ends cannot be there, as nothing of the type is."""
    if spec.kind != "relation":
        return []
    ends = dict.fromkeys(name for name in (spec.left, spec.right) if name)
    return [
        f"{spec.name}: its relations point to {name}, of which nothing is stored yet"
        for name in ends
        if not is_stored(("entity", name))
    ]


def distinct_values(
    rows: pa.Table | pa.RecordBatch, alike: Callable[[Any, Any], bool]
) -> set[tuple[int, Any]]:
    """Of rows of two columns, a commit id and a value: one value of those that are alike, of each
    commit."""
    commits, field = rows.schema.names
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    order = [(commits, "ascending"), (field, "ascending")]
    table = table.group_by([commits, field]).aggregate([]).sort_by(order)
    numbers, values = table.column(commits).to_pylist(), table.column(field).to_pylist()
    distinct: set[tuple[int, Any]] = set()
    at = 0
    while at < len(values):
        end = bisect_right(numbers, numbers[at], lo=at)
        value = values[at]
        if value is None:
            at = end  # nulls come last
            continue
        distinct.add((numbers[at], value))

        def differs(other: Any, low: Any = value) -> bool:
            return other is None or not alike(low, other)

        at = bisect_left(values, True, lo=at + 1, hi=end, key=differs)
    return distinct


def check_metadata(metadata: Mapping[str, str], limit: int) -> None:
    """Refuse more than a commit may carry: everybody who reads the log reads it."""
    size = len(orjson.dumps(dict(metadata)))
    if size > limit:
        largest = max(metadata, key=lambda key: len(key) + len(metadata[key]), default="")
        raise CommitMetadataTooLargeError(size=size, limit=limit, largest=largest)


def checked_commit(reference: Reference, commit_id: int, head: int) -> int:
    """`commit_id`, to which a reference was resolved, if there is such a commit."""
    if isinstance(reference, datetime) and commit_id == 0:
        raise ConfigurationError(f"there was no commit yet at {reference.isoformat()}")
    if isinstance(reference, int) and not 1 <= reference <= head:
        there = f"1 to {head} are there" if head else "there are none yet"
        raise ConfigurationError(f"no commit {reference}: {there}; `onto commits` lists them")
    return commit_id


def labels(types: Sequence[tuple[str, str]]) -> list[str]:
    """Types as keys of `storage_info()`: the name, with the kind where two types share it."""
    shared = Counter(name for _, name in types)
    return [f"{kind}:{name}" if shared[name] > 1 else name for kind, name in types]


def no_branches(repository: Repository) -> UnsupportedEngineError:
    """Engine v2 on an object store has branches; others have nothing to fork."""
    engine = f"{repository.backend}/{repository.engine_version}"
    advice = (
        f"copy it to one with `onto copy {repository.uri} TARGET`"
        if repository.backend == "sqlite"
        else "`onto migrate-engine` brings it to v2"
    )
    return UnsupportedEngineError(
        f"{repository.uri} has no branches: its engine is {engine}, and they need engine v2 on an "
        f"object store; {advice}",
        backend=repository.backend,
        engine_version=repository.engine_version,
        format=0,
    )


def no_staging(uri: str, *, backend: str, engine_version: str) -> UnsupportedEngineError:
    """What engines say that cannot publish parts which others have staged."""
    what = "SQLite" if backend == "sqlite" else f"engine {engine_version}"
    return UnsupportedEngineError(
        f"{uri} is kept by {what}, which cannot publish files that Spark has staged: use "
        "session.ingest(), or an object storage with engine v2 "
        "(`onto init --engine-version v2`)",
        backend=backend,
        engine_version=engine_version,
        format=0,
    )


class Repository(Protocol):
    """An opened storage. Safe for use from several threads, whose commits are published together
    where they meet.

    What only one kind of storage has is found through `objects` and `database`, of which one is
    None; nobody asks for the class of an engine.
    """

    @property
    def uri(self) -> str: ...

    @property
    def backend(self) -> str:
        """`sqlite`, `directory`, `s3` (or `memory`, of tests): one word for it everywhere."""

    @property
    def engine_version(self) -> str:
        """`v1` or `v2`."""

    @property
    def branch(self) -> str:
        """What it works on: `main`, or another branch of an object storage."""

    @property
    def objects(self) -> ObjectRepository | None:
        """The log, files and indices of a storage on an object store; None for SQLite."""

    @property
    def database(self) -> SqliteRepository | None:
        """The tables of a SQLite storage; None for an object store."""

    @property
    def history(self) -> RecordedHistory:
        """Its commits as they were recorded, for copies of whole storages."""

    @property
    def duck(self) -> Duck:
        """DuckDB, for what is computed on rows that are at hand."""

    def head_commit_id(self) -> int:
        """The latest commit, 0 when there is none. Always asks the storage."""

    def commit(self, request: CommitRequest) -> CommitResult | None:
        """Reconcile and publish; None when nothing would change and there is no event."""

    def submit(self, request: CommitRequest) -> PendingCommit:
        """Queue what `commit` does. It is published when somebody waits, for this one or for
        another, or flushes. What was submitted by one thread is committed in that order."""

    def applied(self, unit: Idempotency) -> AppliedUnit | None:
        """What became of this unit of work, None when it is still to be done."""

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
        """Begin a write whose parts others put into the store before they are published.

        Only engine v2 on an object store can; others raise UnsupportedEngineError. `attempt`:
        one under which parts were staged already, without anybody's heartbeat. Its own begins
        when it is entered.
        """

    def read(
        self, spec: TypeSpec, window: ReadWindow = LATEST, *, keys: pa.Table | None = None
    ) -> pa.Table:
        """Rows of a type: row schema plus a leading int64 `commit_id`.

        `keys` (identity columns) limits the read to those identities. Latest and as_of come back
        ordered by identity, history by commit and identity.
        """

    def type_head(self, spec: TypeSpec) -> int:
        """The last commit that wrote rows of the type or gave it a schema version, 0 when it was
        never stored."""

    def executor(
        self, pinned: int | None = None, *, on_head: Callable[[int], None] | None = None
    ) -> SqlExecutor:
        """Answers queries. With `pinned`, as if that commit were the head for ever. `on_head` is
        told the head that an answer is of, before there are rows."""

    def key_splits(self, spec: TypeSpec, when: When) -> Sequence[str]:
        """Keys, of the first identity column and ascending, at which a read of a few rows in the
        order of keys may be cut into reads that each cost less. Advice, and none where such a read
        costs little more than what it returns. No file is opened."""

    def commit_at(self, reference: Reference) -> int:
        """The commit that a reference means: an id clamped to 0..head; for an instant the last
        commit at or before it (0 before the first); for a text the commit of that tag."""

    def require_commit(self, reference: Reference) -> int:
        """As `commit_at`, for what is done to a commit: ConfigurationError where none is meant."""

    def list_tags(self) -> list[Tag]:
        """All tags, by name."""

    def resolve_tag(self, name: str) -> Tag:
        """The tag of that name; UnknownTagError (a ValueError) names the nearest ones."""

    def create_tag(self, name: str, commit_id: int | None = None) -> Tag:
        """Name a commit, the latest unless told. Saying the same again is no error; a name that
        is taken by another commit is a TagExistsError."""

    def delete_tag(self, name: str) -> Tag:
        """Take a name away. The commit stays; what only the tag kept may be collected."""

    def known_types(self) -> list[TypeSpec]:
        """The types that the storage has, from their stored schemas: no classes are needed. By
        kind and name."""

    def type_refs(self) -> list[TypeRef]:
        """Kind and name of the types that the storage has, sorted; no schema is looked up."""

    def stored_types(self, refs: Sequence[TypeRef]) -> list[TypeSpec]:
        """Of these types those that the storage has, from their stored schemas."""

    def list_commits(
        self, limit: int = 10, since_commit_id: int | None = None
    ) -> list[CommitRecord]:
        """Newest first; with `since_commit_id`, only later ones."""

    def get_commit(self, commit_id: int) -> CommitRecord | None: ...

    def sent_events(self, commit_id: int) -> Sequence[Mapping[str, Any]]:
        """The events (envelopes) that a commit sent; none when there is no such commit."""

    def identity_counts(self) -> dict[TypeRef, int | None]:
        """By type that the storage has, how many identities there are, from what commits recorded:
        no row is read. None where the log cannot tell, as after a rename."""

    def commits_between(self, since: int, upto: int) -> list[CommitRecord]:
        """Commits after `since`, up to `upto`, oldest first. Only these are read, together."""

    def written_values(
        self,
        spec: TypeSpec,
        field: str,
        *,
        since: int,
        upto: int,
        alike: Callable[[Any, Any], bool] = eq,
    ) -> Iterator[tuple[int, Any]]:
        """The commits after `since`, up to `upto`, that wrote rows of a type, each with the values
        that it wrote into a field, but for nulls: of those that are alike one or a few, in no
        order. Whoever has enough may stop.

        `alike` tells of a lower and a higher value whether all between them are the same to whoever
        asks. Where what the log knows of a file tells its values so far, it is not opened.
        """

    def list_commit_changes(self, commit_id: int) -> list[dict[str, Any]]:
        """What a commit wrote: kind, type_name, identity columns, operation; by identity."""

    def type_histories(self, refs: Sequence[TypeRef] | None = None) -> dict[TypeRef, TypeHistory]:
        """The schema versions of these types, or of all, dropped ones included; without those that
        were never stored."""

    def migrate(self, request: MigrationRequest) -> MigrationOutcome:
        """Make new schema versions current and bring the latest rows into them, or drop types: all
        of it in one commit, or nothing.

        Rows are rewritten before the write lock is taken; those that other commits change meanwhile
        are brought along. MigrationTokenError when another migration was faster.
        """

    def storage_info(self) -> dict[str, Any]: ...

    def requests(self) -> dict[str, int]:
        """What was asked of the object store since the storage was opened, by kind, with the
        total and the bytes moved; nothing where there is no such store."""

    def flush(self) -> None:
        """Wait until what was submitted is committed, and the work that follows commits is
        done. Errors of what was submitted are for who asks for its result."""

    def close(self) -> None: ...
