"""The demo's ontology with every request counted: of writes, reads, checks, events, maintenance.

For `make run`, which does everything in one process. Whatever opens the storage through the
resource is counted; Spark's Python workers are other processes, and are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ontologia_dagster.resources import OntologyResource
from storage_engine import Session
from storage_engine.repository.protocol import Repository

# Of the process, as Dagster makes a new copy of a resource for each run.
_meters: list[Any] = []


class MeteredOntology(OntologyResource):
    @classmethod
    def of(cls, ontology: OntologyResource) -> MeteredOntology:
        names = type(ontology).model_fields
        return cls(**{name: getattr(ontology, name) for name in names})

    @contextmanager
    def repository(self) -> Iterator[Repository]:
        with super().repository() as opened:
            _count(opened)
            yield opened

    def session(self, **settings: Any) -> Session:
        opened = super().session(**settings)
        _count(opened.repository)
        return opened


def requests() -> Counter[str]:
    """By kind, to all storages that were opened so far."""
    total: Counter[str] = Counter()
    for meter in _meters:
        total.update(meter.requests)
    return total


def _count(repository: Repository) -> None:
    store = getattr(repository, "store", None)  # SQLite has none
    if store is not None:
        _meters.append(store.meter)
