"""A code location that is reloaded while one of its runs goes on, with real code servers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._core.test_utils import create_run_for_test
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import PythonFileTarget

from tests.dagster import shop
from tests.dagster.world import storage

# A handler that goes on until it is let: the run's process has begun with the code of then.
LOCATION = """
import time
from pathlib import Path
from ontologia_dagster import OntologyResource, SparkResource, build_platform
import dagster as dg
from storage_engine import HandlerContext, on_event
from tests.dagster.shop import Customer, OrderPlaced

folder = Path({folder!r})

@on_event(OrderPlaced, id="reload.hold")
def hold(ctx: HandlerContext[OrderPlaced]) -> None:
    (folder / "began").touch()
    deadline = time.monotonic() + 300
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    ctx.ensure(Customer(id=ctx.event.order_id, name={name!r}))

@dg.asset
def {name}() -> None:
    pass

ontology = OntologyResource(storage_uri=str(folder / "store"))
defs = dg.Definitions.merge(
    build_platform(handlers=[__name__]),
    dg.Definitions(assets=[{name}], resources={{"ontology": ontology, "spark": SparkResource()}}),
)
"""


@pytest.mark.skipif(
    not os.environ.get("ONTOLOGIA_LONG"), reason="starts two code servers: set ONTOLOGIA_LONG=1"
)
def test_a_run_goes_on_when_its_location_is_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the code that it began with, its event is handled once, and the next run has
    the new code."""
    ontology = storage(tmp_path)
    with ontology.session() as session:
        session.emit(shop.OrderPlaced(order_id="1"))
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text(yaml.safe_dump({"telemetry": {"enabled": False}}))
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    code = tmp_path / "location.py"
    code.write_text(LOCATION.format(folder=str(tmp_path), name="first"))
    target = PythonFileTarget(str(code), None, str(tmp_path), "location")
    with (
        dg.DagsterInstance.get() as instance,
        WorkspaceProcessContext(instance, target) as process,
    ):
        run_id = launched(instance, process)
        until((tmp_path / "began").exists, "the handler has begun")
        code.write_text(LOCATION.format(folder=str(tmp_path), name="second"))
        process.reload_code_location("location")
        (tmp_path / "go").touch()
        until(lambda: ended(instance, run_id), "the run has ended")
        with ontology.session() as session:
            session.emit(shop.OrderPlaced(order_id="2"))
        again = launched(instance, process)
        until(lambda: ended(instance, again), "the next run has ended")
    with ontology.session(entity_types=[shop.Customer]) as session:
        names = {each.id: each.name for each in session.query().entities(shop.Customer).collect()}
        assert session.repository.head_commit_id() == 2
    assert names == {"1": "first", "2": "second"}


def launched(instance: dg.DagsterInstance, process: WorkspaceProcessContext) -> str:
    context = process.create_request_context()
    [repository] = context.get_code_location("location").get_repositories().values()
    job = repository.get_full_job("ontology_drain_events")
    run = create_run_for_test(
        instance,
        job.name,
        remote_job_origin=job.get_remote_origin(),
        job_code_origin=job.get_python_origin(),
    )
    instance.launch_run(run.run_id, context)
    return run.run_id


def ended(instance: dg.DagsterInstance, run_id: str) -> bool:
    run = instance.get_run_by_id(run_id)
    assert run is not None
    assert not run.is_failure, instance.all_logs(run_id)[-3:]
    return run.is_success


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 180
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.1)
