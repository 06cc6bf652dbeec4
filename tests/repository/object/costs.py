"""Counts what a piece of work asks of the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from storage_engine.objectstore.metering import HopTrace, tracing
from storage_engine.repository.object.engine import ObjectRepository


@dataclass(frozen=True)
class Cost:
    """What a piece of work sent: requests by kind, and the longest serial chain of them."""

    requests: dict[str, int]
    hops: int

    @property
    def total(self) -> int:
        return sum(self.requests.values())


def measure(repository: ObjectRepository, work: Callable[[], object]) -> Cost:
    before = repository.store.meter.snapshot()
    with tracing(HopTrace()) as trace:
        work()
    after = repository.store.meter.snapshot()
    kinds = [k for k in after if k not in {"total", "bytes_read", "bytes_written"}]
    spent = {k: after[k] - before.get(k, 0) for k in kinds}
    return Cost({k: n for k, n in spent.items() if n}, trace.depth)
