"""Arguments of sessions and commits, checked and brought into the form that engines take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from storage_engine.errors import ConfigurationError
from storage_engine.events.envelopes import check_id
from storage_engine.events.schedules import Schedule
from storage_engine.model.declarations import Event
from storage_engine.model.validation import INT64_MAX, INT64_MIN
from storage_engine.repository.protocol import Idempotency
from storage_engine.runtime.bound_types import BoundTypes

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def checked_namespace(namespace: Any) -> str:
    """An event namespace; it becomes part of object keys."""
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise ConfigurationError(
            f"namespace {namespace!r}: use up to 100 letters, digits, dots, hyphens and "
            "underscores, beginning with a letter or digit"
        )
    return namespace


def texts(option: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """A mapping of text to text."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{option} takes a mapping of str to str, not {given!r}")
    for key, value in given.items():
        for part, what in ((key, "key"), (value, f"value for {key!r}")):
            if not isinstance(part, str):
                raise ConfigurationError(
                    f"{option}: the {what} must be a str, not {type(part).__name__} {part!r}"
                )
            _encodable(option, part)
    return dict(given)


def events(
    given: Event | Iterable[Event] | None, namespace: str, call: str = "commit(event=...)"
) -> list[dict[str, Any]]:
    """One event or many, as envelopes."""
    if given is None:
        return []
    return [dict(check_id(e.envelope(namespace))) for e in listed_events(call, given)]


def listed_events(call: str, given: Any) -> list[Event]:
    """One event or many."""
    whole = isinstance(given, Event | str | bytes | type | Mapping)
    items = [given] if whole or not isinstance(given, Iterable) else list(given)
    for item in items:
        if not isinstance(item, Event):
            raise ConfigurationError(
                f"{call} takes Event objects, not {type(item).__name__} {item!r}"
            )
    return items


def expectations(given: Mapping[Any, int] | None, types: BoundTypes) -> dict[tuple[str, str], int]:
    """What `commit(expect=...)` says, by kind and stored name."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"expect takes a mapping of types to commit ids, not {given!r}")
    commit_ids: dict[tuple[str, str], int] = {}
    for named, commit_id in given.items():
        spec = types.find(named)
        if type(commit_id) is not int or commit_id < 0:
            raise ConfigurationError(
                f"expect: {spec.name} needs a commit id (0 when it was never written), "
                f"not {commit_id!r}"
            )
        commit_ids[spec.ref] = commit_id
    return commit_ids


def unit_of_work(given: Any) -> Idempotency | None:
    """What `commit(idempotency=...)` names."""
    if given is None:
        return None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ConfigurationError(f"idempotency takes a pair (app id, version), not {given!r}")
    app_id, version = given
    if not isinstance(app_id, str) or not app_id:
        raise ConfigurationError(f"idempotency: the app id must be a non-empty str, not {app_id!r}")
    _encodable("idempotency", app_id)
    if type(version) is int and INT64_MIN <= version <= INT64_MAX:
        return Idempotency(app_id, version)
    if isinstance(version, str):
        _encodable("idempotency", version)
        return Idempotency(app_id, version)
    raise ConfigurationError(
        f"idempotency: the version must be an int of 64 bits or a str, not {version!r}"
    )


def wants_snapshot(isolation: str | None) -> bool:
    if isolation not in (None, "snapshot"):
        raise ConfigurationError(
            f"isolation {isolation!r} is unknown: leave it out, or give 'snapshot'"
        )
    return isolation == "snapshot"


def schedules(given: Any) -> list[Schedule]:
    """What `run(schedules=...)` takes."""
    if isinstance(given, Schedule) or not isinstance(given, Iterable):
        raise ConfigurationError(f"schedules takes a list of Schedule objects, not {given!r}")
    listed = list(given)
    for item in listed:
        if not isinstance(item, Schedule):
            raise ConfigurationError(f"schedules takes Schedule objects, not {item!r}")
    return listed


def rounds(given: Any) -> int | None:
    """What `run(max_iterations=...)` takes."""
    if given is not None and (type(given) is not int or given < 1):
        raise ConfigurationError(f"max_iterations takes a number from 1 on, or None, not {given!r}")
    return given


def _encodable(option: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{option}: {text!r} contains a lone surrogate, which UTF-8 cannot hold"
        ) from None
