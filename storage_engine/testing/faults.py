"""Faults of the simulated store, by schedule or drawn from a seed.

    store = memory_backend("name").client(faults=FaultPlan([FaultRule(Fault(FaultKind.TIMEOUT))]))

A plan is consulted once for each request of one client, in order, so the same plan over the same
requests always does the same: a failing run is replayed from its seed, or by `FaultPlan.replay`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import TypeVar

from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.memory import ClientRequest, MemoryStore, SimulatedCrash
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectStoreError,
    OutcomeUnknown,
    PreconditionFailed,
)

T = TypeVar("T")

READS = frozenset({"GET", "LIST", "HEAD"})
CONDITIONAL = frozenset({"PUT_IF", "DELETE_IF"})


class FaultKind(Enum):
    """What goes wrong with one request."""

    CRASH_BEFORE = "crash_before"  # the process dies; the request never left
    CRASH_AFTER = "crash_after"  # the process dies; the request was applied
    RESPONSE_LOST = "response_lost"  # applied, but the client sees a broken connection
    TIMEOUT = "timeout"  # not applied, and the client cannot know
    DELAYED = "delayed"  # like a timeout, but lands later: its condition is judged then
    CONFLICT = "conflict"  # 409
    PRECONDITION = "precondition"  # 412
    SERVER_ERROR = "server_error"  # 500
    UNAVAILABLE = "unavailable"  # 503
    SLOW = "slow"  # answered properly, `seconds` later
    SKEW = "skew"  # the client's clock jumps by `seconds`; answered properly


# These are answers to a condition, so they make no sense for other requests.
_CONDITIONAL_ONLY = frozenset({FaultKind.CONFLICT, FaultKind.PRECONDITION})


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault with its particulars.

    `applied` says whether a write answered by 409, 412, 500 or 503 landed all the same (as when a
    proxy sent it twice). A delayed write lands once `seconds` have passed on the backend's clock,
    or, when `requests` is set, after that many more requests to the backend.
    """

    kind: FaultKind
    seconds: float = 0.0
    requests: int | None = None
    applied: bool = False


@dataclass(slots=True)
class FaultRule:
    """Do `fault` at the `nth` fitting request (from 1), and at the `times - 1` after it.

    `kind` is a meter kind ("PUT_IF"), an operation ("put_if_match"), "READ", "WRITE" or "*";
    `key` is a shell pattern in which `*` also matches "/". `times=None` means for ever.
    """

    fault: Fault
    kind: str = "*"
    key: str = "*"
    nth: int = 1
    times: int | None = 1
    _seen: int = field(default=0, init=False, repr=False)

    def take(self, kind: str, operation: str, key: str) -> bool:
        """Note one request; true when the fault is due at it."""
        if not self._fits(kind, operation, key):
            return False
        self._seen += 1
        last = None if self.times is None else self.nth + self.times
        return self._seen >= self.nth and (last is None or self._seen < last)

    def _fits(self, kind: str, operation: str, key: str) -> bool:
        if self.fault.kind in _CONDITIONAL_ONLY and kind not in CONDITIONAL:
            return False
        groups = {"*", kind, operation, "READ" if kind in READS else "WRITE"}
        return self.kind in groups and fnmatchcase(key, self.key)


@dataclass(frozen=True, slots=True)
class FiredFault:
    """A fault that happened: at which request of the client (from 1), and what it was."""

    request: int
    kind: str
    key: str
    fault: Fault


class FaultPlan:
    """What goes wrong for one client: explicit rules first, then chance.

    `probabilities` gives the chance of each fault kind per request, drawn from `seed`; at most
    `limit` random faults happen, so that a run with retries comes to an end.
    """

    def __init__(
        self,
        rules: Iterable[FaultRule] = (),
        *,
        seed: int | None = None,
        probabilities: Mapping[FaultKind, float] | None = None,
        limit: int | None = None,
        max_seconds: float = 60.0,
    ) -> None:
        if probabilities and seed is None:
            raise ValueError("random faults need a seed, or the run could not be replayed")
        if sum((probabilities or {}).values()) > 1:
            raise ValueError("the fault probabilities add up to more than 1")
        self.rules = list(rules)
        self.fired: list[FiredFault] = []
        self._random = random.Random(seed)
        self._chances = sorted((probabilities or {}).items(), key=lambda item: item[0].value)
        self._left = limit
        self._max_seconds = max_seconds
        self._requests = 0
        self._replay: dict[int, Fault] = {}
        self._lock = threading.Lock()

    @classmethod
    def replay(cls, fired: Iterable[FiredFault]) -> FaultPlan:
        """A plan that does again what another one did, at the same requests."""
        plan = cls()
        plan._replay = {event.request: event.fault for event in fired}
        return plan

    def serve(self, client: MemoryStore, request: ClientRequest, action: Callable[[], T]) -> T:
        """Answer a request of a client as the plan has it."""
        with self._lock:
            fault = self.next(request.kind, request.operation, request.key)
        if fault is None:
            return client.backend.serve(action)
        request.outcome = fault.kind.value
        return _serve_badly(client, request, action, fault)

    def next(self, kind: str, operation: str, key: str) -> Fault | None:
        """The fault of the client's next request, if any. Called once for each request."""
        self._requests += 1
        # Every rule must see every request, or later rules would miscount.
        due = [rule.fault for rule in self.rules if rule.take(kind, operation, key)]
        fault = due[0] if due else self._replay.get(self._requests) or self._draw(kind)
        if fault is not None:
            self.fired.append(FiredFault(self._requests, kind, key, fault))
        return fault

    def _draw(self, kind: str) -> Fault | None:
        if not self._chances or self._left == 0:
            return None
        fault_kind = self._pick(self._random.random())
        if fault_kind is None:
            return None
        if fault_kind in _CONDITIONAL_ONLY and kind not in CONDITIONAL:
            return None
        if self._left is not None:
            self._left -= 1
        applied = self._random.random() < 0.5
        seconds = self._random.uniform(0.0, self._max_seconds)
        if fault_kind is FaultKind.SKEW:
            seconds -= self._max_seconds / 2
        requests = self._random.randint(1, 8) if self._random.random() < 0.5 else None
        return Fault(
            fault_kind,
            seconds=seconds,
            requests=requests if fault_kind is FaultKind.DELAYED else None,
            applied=applied,
        )

    def _pick(self, draw: float) -> FaultKind | None:
        for fault_kind, chance in self._chances:
            if draw < chance:
                return fault_kind
            draw -= chance
        return None


def plan_of(client: MemoryStore) -> FaultPlan:
    """The plan of a client, to add rules to or to ask what happened; made if it had none."""
    if client.faults is None:
        client.faults = FaultPlan()
    assert isinstance(client.faults, FaultPlan)
    return client.faults


def _serve_badly(
    client: MemoryStore, request: ClientRequest, action: Callable[[], T], fault: Fault
) -> T:
    backend, what = client.backend, f"{request.operation} {request.key}"
    match fault.kind:
        case FaultKind.SLOW:
            client.clock.sleep(fault.seconds)
            return backend.serve(action)
        case FaultKind.SKEW:
            client.skew += fault.seconds
            return backend.serve(action)
        case FaultKind.CRASH_BEFORE:
            client.crashed = True
            raise SimulatedCrash(f"before {what}")
        case FaultKind.DELAYED if request.kind not in READS:
            backend.serve_later(action, seconds=fault.seconds, requests=fault.requests)
        case FaultKind.CRASH_AFTER | FaultKind.RESPONSE_LOST:
            _serve_unanswered(client, action)
        case _ if fault.applied:
            _serve_unanswered(client, action)
    if fault.kind is FaultKind.CRASH_AFTER:
        client.crashed = True
        raise SimulatedCrash(f"after {what}")
    raise _failure(request, fault)


def _serve_unanswered(client: MemoryStore, action: Callable[[], object]) -> None:
    with suppress(ObjectStoreError):  # The answer is lost, whatever it was.
        client.backend.serve(action)


def _failure(request: ClientRequest, fault: Fault) -> Exception:
    what = f"simulated {fault.kind.value} at {request.operation} {request.key}"
    if fault.kind is FaultKind.CONFLICT:
        return ConditionalConflict(what)
    if fault.kind is FaultKind.PRECONDITION:
        return PreconditionFailed(what)
    if request.kind in CONDITIONAL:
        return OutcomeUnknown(what)
    # Reads, and writes that are safe to repeat, may simply be tried again.
    return StorageBackendError(what, operation=request.operation, key=request.key, retryable=True)
