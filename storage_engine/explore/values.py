"""Values for people and for programs: as JSON, and as text that cannot pass for anything else.

Whatever is stored is shown as text. Characters that nobody sees, or that turn the direction of
what comes after them, are written as their escapes.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from markupsafe import Markup, escape

from storage_engine.wording import counted

IN_TABLE = 120  # characters of a value in a table
ON_PAGE = 20_000  # characters of a value on the page of its object

# Controls, zero width and direction marks, line and paragraph separators, tags. Tab and line feed
# are what they look like.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f"
    "\ufeff\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
_BLANK = re.compile(r"\s")


def plain(value: Any) -> Any:
    """A stored value as JSON: the same everywhere, without loss but for numbers JSON lacks."""
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case datetime():
            moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
            return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case date() | time():
            return value.isoformat()
        case bytes():
            return b64encode(value).decode()
        case Decimal() | UUID():
            return str(value)
        case Mapping():
            return {str(name): plain(part) for name, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
    return str(value)


def as_text(value: Any, *, indent: int | None = None) -> str:
    """A JSON value as people read it: texts as they are, the rest as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, indent=indent)


def visible(text: str) -> Markup:
    """Text as HTML, with what cannot be seen written out."""
    parts: list[Markup | str] = []
    end = 0
    for match in _unseen(text).finditer(text):
        parts.append(escape(text[end : match.start()]))
        parts.append(Markup('<span class="esc">{}</span>').format(_escape(match[0])))
        end = match.end()
    parts.append(escape(text[end:]))
    return Markup("").join(parts)


def title(text: str, limit: int = 80) -> str:
    """Text where no markup can be: titles of pages, labels in pictures."""
    text = shortened(text, limit)
    return _unseen(text).sub(lambda match: _escape(match[0]), text)


def _unseen(text: str) -> re.Pattern[str]:
    """Of blanks alone there would be nothing to see, and of a key of them no link to follow."""
    return _BLANK if text.isspace() else _UNSEEN


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def cell(value: Any, limit: int = IN_TABLE, *, indent: int | None = None) -> Markup:
    """A JSON value in a table, or (with `indent`) on a page of its own."""
    if value is None:
        return Markup('<span class="null">null</span>')
    text = as_text(value, indent=indent)
    shown = visible(text[:limit])
    if len(text) > limit:
        shown += Markup('… <span class="more">{:,} characters</span>').format(len(text))
    if isinstance(value, bool):
        return Markup('<span class="bool">{}</span>').format(shown)
    if isinstance(value, int | float):
        return Markup('<span class="num">{}</span>').format(shown)
    name = "text" if isinstance(value, str) else "json"
    return Markup('<bdi class="{}" dir="auto">{}</bdi>').format(name, shown)


def key_text(identity: Sequence[str], limit: int = 60) -> Markup:
    """An identity for people: a key, or `left → right [instance]`."""
    parts = [Markup('<bdi dir="auto">{}</bdi>').format(_cut(part, limit)) for part in identity]
    if len(parts) == 1:
        return parts[0]
    shown = Markup('{} <span class="arrow">→</span> {}').format(parts[0], parts[1])
    if len(parts) > 2 and identity[2]:
        shown += Markup(' <span class="instance">{}</span>').format(parts[2])
    return shown


def key_label(identity: Sequence[str], limit: int = 60) -> str:
    """The same without markup."""
    shown = " → ".join(title(part, limit) for part in identity[:2])
    return f"{shown} [{title(identity[2], limit)}]" if len(identity) > 2 and identity[2] else shown


def ago(moment: datetime, now: datetime) -> str:
    seconds = (now - moment).total_seconds()
    if seconds < 0:
        return "in the future"
    for length, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now" if seconds < 10 else f"{int(seconds)} seconds ago"


def _cut(text: str, limit: int) -> Markup:
    shown = visible(text[:limit])
    if len(text) > limit:
        shown += Markup('… <span class="more">{:,} characters</span>').format(len(text))
    return shown


def _escape(character: str) -> str:
    number = ord(character)
    if number <= 0xFF:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"
