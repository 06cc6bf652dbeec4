"""What readers and writers begin with: an opened storage, a type in it, a point in its history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.query.reference import Reference, checked_reference
from storage_engine.repository.open import open_repository
from storage_engine.repository.protocol import Repository
from storage_engine.runtime.arguments import declared_types
from storage_engine.runtime.session import Session
from storage_engine.spark.schema import type_spec

_SHOWN = 20  # names in a message


@contextmanager
def opened(source: Session | str, config: OntologiaConfig | None = None) -> Iterator[Repository]:
    """The storage of a session, or the one at a URI, which is closed afterwards."""
    if isinstance(source, Session):
        yield source.repository
        return
    repository = open_repository(source, config)
    try:
        yield repository
    finally:
        repository.close()


def find_type(
    repository: Repository, type: Any, *, kind: Kind | None = None, models: str | None = None
) -> TypeSpec:
    """The type that a class, a spec or a stored name stands for; `models` is a module that
    declares types which may not be stored yet."""
    spec = _named(repository, type, models) if isinstance(type, str) else type_spec(type)
    if kind is not None and spec.kind != kind:
        raise ConfigurationError(
            f"{spec.name} is a type of {_PLURAL[spec.kind]}, not of {_PLURAL[kind]}: use "
            f"read_{_PLURAL[spec.kind]}, or read_type for either"
        )
    return spec


_PLURAL: dict[Kind, str] = {"entity": "entities", "relation": "relations"}


def _named(repository: Repository, name: str, models: str | None) -> TypeSpec:
    declared = declared_types(models, option="models") if models else {}
    for specs in (declared.values(), repository.known_types()):
        named = [spec for spec in specs if spec.name == name]
        if len(named) > 1:
            raise ConfigurationError(
                f"{name} is the name of an entity type and of a relation type in "
                f"{repository.uri}; give the class, or use read_entities or read_relations"
            )
        if named:
            return named[0]
    names = sorted({spec.name for spec in [*declared.values(), *repository.known_types()]})
    listed = ", ".join(names[:_SHOWN]) or "no types yet"
    hint = "" if models else "; a type that is declared but not stored needs the option models"
    raise ConfigurationError(
        f"{unknown_name(name, names, what='type')} in {repository.uri} (there are {listed}){hint}"
    )


def commit_of(repository: Repository, as_of: Reference | None) -> int:
    """The commit that a read is pinned to."""
    if as_of is None:
        return repository.head_commit_id()
    return repository.commit_at(checked_reference(as_of))
