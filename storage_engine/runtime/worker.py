"""A session as event worker: what it emits, which handlers it runs, how their work is published,
and when it ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from storage_engine.errors import (
    CommitStateUnknownError,
    ConfigurationError,
    EventLoopLimitError,
)
from storage_engine.events.dispatcher import (
    Dispatcher,
    Drop,
    HandlerFailure,
    HandlerOutcome,
    Pace,
    Success,
    Totals,
)
from storage_engine.events.protocol import EventStore, open_event_store
from storage_engine.events.records import Claim
from storage_engine.events.schedules import Schedule, Scheduler
from storage_engine.model.declarations import Event
from storage_engine.process import identity
from storage_engine.repository.protocol import ClaimLost, Repository
from storage_engine.runtime import arguments
from storage_engine.runtime.core import SessionSettings, internals
from storage_engine.runtime.handlers import Handler, HandlerContext
from storage_engine.runtime.session import Session, session_on

log = logging.getLogger(__name__)

_ERROR_LENGTH = 2_000


class EventWorker:
    """The event side of one session: its bus, and the worker that it is while it runs."""

    def __init__(self, repository: Repository, settings: SessionSettings) -> None:
        self._repository = repository
        self._settings = settings
        self._config = settings.config
        self._namespace = settings.namespace
        self.store: EventStore = open_event_store(repository, settings.config)
        self._dispatcher: Dispatcher | None = None
        self._guard = threading.Lock()

    def emit(self, events: Event | Iterable[Event]) -> None:
        """Put events on the bus, without a commit."""
        self.store.enqueue(arguments.events(events, self._namespace, "emit"))

    @property
    def running(self) -> bool:
        return self._dispatcher is not None

    def stop(self) -> None:
        dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.stop()

    def work(
        self,
        handlers: Sequence[Handler[Any]],
        schedules: Sequence[Schedule] = (),
        *,
        max_iterations: int | None = None,
        until_idle: bool = False,
        progress: Callable[[Totals], None] | None = None,
    ) -> Totals:
        """Run a worker to its end."""
        dispatcher = self._new_dispatcher(handlers, schedules, progress)
        with self._guard:
            if self._dispatcher is not None:
                raise ConfigurationError(
                    "this session is running already: open another session, or stop() this one"
                )
            self._dispatcher = dispatcher
        try:
            with _stopped_by_sigterm(dispatcher):
                return dispatcher.run(max_iterations=max_iterations, until_idle=until_idle)
        finally:
            self._dispatcher = None

    def _new_dispatcher(
        self,
        handlers: Sequence[Handler[Any]],
        schedules: Sequence[Schedule],
        progress: Callable[[Totals], None] | None,
    ) -> Dispatcher:
        config, session_id = self._config, str(uuid.uuid4())
        subscriptions = [handler.subscription() for handler in handlers]
        by_id = {handler.id: handler for handler in handlers}
        return Dispatcher(
            self.store,
            self.store.consumer(self._namespace, subscriptions, session_id),
            lambda claim: self._execute(by_id[claim.handler_id], claim),
            namespace=self._namespace,
            session_id=session_id,
            pace=Pace(
                claim_limit=config.event_claim_limit,
                poll_interval=timedelta(milliseconds=config.event_poll_interval_ms),
                lease=timedelta(milliseconds=config.event_lease_ms),
                session_ttl=timedelta(milliseconds=config.session_ttl_ms),
            ),
            scheduler=Scheduler(self.store, self._namespace, schedules),
            metadata={
                "hostname": socket.gethostname(),
                "pid": os.getpid(),
                **self._settings.instance_metadata,
                "handlers": sorted(by_id),  # by these two, workers find one another
                "process": identity(),
            },
            flush=self._repository.flush,
            progress=progress,
        )

    def _execute(self, handler: Handler[Any], claim: Claim) -> HandlerOutcome:
        """Run a handler and publish its work. What it raises is its failure, not the worker's."""
        context: HandlerContext[Any] | None = None
        try:
            event_class = handler.event_types[claim.envelope["type"]]
            event = event_class.from_envelope(claim.envelope)
            context = HandlerContext(
                event, claim, self._handler_session, self._config.max_event_chain_depth
            )
            handler(context)
            emits, committed = context._finish()
            result = context.session.last_commit if committed else None
            return Success(emits, committed, result.notes if result is not None else ())
        except (ClaimLost, CommitStateUnknownError) as error:
            # The log knows how it ended; whoever finds the lease expired asks it.
            return Drop(f"{handler.id}: {error}")
        except EventLoopLimitError as error:
            return self._failed(handler, claim, error, retry=False)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            return self._failed(handler, claim, error)
        finally:
            if context is not None and context._session is not None:
                internals(context._session).end_handler()

    def _handler_session(self) -> Session:
        """A session for one handler's intents, so that a failure drops no others."""
        return session_on(self._repository, self._settings.fresh())

    @staticmethod
    def _failed(
        handler: Handler[Any], claim: Claim, error: Exception, *, retry: bool = True
    ) -> HandlerFailure:
        log.info("%s failed on event %s", handler.id, claim.event_id, exc_info=error)
        message = "".join(traceback.format_exception_only(error)).strip()
        return HandlerFailure(message[:_ERROR_LENGTH], retry)


@contextmanager
def _stopped_by_sigterm(dispatcher: Dispatcher) -> Iterator[None]:
    """SIGTERM ends the worker in order; only the main thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: dispatcher.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
