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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from storage_engine.errors import (
    CommitStateUnknownError,
    ConfigurationError,
    EventLoopLimitError,
)
from storage_engine.events.dispatcher import Dispatcher, Pace
from storage_engine.events.outcomes import (
    Drop,
    Execute,
    HandlerFailure,
    HandlerOutcome,
    Publishing,
    Success,
    Totals,
)
from storage_engine.events.protocol import EventStore, open_event_store
from storage_engine.events.records import Claim, Envelope
from storage_engine.events.schedules import Schedule, Scheduler
from storage_engine.model.declarations import Event
from storage_engine.process import identity
from storage_engine.repository.protocol import ClaimLost, CommitResult, Repository
from storage_engine.runtime import arguments
from storage_engine.runtime.core import SessionSettings, SubmittedCommit, internals
from storage_engine.runtime.handlers import Handler, HandlerContext
from storage_engine.runtime.session import session_on

log = logging.getLogger(__name__)

_ERROR_LENGTH = 2_000


@dataclass(frozen=True, slots=True)
class HandlerRun:
    """One event with one handler, as it ended: without an error it was handled.

    `commit` is the commit that acks it, where the handler led to one; `emitted` are the types of
    the events that it sent.
    """

    handler_id: str
    event_id: str
    event_type: str
    commit: CommitResult | None = None
    emitted: Sequence[str] = ()
    error: str | None = None


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

    def catch_up(self) -> None:
        """Wait until the commits of handlers that have ended are there to be read."""
        dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.catch_up()

    def work(
        self,
        handlers: Sequence[Handler[Any]],
        schedules: Sequence[Schedule] = (),
        *,
        concurrency: int = 1,
        max_iterations: int | None = None,
        until_idle: bool = False,
        progress: Callable[[Totals], None] | None = None,
        observe: Callable[[HandlerRun], None] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Totals:
        """Run a worker to its end."""
        by_id = {handler.id: handler for handler in handlers}
        settings = replace(self._settings, commit_metadata=metadata or {})

        def execute(claim: Claim) -> HandlerOutcome | Publishing:
            return self._execute(by_id[claim.handler_id], claim, settings)

        dispatcher = self._new_dispatcher(
            handlers, schedules, execute, concurrency, progress, _observer(observe)
        )
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
        execute: Execute,
        concurrency: int,
        progress: Callable[[Totals], None] | None,
        observe: Callable[[Claim, Success | HandlerFailure], None] | None,
    ) -> Dispatcher:
        config, session_id = self._config, str(uuid.uuid4())
        subscriptions = [handler.subscription() for handler in handlers]
        return Dispatcher(
            self.store,
            self.store.consumer(self._namespace, subscriptions, session_id),
            execute,
            namespace=self._namespace,
            session_id=session_id,
            pace=Pace(
                claim_limit=config.event_claim_limit,
                poll_interval=timedelta(milliseconds=config.event_poll_interval_ms),
                lease=timedelta(milliseconds=config.event_lease_ms),
                session_ttl=timedelta(milliseconds=config.session_ttl_ms),
                concurrency=concurrency,
            ),
            scheduler=Scheduler(self.store, self._namespace, schedules),
            metadata={
                "hostname": socket.gethostname(),
                "pid": os.getpid(),
                **self._settings.instance_metadata,
                "handlers": sorted(
                    handler.id for handler in handlers
                ),  # by these two, workers find one another
                "process": identity(),
            },
            flush=self._repository.flush,
            progress=progress,
            observe=observe,
        )

    def _execute(
        self, handler: Handler[Any], claim: Claim, settings: SessionSettings
    ) -> HandlerOutcome | Publishing:
        """Run a handler and send its work on its way. What it raises is its failure, not the
        worker's."""

        def run() -> HandlerOutcome | Publishing:
            event = handler.event_types[claim.envelope["type"]].from_envelope(claim.envelope)
            context: HandlerContext[Any] = HandlerContext(
                event,
                claim,
                lambda: session_on(self._repository, settings.fresh(), catch_up=self.catch_up),
                self._config.max_event_chain_depth,
            )
            try:
                handler(context)
                commit = context._finish()
                if commit is not None:
                    return _HandlerCommit(handler, claim, commit, context._events)
                return _success(handler, None, context._events)
            finally:
                if context._session is not None:
                    internals(context._session).end_handler()

        return _ended(handler, claim, run)


class _HandlerCommit:
    """See `Publishing`."""

    def __init__(
        self,
        handler: Handler[Any],
        claim: Claim,
        commit: SubmittedCommit,
        events: Sequence[Envelope],
    ) -> None:
        self._handler = handler
        self._claim = claim
        self._commit = commit
        self._events = events
        self.size = commit.pending.size

    def wait(self) -> HandlerOutcome:
        return _ended(
            self._handler,
            self._claim,
            lambda: _success(self._handler, self._commit.result(), self._events),
        )

    def withdraw(self) -> None:
        self._commit.pending.withdraw()


T = TypeVar("T")


def _ended(handler: Handler[Any], claim: Claim, work: Callable[[], T]) -> T | HandlerOutcome:
    """What a handler or its commit came to."""
    try:
        return work()
    except (ClaimLost, CommitStateUnknownError) as error:
        # The log knows how it ended; whoever finds the lease expired asks it.
        return Drop(f"{handler.id}: {error}", handled=isinstance(error, ClaimLost))
    except Exception as error:
        log.info("%s failed on event %s", handler.id, claim.event_id, exc_info=error)
        message = "".join(traceback.format_exception_only(error)).strip()
        retry = not isinstance(error, EventLoopLimitError)
        return HandlerFailure(message[:_ERROR_LENGTH], retry)


def _success(
    handler: Handler[Any], commit: CommitResult | None, events: Sequence[Envelope]
) -> Success:
    """A commit has sent the events; without one they are still to be sent."""
    sent = tuple(envelope["type"] for envelope in events)
    notes = [*(commit.notes if commit else ()), *_beyond(handler, commit, sent)]
    return Success(events if commit is None else (), commit, sent, notes)


def _observer(
    observe: Callable[[HandlerRun], None] | None,
) -> Callable[[Claim, Success | HandlerFailure], None] | None:
    if observe is None:
        return None

    def told(claim: Claim, outcome: Success | HandlerFailure) -> None:
        names = claim.handler_id, claim.event_id, str(claim.envelope["type"])
        if isinstance(outcome, Success):
            observe(HandlerRun(*names, outcome.commit, outcome.sent))
        else:
            observe(HandlerRun(*names, error=outcome.error))

    return told


def _beyond(
    handler: Handler[Any], commit: CommitResult | None, emitted: Sequence[str]
) -> Iterator[str]:
    """Notes on what a handler did that its declaration does not say, where it says anything."""
    if handler.writes is not None and commit is not None:
        declared = {cls.__declaration__.name for cls in handler.writes}
        for name in dict.fromkeys(change.type_name for change in commit.changes):
            if name not in declared:
                yield f"it wrote {name}, which @on_event(..., writes=[...]) does not name"
    if handler.emits is not None:
        sent = {cls.event_type for cls in handler.emits}
        for name in dict.fromkeys(emitted):
            if name not in sent:
                yield f"it sent {name}, which @on_event(..., emits=[...]) does not name"


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
