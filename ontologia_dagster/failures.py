"""How an Ontologia error ends a Dagster step: one clear failure with the error's facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from ontologia_dagster.provenance import RUN_ID
from storage_engine.errors import LockContentionError, OntologiaError


@contextmanager
def reported_failures(instance: dg.DagsterInstance | None = None) -> Iterator[None]:
    """Turn an OntologiaError into a `dg.Failure` that Dagster retries only if that can help.

    With `instance`, the failure links to the run that holds the lock, where it is one of its runs.
    """
    try:
        yield
    except OntologiaError as error:
        raise dg.Failure(
            description=str(error),
            metadata={
                "error": type(error).__name__,
                **{name: _shown(fact) for name, fact in error.facts().items()},
                **_holding_run(error, instance),
            },
            allow_retries=error.retryable,
        ) from error


def _holding_run(
    error: OntologiaError, instance: dg.DagsterInstance | None
) -> dict[str, dg.MetadataValue[Any]]:
    if not isinstance(error, LockContentionError):
        return {}
    run_id = error.holder.get(RUN_ID) or error.holder.get("run_id")
    if not run_id:
        return {}
    if instance is None or not instance.has_run(str(run_id)):
        return {"lock_held_by_run": dg.MetadataValue.text(f"{run_id} of another instance")}
    return {"lock_held_by_run": dg.MetadataValue.dagster_run(str(run_id))}


def _shown(fact: Any) -> str | int | float | bool:
    """Facts hold whatever the error knows; Dagster takes less."""
    return fact if isinstance(fact, str | int | float | bool) else str(fact)
