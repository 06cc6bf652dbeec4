"""Hops follow dependencies, whatever the threads did."""

from __future__ import annotations

import threading
import time

import pytest

from storage_engine.objectstore.metering import HopTrace, RequestMeter, tracing
from storage_engine.objectstore.parallel import Parallel


@pytest.fixture(params=["threads", "inline"])
def parallel(request: pytest.FixtureRequest) -> Parallel:
    return Parallel(4, inline=request.param == "inline")


def chain(meter: RequestMeter, length: int) -> int:
    for _ in range(length):
        meter.count("GET")
    return length


def test_serial_requests_are_a_hop_each() -> None:
    meter = RequestMeter()
    chain(meter, 2)  # Outside a trace: counted, but no hops to add to.
    with tracing(HopTrace()) as trace:
        chain(meter, 3)
    assert trace.depth == 3
    assert meter.snapshot()["GET"] == 5


def test_requests_together_are_one_hop(parallel: Parallel) -> None:
    meter = RequestMeter()
    with tracing(HopTrace()) as trace:
        results = parallel.gather([lambda: chain(meter, 1)] * 10)
        assert trace.depth == 1
        meter.count("PUT")
    assert results == [1] * 10
    assert trace.depth == 2


def test_the_longest_line_counts(parallel: Parallel) -> None:
    meter = RequestMeter()
    with tracing(HopTrace()) as trace:
        meter.count("GET")
        assert parallel.map(lambda n: chain(meter, n), [1, 4, 2]) == [1, 4, 2]
    assert trace.depth == 5


def test_nested_gathers_neither_deadlock_nor_miscount(parallel: Parallel) -> None:
    meter = RequestMeter()

    def inner(depth: int) -> None:
        meter.count("GET")
        if depth:
            parallel.gather([lambda: inner(depth - 1)] * 3)

    with tracing(HopTrace()) as trace:
        parallel.gather([lambda: inner(3)] * 8)
    assert trace.depth == 4
    assert meter.snapshot()["GET"] == 8 * (1 + 3 + 9 + 27)


def test_background_work_joins_when_waited_for(parallel: Parallel) -> None:
    meter = RequestMeter()
    with tracing(HopTrace()) as trace:
        meter.count("PUT")
        background = parallel.start(lambda: chain(meter, 3))
        meter.count("GET")
        assert trace.depth == 2
        assert background.wait() == 3
        assert trace.depth == 4
        assert background.done


def test_background_work_may_gather(parallel: Parallel) -> None:
    meter = RequestMeter()
    with tracing(HopTrace()) as trace:
        background = parallel.start(lambda: parallel.map(lambda n: chain(meter, n), [1, 2]))
        assert background.wait() == [1, 2]
    assert trace.depth == 2


def test_failures_wait_for_the_others_and_come_first_by_place(parallel: Parallel) -> None:
    done: list[int] = []

    def work(number: int) -> int:
        if number == 1:
            raise ValueError("one")
        if number == 2:
            raise KeyError("two")
        time.sleep(0.05)
        done.append(number)
        return number

    with pytest.raises(ValueError, match="one"):
        parallel.map(work, range(4))
    assert sorted(done) == [0, 3]
    outcomes = parallel.gather_outcomes([lambda n=n: work(n) for n in range(4)])  # type: ignore[misc]
    assert [type(outcome) for outcome in outcomes] == [int, ValueError, KeyError, int]


def test_background_failures_are_raised_by_wait(parallel: Parallel) -> None:
    def fail() -> None:
        raise ValueError("in the background")

    background = parallel.start(fail)
    with pytest.raises(ValueError, match="in the background"):
        background.wait()


def test_nothing_to_gather(parallel: Parallel) -> None:
    assert parallel.gather([]) == []


def test_inline_runs_in_order_and_waits_for_the_background() -> None:
    order: list[object] = []
    parallel = Parallel(inline=True)
    here = threading.get_ident()
    parallel.map(lambda n: order.append((n, threading.get_ident() == here)), range(3))
    parallel.start(lambda: order.append("background"))
    order.append("after")
    assert order == [(0, True), (1, True), (2, True), "background", "after"]


def test_meters_add_up_from_many_threads() -> None:
    meter, parallel = RequestMeter(), Parallel(8)
    parallel.map(lambda n: meter.count("PUT", written=n), range(1000))
    meter.add_bytes(read=7)
    assert meter.snapshot() == {
        "PUT": 1000,
        "total": 1000,
        "bytes_read": 7,
        "bytes_written": sum(range(1000)),
    }
    parallel.close()
