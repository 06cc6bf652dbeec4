"""A session as a worker: which handlers it runs, how their work is published, and when it ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    CommitStateUnknownError,
    ConfigurationError,
    EventLoopLimitError,
)
from storage_engine.events import open_event_store
from storage_engine.events.dispatcher import (
    Dispatcher,
    Done,
    Dropped,
    Failed,
    Outcome,
    Pace,
    Totals,
)
from storage_engine.events.protocol import Claim, EventStore
from storage_engine.events.schedules import Schedule, Scheduler
from storage_engine.repository.protocol import ClaimLost, Repository
from storage_engine.runtime.handlers import Handler, HandlerContext

if TYPE_CHECKING:
    from storage_engine.runtime.session import Session

log = logging.getLogger(__name__)

_ERROR_LENGTH = 2_000


class EventRuntime:
    """The event side of one session."""

    def __init__(
        self,
        repository: Repository,
        config: OntologiaConfig,
        namespace: str,
        open_session: Callable[[], Session],
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._open_session = open_session
        self.store: EventStore = open_event_store(repository, config)
        self._worker: Dispatcher | None = None
        self._guard = threading.Lock()

    @property
    def running(self) -> bool:
        return self._worker is not None

    def stop(self) -> None:
        worker = self._worker
        if worker is not None:
            worker.stop()

    def work(
        self,
        handlers: Sequence[Handler[Any]],
        schedules: Sequence[Schedule],
        metadata: Mapping[str, Any],
        *,
        max_iterations: int | None = None,
        until_idle: bool = False,
        progress: Callable[[Totals], None] | None = None,
    ) -> Totals:
        """Run a worker to its end."""
        worker = self._dispatcher(handlers, schedules, metadata, progress)
        with self._guard:
            if self._worker is not None:
                raise ConfigurationError(
                    "this session is running already: open another session, or stop() this one"
                )
            self._worker = worker
        try:
            with _stopped_by_sigterm(worker):
                return worker.run(max_iterations=max_iterations, until_idle=until_idle)
        finally:
            self._worker = None

    def _dispatcher(
        self,
        handlers: Sequence[Handler[Any]],
        schedules: Sequence[Schedule],
        metadata: Mapping[str, Any],
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
                "handlers": sorted(by_id),
                **metadata,
            },
            progress=progress,
        )

    def _execute(self, handler: Handler[Any], claim: Claim) -> Outcome:
        """Run a handler and publish its work. What it raises is its failure, not the worker's."""
        context: HandlerContext[Any] | None = None
        try:
            event_class = handler.event_types[claim.envelope["type"]]
            event = event_class.from_envelope(_stored(claim.envelope))
            context = HandlerContext(
                event, claim, self._open_session, self._config.max_event_chain_depth
            )
            handler(context)
            emits, committed = context._finish()
            return Done(emits, committed)
        except (ClaimLost, CommitStateUnknownError) as error:
            # The log knows how it ended; whoever finds the lease expired asks it.
            return Dropped(f"{handler.id}: {error}")
        except EventLoopLimitError as error:
            return self._failed(handler, claim, error, retry=False)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            return self._failed(handler, claim, error)
        finally:
            if context is not None and context._session is not None:
                context._session.end_handler()

    @staticmethod
    def _failed(
        handler: Handler[Any], claim: Claim, error: Exception, *, retry: bool = True
    ) -> Failed:
        log.info("%s failed on event %s", handler.id, claim.event_id, exc_info=error)
        said = "".join(traceback.format_exception_only(error)).strip()
        return Failed(said[:_ERROR_LENGTH], retry)


def _stored(envelope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Other implementations may leave out lineage."""
    return {"root_event_id": envelope["id"], "chain_depth": 0, **envelope}


@contextmanager
def _stopped_by_sigterm(worker: Dispatcher) -> Iterator[None]:
    """SIGTERM ends the worker in order; only the main thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
