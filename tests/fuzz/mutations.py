"""A stored JSON object with one thing wrong: each field, at any depth, missing, null, of each
other type, negative, huge, NaN, nested too deep."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "zero": 0,
    "negative": -1,
    "huge": 2**70,
    "largest": 2**63 - 1,
    "fraction": 1.5,
    "empty text": "",
    "text": "text",
    "path out": "../../text",
    "list": [],
    "list of text": ["text"],
    "object": {},
    "object in object": {"a": {"b": [None]}},
}
WHOLE: dict[str, bytes] = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "null": b"null",
    "list": b"[]",
    "empty object": b"{}",
    "number": b"7",
    "NaN": b"NaN",
    "half": b'{"half": ',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
}
_MARK = "@@"
_ITEMS = 2  # of a list, the first and the last


def mutations(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(what was done, the object afterwards)"""
    for name, whole in WHOLE.items():
        yield f"whole object: {name}", whole
    document = json.loads(data)
    for place in places(document):
        label = ".".join(map(str, place))
        yield f"{label} missing", _dump(changed(document, place, ...))
        for name, value in VALUES.items():
            yield f"{label}: {name}", _dump(changed(document, place, value))
        marked = _dump(changed(document, place, _MARK))
        yield f"{label}: NaN", marked.replace(b'"@@"', b"NaN")
        yield f"{label}: deep", marked.replace(b'"@@"', b"[" * 600 + b"]" * 600)


def places(value: Any, prefix: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        numbers = sorted({0, len(value) - 1})[:_ITEMS] if value else []
        inside = [(number, value[number]) for number in numbers]
    else:
        inside = []
    for name, item in inside:
        yield (*prefix, name)
        yield from places(item, (*prefix, name))


def changed(document: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """A copy with another value at a place; `...`: with none."""
    made = copy.deepcopy(document)
    holder = made
    for step in place[:-1]:
        holder = holder[step]
    if value is ...:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return made


def _dump(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
