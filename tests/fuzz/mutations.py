"""A stored JSON object with one thing wrong: each field, at any depth, missing, null, of each
other type, negative, huge, NaN, nested too deep."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
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
TEXTS: dict[str, bytes] = {"NaN": b"NaN", "deep": b"[" * 600 + b"]" * 600}
_MARK = "@@"
_ITEMS = 2  # of a list, the first and the last


def mutations(data: bytes) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(what is done, the object afterwards)"""
    for name, whole in WHOLE.items():
        yield f"whole object: {name}", partial(bytes, whole)
    document = json.loads(data)
    for place in places(document):
        label = ".".join(map(str, place))
        yield f"{label} missing", partial(_changed, document, place, ...)
        for name, value in VALUES.items():
            yield f"{label}: {name}", partial(_changed, document, place, value)
        for name, text in TEXTS.items():
            yield f"{label}: {name}", partial(_spliced, document, place, text)


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
    made = copy.copy(document)  # of what lies on the way alone
    step, *further = place
    if further:
        made[step] = changed(document[step], tuple(further), value)
    elif value is ...:
        del made[step]
    else:
        made[step] = value
    return made


def _changed(document: Any, place: tuple[str | int, ...], value: Any) -> bytes:
    return json.dumps(changed(document, place, value), separators=(",", ":")).encode()


def _spliced(document: Any, place: tuple[str | int, ...], text: bytes) -> bytes:
    """With something at a place that no document makes."""
    return _changed(document, place, _MARK).replace(b'"@@"', text)
