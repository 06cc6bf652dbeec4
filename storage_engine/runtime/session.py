"""`Session`: state what should be, commit it, and look at what was committed.

A session collects intents and turns them into commits. Nothing is written before `commit()` (or
the end of the `with` block), and everything stated until then is published together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Self, overload

from storage_engine.commitlog.layout import MAIN
from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError
from storage_engine.model.declarations import Entity, Event, Relation
from storage_engine.query.builder import Query
from storage_engine.query.reference import Reference
from storage_engine.query.results import Parameters
from storage_engine.repository.open import open_repository
from storage_engine.repository.protocol import CommitRequest, CommitResult, Repository
from storage_engine.runtime import arguments
from storage_engine.runtime.arguments import BoundTypes, StoredClass
from storage_engine.runtime.core import SessionCore, SessionSettings, Terms
from storage_engine.runtime.handlers import Handler, checked_handlers
from storage_engine.runtime.history import Changes
from storage_engine.runtime.reads import Reads, SqlQuery, View
from storage_engine.runtime.sources import open_source

if TYPE_CHECKING:
    from storage_engine.commitlog.branches import Branch
    from storage_engine.events.outcomes import Totals
    from storage_engine.events.schedules import Schedule
    from storage_engine.maintenance.compaction import (
        CompactionPolicy,
        CompactionProgress,
        CompactionReport,
    )
    from storage_engine.maintenance.metrics import Metrics
    from storage_engine.repository.object.merge import MergeReport, MergeTerms, Policy
    from storage_engine.runtime.branches import PerType
    from storage_engine.runtime.exchange import ExportReport, ImportReport
    from storage_engine.runtime.worker import HandlerRun
    from storage_engine.schema.migration import Progress
    from storage_engine.schema.preview import MigrationPreview, MigrationResult
    from storage_engine.schema.upgraders import UpgraderSource


class Session:
    """Work on one storage.

        with Session("onto.db") as session:
            session.ensure(Customer(id="c1", name="Ann"))

    `uri_or_path` is a SQLite file, a directory or a storage URI; left out, it is what
    ONTOLOGIA_STORAGE_URI names or this folder has: `onto.db`, or `.ontologia/store`. Given
    `entity_types` and `relation_types` are the only ones that the session takes; otherwise types
    are bound as they come. `namespace` is where events go. `instance_metadata` (text to text)
    tells others who this is, for example while they wait for the write lock. `branch`: what to
    work on instead of main.

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
        branch: str | None = None,
    ) -> None:
        types = BoundTypes(entity_types, relation_types)
        config = config or OntologiaConfig()
        settings = SessionSettings.of(config, types, namespace, instance_metadata)
        repository = open_repository(uri_or_path, config, branch=branch)
        self._begin(SessionCore(repository, settings, owns_repository=True))

    def _begin(self, core: SessionCore) -> None:
        self._core = core
        self._reads = Reads(core.repository, core.types, core.check_open, core.read_set)

    # --- stating intents ------------------------------------------------------------------------

    def ensure(self, objects: Entity | Relation[Any, Any] | Iterable[Any]) -> None:
        """State that an object, or every object of an iterable, should be stored as it is.

        The last statement about an identity wins. A list with something else in it is refused as
        a whole. How many objects one commit takes is limited (`max_batch_size`).
        """
        with self._core.use("ensure"):
            self._core.state()
            self._core.intents.ensure(objects)

    def ingest(self, type: StoredClass, source: Any) -> None:
        """State that every row of a source should be stored, however many there are.

        A source is an Arrow table, record batch or RecordBatchReader, a pandas or Polars frame,
        anything with `__arrow_c_stream__`, the path of a Parquet, CSV or JSON lines file, or a
        list of these. Columns are the field names; a relation has `left_key`, `right_key` and
        its instance key under its own name. Columns are checked now; rows are read and checked
        by `commit()`, and a source that does not fit leaves nothing behind.
        """
        with self._core.use("ingest"):
            spec = self._core.types.bind(type)
            opened = open_source(spec, source)
            self._core.state()
            self._core.intents.ingest(spec, opened)

    def add_commit_meta(self, key: str, value: str) -> None:
        """Attach a text to the next commit; a later value for the same key replaces it."""
        with self._core.use("add_commit_meta"):
            self._core.metadata |= arguments.texts("add_commit_meta", {key: value})

    def discard(self) -> None:
        """Forget the intents and commit metadata that were not committed, and what was read:
        the session is based on what it reads or states next."""
        with self._core.use("discard"):
            self._core.discard()

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
                      identities after this session read it (after `snapshot` if it did not)

        Whatever goes wrong, nothing is published (CommitStateUnknownError is the one exception)
        and the intents stay, BatchSizeExceededError included: call `commit()` again, or
        `discard()` them.
        """
        with self._core.use("commit"):
            return self._core.commit(
                Terms(
                    metadata=arguments.texts("meta", meta),
                    expect=arguments.expectations(expect, self._core.types),
                    idempotency=arguments.unit_of_work(idempotency),
                    isolated=arguments.wants_snapshot(isolation),
                    events=arguments.events(event, self.namespace),
                )
            )

    @property
    def last_commit(self) -> CommitResult | None:
        """What this session's latest commit did: rows inserted and updated per type, attempts,
        and `notes` on what may surprise."""
        return self._core.last_commit

    @property
    def snapshot(self) -> int:
        """The commit on which this session is based: head when the session was first used (to
        read the latest state, for intents or for this property), then the session's own latest
        commit. What was read keeps the head as of which it was read."""
        with self._core.use("snapshot"):
            return self._core.base()

    # --- reading: what is committed, not the intents --------------------------------------------

    def query(self) -> Query:
        """Begin a query: `session.query().entities(Customer).where(...).collect()`.

        Queries see what is committed, not the intents of this session.
        """
        with self._core.use("query"):
            return self._reads.query()

    def sql(self, statement: str, parameters: Parameters | None = None) -> SqlQuery:
        """Read-only SQL over the latest rows of every stored type, through DuckDB.

            session.sql("select tier, count(*) as n from Customer group by tier").collect()

        Values go into `parameters`: a list for `?`, a dict for `$name`.
        """
        with self._core.use("sql"):
            return self._reads.sql(statement, parameters)

    def at(self, reference: Reference) -> View:
        """The storage as of a commit id, an instant or a tag, for reading; it stays the same."""
        with self._core.use("at"):
            return self._reads.at(reference)

    def diff(
        self, before: Reference, after: Reference, *, upgraders: UpgraderSource | None = None
    ) -> list[dict[str, Any]]:
        """What differs between two commits, or branches (`diff("main", "run/42")`, also as
        `branch@commit`): kind, type_name, identity, commit_id (the last that
        changed it), operation, and the fields that differ, `before` (None: insert) and `after`.

        Rows of older schema versions are brought up to the present one, by `upgraders` as for
        `migrate`; where that cannot be, an entry of the type says so (`not_upgraded`)."""
        with self._core.use("diff"):
            return self._reads.diff(before, after, upgraders)

    def changes(
        self,
        since: int | str = 0,
        limit: int = 1000,
        *,
        upgraders: UpgraderSource | None = None,
    ) -> Changes:
        """The change feed: the oldest changes after a commit id or a cursor, at most `limit`.

        Each is a dict: commit_id, kind, type_name, identity, fields, operation (insert or
        update). The page's `cursor` is where to go on; it is a text that can be kept.

        Rows of older schema versions are brought up to the present one, as in `diff`; one that
        cannot be has its fields as they were stored, with `schema_version` and `not_upgraded`,
        which says why. A type that was dropped ends with an entry whose operation is `drop`.
        """
        with self._core.use("changes"):
            return self._reads.changes(since, limit, upgraders)

    def list_commits(
        self, limit: int = 10, since_commit_id: int | None = None
    ) -> list[dict[str, Any]]:
        """The latest commits, newest first; with `since_commit_id`, only later ones."""
        with self._core.use("list_commits"):
            return self._reads.list_commits(limit, since_commit_id)

    def get_commit(self, commit_id: int) -> dict[str, Any] | None:
        """One commit, None when there is none of that id."""
        with self._core.use("get_commit"):
            return self._reads.get_commit(commit_id)

    def list_commit_changes(self, commit_id: int) -> list[dict[str, Any]]:
        """What a commit wrote: kind, type_name, identity and operation (insert or update)."""
        with self._core.use("list_commit_changes"):
            return self._core.repository.list_commit_changes(commit_id)

    # --- files ----------------------------------------------------------------------------------

    def export(
        self,
        output: str | Path | IO[bytes],
        *,
        types: Iterable[StoredClass | str] | None = None,
        format: Literal["jsonl", "csv", "parquet"] = "jsonl",
        as_of: Reference | None = None,
        history_since: int | None = None,
        with_metadata: bool = False,
        overwrite: bool = False,
        progress: Callable[[str, int], None] | None = None,
    ) -> ExportReport:
        """Write the rows of these types (or all), as of one commit, into a folder or a stream.

        A folder gets one file for each type and `export.json`, which comes last: without it, or
        while it says `complete: false`, the export is not whole. A binary stream gets JSON lines of
        all types, or one type as CSV or Parquet. Rows come by identity; memory is bounded.

        as_of:          a commit id, an instant or a tag, instead of the latest commit
        history_since:  every version after a commit (0: all), by commit and identity
        with_metadata:  with `commit_id`, the commit that wrote each version
        overwrite:      write over an export, or beside files, that the folder has
        progress:       is told the type's name and how many rows are written so far
        """
        from storage_engine.runtime.exchange import export_types

        with self._core.use("export"):
            names = None
            if types is not None:
                specs = [t if isinstance(t, str) else self._core.types.find(t) for t in types]
                names = [s if isinstance(s, str) else f"{s.kind}:{s.name}" for s in specs]
        return export_types(
            self._core.repository,
            output,
            types=names,
            file_format=format,
            as_of=as_of,
            history_since=history_since,
            with_metadata=with_metadata,
            overwrite=overwrite,
            progress=progress,
        )

    def import_files(
        self,
        source: str | Path | IO[bytes],
        *,
        apply: bool = False,
        on_conflict: Literal["abort", "skip", "upsert"] = "abort",
        format: Literal["jsonl", "csv", "parquet"] | None = None,
        type: StoredClass | str | None = None,
        idempotency: tuple[str, int | str] | None = None,
        meta: Mapping[str, str] | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> ImportReport:
        """Check a folder, a file or a stream of rows and say what importing it would do; with
        `apply`, do it, in one commit. The session's intents have no part in it.

        Rows are of the session's types, else of stored ones, else of those that an export tells
        of. A preview has all problems, with file and line, and all conflicts in its report; with
        `apply` they raise ValidationError and ImportConflictError, and nothing is written.

        on_conflict:  of rows that are stored with other values: refuse them all, keep what is
                      stored, or write new versions
        format, type: of a stream, or where a file's name does not tell
        idempotency:  (app id, version) of this unit of work; from the content unless told
        progress:     is told what is being done and how many rows are through
        """
        from storage_engine.runtime.exchange import import_types

        with self._core.use("import_files"):
            named = type
            if named is not None and not isinstance(named, str):
                spec = self._core.types.find(named)
                named = f"{spec.kind}:{spec.name}"
            report = import_types(
                self._core.repository,
                source,
                declared=self._core.types.by_ref,
                apply=apply,
                on_conflict=on_conflict,
                file_format=format,
                type_name=named,
                idempotency=arguments.unit_of_work(idempotency),
                meta=arguments.texts("meta", meta),
                progress=progress,
                holder=self._core.settings.instance_metadata,
                commit=self._core.commit_request,
            )
            if apply:
                report.require()
            return report

    # --- schema ---------------------------------------------------------------------------------

    def validate(self) -> None:
        """Compare the declared types with the storage. SchemaOutdatedError names everything that
        differs, TypeDroppedError a type that was dropped; new types are fine."""
        from storage_engine.runtime import migration

        with self._core.use("validate"):
            migration.validate(self._core.repository, self._core.types.declared("validate"))

    @overload
    def migrate(
        self, *, dry_run: Literal[True] = True, upgraders: UpgraderSource | None = None
    ) -> MigrationPreview: ...

    @overload
    def migrate(
        self,
        *,
        dry_run: Literal[False],
        token: str | None = None,
        force: bool = False,
        upgraders: UpgraderSource | None = None,
        progress: Progress | None = None,
    ) -> MigrationResult: ...

    def migrate(
        self,
        *,
        dry_run: bool = True,
        token: str | None = None,
        force: bool = False,
        upgraders: UpgraderSource | None = None,
        progress: Progress | None = None,
    ) -> MigrationPreview | MigrationResult:
        """Bring the storage to the declared types: show how, or with `dry_run=False` do it.

        It is one commit: new schema versions become current, with the latest rows rewritten for
        them; what was stored before stays as it was.

        token:      of the preview that is to be applied: MigrationTokenError if the storage or the
                    plan is another one by now. `force` goes without
        upgraders:  for changes that are not additive: a mapping {("Customer", 1): function},
                    functions marked with `@upgrader`, or a module of them; all that were declared
                    unless told
        progress:   is told the type's name and how many more of its rows are rewritten

        MissingUpgraderError and MigrationError (which names the type, the identity and the old
        row) leave the storage as it is.
        """
        from storage_engine.runtime import migration

        arguments.check_dry_run(dry_run=dry_run, token=token, force=force)
        with self._core.use("migrate"):
            core, declared = self._core, self._core.types.declared("migrate")
            if dry_run:
                return migration.preview(core.repository, declared, upgraders)
            return core.migrate(
                lambda: migration.apply(
                    core.repository,
                    declared,
                    upgraders,
                    token=token,
                    force=force,
                    progress=progress,
                    holder=core.settings.instance_metadata,
                )
            )

    # --- events ---------------------------------------------------------------------------------

    def emit(self, events: Event | Iterable[Event]) -> None:
        """Put events on the bus, one or many, without a commit. On a branch they are a commit,
        and go out with its merge."""
        with self._core.use("emit"):
            if self.branch != MAIN:
                outbox = arguments.events(events, self.namespace, "emit")
                self._core.commit_request(CommitRequest((), events=outbox))
            else:
                self._core.worker.emit(events)

    def run(
        self,
        handlers: Iterable[Handler[Any]],
        *,
        schedules: Iterable[Schedule] = (),
        concurrency: int = 1,
        max_iterations: int | None = None,
        progress: Callable[[Totals], None] | None = None,
    ) -> Totals:
        """Handle events as they come, until `stop()`, SIGTERM, or `max_iterations` rounds.

        A round claims up to `event_claim_limit` events and hands them to their handlers, by
        priority; while there are none, one is made every `event_poll_interval_ms`. `progress` is
        called after each round. Several workers share the events of a handler between them.

        Handlers run one after the other, or with `concurrency` up to so many at once, in threads.
        Their commits are published together, while the next ones run; a handler that reads with
        its session sees what those before it have left.
        """
        schedules = arguments.schedules(schedules)
        max_iterations = arguments.rounds(max_iterations)
        concurrency = arguments.handlers_at_once(concurrency)
        with self._core.use("run"):
            self._refuse_on_branch("run")
            worker, checked = self._core.worker, checked_handlers(handlers)
        return worker.work(
            checked,
            schedules,
            concurrency=concurrency,
            max_iterations=max_iterations,
            progress=progress,
        )

    def drain(
        self,
        handlers: Iterable[Handler[Any]],
        *,
        concurrency: int = 1,
        progress: Callable[[Totals], None] | None = None,
        observe: Callable[[HandlerRun], None] | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> Totals:
        """Handle events until none is due. Failed ones that wait for their next attempt stay.

        `concurrency` and `progress` are those of `run`. `observe` is told of each event that was
        handled or failed, with the commit that it led to, when that is there: one at a time, and
        from other threads too. `meta` are texts for every commit that handlers make.
        """
        texts = arguments.texts("meta", meta)
        concurrency = arguments.handlers_at_once(concurrency)
        with self._core.use("drain"):
            self._refuse_on_branch("drain")
            worker, checked = self._core.worker, checked_handlers(handlers)
        return worker.work(
            checked,
            concurrency=concurrency,
            until_idle=True,
            progress=progress,
            observe=observe,
            metadata=texts,
        )

    def _refuse_on_branch(self, operation: str) -> None:
        if self.branch != MAIN:
            raise ConfigurationError(
                f"{operation}(): events are handled on main; those of branch {self.branch!r} go "
                "out when it is merged"
            )

    def stop(self) -> None:
        """End `run()` or `drain()`, from a handler or another thread, after the handlers that
        run now. What the worker had claimed besides is given back."""
        self._core.stop_worker()

    @property
    def namespace(self) -> str:
        """Where this session's events go, and those come from that it handles."""
        return self._core.settings.namespace

    # --- branches -------------------------------------------------------------------------------

    @property
    def branch(self) -> str:
        """What this session works on."""
        return self._core.repository.branch

    def list_branches(self) -> list[Branch]:
        """Main, and then the others by name."""
        from storage_engine.runtime.branches import branches_of

        with self._core.use("list_branches"):
            return branches_of(self._core.repository).list()

    def create_branch(
        self,
        name: str,
        at: Reference | None = None,
        *,
        owner: str | None = None,
        expires_in: timedelta | None = None,
    ) -> Branch:
        """Fork a branch from this session's; nothing is copied, whatever the size. The session
        stays where it is: open the branch with `Session(..., branch=name)`.

        at:          a commit id, an instant or a tag, instead of the latest commit
        owner:       whose it is, for people; the runtime's id unless told
        expires_in:  after which garbage collection deletes it, with what only it has

        BranchExistsError if there is one of the name.
        """
        from storage_engine.runtime.branches import create_branch

        with self._core.use("create_branch"):
            return create_branch(
                self._core.repository, name, at, owner=owner, expires_in=expires_in
            )

    def delete_branch(self, name: str, *, expect: int | None = None) -> Branch:
        """Delete a branch; one that was merged leaves what it brought. A branch with children, or
        a protected one, is refused; with `expect`, also one that is at another commit than this
        (HeadMismatchError): `delete_branch(name, expect=report.source_commit_id)` after a merge
        deletes nothing that others have written since."""
        from storage_engine.runtime.branches import branches_of

        with self._core.use("delete_branch"):
            return branches_of(self._core.repository).delete(
                name, expect=arguments.head_commit(expect)
            )

    def merge(
        self,
        source: str,
        *,
        on_conflict: Policy | Mapping[StoredClass | str, Policy] = "fail",
        expectations: PerType | None = None,
        upgraders: UpgraderSource | None = None,
        dry_run: bool = False,
        meta: Mapping[str, str] | None = None,
        expect: int | None = None,
    ) -> MergeReport:
        """Bring the net changes of a branch of this one into it, all types in one commit, or say
        with `dry_run` what that would be.

        on_conflict:  of a row that both sides have changed: "fail" (MergeConflictError has all of
                      them, and nothing is done), "ours" keeps it, "theirs" takes the branch's,
                      "fields" combines changes to different fields, and a function `(base, ours,
                      theirs) -> row` decides by itself; or one of these by type
        expectations: rules by type, such as {Customer: [{"unique": "email"}]}: where the two
                      sides together would break one, that is a conflict too
        upgraders:    for rows of one side where the other has migrated the type; unless told,
                      those that were declared in this process
        meta:         texts kept with the commit
        expect:       the latest commit here on which this was decided; HeadMismatchError if there
                      is a later one

        The branch's events go out, and its units of work count here, from now on. It stays as it
        is: go on with it, or delete it.
        """
        from storage_engine.runtime.branches import branches_of

        with self._core.use("merge"):
            branches = branches_of(self._core.repository)
            terms = self._merge_terms(on_conflict, expectations, upgraders, meta)
            terms = replace(terms, expect=arguments.head_commit(expect))
            return self._core.migrate(
                lambda: branches.merge(source, terms, dry_run=dry_run), "merge"
            )

    def update_branch(
        self,
        *,
        on_conflict: Policy | Mapping[StoredClass | str, Policy] = "fail",
        expectations: PerType | None = None,
        upgraders: UpgraderSource | None = None,
        dry_run: bool = False,
        meta: Mapping[str, str] | None = None,
    ) -> MergeReport:
        """Bring what its parent has changed since into this session's branch, as one commit; the
        arguments are those of `merge`, and "ours" is this branch."""
        from storage_engine.runtime.branches import branches_of

        with self._core.use("update_branch"):
            branches = branches_of(self._core.repository)
            terms = self._merge_terms(on_conflict, expectations, upgraders, meta)
            return self._core.migrate(
                lambda: branches.update(terms, dry_run=dry_run), "update_branch"
            )

    def _merge_terms(
        self,
        on_conflict: Policy | Mapping[StoredClass | str, Policy],
        expectations: PerType | None,
        upgraders: UpgraderSource | None,
        meta: Mapping[str, str] | None,
    ) -> MergeTerms:
        from storage_engine.runtime.branches import merge_terms

        return merge_terms(
            self._core.types,
            self._core.repository,
            on_conflict=on_conflict,
            expectations=expectations,
            upgraders=upgraders,
            metadata=arguments.texts("meta", meta),
            holder=self._core.settings.instance_metadata,
        )

    def protect_branch(self, name: str, protected: bool = True) -> Branch:
        """Let a branch, or main, take merges only: commits raise ProtectedBranchError."""
        from storage_engine.runtime.branches import branches_of

        with self._core.use("protect_branch"):
            return branches_of(self._core.repository).protect(name, protected)

    # --- the storage ----------------------------------------------------------------------------

    @property
    def repository(self) -> Repository:
        """The storage engine underneath: Arrow tables instead of objects."""
        self._core.catch_up()
        return self._core.repository

    def storage_info(self) -> dict[str, Any]:
        """Engine, head, known types and, on object stores, the requests made so far."""
        with self._core.use("storage_info"):
            return self._core.repository.storage_info()

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

        with self._core.use("compact"):
            names = None
            if types is not None:
                find = self._core.types.find
                names = [t if isinstance(t, str) else find(t).name for t in types]
        return compact(self._core.repository, policy, progress, types=names)

    def metrics(self) -> Metrics:
        """Figures of this session's commits and of the storage; `.prometheus()` as text."""
        from storage_engine.maintenance.metrics import collect

        with self._core.use("metrics"):
            return collect(self._core.repository, self._core.counters)

    # --- lifetime -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the work that follows a commit (indices, lock release) is done."""
        with self._core.use("flush"):
            self._core.repository.flush()

    def close(self) -> None:
        """Drop what was not committed, wait for the work that follows commits, and close.

        Closing again does nothing.
        """
        self._core.close()

    def __reduce__(self) -> Any:
        """For whoever hands a session to a process that is spawned, or to Spark."""
        raise TypeError(
            "a session cannot be pickled, as it holds connections and a lease of this process: "
            "hand over the storage URI, and open a session there"
        )

    def __enter__(self) -> Self:
        with self._core.use("with"):
            return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._core.leave(failed=kind is not None)


def session_on(
    repository: Repository,
    settings: SessionSettings,
    *,
    catch_up: Callable[[], None] | None = None,
) -> Session:
    """A session on a repository that someone else opened and will close. `catch_up` is called
    before each look at what is stored."""
    session = Session.__new__(Session)
    core = SessionCore(repository, settings, owns_repository=False, catch_up=catch_up)
    session._begin(core)
    return session
