"""What a declaration says for people: what a type is, whose it is, what must not be shown.

That is of the class alone. It is no part of the schema, and no storage keeps it: to add, change or
remove something of it makes no new schema version.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

# As Dagster takes them: what is declared here is to be seen there.
_EMAIL = re.compile(r"[a-zA-Z0-9_.+-]+@[a-zA-Z0-9-]+\.[a-zA-Z0-9-.]+")
_TEAM = re.compile(r"team:\S.*")
_TAG = re.compile(r"([A-Za-z0-9_.-]{1,63}/)?[A-Za-z0-9_.-]{1,63}")
_TAG_VALUE = re.compile(r"[A-Za-z0-9_.-]{0,63}")


def checked_owners(owners: Any) -> tuple[str, ...]:
    """Owners in the form that they must have; ValueError says which has not."""
    if isinstance(owners, str) or not isinstance(owners, list | tuple):
        raise ValueError(f"owners takes a list, such as ['team:sales'], not {owners!r}")
    for owner in owners:
        if not isinstance(owner, str) or not (_EMAIL.fullmatch(owner) or _TEAM.fullmatch(owner)):
            raise ValueError(
                f"the owner {owner!r} is neither an email address nor a team, such as "
                f"{f'team:{owner}' if isinstance(owner, str) and owner else 'team:sales'!r}"
            )
    return tuple(dict.fromkeys(owners))


def checked_tags(tags: Any) -> dict[str, str]:
    """Tags in the form that they must have; ValueError says which has not."""
    if not isinstance(tags, Mapping):
        raise ValueError(f"tags takes names and texts, such as {{'domain': 'sales'}}, not {tags!r}")
    for name, text in tags.items():
        if not isinstance(name, str) or not _TAG.fullmatch(name):
            raise ValueError(
                f"the tag {name!r} has no name that a tag can have: up to 63 letters, digits, "
                "'_', '-' and '.', after a prefix of the same and '/' if you like"
            )
        if not isinstance(text, str) or not _TAG_VALUE.fullmatch(text):
            raise ValueError(
                f"the tag {name!r} cannot be {text!r}: up to 63 letters, digits, '_', '-' and '.'"
            )
    return dict(tags)


def description_of(cls: type) -> str | None:
    """The class's own docstring: a base describes itself, not what is derived from it."""
    doc = cls.__dict__.get("__doc__")
    return inspect.cleandoc(doc) or None if isinstance(doc, str) else None
