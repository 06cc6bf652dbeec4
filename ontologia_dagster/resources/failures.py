"""How an Ontologia error ends a Dagster step: one clear failure with the error's facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

from ontologia_dagster.ingestion.provenance import RUN_ID
from storage_engine.errors import LockContentionError, OntologiaError


@contextmanager
def report_failures(instance: dg.DagsterInstance | None = None) -> Iterator[None]:
    """Turn an OntologiaError into a `dg.Failure` that Dagster retries only if that can help.

    With `instance`, the failure links to the run that holds the lock, where it is one of its runs.
    """
    try:
        yield
    except OntologiaError as error:
        name, facts = type(error).__name__, error.facts()
        raise failure(name, str(error), facts, error.retryable, instance) from error


def failure(
    name: str,
    message: str,
    facts: Mapping[str, Any],
    retryable: bool,
    instance: dg.DagsterInstance | None,
) -> dg.Failure:
    """Of an error by its name and facts, which may have come from another process."""
    return dg.Failure(
        description=message,
        metadata={
            "error": name,
            **{name: _shown(fact) for name, fact in facts.items()},
            **_holding_run(name, facts, instance),
        },
        allow_retries=retryable,
    )


def _holding_run(
    name: str, facts: Mapping[str, Any], instance: dg.DagsterInstance | None
) -> dict[str, dg.MetadataValue[Any]]:
    holder = facts.get("holder")
    if name != LockContentionError.__name__ or not isinstance(holder, Mapping):
        return {}
    run_id = holder.get(RUN_ID) or holder.get("run_id")
    if not run_id:
        return {}
    if instance is None or not instance.has_run(str(run_id)):
        return {"lock_held_by_run": dg.MetadataValue.text(f"{run_id} of another instance")}
    return {"lock_held_by_run": dg.MetadataValue.dagster_run(str(run_id))}


def _shown(fact: Any) -> str | int | float | bool:
    """Facts hold whatever the error knows; Dagster takes less."""
    return fact if isinstance(fact, str | int | float | bool) else str(fact)
