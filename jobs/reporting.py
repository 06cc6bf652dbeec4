"""Reports to Dagster when it started the job through Pipes; otherwise says nothing.

Needs the package `dagster-pipes` only, which has no Dagster in it and may be missing where jobs
are never started by Dagster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

CONTEXT = "DAGSTER_PIPES_CONTEXT"  # the variable by which Dagster says that it is there
_ASSET = "asset_key"  # in extras: which asset of several the job materialises


class Reporter(Protocol):
    """Whom a job tells what it does."""

    def log(self, text: str) -> None: ...

    def materialized(self, metadata: Mapping[str, Any], data_version: str) -> None: ...


class Nobody:
    """Not started by Dagster."""

    def log(self, text: str) -> None:
        """Nobody listens."""

    def materialized(self, metadata: Mapping[str, Any], data_version: str) -> None:
        """Nobody listens."""


class _Pipes:
    def __init__(self, context: Any) -> None:
        self._context = context

    def log(self, text: str) -> None:
        self._context.log.info(text)

    def materialized(self, metadata: Mapping[str, Any], data_version: str) -> None:
        """The whole result goes as a message too: what the run does with it is its own affair."""
        self._context.report_custom_message({"data_version": data_version, **metadata})
        if self._context.is_asset_step:
            self._context.report_asset_materialization(
                metadata=_metadata(metadata),
                data_version=data_version,
                asset_key=self._context.extras.get(_ASSET),
            )


@contextmanager
def reporting() -> Iterator[Reporter]:
    """Open for the length of the job: an exception in it is reported as well."""
    if CONTEXT not in os.environ:
        yield Nobody()
        return
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as context:
        yield _Pipes(context)


def _metadata(result: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values as they are, so that numbers plot; the rest as JSON; nothing for None."""
    found: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, bool | int | float | str):
            found[name] = value
        elif value:
            found[name] = {"raw_value": value, "type": "json"}
    return found
