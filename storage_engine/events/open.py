"""From an opened repository to its event store."""

from __future__ import annotations

from storage_engine.config import OntologiaConfig
from storage_engine.events.protocol import EventStore
from storage_engine.events.records import Policy
from storage_engine.repository.protocol import Repository


def open_event_store(repository: Repository, config: OntologiaConfig) -> EventStore:
    """The bus that shares the repository's store; it lives as long as the repository does."""
    policy = Policy.of(config)
    if repository.backend == "sqlite":
        from storage_engine.events.sqlite.store import SqliteEventStore
        from storage_engine.repository.sqlite.engine import SqliteRepository

        assert isinstance(repository, SqliteRepository)
        return SqliteEventStore(repository, policy)
    from storage_engine.events.object.store import ObjectEventStore
    from storage_engine.repository.object.engine import ObjectRepository

    assert isinstance(repository, ObjectRepository)
    return ObjectEventStore(repository.store.bulk, repository.chain, policy)
