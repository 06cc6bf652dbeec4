"""What assets, checks and sensors reach an ontology through.

A resource only remembers where the storage is. It is opened by the step that uses it and closed
at the step's end, so loading definitions needs no storage, and no lock outlives a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from storage_engine.config import OntologiaConfig
from storage_engine.repository import open_repository

if TYPE_CHECKING:
    from storage_engine import Entity, Relation, Session
    from storage_engine.repository.protocol import Repository

STORAGE_URI_VARIABLE = "ONTOLOGIA_STORAGE_URI"


def default_storage_uri() -> str:
    """What ONTOLOGIA_STORAGE_URI names, else the directory `.ontologia/store` beside us."""
    return os.environ.get(STORAGE_URI_VARIABLE) or str(Path(".ontologia/store").resolve())


class OntologyResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """An ontology, by the URI of its storage."""

    storage_uri: str = Field(
        description="s3://bucket/prefix, file:///path, a directory, or sqlite:///path.db"
    )
    runtime_id: str = Field(
        default="dagster", description="Written into every commit as who made it"
    )

    def config(self) -> OntologiaConfig:
        return OntologiaConfig(runtime_id=self.runtime_id)

    @contextmanager
    def repository(self) -> Iterator[Repository]:
        """The opened storage, without types: for inspection and maintenance."""
        repository = open_repository(self.storage_uri, self.config())
        try:
            yield repository
        finally:
            repository.close()

    def session(
        self,
        *,
        entity_types: Sequence[type[Entity]] = (),
        relation_types: Sequence[type[Relation[Any, Any]]] = (),
    ) -> Session:
        """A session on the storage. Use it in a `with` block: that commits and closes it."""
        from storage_engine import Session

        return Session(
            self.storage_uri,
            entity_types=entity_types,
            relation_types=relation_types,
            config=self.config(),
        )
