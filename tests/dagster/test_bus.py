"""The event bus: the sensor only looks, the run handles, dead letters are shown and redriven."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage import events as liveness
from ontologia_dagster.storage.drain import drain_job_name
from ontologia_dagster.storage.maintenance import look_at_all
from ontologia_dagster.storage.storage_defs import build_platform
from storage_engine import ConfigurationError
from tests.dagster import shop
from tests.dagster.world import MODELS, evaluated, facts, remote_job, resources, rows, storage
from tests.events.clock import skipped_sleep

FAST = {"event_backoff_base_ms": 1, "event_backoff_max_ms": 1, "event_max_attempts": 3}


@pytest.fixture(autouse=True)
def _forget() -> None:
    shop.attempts.clear()
    shop.failures.clear()


@pytest.fixture
def ontology(tmp_path: Path) -> OntologyResource:
    return storage(tmp_path, engine_options=FAST)


def place(ontology: OntologyResource, *order_ids: str) -> None:
    with ontology.session() as session:
        session.emit([shop.OrderPlaced(order_id=order_id) for order_id in order_ids])


def tick(ontology: OntologyResource, instance: dg.DagsterInstance) -> Any:
    definitions = build_platform(handlers=[MODELS])
    return evaluated(definitions, "ontology_events", resources(ontology), instance)


def drain(
    ontology: OntologyResource, instance: dg.DagsterInstance, **config: Any
) -> dict[str, Any]:
    definitions = bound(ontology)
    result = definitions.resolve_job_def("ontology_drain_events").execute_in_process(
        instance=instance,
        run_config={"ops": {"ontology_handle_events": {"config": config}}},
    )
    [told] = [
        event.asset_observation_data.asset_observation
        for event in result.get_asset_observation_events()
        if event.asset_key == dg.AssetKey(["ontology", "log"])
    ]
    return facts(told.metadata)


def bound(ontology: OntologyResource, *modules: str) -> dg.Definitions:
    platform = build_platform(handlers=list(modules) or [MODELS])
    return dg.Definitions.merge(platform, dg.Definitions(resources=resources(ontology)))


def invoices(ontology: OntologyResource) -> list[str]:
    with ontology.session() as session:
        return sorted(one.id for one in session.query().entities(shop.Invoice).collect())


def test_the_sensor_looks_and_the_run_handles(ontology: OntologyResource) -> None:
    instance = dg.DagsterInstance.ephemeral()

    assert "no events" in str(tick(ontology, instance).skip_message)
    place(ontology, "o1", "o2")
    first, second = tick(ontology, instance), tick(ontology, instance)
    with ontology.bus() as store:
        untouched = store.list_events("default", 10, status="pending")

    assert len(untouched) == 2  # looking claimed nothing
    for asked in (first, second):
        assert asked.cursor is None
        [request] = asked.run_requests
        assert request.run_key is None
        assert request.tags["ontologia/events_due"] == "2"

    assert drain(ontology, instance)["handled"] == 2
    assert invoices(ontology) == ["o1", "o2"]
    assert "no events" in str(tick(ontology, instance).skip_message)


def test_one_run_at_a_time(ontology: OntologyResource) -> None:
    place(ontology, "o1")
    with dg.DagsterInstance.ephemeral() as instance:
        job = bound(ontology).resolve_job_def("ontology_drain_events")
        run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
        assert f"run {run.run_id} is on it" in str(tick(ontology, instance).skip_message)

        instance.report_run_failed(run)  # it died before it claimed anything
        assert tick(ontology, instance).run_requests


def started(instance: dg.DagsterInstance, location: str = "shop") -> dg.DagsterRun:
    """A drain run whose process nobody hears of again."""
    nowhere = OntologyResource(storage_uri="/nowhere")
    job = bound(nowhere).resolve_job_def("ontology_drain_events")
    return instance.create_run_for_job(
        job,
        status=dg.DagsterRunStatus.STARTED,
        remote_job_origin=remote_job(location, job.name),
    )


def status(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status.value


def test_a_run_whose_process_is_gone_strands_nothing(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine went down: no run monitoring, no code server tells Dagster of it."""
    place(ontology, "o1")
    with (
        dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
        skipped_sleep(),
        ontology.bus() as store,
    ):
        slots = instance.event_log_storage
        slots.set_concurrency_slots("ontologia_events", 1)
        run = started(instance)
        slots.claim_concurrency_slot("ontologia_events", run.run_id, "handle")

        # It was seen on the bus, and is not any more.
        store.register_session("default", "worker", {"run_id": run.run_id})
        assert f"run {run.run_id} is on it" in str(tick(ontology, instance).skip_message)
        store.sleep(3.2 * ontology.config().session_ttl_ms / 1000)
        assert tick(ontology, instance).run_requests
        assert status(instance, run) == "FAILURE"
        assert slots.claim_concurrency_slot("ontologia_events", "next", "handle").is_claimed
        store.end_session("default", "worker")

        # It never came to the bus: silence for long is enough. Others that live are waited for.
        silent, working = started(instance), started(instance)
        store.register_session("default", "worker", {"run_id": working.run_id})
        monkeypatch.setattr(liveness, "PATIENCE", timedelta(0))
        assert f"run {working.run_id} is on it" in str(tick(ontology, instance).skip_message)
        assert (status(instance, silent), status(instance, working)) == ("FAILURE", "STARTED")


def test_locations_do_not_wait_for_each_other(ontology: OntologyResource) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        run = started(instance, location="other")
        name = drain_job_name("ontology")

        assert liveness.living_run(instance, name, location="shop") is None
        assert liveness.living_run(instance, name, location="other") == run.run_id
        assert liveness.living_run(instance, name) == run.run_id


def test_the_run_ends_at_its_limit(ontology: OntologyResource) -> None:
    place(ontology, "o1", "o2", "o3")
    options = {**FAST, "event_claim_limit": 1}
    limited = OntologyResource(storage_uri=ontology.storage_uri, engine_options=options)
    instance = dg.DagsterInstance.ephemeral()

    assert drain(limited, instance, max_events=1)["handled"] < 3
    drain(limited, instance)
    assert invoices(ontology) == ["o1", "o2", "o3"]


def test_handlers_of_a_run_may_run_at_once(ontology: OntologyResource) -> None:
    place(ontology, "o1", "o2", "o3")
    assert drain(ontology, dg.DagsterInstance.ephemeral(), concurrency=3)["handled"] >= 3
    assert invoices(ontology) == ["o1", "o2", "o3"]


def test_a_handler_fails_twice_and_then_succeeds(ontology: OntologyResource) -> None:
    shop.failures["o1"] = 2
    place(ontology, "o1")
    instance = dg.DagsterInstance.ephemeral()

    deadline = time.monotonic() + 240
    while not invoices(ontology) and time.monotonic() < deadline:
        drain(ontology, instance)  # as often as the sensor asks for it: what failed comes later

    assert shop.attempts["o1"] == 3
    assert invoices(ontology) == ["o1"]


def test_a_dead_letter_is_shown_and_redriven(ontology: OntologyResource) -> None:
    shop.failures["o1"] = 3
    place(ontology, "o1")
    instance = dg.DagsterInstance.ephemeral()
    deadline = time.monotonic() + 240
    letters: list[dict[str, Any]] = []
    while not letters and time.monotonic() < deadline:
        letters = rows(drain(ontology, instance)["dead_letters"])
    [letter] = letters
    assert letter["handler"] == "tests.dagster.shop.bill"
    assert letter["type"] == "OrderPlaced"
    assert "printer is on fire" in letter["error"]

    def redrive(**config: Any) -> dict[str, Any]:
        result = (
            bound(ontology)
            .resolve_job_def("ontology_redrive")
            .execute_in_process(
                instance=instance,
                run_config={"ops": {"ontology_redrive_dead_letters": {"config": config}}},
            )
        )
        [event] = [e for e in result.all_events if e.is_successful_output]
        return facts(event.step_output_data.metadata)

    assert redrive(dry_run=True) | {"found": 1, "sent": 0} == redrive(dry_run=True)
    assert redrive(handler="nobody")["found"] == 0
    assert redrive(event_id=letter["event"], limit=0, dry_run=True)["found"] == 1
    assert redrive(event_id=letter["event"])["sent"] == 1
    assert tick(ontology, instance).run_requests
    drain(ontology, instance)
    assert invoices(ontology) == ["o1"]
    assert redrive()["found"] == 0


def test_a_look_costs_the_same_however_much_is_pending(
    ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the sensor of events, of that of conditions, and of the figures of the bus."""
    instance = dg.DagsterInstance.ephemeral()
    place(ontology, *(f"o{number}" for number in range(400)))
    asked: list[int] = []
    opened = OntologyResource.repository

    @contextmanager
    def counting(self: OntologyResource, **options: Any) -> Iterator[Any]:
        with opened(self, **options) as repository:
            yield repository
            asked.append(sum(n for kind, n in repository.requests().items() if kind in _READS))

    monkeypatch.setattr(OntologyResource, "repository", counting)
    seen = tick(ontology, instance)
    definitions = build_platform(handlers=[MODELS])
    evaluated(definitions, "ontology_conditions", resources(ontology), instance)

    [request] = seen.run_requests
    assert request.tags["ontologia/events_due"] == "400"
    assert "400 events left to handle" in request.tags["ontologia/events"]
    assert sum(asked) <= 60
    asked.clear()
    text, _, _ = look_at_all(ontology, [shop.bill])
    assert re.findall(r"^ontologia_events_(pending|due|more)\{.*\} (\d+)$", text, re.M) == [
        ("pending", "400"),
        ("more", "0"),
        ("due", "400"),
    ]
    assert sum(asked) <= 60


_READS = ("GET", "LIST", "HEAD")


def test_dead_letters_are_counted_by_name_and_the_newest_are_read(
    ontology: OntologyResource,
) -> None:
    instance = dg.DagsterInstance.ephemeral()
    orders = [f"o{number}" for number in range(6)]
    shop.failures.update(dict.fromkeys(orders, 99))
    place(ontology, *orders)
    deadline = time.monotonic() + 240
    while sum(shop.attempts.values()) < 18 and time.monotonic() < deadline:
        drain(ontology, instance)
    with ontology.bus() as bus:
        every = bus.list_dead_letters("default", 100)
        assert bus.count_dead_letters("default") == {"tests.dagster.shop.bill": 6}
        assert bus.count_dead_letters("other") == {}
        assert bus.list_dead_letters("default", 2) == every[:2]


@pytest.mark.parametrize("sensor", ["log_tail", "events", "conditions"])
def test_a_storage_that_is_not_there_fails_the_tick_with_what_to_do(
    tmp_path: Path, sensor: str
) -> None:
    """The daemon keeps the cursor that there was."""
    gone = OntologyResource(storage_uri=str(tmp_path / "nothing"))
    definitions = build_platform(handlers=[MODELS])
    with pytest.raises(dg.Failure) as caught:
        evaluated(
            definitions, f"ontology_{sensor}", resources(gone), dg.DagsterInstance.ephemeral()
        )
    assert "onto init" in str(caught.value.description)


def test_sensors_do_not_wait_for_the_write_lock(ontology: OntologyResource) -> None:
    """Somebody holds it for longer than a tick may take."""
    place(ontology, "o1")
    with ontology.repository() as repository:
        assert repository.objects is not None
        repository.objects.lock.acquire()
        instance = dg.DagsterInstance.ephemeral()
        assert tick(ontology, instance).run_requests
        definitions = build_platform(handlers=[MODELS])
        for sensor in ("ontology_log_tail", "ontology_conditions"):
            evaluated(definitions, sensor, resources(ontology), instance)


@pytest.mark.parametrize("namespace", ["", "a/b", "..", "\u00e4", "x" * 101, "_a", "a b"])
def test_a_namespace_that_no_session_takes_is_refused(tmp_path: Path, namespace: str) -> None:
    ontology = OntologyResource(storage_uri=str(tmp_path / "store"), namespace=namespace)
    with pytest.raises(ConfigurationError, match="namespace"), ontology.bus():
        pass
