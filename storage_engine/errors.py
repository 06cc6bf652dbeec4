"""Every error a user can meet, in one flat tree.

Each class says whether trying again can help (`retryable`) and carries its facts as attributes,
so that programs decide by type and attribute, never by parsing a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class OntologiaError(Exception):
    """Base of all errors that Ontologia raises on purpose."""

    retryable: bool = False

    def facts(self) -> dict[str, Any]:
        """The error's attributes, for logs, `--json` output and Dagster metadata."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}


class ConfigurationError(OntologiaError):
    """A setting, URI or option is wrong or contradicts another one."""


class ClosedError(OntologiaError):
    """A session or ontology was used after it was closed."""

    def __init__(self, what: str, operation: str) -> None:
        self.what = what
        self.operation = operation
        super().__init__(f"{operation}: this {what} was closed; open a new one")


class UninitializedStorageError(OntologiaError):
    """The storage exists but holds no ontology yet."""

    def __init__(self, uri: str, advice: str | None = None) -> None:
        self.uri = uri
        init = (
            f"run `onto init --storage-uri {uri}` first, or call "
            "storage_engine.initialize_storage(uri)"
        )
        super().__init__(f"no ontology at {uri}: {advice or init}")


class AlreadyInitializedError(OntologiaError):
    """`init` met a storage that already holds an ontology."""

    def __init__(self, uri: str, commit_id: int) -> None:
        self.uri = uri
        self.commit_id = commit_id
        super().__init__(
            f"{uri} already holds an ontology (head at commit {commit_id}): open it with "
            f"Session({uri!r}), or initialise with exist_ok=True (`onto init --exist-ok`) where it "
            "may be there; to erase it, run `onto init --force --dry-run` and apply with the token "
            "that it prints"
        )


class UnsupportedEngineError(OntologiaError):
    """The storage was written by an engine or format that this version does not know."""

    def __init__(self, message: str, *, backend: str, engine_version: str, format: int) -> None:
        self.backend = backend
        self.engine_version = engine_version
        self.format = format
        super().__init__(message)


class StorageBackendError(OntologiaError):
    """The store refused or failed a request (network, permission, disk)."""

    def __init__(
        self,
        message: str,
        *,
        bucket: str = "",
        prefix: str = "",
        operation: str = "",
        key: str = "",
        retryable: bool = False,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.operation = operation
        self.key = key
        self.retryable = retryable
        super().__init__(message)


class IntegrityError(OntologiaError):
    """Stored data contradicts itself: a hash, a link or a row count does not match."""

    def __init__(self, message: str, *, key: str = "") -> None:
        self.key = key
        super().__init__(message)


# Of a lock's holder, beside host and pid: for programs that look whether it lives, not for people.
PROCESS_FACTS = ("boot_id", "pid_namespace", "pid_started")


class LockContentionError(OntologiaError):
    """The write lock was not free within the timeout."""

    retryable = True

    def __init__(
        self,
        *,
        waited_ms: int,
        owner_id: str = "",
        holder: Mapping[str, Any] | None = None,
        acquired_at: str = "",
        expires_at: str = "",
        place: int | None = None,
        waiting: int | None = None,
    ) -> None:
        """`place` in the line of the `waiting`, from 1, where it is known."""
        self.waited_ms = waited_ms
        self.owner_id = owner_id
        self.holder = dict(holder or {})
        self.acquired_at = acquired_at
        self.expires_at = expires_at
        self.place = place
        self.waiting = waiting
        who = f"held by {owner_id!r}" if owner_id else "held by another writer"
        where = ", ".join(f"{k} {v}" for k, v in self.holder.items() if k not in PROCESS_FACTS)
        since = f" since {acquired_at}, lease until {expires_at}" if acquired_at else ""
        line = f"; place {place} of {waiting} in line" if place is not None else ""
        look = "; `onto lock show` tells more" if acquired_at else ""
        super().__init__(
            f"write lock not acquired within {waited_ms} ms: {who}"
            f"{f' ({where})' if where else ''}{since}{line}; try again, or raise "
            f"s3_lock_timeout_ms{look}"
        )


class LockBreakError(OntologiaError):
    """The write lock was not broken: it is free, of another token, or has just been renewed."""


class ForkedSessionError(OntologiaError):
    """A session or storage was used in a fork of the process that opened it."""

    def __init__(self, what: str, *, in_use: bool = False) -> None:
        """`in_use`: the parent was in the middle of using it, so that a new one does not help."""
        if in_use:
            message = (
                f"{what} was in use in the parent at the fork, and what SQLite holds for it came "
                "along: nothing in this child may use it. Fork while nobody reads or writes, or "
                'start processes by "spawn" or "forkserver"'
            )
        else:
            message = (
                f"{what} was opened before a fork and cannot be used in the child: its "
                "connections, threads and lease are the parent's. Open a session of its own in "
                'the child, or start processes by "spawn" or "forkserver"'
            )
        super().__init__(message)


class LeaseExpiredError(OntologiaError):
    """The writer's lease ran out (or could not be renewed) before it could publish."""

    retryable = True

    def __init__(self, message: str = "", *, expires_at: str = "") -> None:
        self.expires_at = expires_at
        super().__init__(
            message
            or "the write lease is no longer safe, so nothing was published; try again, "
            "or raise s3_lease_ttl_ms if commits regularly take that long"
        )


class HeadMismatchError(OntologiaError):
    """Other writers moved head at every attempt within the retry budget."""

    retryable = True

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts
        often = f" in each of {attempts} attempts" if attempts > 1 else ""
        super().__init__(f"head moved under us{often}; nothing was published, try again")


class CommitStateUnknownError(OntologiaError):
    """The store never answered whether the commit was published. It may have been."""

    def __init__(self, *, commit_id: int, manifest_path: str, write_id: str) -> None:
        self.commit_id = commit_id
        self.manifest_path = manifest_path
        self.write_id = write_id
        super().__init__(
            f"the store did not say whether commit {commit_id} was published; once it answers, "
            f"look whether commit {commit_id} has manifest {manifest_path} "
            f"(`onto commits examine {commit_id}`) before writing the same data again. "
            "An idempotency key makes repeating it safe"
        )


class ExpectedVersionMismatchError(OntologiaError):
    """`commit(expect=...)` named another last-changing commit than the type has."""

    def __init__(self, *, type: str, expected: int, actual: int) -> None:
        self.type = type
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"{type} was last changed by commit {actual}, not {expected}; "
            "read it again and decide on the new state"
        )


class ConcurrentWriteError(OntologiaError):
    """Under snapshot isolation, another commit changed an identity that this one targets."""

    def __init__(self, *, type: str, identities: Sequence[Any], snapshot: int) -> None:
        self.type = type
        self.identities = list(identities)
        self.snapshot = snapshot
        shown = ", ".join(repr(i) for i in self.identities[:3])
        more = f" and {len(self.identities) - 3} more" if len(self.identities) > 3 else ""
        super().__init__(
            f"{type} {shown}{more} changed after commit {snapshot}, on which this commit is "
            "based; read them again and decide anew"
        )


class UnknownTagError(OntologiaError, ValueError):
    """There is no tag of this name."""

    def __init__(self, name: str, *, nearest: Sequence[str] = (), count: int = 0) -> None:
        self.name = name
        self.nearest = list(nearest)
        meant = f"; did you mean {', '.join(self.nearest)}?" if nearest else ""
        tags = "1 tag" if count == 1 else f"{count} tags"
        there = f"{tags}, `onto tag list` shows them" if count else "no tags yet"
        super().__init__(f"no tag {name!r}{meant} (the storage has {there})")


class TagExistsError(OntologiaError):
    """The tag is there already, and names another commit: tags do not move."""

    def __init__(self, name: str, *, commit_id: int, asked: int) -> None:
        self.name = name
        self.commit_id = commit_id
        self.asked = asked
        super().__init__(
            f"tag {name!r} names commit {commit_id}, not {asked}: choose another name, or delete "
            f"it first (`onto tag delete {name}`)"
        )


class UnknownBranchError(OntologiaError, ValueError):
    """There is no branch of this name, or not the one any more that was opened."""

    def __init__(
        self, name: str, *, nearest: Sequence[str] = (), count: int = 0, gone: bool = False
    ) -> None:
        self.name = name
        self.nearest = list(nearest)
        self.gone = gone
        if gone:
            super().__init__(
                f"branch {name!r} was deleted since it was opened (`onto branch list` shows those "
                "that there are); one that was made anew under the name has to be opened anew"
            )
            return
        meant = f"; did you mean {', '.join(self.nearest)}?" if nearest else ""
        branches = "1 branch" if count == 1 else f"{count} branches"
        there = f"{branches}, `onto branch list` shows them" if count else "no branches yet"
        super().__init__(f"no branch {name!r}{meant} (the storage has {there})")


class BranchExistsError(OntologiaError):
    """A branch of this name is there already."""

    def __init__(self, name: str, *, parent: str, base_commit_id: int) -> None:
        self.name = name
        self.parent = parent
        self.base_commit_id = base_commit_id
        super().__init__(
            f"branch {name!r} is there already, forked from {parent!r} at commit "
            f"{base_commit_id}: open it with Session(..., branch={name!r}), choose another name, "
            f"or delete it first (`onto branch delete {name}`)"
        )


class ProtectedBranchError(OntologiaError):
    """The branch takes merges only."""

    def __init__(self, name: str, operation: str = "commit") -> None:
        self.name = name
        self.operation = operation
        super().__init__(
            f"{operation}: {name!r} is protected and takes merges only: work on a branch of it "
            f"(`onto branch create NAME`) and merge that"
            if operation == "commit"
            else f"{operation}: {name!r} is protected; lift the protection first"
        )


class MergeConflictError(OntologiaError):
    """Both sides changed the same, and nobody said what counts: nothing was merged."""

    def __init__(
        self, source: str, target: str, conflicts: Sequence[Mapping[str, Any]], *, shown: int = 3
    ) -> None:
        self.source = source
        self.target = target
        self.conflicts = [dict(conflict) for conflict in conflicts]
        self.conflicts_total = len(self.conflicts)
        first = "; ".join(str(conflict["message"]) for conflict in self.conflicts[:shown])
        more = len(self.conflicts) - shown
        rest = f"; and {more:,} more" if more > 0 else ""
        count = f"{len(self.conflicts):,} conflict{'s' if len(self.conflicts) != 1 else ''}"
        decidable = any(c["conflict"].startswith("divergent") for c in self.conflicts)
        remedy = (
            "Say what counts with on_conflict ('ours', 'theirs', 'fields' or a function), or bring"
            if decidable
            else "No policy decides that: bring"
        )
        super().__init__(
            f"{source!r} into {target!r}: {count}, nothing was done: {first}{rest}. {remedy} the "
            "two together and merge again"
        )


class SchemaOutdatedError(OntologiaError):
    """The declared class differs from the schema version that the storage has."""

    def __init__(
        self,
        message: str,
        *,
        type: str,
        stored_version: int | None = None,
        differences: Sequence[str] = (),
    ) -> None:
        self.type = type
        self.stored_version = stored_version
        self.differences = list(differences)
        super().__init__(message)


class UnsupportedTypeError(OntologiaError):
    """A stored type has a field of a kind that this version does not know."""

    def __init__(self, *, field: str, kind: str) -> None:
        self.field = field
        self.kind = kind
        super().__init__(
            f"the stored field {field!r} is of the kind {kind!r}, which this version does not "
            "know: the storage was written by a newer ontologia, upgrade this one first"
        )


class SchemaMetadataError(OntologiaError):
    """A schema catalog object (such as meta/schema/types.json) is missing or malformed."""

    def __init__(self, message: str, *, key: str = "") -> None:
        self.key = key
        super().__init__(message)


class SqlNotAllowedError(OntologiaError, ValueError):
    """A statement asks for what is not a row of a stored type: files, settings, catalogs."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"sql: {what} is not allowed. A statement is one SELECT over the stored types (`show "
            "tables` lists them, `describe TYPE` shows columns), common table expressions, "
            "VALUES, range, generate_series, unnest and json_each, with functions that compute "
            "from their arguments"
        )


class MigrationTokenError(OntologiaError):
    """The confirmation token is missing, or no longer fits what it was issued for."""


class CopyRefusedError(OntologiaError):
    """A copy would mix its commits with others: the target holds something else, or somebody else
    writes to it."""

    def __init__(self, message: str, *, source: str = "", target: str = "") -> None:
        self.source = source
        self.target = target
        super().__init__(message)


class ImportConflictError(OntologiaError):
    """Rows of an import are stored otherwise; nothing was written."""

    def __init__(
        self, *, source: str, conflicts: Mapping[str, int], applied_by: int | None = None
    ) -> None:
        self.source = source
        self.conflicts = dict(conflicts)
        self.applied_by = applied_by
        told = ", ".join(f"{count} of {name}" for name, count in self.conflicts.items())
        if applied_by is not None:
            super().__init__(
                f"{source} was imported by commit {applied_by}, and rows of it were changed since "
                f"({told}): nothing was written; to import it again, give it a name of its own "
                "(--idempotency-key)"
            )
            return
        super().__init__(
            f"{source}: rows are stored with other values ({told}): nothing was written; keep what "
            "is stored (--on-conflict skip), or write new versions (--on-conflict upsert)"
        )


class MissingUpgraderError(OntologiaError):
    """Rows of a stored version cannot become the declared class by themselves."""

    def __init__(
        self,
        missing: Sequence[tuple[str, int]],
        differences: Sequence[str] = (),
        *,
        reading: bool = False,
    ) -> None:
        """`reading`: not a migration wants it, but whoever reads history through upgraders."""
        self.missing = list(missing)
        self.differences = list(differences)
        listed = ", ".join(f"{name} from version {version}" for name, version in self.missing)
        because = f" ({'; '.join(self.differences)})" if self.differences else ""
        name, version = self.missing[0]
        given = (
            "import its module or give it (`upgraded(upgraders=...)`, `changes(upgraders=...)`). "
            f"`raw({name!r}, schema_version={version})` reads the rows as they were stored"
            if reading
            else "name its module (`onto migrate --upgraders MODULE`, `migrate(upgraders=...)`)"
        )
        super().__init__(
            f"no upgrader for {listed}{because}: write one, `@upgrader({name!r}, "
            f"from_version={version})`, which takes a row as a dict and returns the new one, and "
            f"{given}"
        )


class MigrationError(OntologiaError):
    """A row, or a change of a type, that cannot be migrated; nothing was published."""

    def __init__(
        self, message: str, *, type: str, identity: Any = None, old: Mapping[str, Any] | None = None
    ) -> None:
        self.type = type
        self.identity = identity
        self.old = dict(old) if old is not None else None
        super().__init__(message)


class TypeDroppedError(OntologiaError):
    """The type was dropped: its history is kept, and nothing more is written to it."""

    def __init__(self, *, type: str, dropped_commit_id: int, renamed_to: str | None = None) -> None:
        self.type = type
        self.dropped_commit_id = dropped_commit_id
        self.renamed_to = renamed_to
        what = f"renamed to {renamed_to}" if renamed_to else "dropped"
        advice = (
            f"write to {renamed_to}"
            if renamed_to
            else "create it anew with migrate() (`onto migrate`), or write under another name"
        )
        super().__init__(f"{type} was {what} by commit {dropped_commit_id}: {advice}")


class DropDependencyError(OntologiaError):
    """A type cannot be dropped while relations point to it."""

    def __init__(self, *, type: str, dependents: Sequence[str]) -> None:
        self.type = type
        self.dependents = list(dependents)
        super().__init__(
            f"{type} is an end of {', '.join(self.dependents)}: drop them too (`--cascade`), or "
            "first"
        )


class TypeDeclarationError(OntologiaError, TypeError):
    """An Entity, Relation or Event class is declared wrongly; raised when it is declared."""

    def __init__(self, message: str, *, type: str, field: str = "") -> None:
        self.type = type
        self.field = field
        super().__init__(message)


class ValidationError(OntologiaError, ValueError):
    """A value does not fit its declared field."""

    def __init__(
        self, message: str, *, type: str = "", identity: Any = None, field: str = ""
    ) -> None:
        self.type = type
        self.identity = identity
        self.field = field
        super().__init__(message)


class BadRowsError(ValidationError):
    """Rows of a bulk write do not fit their type, or break an expectation. `reasons` has the number
    of rows for each, `examples` some of their identities, where those may be shown."""

    def __init__(
        self,
        message: str,
        *,
        type: str,
        rows: int,
        reasons: Mapping[str, int],
        examples: Mapping[str, Sequence[str]],
    ) -> None:
        self.rows = rows
        self.reasons = dict(reasons)
        self.examples = {reason: list(some) for reason, some in examples.items()}
        super().__init__(message, type=type)


class MissingRowsError(OntologiaError):
    """More rows are missing from a full extract than the order allows to be marked."""

    def __init__(
        self, *, type: str, missing: int, of: int, limit: str, examples: Sequence[Any]
    ) -> None:
        self.type = type
        self.missing = missing
        self.of = of
        self.limit = limit
        self.examples = list(examples)
        shown = ", ".join(repr(identity) for identity in self.examples)
        share = f"{100 * missing / of:.3g} %" if of else "all"
        super().__init__(
            f"{type}: {missing} of {of} rows ({share}) are missing from the extract, for example "
            f"{shown}; at most {limit.replace('%', ' %')} may be. Nothing was published. Is the "
            "extract whole? If these rows are really gone, say so with a higher missing.limit for "
            f"this run, such as {missing} or 100%"
        )


class OvertakenExtractError(OntologiaError):
    """Another extract of the same source was published while this one was compared."""

    retryable = True

    def __init__(self, *, type: str, app_id: str, version: int | str, published: int | str) -> None:
        self.type = type
        self.app_id = app_id
        self.version = version
        self.published = published
        super().__init__(
            f"{type}: while {app_id} {version!r} was compared with what is stored, {app_id} "
            f"{published!r} was published; what is missing here may be in that one. Nothing was "
            "published, run it again"
        )


class BatchSizeExceededError(OntologiaError):
    """More objects were ensured than one commit takes."""

    def __init__(self, *, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(
            f"{size} objects in one commit, limit {limit}; nothing was written. Commit in "
            "batches, use session.ingest() for bulk data, or raise max_batch_size"
        )


class CommitMetadataTooLargeError(OntologiaError):
    """More metadata was given with a commit than one may carry."""

    def __init__(self, *, size: int, limit: int, largest: str) -> None:
        self.size = size
        self.limit = limit
        self.largest = largest
        super().__init__(
            f"commit metadata of {size:,} bytes, limit {limit:,} (the largest is {largest!r}); "
            "nothing was written. Keep large texts as rows of a type or as files and put their "
            "names into the metadata, or raise max_commit_metadata_bytes"
        )


class MetadataUnavailableError(OntologiaError):
    """`.meta()` was asked of an object that did not come out of the storage."""


class HandlerError(OntologiaError):
    """An event handler is declared wrongly."""


class EventLoopLimitError(OntologiaError):
    """A chain of events grew past max_event_chain_depth."""
