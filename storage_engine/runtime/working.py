"""What a session can do with events: send them, and work on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from storage_engine.config import OntologiaConfig
from storage_engine.model.declarations import Event
from storage_engine.repository.protocol import Repository
from storage_engine.runtime import arguments

if TYPE_CHECKING:
    from storage_engine.events.dispatcher import Totals
    from storage_engine.events.schedules import Schedule
    from storage_engine.runtime.handlers import Handler
    from storage_engine.runtime.session import Session
    from storage_engine.runtime.worker import EventRuntime


class Working(ABC):
    """The event side of `Session`, which has the rest."""

    _repository: Repository
    _config: OntologiaConfig
    _namespace: str
    _instance_metadata: dict[str, str]
    _events: EventRuntime | None

    @abstractmethod
    def _use(self, operation: str) -> AbstractContextManager[None]:
        """Refuse a session that is closed or busy."""

    @abstractmethod
    def for_handler(self) -> Session:
        """A session for one handler's intents, so that a failure drops no others."""

    def emit(self, events: Event | Iterable[Event]) -> None:
        """Put events on the bus, one or many, without a commit."""
        with self._use("emit"):
            envelopes = arguments.events(events, self._namespace, "emit")
            self._event_runtime().store.enqueue(envelopes)

    def run(
        self,
        handlers: Iterable[Handler[Any]],
        *,
        schedules: Iterable[Schedule] = (),
        max_iterations: int | None = None,
        progress: Callable[[Totals], None] | None = None,
    ) -> Totals:
        """Handle events as they come, until `stop()`, SIGTERM, or `max_iterations` rounds.

        A round claims up to `event_claim_limit` events and handles them one after the other;
        while there are none, one is made every `event_poll_interval_ms`. `progress` is called
        after each round. Several workers share the events of a handler between them.
        """
        return self._work(
            "run",
            handlers,
            schedules=arguments.schedules(schedules),
            max_iterations=arguments.rounds(max_iterations),
            progress=progress,
        )

    def drain(
        self,
        handlers: Iterable[Handler[Any]],
        *,
        progress: Callable[[Totals], None] | None = None,
    ) -> Totals:
        """Handle events until none is due. Failed ones that wait for their next attempt stay."""
        return self._work("drain", handlers, schedules=(), until_idle=True, progress=progress)

    def stop(self) -> None:
        """End `run()` or `drain()`, from a handler or another thread, after the handler that
        runs now. What the worker had claimed besides is given back."""
        if self._events is not None:
            self._events.stop()

    @property
    def is_working(self) -> bool:
        """Whether `run()` or `drain()` is under way."""
        return self._events is not None and self._events.running

    def _work(self, operation: str, handlers: Any, **settings: Any) -> Totals:
        from storage_engine.runtime.handlers import checked_handlers

        with self._use(operation):
            runtime, found = self._event_runtime(), checked_handlers(handlers)
        return runtime.work(found, metadata=self._instance_metadata, **settings)

    def _event_runtime(self) -> EventRuntime:
        if self._events is None:
            from storage_engine.runtime.worker import EventRuntime

            self._events = EventRuntime(
                self._repository, self._config, self._namespace, self.for_handler
            )
        return self._events
