"""Arguments of sessions and commits, checked and brought into the form that engines take.

Promise: no two types of a session, and none of a module, are stored under one kind and name.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from storage_engine.errors import ConfigurationError, TypeDeclarationError
from storage_engine.events.records import check_id
from storage_engine.events.schedules import Schedule
from storage_engine.model.declarations import Entity, Event, Relation, Stored, spec_of
from storage_engine.model.spec import TypeSpec
from storage_engine.model.validation import INT64_MAX, INT64_MIN
from storage_engine.repository.protocol import Idempotency

StoredClass = type[Entity] | type[Relation[Any, Any]]
MOST_AT_ONCE = 256  # handlers of one worker


class BoundTypes:
    """The types of one session.

    Given types are all there are. Without any, types are bound as they come.
    """

    def __init__(
        self,
        entity_types: Iterable[type[Entity]] | None = None,
        relation_types: Iterable[type[Relation[Any, Any]]] | None = None,
    ) -> None:
        # By name in lower case, as SQL cannot tell names by case, then by kind.
        self._by_name: dict[str, dict[str, TypeSpec]] = {}
        self._specs: dict[Any, TypeSpec] = {}
        self._closed = False
        for option, base, classes in (
            ("entity_types", Entity, entity_types),
            ("relation_types", Relation, relation_types),
        ):
            for cls in _listed(option, classes):
                if not (isinstance(cls, type) and issubclass(cls, base)):
                    raise ConfigurationError(
                        f"{option} takes {base.__name__} classes, not {_show(cls)}"
                    )
                self.bind(cls)
        self._closed = bool(self._specs)

    def fresh(self) -> BoundTypes:
        """For another session: the given types, or none yet."""
        return self if self._closed else BoundTypes()

    def bind(self, cls: Any) -> TypeSpec:
        """The spec of a class, which becomes one of the session's types."""
        bound = self._specs.get(cls)
        if bound is not None:
            return bound
        spec = spec_of(cls)
        if self._closed:
            option = "entity_types" if spec.kind == "entity" else "relation_types"
            names = ", ".join(s.name for s in self._specs.values())
            raise ConfigurationError(
                f"{spec.name} is not among this session's types ({names}); add the class to "
                f"{option}"
            )
        namesakes = self._by_name.setdefault(spec.name.lower(), {})
        for namesake in namesakes.values():
            if namesake.name != spec.name:
                raise ConfigurationError(
                    f"the types {namesake.name} and {spec.name} differ in case only, which SQL "
                    "cannot tell; give one of them another name"
                )
        other = namesakes.setdefault(spec.kind, spec)
        if other is not spec:
            raise ConfigurationError(
                f"two classes are stored as {spec.name}: {_origin(other)} and {_origin(spec)}; "
                "give one of them another name, or open a new session if the class was declared "
                "again"
            )
        self._specs[cls] = spec
        return spec

    @property
    def by_ref(self) -> dict[tuple[str, str], TypeSpec]:
        return {spec.ref: spec for spec in self._specs.values()}

    def declared(self, call: str) -> list[TypeSpec]:
        """All types so far, for `call`, which is about them."""
        if not self._specs:
            raise ConfigurationError(
                f"{call}() compares declared types with the storage, and none were given: pass "
                "entity_types and relation_types"
            )
        return list(self._specs.values())

    def find(self, named: Any) -> TypeSpec:
        """The type that a class or a stored name stands for."""
        if not isinstance(named, str):
            try:
                return self.bind(named)
            except TypeDeclarationError as error:
                raise ConfigurationError(str(error)) from None
        specs = [s for s in self._by_name.get(named.lower(), {}).values() if s.name == named]
        if len(specs) > 1:
            raise ConfigurationError(
                f"{named!r} is an entity type and a relation type of this session; give the "
                "class itself"
            )
        if not specs:
            raise ConfigurationError(
                f"{named!r} is not a type of this session; give the class itself"
            )
        return specs[0]


def _listed(option: str, classes: Any) -> list[Any]:
    if classes is None:
        return []
    if isinstance(classes, type) or not isinstance(classes, Iterable):
        raise ConfigurationError(f"{option} takes a list of classes, not {_show(classes)}")
    return list(classes)


def _show(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)


def _origin(spec: TypeSpec) -> str:
    cls = spec.python_class
    return f"{cls.__module__}.{cls.__qualname__}" if cls is not None else spec.name


# --- the types of a module ----------------------------------------------------------------------


def declared_types(name: str, *, option: str = "--models") -> dict[tuple[str, str], TypeSpec]:
    """The types in a module's namespace, declared there or imported, by kind and name.

    `option` is what the user knows the name by.
    """
    specs: dict[tuple[str, str], TypeSpec] = {}
    for value in vars(imported_module(name, option)).values():
        if not (isinstance(value, type) and issubclass(value, Stored)):
            continue
        declaration = getattr(value, "__declaration__", None)
        if declaration is None or declaration.abstract:
            continue
        spec = spec_of(value)
        other = specs.setdefault(spec.ref, spec)
        if other is not spec:
            raise ConfigurationError(
                f"{option} {name}: two {spec.kind} classes are stored as {spec.name}; give one of "
                "them another name"
            )
    if not specs:
        raise ConfigurationError(f"{option} {name}: declares no entity or relation types")
    return specs


def imported_module(name: str, option: str) -> ModuleType:
    """A module that the user names, those of the current folder included."""
    if name.endswith(".py") or "/" in name or not name.strip():
        raise ConfigurationError(
            f"{option} takes the name of a module, such as shop.models, not {name!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:  # as with `python -m`: modules of the current folder are found
        sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
            return importlib.import_module(name)
    except Exception as error:
        raise ConfigurationError(
            f"{option} {name}: cannot be imported: {type(error).__name__}: {error}"
        ) from error


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


def text(option: str, given: str) -> str:
    """A text that can be stored."""
    if not isinstance(given, str):
        raise ConfigurationError(f"{option} takes a str, not {given!r}")
    _encodable(option, given)
    return given


def head_commit(given: Any) -> int | None:
    """The commit that a branch must be at."""
    if given is not None and (not isinstance(given, int) or isinstance(given, bool)):
        raise ConfigurationError(f"expect takes a commit id, not {given!r}")
    return given


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


_UNIT_BYTES = 1024  # of an app id or version: head has hundreds of them, and is read by everybody


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
    if len(app_id.encode()) > _UNIT_BYTES:
        raise ConfigurationError(f"idempotency: the app id has more than {_UNIT_BYTES} bytes")
    if type(version) is int and INT64_MIN <= version <= INT64_MAX:
        return Idempotency(app_id, version)
    if isinstance(version, str):
        _encodable("idempotency", version)
        if len(version.encode()) > _UNIT_BYTES:
            raise ConfigurationError(f"idempotency: the version has more than {_UNIT_BYTES} bytes")
        return Idempotency(app_id, version)
    raise ConfigurationError(
        f"idempotency: the version must be an int of 64 bits or a str, not {version!r}"
    )


def check_dry_run(*, dry_run: bool, token: str | None, force: bool) -> None:
    """What is to be applied is not previewed by mistake."""
    if dry_run and (token is not None or force):
        given = "token" if token is not None else "force"
        raise ConfigurationError(f"migrate({given}=...) is for dry_run=False")


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


def handlers_at_once(given: Any) -> int:
    """What `run(concurrency=...)` takes."""
    if type(given) is not int or not 1 <= given <= MOST_AT_ONCE:
        raise ConfigurationError(
            f"concurrency takes a number of handlers from 1 to {MOST_AT_ONCE}, not {given!r}"
        )
    return given


def _encodable(option: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{option}: {text!r} contains a lone surrogate, which UTF-8 cannot hold"
        ) from None
