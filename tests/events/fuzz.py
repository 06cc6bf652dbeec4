"""Stored JSON with one thing wrong: each field missing, null, of every other type, out of range.

ONTOLOGIA_LONG=1 tries more values for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

LONG = bool(os.environ.get("ONTOLOGIA_LONG"))
_SOME: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**63 - 1,
    "",
    "0001-01-01T00:00:00+14:00",
    [1],
    {"deep": {"deeper": [None]}},
)
_MORE: tuple[Any, ...] = (
    0,
    2**70,
    1.5,
    "no time, no key",
    "9999-12-31T23:59:59.999999-14:00",
    "events/default/9999-01-01T00-00-00.000000+00-00_x",
    [],
    ["text"],
    {},
)
VALUES = (*_SOME, *_MORE) if LONG else _SOME
WHOLE: tuple[bytes, ...] = (
    b"",
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b"{}",
    b"7",
    b'"text"',
    b"NaN",
    b'{"id": NaN}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"half": ',
)


def mutations(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(what was done, the object afterwards)"""
    document: dict[str, Any] = json.loads(data)
    for number, whole in enumerate(WHOLE):
        yield f"whole {number}", whole
    for field, right in document.items():
        yield f"{field} missing", _dump({k: v for k, v in document.items() if k != field})
        for value in VALUES:
            if value != right or type(value) is not type(right):
                yield f"{field} = {str(value)[:30]}", _dump({**document, field: value})
        nan = _dump({**document, field: "@"}).replace(b'"@"', b"NaN")
        yield f"{field} = NaN", nan


def _dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()
