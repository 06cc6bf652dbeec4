"""Cron expressions, time zones, and what one due time makes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from storage_engine import ConfigurationError, Event, Field, Schedule


class Tick(Event):
    note: Field[str] = Field(default="")


class Needs(Event):
    n: Field[int]


def utc(*moment: int) -> datetime:
    return datetime(*moment, tzinfo=UTC)  # type: ignore[misc, arg-type]


def test_due_times_are_after_the_one_and_up_to_the_other() -> None:
    schedule = Schedule(event=Tick, cron="0 * * * *")

    due = schedule.due_times(utc(2026, 1, 1, 10), utc(2026, 1, 1, 12))
    assert due == [utc(2026, 1, 1, 11), utc(2026, 1, 1, 12)]


def test_a_time_zone_moves_with_summer_time() -> None:
    schedule = Schedule(event=Tick, cron="0 18 * * *", timezone="Europe/Vienna")

    assert schedule.next_due(utc(2026, 1, 1)) == utc(2026, 1, 1, 17)
    assert schedule.next_due(utc(2026, 7, 1)) == utc(2026, 7, 1, 16)


@pytest.mark.parametrize(
    ("day", "count"), [((2026, 3, 29), 23), ((2026, 10, 25), 25)], ids=["spring", "autumn"]
)
def test_every_hour_of_a_day_on_which_the_clock_is_changed(
    day: tuple[int, int, int], count: int
) -> None:
    """An hour that is skipped does not fire; of one that comes twice, each does."""
    schedule = Schedule(event=Tick, cron="30 * * * *", timezone="Europe/Vienna")
    start = schedule._zone
    begin = datetime(*day, tzinfo=start).astimezone(UTC)
    end = (datetime(*day, tzinfo=start) + timedelta(days=1)).astimezone(UTC)

    due = schedule.due_times(begin, end)
    assert len(due) == len(set(due)) == count
    assert due == sorted(due)


@pytest.mark.parametrize(
    ("cron", "autumn", "spring"),
    [
        ("30 2 * * *", ["02:30"], ["03:00"]),
        ("0 2 * * sun", ["02:00"], ["03:00"]),
        ("15 2-3 * * *", ["02:15", "03:15"], ["03:00", "03:15"]),
        ("0,30 2 25,29 * *", ["02:00", "02:30"], ["03:00"]),
        ("@daily", [], []),
        ("30 */2 * * *", ["02:30", "02:30"], ["04:30"]),
        ("*/30 2 * * *", ["02:00", "02:30", "02:00", "02:30"], []),
        ("@hourly", ["02:00", "02:00", "03:00"], ["03:00", "04:00", "05:00"]),
    ],
)
def test_times_of_day_on_which_the_clock_is_changed(
    cron: str, autumn: list[str], spring: list[str]
) -> None:
    """As cron does: a time of day fires once, the first time it comes or where the gap ends; what
    goes by the hour or minute fires whenever the clock shows it."""
    schedule = Schedule(event=Tick, cron=cron, timezone="Europe/Vienna")
    for day, expected in ((utc(2026, 10, 24, 23, 59), autumn), (utc(2026, 3, 29, 0, 59), spring)):
        due = schedule.due_times(day, day + timedelta(hours=2, minutes=30))
        assert [f"{at.astimezone(schedule._zone):%H:%M}" for at in due] == expected
        moments, at = [], day
        while (at := schedule.next_due(at)) <= day + timedelta(hours=2, minutes=30):
            moments.append(at)
        assert moments == due


def test_a_due_time_makes_the_same_event_everywhere() -> None:
    due = utc(2026, 1, 1, 10)
    envelopes = [
        Schedule(event=Tick(note="x"), cron="0 * * * *").firing(due, "default") for _ in range(2)
    ]
    assert envelopes[0] == envelopes[1]
    assert envelopes[0]["created_at"] == "2026-01-01T10:00:00.000000+00:00"
    others = [
        Schedule(event=Tick(note="y"), cron="0 * * * *").firing(due, "default"),
        Schedule(event=Tick(note="x"), cron="0 * * * *").firing(due, "other"),
        Schedule(event=Tick(note="x"), cron="0 0 * * *").firing(due, "default"),
        Schedule(event=Tick(note="x"), cron="0 * * * *").firing(
            due + timedelta(hours=1), "default"
        ),
    ]
    assert len({e["id"] for e in [*others, envelopes[0]]}) == 5


def test_an_event_can_be_made_from_its_due_time() -> None:
    schedule = Schedule(event=lambda due: Tick(note=due.isoformat()), cron="0 0 * * *", name="day")

    firing = schedule.firing(utc(2026, 1, 2), "default")
    assert firing["payload"]["note"] == "2026-01-02T00:00:00+00:00"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"event": Tick, "cron": "every day"}, "no cron expression"),
        ({"event": Tick, "cron": "0 0 * * * *"}, "it has 6 fields, and five are expected"),
        ({"event": Tick, "cron": "0 0 * * * * 2026"}, "it has 7 fields, and five are expected"),
        ({"event": Tick, "cron": "0 0 * *"}, "it has 4 fields, and five are expected"),
        ({"event": Tick, "cron": "0 0 30 2 *"}, "is never due"),
        ({"event": Tick, "cron": "61 0 * * *"}, "no cron expression"),
        ({"event": Tick, "cron": ""}, "no cron expression"),
        ({"event": Tick, "cron": 5}, "no cron expression"),
        ({"event": Tick, "cron": "0 0 * * *", "timezone": "Mars"}, "time zone 'Mars'"),
        ({"event": 7, "cron": "0 0 * * *"}, "takes an Event"),
        ({"event": lambda due: Tick(), "cron": "0 0 * * *"}, "give a name"),
    ],
)
def test_mistakes(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Schedule(**settings)


@pytest.mark.parametrize("cron", ["0 18 * * mon-fri", "*/5 * * * *", "  0 0 1 1 *  ", "@daily"])
def test_five_fields_and_names_for_them(cron: str) -> None:
    schedule = Schedule(event=Tick, cron=cron)
    assert schedule.next_due(datetime(2026, 1, 1, tzinfo=UTC)) > datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("cron", ["R R * * *", "r(0-10) * * * *", "0 0 1,R * *", "R/5 * * * *"])
def test_times_by_chance_are_refused(cron: str) -> None:
    """Each look at them would give another one: workers would not agree, and fire many times."""
    with pytest.raises(ConfigurationError, match=r"random|no cron expression"):
        Schedule(event=Tick, cron=cron)


@pytest.mark.parametrize("cron", ["0 0 * mar,apr fri", "0 0 * APR THU"])
def test_an_r_in_a_name_is_no_chance(cron: str) -> None:
    schedule, moment = Schedule(event=Tick, cron=cron), datetime(2026, 1, 1, tzinfo=UTC)
    assert schedule.next_due(moment) == schedule.next_due(moment)
