"""`Ontology`: a storage and its types, opened once and shared by many sessions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ClosedError
from storage_engine.model.declarations import Entity, Relation
from storage_engine.process import renew_after_fork
from storage_engine.query.builder import Query
from storage_engine.repository.open import bind, open_repository
from storage_engine.repository.protocol import Repository
from storage_engine.runtime import arguments
from storage_engine.runtime.arguments import BoundTypes
from storage_engine.runtime.core import SessionCore, SessionSettings, internals
from storage_engine.runtime.reads import Reads
from storage_engine.runtime.session import Session, session_on

if TYPE_CHECKING:
    from storage_engine.schema.migration import Progress
    from storage_engine.schema.preview import MigrationPreview, MigrationResult
    from storage_engine.schema.upgraders import UpgraderSource


class Ontology:
    """A storage, by SQLite path or storage URI, and the types that its sessions take.

        ontology = Ontology(storage_uri="s3://bucket/prefix", entity_types=[Customer])
        with ontology.session() as session:
            session.ensure(Customer(id="c1", name="Ann"))

    `branch`: what its sessions work on instead of main.

    `db_path` is a SQLite file; with `storage_uri` as well, both must mean the same one. Without
    either it is what `Session()` opens. Sessions share the opened storage and may live in different
    threads; closing one leaves it open.
    """

    def __init__(
        self,
        db_path: str | Path | None = None,
        config: OntologiaConfig | None = None,
        *,
        storage_uri: str | None = None,
        entity_types: Sequence[type[Entity]] | None = None,
        relation_types: Sequence[type[Relation[Any, Any]]] | None = None,
        branch: str | None = None,
    ) -> None:
        self._types = BoundTypes(entity_types, relation_types)
        self._config = config or OntologiaConfig()
        location = bind(db_path, storage_uri)
        self._repository: Repository = open_repository(location, self._config, branch=branch)
        self._sessions: weakref.WeakSet[SessionCore] = weakref.WeakSet()
        self._mutex = threading.Lock()
        self._closed = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._mutex = threading.Lock()

    def session(
        self, *, namespace: str = "default", instance_metadata: Mapping[str, str] | None = None
    ) -> Session:
        """A new session on this storage."""
        with self._mutex:
            self._check_open("session")
            settings = SessionSettings.of(
                self._config, self._types.fresh(), namespace, instance_metadata
            )
            session = session_on(self._repository, settings)
            self._sessions.add(internals(session))  # queries outlive a session that was dropped
            return session

    def query(self) -> Query:
        """Begin a query, without a session."""
        self._check_open("query")
        return self._reads().query()

    def validate(self) -> None:
        """Compare the declared types with the storage. SchemaOutdatedError names everything that
        differs, TypeDroppedError a type that was dropped; new types are fine."""
        from storage_engine.runtime import migration

        self._check_open("validate")
        migration.validate(self._repository, self._types.declared("validate"))

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
        `Session.migrate` tells what the arguments mean and what is raised."""
        from storage_engine.runtime import migration

        arguments.check_dry_run(dry_run=dry_run, token=token, force=force)
        self._check_open("migrate")
        declared = self._types.declared("migrate")
        if dry_run:
            return migration.preview(self._repository, declared, upgraders)
        return migration.apply(
            self._repository, declared, upgraders, token=token, force=force, progress=progress
        )

    def list_commits(
        self, limit: int = 10, since_commit_id: int | None = None
    ) -> list[dict[str, Any]]:
        """The latest commits, newest first; with `since_commit_id`, only later ones."""
        self._check_open("list_commits")
        return self._reads().list_commits(limit, since_commit_id)

    def get_commit(self, commit_id: int) -> dict[str, Any] | None:
        """One commit, None when there is none of that id."""
        self._check_open("get_commit")
        return self._reads().get_commit(commit_id)

    def _reads(self) -> Reads:
        return Reads(self._repository, self._types.fresh(), self._check_open)

    def close(self) -> None:
        """Close the sessions that are still open, then the storage. Closing again does nothing."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            sessions = list(self._sessions)
        try:
            for session in sessions:
                session.close()
        finally:
            self._repository.close()

    def __enter__(self) -> Self:
        self._check_open("with")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError("ontology", operation)
