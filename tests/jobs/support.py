"""Orders on small storages, and what became of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Session
from storage_engine.repository import initialize_storage
from storage_engine.spark.jobs import ingest
from storage_engine.spark.jobs.ingest import IngestSpec, Source

MODELS = "tests.jobs.shop"


def new_storage(folder: Path, **settings: Any) -> str:
    uri = str(folder / "store")
    initialize_storage(uri, engine_version="v2", **settings)
    return uri


def order_for(uri: str, source: Source, type: str = "Customer", **members: Any) -> IngestSpec:
    return IngestSpec(storage_uri=uri, type=type, models=MODELS, source=source, **members)


def rows(uri: str, statement: str) -> list[tuple[Any, ...]]:
    with Session(uri) as session:
        return [tuple(row.values()) for row in session.sql(statement).collect()]


def head(uri: str) -> int:
    with Session(uri) as session:
        return session.repository.head_commit_id()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """A program's exit code and its JSON line."""
    code = ingest.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)
