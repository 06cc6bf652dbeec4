"""The store's time from Date headers, and byte order from servers that list by folders."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_engine.objectstore.protocol import ObjectInfo
from storage_engine.objectstore.s3 import ClockOffset
from storage_engine.objectstore.s3_listing import in_byte_order, just_before

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def observe(offset: ClockOffset, true_offset: float, sent: float, took: float) -> None:
    offset.observe(sent, sent + took, float(int(sent + took / 2 + true_offset)))


def test_unknown_clocks_are_taken_as_right() -> None:
    assert ClockOffset().seconds == 0


@pytest.mark.parametrize("true_offset", [0.0, 0.4, -0.3])
def test_small_offsets_that_cannot_be_told_from_none_are_none(true_offset: float) -> None:
    offset = ClockOffset()
    offset.observe(1000.2, 1000.3, 1000.0)
    assert offset.seconds == 0
    observe(offset, true_offset, 1000.2, 1.5)
    assert offset.seconds == 0


@pytest.mark.parametrize("true_offset", [3.0, -3.0, 7200.5, -0.9])
def test_many_answers_narrow_the_offset(true_offset: float) -> None:
    offset = ClockOffset()
    for n in range(50):
        observe(offset, true_offset, 1000 + n * 0.137, 0.02)
    assert offset.seconds == pytest.approx(true_offset, abs=0.1)


def test_a_clock_that_was_set_is_noticed() -> None:
    offset = ClockOffset()
    for n in range(20):
        observe(offset, 100.0, 1000 + n * 0.137, 0.02)
    observe(offset, 0.0, 1010.0, 0.02)
    assert offset.seconds == 0
    offset.observe(2000.0, 1990.0, 1990.0)  # Received before it was sent: tells nothing.
    assert offset.seconds == 0


def infos(keys: list[str]) -> list[ObjectInfo]:
    return [ObjectInfo(key, 0, NOW) for key in keys]


segments = st.text(alphabet="ab-.0", min_size=1, max_size=3)
key_sets = st.sets(st.lists(segments, min_size=1, max_size=3).map("/".join), max_size=30).map(
    # No key is a folder of another one, as on a server that keeps folders.
    lambda keys: {k for k in keys if not any(o.startswith(k + "/") for o in keys)}
)


@given(key_sets)
def test_orders_by_folders_and_by_bytes_both_come_out_by_bytes(keys: set[str]) -> None:
    for order in (sorted(keys, key=lambda key: key.split("/")), sorted(keys)):
        for prefix in ("", "a", "a/", "a/b"):
            given_order = infos([key for key in order if key.startswith(prefix)])
            found = [info.key for info in in_byte_order(given_order, prefix)]
            assert found == sorted(key for key in keys if key.startswith(prefix))


def test_flat_listings_are_not_held_back() -> None:
    taken: list[str] = []

    def stream() -> object:
        for info in infos(["f/1", "f/2", "f/3"]):
            taken.append(info.key)
            yield info

    assert next(in_byte_order(stream(), "f/")).key == "f/1"  # type: ignore[arg-type]
    assert taken == ["f/1"]


@given(st.lists(segments, min_size=1, max_size=3).map("/".join), key_sets)
def test_nothing_that_follows_comes_before_the_place_to_start(key: str, keys: set[str]) -> None:
    start = just_before(key)
    assert start <= key
    inside = {k for k in keys if k.startswith(key + "/")}
    for follower in inside | {f"{key}/x"}:
        if start != key:
            assert start.split("/") < follower.split("/")
