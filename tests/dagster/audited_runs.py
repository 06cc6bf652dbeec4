"""Audited runs of the ten types, and what can be seen of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg
import pytest

from ontologia_dagster.storage.alerts import Notifier
from storage_engine import Session
from tests.dagster import audited
from tests.dagster.audited import JOB, NAMES, NUMBER
from tests.dagster.world import materialisations


class Recorder(Notifier):
    sent: ClassVar[list[Mapping[str, Any]]] = []

    def send(self, payload: Mapping[str, Any]) -> None:
        self.sent.append(payload)


def run(
    folder: Path,
    instance: dg.DagsterInstance,
    number: int,
    *,
    names: list[str] = NAMES,
    tags: dict[str, str] | None = None,
    **options: Any,
) -> Any:
    job = audited.definitions(folder, names=names, **options).resolve_job_def(JOB)
    return job.execute_in_process(
        instance=instance, tags={NUMBER: str(number), **(tags or {})}, raise_on_error=False
    )


def numbers(folder: Path, branch: str | None = None, names: list[str] = NAMES) -> set[int]:
    with Session(str(folder / "store"), branch=branch) as session:
        view = session.at(session.repository.head_commit_id())
        there = {name for _, name in session.repository.type_refs()}
        return {
            row["number"]
            for name in names
            if name in there
            for row in view.sql(f'SELECT DISTINCT number FROM "{name}"').collect()
        }


def head(folder: Path) -> bytes:
    return (folder / "store" / "meta" / "head.json").read_bytes()


def branches(folder: Path) -> list[str]:
    with Session(str(folder / "store")) as session:
        return [branch.name for branch in session.list_branches() if branch.parent]


def messages(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    entries = instance.all_logs(run_id)
    return [
        e.user_message or (e.dagster_event.message if e.dagster_event else "") or ""
        for e in entries
    ]


def published(result: Any) -> dg.AssetMaterialization:
    [made] = [m for m in materialisations(result) if m.asset_key.path == ["ontology_publication"]]
    return made


def failure_of(result: Any) -> Any:
    [event] = [e for e in result.all_events if e.is_step_failure]
    return event.event_specific_data.user_failure_data


@contextmanager
def patched_check(name: str, look: Callable[[Any], None]) -> Iterator[None]:
    """`look` is called while the check of this type runs."""
    consistent = audited.consistent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            audited, "consistent", lambda of: consistent(of, look if of == name else None)
        )
        yield
