"""Several workers at once on a simulated store, in simulated time.

Every worker is a whole one (session, dispatcher, handlers) in a thread of its own. A request takes
some time, a pause as long as it says, and only the one moves whose time has come. So the same run
happens again and again, and its requests can be counted exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from unittest import mock

from storage_engine import Session
from storage_engine.config import OntologiaConfig
from storage_engine.objectstore.memory import MemoryStore, SimulatedCrash
from storage_engine.repository.object import engine
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.open import open_object_repository
from storage_engine.runtime.core import SessionSettings
from storage_engine.runtime.session import session_on
from tests.commitlog.support import World, shared_duck
from tests.simulation.schedule import in_threads

REQUEST_S = 0.01


class Turns:
    """Whose turn it is: of the one that waits for the earliest time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._clock = world.backend.clock
        self._stopped = threading.Condition()
        self._until: dict[str, datetime] = {}
        self._live: set[str] = set()
        self._chosen: str | None = None

    def worker(self, name: str, *, skew: float = 0.0, **settings: Any) -> Worker:
        return Worker(self, name, skew, OntologiaConfig(**settings))

    def run(self, jobs: Mapping[str, Callable[[], object]]) -> None:
        """Run all to their end; then raise what one of them raised."""
        self._live = set(jobs)

        def work(name: str, job: Callable[[], object]) -> None:
            try:
                self.pause(name, 0)
                with suppress(SimulatedCrash):
                    job()
            finally:
                with self._stopped:
                    self._live.discard(name)
                    self._choose()

        in_threads([partial(work, *item) for item in jobs.items()])

    def pause(self, name: str, seconds: float) -> None:
        """Wait until so much time has passed."""
        with self._stopped:
            if name not in self._live:
                self._clock.sleep(seconds)
                return
            self._until[name] = self._clock.now() + timedelta(seconds=max(seconds, 0.0))
            self._choose()
            self._stopped.wait_for(lambda: self._chosen == name)
            self._chosen = None
            until = self._until.pop(name)
            self._clock.sleep((until - self._clock.now()).total_seconds())

    def _choose(self) -> None:
        if self._chosen is None and self._live and set(self._until) == self._live:
            self._chosen = min(self._until, key=lambda name: (self._until[name], name))
            self._stopped.notify_all()


class Worker:
    """A process, its requests, and a session in it."""

    def __init__(self, turns: Turns, name: str, skew: float, config: OntologiaConfig) -> None:
        self._turns = turns
        self.name = name
        self.store: MemoryStore = turns.world.backend.client(name, clock=self, skew=skew)
        self.store.on_request(lambda _kind, _key: turns.pause(name, REQUEST_S))
        with mock.patch.object(engine, "Duck", return_value=shared_duck()):
            self.repository = open_object_repository(self.store, config)
        assert isinstance(self.repository, ObjectRepository)
        self.session: Session = session_on(self.repository, SessionSettings.of(config))

    def now(self) -> datetime:
        return self._turns.world.backend.clock.now()

    def sleep(self, seconds: float) -> None:
        self._turns.pause(self.name, seconds)

    @property
    def requests(self) -> dict[str, int]:
        counts = self.store.meter.snapshot()
        return {
            kind: number
            for kind, number in counts.items()
            if kind not in {"total", "bytes_read", "bytes_written"}
        }
