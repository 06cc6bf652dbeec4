"""How handlers end, and what a worker has done so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from storage_engine.events.records import Claim, Envelope
from storage_engine.repository.protocol import CommitResult

_NOTES_KEPT = 20


@dataclass(frozen=True, slots=True)
class Success:
    """The handler succeeded; `emits` go out before its ack. The `commit`, where there is one, has
    acked. `sent` are the types of all events that it sent, `notes` what may surprise."""

    emits: Sequence[Envelope] = ()
    commit: CommitResult | None = None
    sent: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """The handler failed; without `retry`, trying again cannot help."""

    error: str
    retry: bool = True


@dataclass(frozen=True, slots=True)
class Drop:
    """The claim is not ours to settle: it was lost, or nobody knows whether its commit landed.
    Where the event was `handled` by another commit, the claim is ended if it is ours after all."""

    reason: str
    handled: bool = False


HandlerOutcome = Success | HandlerFailure | Drop


class Publishing(Protocol):
    """The handler has ended, and its commit, which is also the ack, is on its way."""

    @property
    def size(self) -> int:
        """Bytes that are held until it has ended."""

    def wait(self) -> HandlerOutcome:
        """How it ended; the same at every call. Raises only what should end the worker."""

    def withdraw(self) -> None:
        """Take it back, where nobody has begun with it."""


class Execute(Protocol):
    """Runs the handler of a claim. Raises only what should end the worker."""

    def __call__(self, claim: Claim) -> HandlerOutcome | Publishing: ...


@dataclass(slots=True)
class Totals:
    """What a worker has done so far."""

    handled: int = 0
    failed: int = 0
    dead_lettered: int = 0
    dropped: int = 0
    emitted: int = 0
    fired: int = 0
    iterations: int = 0
    claimed: int = 0
    held: int = 0
    malformed: int = 0  # set aside, as it or its claim cannot be read
    notes: list[str] = field(default_factory=list)  # of handlers' commits, each text once
    more_notes: int = 0  # beyond those: a worker may live for long

    def note(self, notes: Sequence[str]) -> None:
        for text in notes:
            if text in self.notes:
                continue
            if len(self.notes) < _NOTES_KEPT:
                self.notes.append(text)
            else:
                self.more_notes += 1
