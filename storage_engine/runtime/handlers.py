"""Event handlers as users write them: `@on_event`, and the context that a handler is given."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from storage_engine.commitlog.layout import segment
from storage_engine.errors import EventLoopLimitError, HandlerError
from storage_engine.events.envelopes import derived_id
from storage_engine.events.protocol import Subscription
from storage_engine.events.records import MAX_NAME, Claim, Envelope, check_id
from storage_engine.model.declarations import DEFAULT_PRIORITY, Entity, Event, Relation
from storage_engine.repository.protocol import ClaimLost
from storage_engine.runtime import arguments
from storage_engine.runtime.core import internals

if TYPE_CHECKING:
    from storage_engine.runtime.arguments import StoredClass
    from storage_engine.runtime.core import SubmittedCommit
    from storage_engine.runtime.session import Session

E = TypeVar("E", bound=Event)


class Handler(Generic[E]):
    """A function that handles events of some types. Calling it calls the function."""

    def __init__(
        self,
        function: Callable[[HandlerContext[E]], None],
        event_types: tuple[type[E], ...],
        priority: int,
        id: str,
        writes: tuple[StoredClass, ...] | None = None,
        emits: tuple[type[Event], ...] | None = None,
    ) -> None:
        self.function = function
        self.event_types = {cls.event_type: cls for cls in event_types}
        self.priority = priority
        self.id = id
        self.writes = writes  # None: it does not say
        self.emits = emits
        self.__name__ = getattr(function, "__name__", id)
        self.__doc__ = function.__doc__

    def __call__(self, ctx: HandlerContext[E]) -> None:
        self.function(ctx)

    def __repr__(self) -> str:
        return f"<handler {self.id} of {', '.join(self.event_types)}>"

    def subscription(self) -> Subscription:
        keys = {name: cls.ordering_key for name, cls in self.event_types.items()}
        return Subscription(
            self.id,
            frozenset(self.event_types),
            self.priority,
            {name: key for name, key in keys.items() if key is not None},
        )


def on_event(
    *event_types: type[E],
    priority: int = DEFAULT_PRIORITY,
    id: str | None = None,
    writes: Iterable[StoredClass] | None = None,
    emits: Iterable[type[Event]] | None = None,
) -> Callable[[Callable[[HandlerContext[E]], None]], Handler[E]]:
    """Make a function a handler of events.

        @on_event(OrderPlaced, priority=200)
        def bill(ctx: HandlerContext[OrderPlaced]) -> None:
            ctx.ensure(Invoice(id=ctx.event.order_id))

    Among events of one priority, handlers of higher `priority` go first. What a handler has
    handled is kept under its `id`, module and name unless given: after renaming the function,
    give the old one, or it starts from the beginning.

    `writes` and `emits` say which types it writes and which events it sends, for whoever draws
    the lineage (Dagster does). They keep it from nothing: what it does beyond them is done, and
    noted in what `run` and `drain` return.
    """
    if not event_types:
        raise HandlerError("on_event needs at least one Event class: @on_event(OrderPlaced)")
    given: tuple[Any, ...] = event_types
    for cls in given:
        if not (isinstance(cls, type) and issubclass(cls, Event) and cls.event_type):
            raise HandlerError(f"on_event takes Event classes, not {cls!r}")
    if type(priority) is not int:
        raise HandlerError(f"on_event: priority must be an int, not {priority!r}")
    written = _listed("writes", writes, (Entity, Relation), "Entity and Relation classes")
    sent = _listed("emits", emits, (Event,), "Event classes")

    def decorate(function: Callable[[HandlerContext[E]], None]) -> Handler[E]:
        handler_id = _checked_id(function, id)
        return Handler(function, event_types, priority, handler_id, written, sent)

    return decorate


def _listed(option: str, given: Any, bases: tuple[type, ...], what: str) -> tuple[Any, ...] | None:
    """The classes of `writes` or `emits`, each once; None when nothing was said."""
    if given is None:
        return None
    if isinstance(given, type | str) or not isinstance(given, Iterable):
        name = getattr(given, "__name__", repr(given))
        raise HandlerError(f"on_event: {option} takes a list: {option}=[{name}]")
    classes = tuple(dict.fromkeys(given))
    for cls in classes:
        declared = isinstance(cls, type) and issubclass(cls, bases) and cls not in bases
        if not declared or (issubclass(cls, Event) and not cls.event_type):
            raise HandlerError(f"on_event: {option} takes {what}, not {cls!r}")
        declaration = getattr(cls, "__declaration__", None)
        if declaration is not None and declaration.abstract:
            raise HandlerError(f"on_event: {option} names {cls.__name__}, which is not stored")
    return classes


def _checked_id(function: Any, given: str | None) -> str:
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function) or isinstance(function, type):
        raise HandlerError(f"on_event decorates a function, not {function!r}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HandlerError(
            f"{name} is a coroutine or generator, which nobody would run: write a plain function"
        )
    try:
        inspect.signature(function).bind(object())
    except TypeError:
        raise HandlerError(f"{name} must take one argument, the context: def {name}(ctx)") from None
    handler_id: Any = given if given is not None else f"{function.__module__}.{name}"
    if not isinstance(handler_id, str) or not handler_id or len(segment(handler_id)) > MAX_NAME:
        raise HandlerError(
            f"{name}: the id must be a text of up to {MAX_NAME} letters: {handler_id!r}"
        )
    return str(handler_id)


def checked_handlers(handlers: Any) -> list[Handler[Any]]:
    """What `run` and `drain` were given."""
    if isinstance(handlers, Handler) or not isinstance(handlers, Iterable):
        raise HandlerError(f"handlers are given as a list: [{getattr(handlers, 'id', handlers)}]")
    listed = list(handlers)
    if not listed:
        raise HandlerError("no handlers were given, so no event would ever be handled")
    by_id: dict[str, Any] = {}
    for handler in listed:
        if not isinstance(handler, Handler):
            name = getattr(handler, "__qualname__", repr(handler))
            raise HandlerError(f"{name} is no handler: decorate it with @on_event(EventClass)")
        if by_id.setdefault(handler.id, handler) is not handler:
            raise HandlerError(
                f"two handlers have the id {handler.id}; give one of them another: "
                "@on_event(..., id='...')"
            )
    return list(by_id.values())


class HandlerContext(Generic[E]):
    """What a handler works with: the event, and everything that it wants to leave behind.

    Nothing is written while the handler runs. When it returns, its intents and events are
    published as one commit, and that commit is also the ack: a crash cannot separate them. A
    handler without intents emits its events and is acked. If it raises, all of it is dropped.
    """

    def __init__(
        self, event: E, claim: Claim, open_session: Callable[[], Session], max_chain_depth: int
    ) -> None:
        self.event: E = event
        self._claim = claim
        self._open_session = open_session
        self._max_chain_depth = max_chain_depth
        self._session: Session | None = None
        self._commits = False
        self._events: list[Envelope] = []
        self._options: dict[str, Any] = {}

    @property
    def session(self) -> Session:
        """A session of this handler alone, to read with. What it commits by itself is not part
        of the handler's commit, and stays when the handler fails."""
        if self._session is None:
            self._session = self._open_session()
        return self._session

    @property
    def lease_until(self) -> datetime:
        """Until when the claim holds; it is extended while the handler runs."""
        return self._claim.record.lease_until

    def ensure(self, objects: Entity | Relation[Any, Any] | Iterable[Any]) -> None:
        """State that an object, or every object of an iterable, should be stored as it is."""
        self.session.ensure(objects)

    def ingest(self, type: StoredClass, source: Any) -> None:
        """State that every row of a source should be stored; it is read after the handler."""
        self.session.ingest(type, source)

    def add_commit_meta(self, key: str, value: str) -> None:
        """Attach a text to the commit."""
        self.session.add_commit_meta(key, value)

    def emit(self, events: Event | Iterable[Event]) -> None:
        """Send events when the handler succeeds. They continue the chain of the handled one."""
        for event in arguments.listed_events("emit", events):
            self._events.append(self._in_chain(event))  # its number is part of its id

    def commit(
        self,
        event: Event | Iterable[Event] | None = None,
        *,
        meta: Mapping[str, str] | None = None,
        expect: Mapping[StoredClass | str, int] | None = None,
        idempotency: tuple[str, int | str] | None = None,
    ) -> None:
        """Ask for a commit of the intents, with these events, when the handler returns.

        All of a handler's commits are one, so that it happens altogether or not at all.
        """
        if event is not None:
            self.emit(event)
        self._commits = True
        if meta is not None:
            for key, value in arguments.texts("meta", meta).items():
                self.session.add_commit_meta(key, value)
        if expect is not None:
            self._options["expect"] = {**self._options.get("expect", {}), **expect}
        if idempotency is not None:
            self._options["idempotency"] = idempotency

    def _in_chain(self, event: Event) -> Envelope:
        parent, depth = self.event, self.event.chain_depth + 1
        if depth > self._max_chain_depth:
            raise EventLoopLimitError(
                f"{event.event_type} would be number {depth} in the chain that "
                f"{parent.root_event_id} began, and max_event_chain_depth is "
                f"{self._max_chain_depth}: handlers seem to emit one another's events in a circle"
            )
        return check_id(
            {
                **event.envelope(self._claim.namespace),
                "id": self._stable_id(event.id),
                "root_event_id": parent.root_event_id,
                "chain_depth": depth,
            }
        )

    def _stable_id(self, event_id: str) -> str:
        """Instead of a random id one that a second run of the handler comes to again, so that
        what a crashed run had emitted is not handled twice."""
        try:
            made_up = uuid.UUID(event_id).version == 4
        except ValueError:
            made_up = False
        if not made_up:
            return event_id
        number = str(len(self._events))
        return derived_id("emitted", self.event.id, self._claim.handler_id, number)

    def _finish(self) -> SubmittedCommit | None:
        """Send what the handler left on its way: the commit, which is also the ack, or None where
        there is none to make, and its events are still to be sent."""
        session = self._session
        pending = self._commits or (session is not None and internals(session).has_intents)
        if not pending:
            return None
        if self._claim.lost:
            raise ClaimLost(self._claim.as_ack())
        core = internals(self.session)
        return core.submit_handled(self._claim.as_ack(), self._events, **self._options)
