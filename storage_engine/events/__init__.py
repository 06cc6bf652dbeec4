"""The event bus: stores of events and claims, and the dispatcher that runs handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage_engine.config import OntologiaConfig
    from storage_engine.events.protocol import EventStore
    from storage_engine.repository.protocol import Repository


def open_event_store(repository: Repository, config: OntologiaConfig) -> EventStore:
    """The bus that shares the repository's store; it lives as long as the repository does."""
    from storage_engine.events.records import Policy

    policy = Policy.of(config)
    if (objects := repository.objects) is not None:
        from storage_engine.events.object.store import ObjectEventStore

        return ObjectEventStore(objects.store.bulk, objects.chain, policy)
    from storage_engine.events.sqlite.store import SqliteEventStore

    database = repository.database
    assert database is not None, "a storage is one or the other"
    return SqliteEventStore(database, policy)
