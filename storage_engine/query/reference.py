"""What names a commit: its id, an instant, or a tag; and the one reading of a text as one of them.

Whoever takes a reference as text (a command line, a Spark option, a run config) and whoever takes
one from Python goes through here, so that one text means one commit everywhere. A time without a
zone is UTC, whatever the machine's own zone. A tag can look like neither an id nor a time.
"""

from __future__ import annotations

import re
from datetime import datetime

from pydantic_core import PydanticCustomError

from storage_engine.errors import ConfigurationError
from storage_engine.model.validation import INT64_MAX, to_utc

Reference = int | datetime | str
"""What `as_of` takes: a commit id, an instant (the last commit at or before it), or a tag."""

_NUMBER = re.compile(r"[+-]?[0-9]+")
_DIGITS = 32  # of a number that are looked at: there are no commits beyond 64 bits
_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ]\d.*)?")


def parse_reference(text: str, use: str = "as_of") -> Reference:
    """Digits are a commit, ISO 8601 is an instant, anything else is the name of a tag."""
    text = text.strip()
    if not text:
        raise ValueError(f"{use}: the name of a tag is not empty")
    if _NUMBER.fullmatch(text):
        return max(-INT64_MAX, min(int(text[:_DIGITS]), INT64_MAX))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        if _TIME.fullmatch(text):
            raise ValueError(
                f"{use} {text}: not a time in ISO 8601, such as 2026-01-31T12:00:00Z"
            ) from None
        return text
    return _instant(moment, use)


def checked_reference(reference: object, use: str = "as_of") -> Reference:
    """Refuse what cannot mean a commit; a text is read as `parse_reference` does."""
    if isinstance(reference, str):
        return parse_reference(reference, use)
    if isinstance(reference, datetime):
        return _instant(reference, use)
    if isinstance(reference, int) and not isinstance(reference, bool):
        return reference
    raise TypeError(f"{use} takes a commit id, a datetime or the name of a tag, not {reference!r}")


def check_tag(name: str) -> None:
    """Refuse a name that would be taken for an id or a time. Whether a storage can keep others
    is for the storage to say."""
    if name.strip() and not _is_tag(name):
        raise ConfigurationError(
            f"{name!r} is no name for a tag: it reads as a commit id or a time; "
            f"choose for example v{name}"
        )


def _is_tag(text: str) -> bool:
    try:
        return isinstance(parse_reference(text), str)
    except ValueError:
        return False  # nearly a time


def _instant(moment: datetime, use: str) -> datetime:
    try:
        return to_utc(moment)
    except PydanticCustomError as error:
        raise ValueError(f"{use}: {moment!r} {error.message()}") from None
