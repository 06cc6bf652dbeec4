"""Addresses of the page: every type, object and commit has one, which can be shared.

    /types/<Type>                             /commits/<id>
    /types/<Type>/objects/<key>               /types/<Relation>/objects/<left>/<right>[/<instance>]

A key is one percent-encoded segment, whatever is in it. What browsers would not leave alone begins
with a tilde: the keys `.` and `..`, and keys that are too long for an address, which are named by
their beginning and a digest, so that a look into the order of keys finds them again. A key that
itself begins with a tilde has it encoded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlencode

LONGEST_SEGMENT = 1_500  # encoded characters; some programs cut addresses of more than 2,000
_PREFIX = 120  # characters of a long key
_LONG = re.compile(r"~long\.([0-9a-f]{64})\.(.+)", re.DOTALL)
_DOTS = (".", "..")


@dataclass(frozen=True, slots=True)
class LongKey:
    """A key that is known by its beginning and the digest of all of it."""

    prefix: str
    sha256: str

    def is_of(self, key: str) -> bool:
        return key.startswith(self.prefix) and _digest(key) == self.sha256


KeyName = str | LongKey
"""A key, or what leads to it."""


def segment(key: str) -> str:
    """A key as a part of an address."""
    if key in _DOTS:
        return f"~{key}"
    encoded = _quoted(key)
    if len(encoded) > LONGEST_SEGMENT:
        return f"~long.{_digest(key)}.{_quoted(key[:_PREFIX])}"
    return encoded


def parse_segment(text: str) -> KeyName:
    """What `segment` made; also a key that somebody else has encoded. ValueError for what is no
    text."""
    if text.startswith("~"):
        if text[1:] in _DOTS:
            return text[1:]
        if match := _LONG.fullmatch(text):
            return LongKey(unquote(match[2], errors="strict"), match[1])
    return unquote(text, errors="strict")


def identity_path(identity: Sequence[str]) -> str:
    """An identity as the end of an address; relations without instance key have two parts."""
    parts = [*identity]
    if len(parts) == 3 and not parts[2]:
        parts.pop()
    return "/".join(map(segment, parts))


def parse_identity(text: str, kind: str) -> tuple[KeyName, ...]:
    """What `identity_path` made. An entity's key may have its slashes unencoded."""
    if kind == "entity":
        return (parse_segment(text),)
    parts = tuple(map(parse_segment, text.split("/")))
    if len(parts) not in (2, 3) or "" in parts:
        raise ValueError("a relation has a left key, a right key and perhaps an instance key")
    return (*parts, "")[:3]


def type_path(label: str, *rest: str) -> str:
    return "/".join(["", "types", quote(label, safe=":"), *rest])


def object_path(label: str, identity: Sequence[str]) -> str:
    return type_path(label, "objects", identity_path(identity))


def commit_path(commit_id: int) -> str:
    return f"/commits/{commit_id}"


def branch_path(name: str, *rest: str) -> str:
    return "/".join(["", "branches", segment(name), *rest])


def namespace_path(namespace: str) -> str:
    return f"/events/{segment(namespace)}"


def event_path(namespace: str, event_id: str) -> str:
    return f"{namespace_path(namespace)}/{segment(event_id)}"


def with_query(path: str, parameters: Iterable[tuple[str, object]] | Mapping[str, object]) -> str:
    """An address with what is not None of the parameters."""
    pairs = parameters.items() if isinstance(parameters, Mapping) else parameters
    query = urlencode([(name, str(value)) for name, value in pairs if value is not None])
    return f"{path}?{query}" if query else path


def _quoted(key: str) -> str:
    encoded = quote(key, safe="")
    return f"%7E{encoded[1:]}" if encoded.startswith("~") else encoded


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
