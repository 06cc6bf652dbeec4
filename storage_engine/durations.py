"""Spans of time as people write them: `90s`, `26h`, `7d`, `1d12h`."""

from __future__ import annotations

import re
from datetime import timedelta

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_PART = re.compile(r"(\d+)([smhdw])")


def duration(text: str) -> timedelta:
    """ValueError for anything that is not a sequence of numbers with units."""
    found = _PART.findall(text)
    if not found or "".join(f"{n}{unit}" for n, unit in found) != text.strip().lower():
        raise ValueError(f"{text!r} is no duration: write 90s, 30m, 12h, 7d, 2w or 1d12h")
    try:
        return timedelta(seconds=sum(int(n) * _UNITS[unit] for n, unit in found))
    except OverflowError:
        raise ValueError(f"{text!r} is too long") from None


def show_duration(span: timedelta) -> str:
    """The largest units first: `1d12h`."""
    left, shown = int(span.total_seconds()), ""
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, _UNITS[unit])
        shown += f"{count}{unit}" if count else ""
    return shown or "0s"
