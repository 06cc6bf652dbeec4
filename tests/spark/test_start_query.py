"""Streaming queries are started again where Spark did not wait for their Python worker."""

from __future__ import annotations

from typing import Any

import pytest

from storage_engine.spark import start_query


class Starting:
    def __init__(self, *failures: str) -> None:
        self.failures = list(failures)
        self.started = 0

    def start(self) -> str:
        self.started += 1
        if self.failures:
            raise RuntimeError(self.failures.pop(0))
        return "query"


BUSY = "(org.apache.spark.SparkException) Python worker failed to connect back."


def test_a_worker_that_is_slow_to_come_up_is_waited_for() -> None:
    starting: Any = Starting(BUSY, BUSY)
    query: Any = start_query(starting)
    assert query == "query"
    assert starting.started == 3


def test_other_failures_are_told_at_once() -> None:
    starting: Any = Starting("the checkpoint is of another query")
    with pytest.raises(RuntimeError, match="another query"):
        start_query(starting)
    assert starting.started == 1


def test_patience_ends() -> None:
    starting: Any = Starting(BUSY, BUSY)
    with pytest.raises(RuntimeError, match="connect back"):
        start_query(starting, patience_s=-1)
    assert starting.started == 1
