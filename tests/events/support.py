"""Event stores of every kind behind one fixture, and events to put in them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from storage_engine import Event, Field
from storage_engine.config import OntologiaConfig
from storage_engine.events.protocol import Consumer, EventStore, Subscription, open_event_store
from storage_engine.events.records import Claim
from storage_engine.repository import Repository, initialize_storage, open_repository

NAMESPACE = "shop"


class OrderPlaced(Event):
    order_id: Field[str]


class Billed(Event):
    order_id: Field[str]


BILL = Subscription("billing.bill", frozenset({"OrderPlaced"}))
SHIP = Subscription("shipping.ship", frozenset({"OrderPlaced"}))


def order(number: int | str, **envelope: Any) -> dict[str, Any]:
    """An event as it is enqueued."""
    given = {"id": f"order-{number}", **envelope}
    return OrderPlaced(order_id=str(number), **given).envelope(NAMESPACE)


@dataclass
class Bus:
    """An initialised storage and the event stores that were opened on it."""

    uri: str
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # of the storage, or of the server it is on
    opened: list[Repository] = field(default_factory=list)

    @property
    def lease_ms(self) -> int:
        """Long for a busy machine; `pass_lease` costs nothing where the test's clock is used."""
        return 30_000

    @property
    def short(self) -> dict[str, Any]:
        return {"event_lease_ms": self.lease_ms}

    def pass_lease(self, store: EventStore) -> None:
        store.sleep(self.lease_ms / 1000 * 1.4)

    def config(self, **settings: Any) -> OntologiaConfig:
        return OntologiaConfig(**{**self.settings, **settings})

    def open(self, **settings: Any) -> EventStore:
        """As another process would."""
        config = self.config(**settings)
        repository = open_repository(self.uri, config)
        self.opened.append(repository)
        return open_event_store(repository, config)

    def worker(
        self,
        *subscriptions: Subscription,
        name: str = "",
        store: EventStore | None = None,
        **s: Any,
    ) -> Consumer:
        store = store or self.open(**s)
        return store.consumer(NAMESPACE, subscriptions or (BILL,), name or str(uuid.uuid4()))

    def close(self) -> None:
        for repository in self.opened:
            repository.close()


@contextmanager
def made_bus(uri: str, kind: str = "", **settings: Any) -> Iterator[Bus]:
    initialize_storage(uri, config=OntologiaConfig(**settings))
    bus = Bus(uri, settings, kind)
    try:
        yield bus
    finally:
        bus.close()


def ids(claims: list[Claim]) -> list[str]:
    return [claim.event_id for claim in claims]


def take_all(worker: Consumer, limit: int = 50) -> list[Claim]:
    """Claim until nothing is due."""
    found: list[Claim] = []
    while claims := worker.claim(limit, whole=True):
        found += claims
    return found
