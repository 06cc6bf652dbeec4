"""How an Ontologia error ends a Dagster step: one clear failure with the error's facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from storage_engine.errors import OntologiaError


@contextmanager
def reported_failures() -> Iterator[None]:
    """Turn an OntologiaError into a `dg.Failure` that Dagster retries only if that can help."""
    try:
        yield
    except OntologiaError as error:
        raise dg.Failure(
            description=str(error),
            metadata={
                "error": type(error).__name__,
                **{name: _shown(fact) for name, fact in error.facts().items()},
            },
            allow_retries=error.retryable,
        ) from error


def _shown(fact: Any) -> str | int | float | bool:
    """Facts hold whatever the error knows; Dagster takes less."""
    return fact if isinstance(fact, str | int | float | bool) else str(fact)
