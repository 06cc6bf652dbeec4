"""How a storage stands, as far as a look at the log, the indices and the bus tells; no row is read.

`onto verify` looks at everything; what is found here says which command to run next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from storage_engine.errors import IntegrityError
from storage_engine.explore import bus
from storage_engine.explore.links import type_path
from storage_engine.explore.view import StorageView
from storage_engine.maintenance.metrics import TypeMetrics, collect
from storage_engine.maintenance.overview import Advice, advise


def health(view: StorageView) -> dict[str, Any]:
    repository = view.repository
    info = repository.storage_info()
    metrics = collect(repository)
    objects = repository.objects
    lock: Mapping[str, Any] | None = None
    lock_problem: str | None = None
    warnings = metrics.index_warnings
    if objects is not None:
        try:
            lock = objects.lock_info()
        except IntegrityError as error:
            lock_problem = str(error)
    namespaces = bus.namespaces(view.storage)
    types = [_figures(view, figures) for figures in metrics.types]
    return {
        "uri": repository.uri,
        "backend": repository.backend,
        "engine_version": repository.engine_version,
        "format": info["format"],
        "head_updated_at": info.get("head_updated_at"),
        "checkpoint_commit_id": info.get("checkpoint_commit_id"),
        "has_lock": objects is not None,
        "lock": _without_token(lock),
        "lock_problem": lock_problem,
        "index_warnings": list(warnings),
        "types": types,
        "namespaces": namespaces,
        "requests": dict(metrics.requests),
        "bytes_read": metrics.bytes_read,
        "cache": dict(metrics.cache),
        "advice": [each.as_dict() for each in _advice(view, warnings, lock, lock_problem)],
    }


def _without_token(lock: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Who has the token may break the lock: `onto lock show` tells it to whoever may read the
    storage itself."""
    return None if lock is None else {k: v for k, v in lock.items() if k != "token"}


def _figures(view: StorageView, figures: TypeMetrics) -> dict[str, Any]:
    label = view.label((figures.kind, figures.type_name))
    return {"type": label, "url": type_path(label), **figures.as_dict()}


def _advice(
    view: StorageView,
    warnings: Sequence[str],
    lock: Mapping[str, Any] | None,
    lock_problem: str | None,
) -> Iterator[Advice]:
    """That of `onto info`, and what the lock asks for."""
    yield from advise(view.repository, warnings, bus.namespace_infos(view.storage))
    if lock_problem is not None:
        yield Advice(lock_problem, "onto lock show")
    elif lock is not None and (lock["expired"] or lock["gone"]):
        why = f"the write lock of {lock['owner_id']} has run out; the next writer takes it over"
        yield Advice(why, "onto lock show")
