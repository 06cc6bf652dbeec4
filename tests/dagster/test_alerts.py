"""Alerts reach a webhook, once for each thing, and the webhook's address stays a secret."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage import alerts
from ontologia_dagster.storage.alerts import Alert, Notifier, conditions_sensor, failed_runs_sensor
from ontologia_dagster.storage.storage_defs import build_platform
from tests.dagster import shop
from tests.dagster.test_bus import FAST, drain, place
from tests.dagster.world import MODELS, customers, evaluated, orders, resources, storage


class Hook:
    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.status = 200
        self.fails_after: int | None = None  # so many, until told.clear()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                full = hook.fails_after is not None and len(hook.told) >= hook.fails_after
                status = 500 if full else hook.status
                if status == 200:
                    hook.told.append(json.loads(body))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/T0KEN-9f2"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_failed_run_is_told(hook: Hook) -> None:
    @dg.op
    def explode() -> None:
        raise RuntimeError("the disk is full")

    @dg.job
    def ingest_customer() -> None:
        explode()

    with dg.DagsterInstance.ephemeral() as instance:
        result = ingest_customer.execute_in_process(instance=instance, raise_on_error=False)
        context = dg.build_run_status_sensor_context(
            sensor_name="ontologia_failed_runs",
            dagster_event=result.get_run_failure_event(),
            dagster_instance=instance,
            dagster_run=result.dagster_run,
        ).for_run_failure()
        failed_runs_sensor()(context, notifier=Notifier(webhook_url=hook.url))

    [told] = hook.told
    assert told["title"] == "ingest_customer failed"
    assert told["facts"]["run_id"] == result.run_id


class Conditions:
    """The sensor with its cursor, as the daemon keeps it."""

    def __init__(
        self, definitions: dg.Definitions, bound: dict[str, Any], hook: Hook, storage: str
    ) -> None:
        self.definitions, self.bound, self.hook = definitions, bound, hook
        self.sensor = f"{storage}_conditions"
        self.instance = dg.DagsterInstance.ephemeral()
        self.cursor: str | None = None

    def tick(self) -> list[str]:
        self.hook.told.clear()
        found = evaluated(self.definitions, self.sensor, self.bound, self.instance, self.cursor)
        self.cursor = found.cursor
        return [told["title"] for told in self.hook.told]

    def checked(self, name: str, asset: str, *, passed: bool) -> None:
        self.instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=dg.AssetKey.from_user_string(asset), check_name=name, passed=passed
            )
        )


def check_begins(instance: dg.DagsterInstance, name: str, asset: str) -> None:
    """As a run does that has the check before it."""
    from dagster._core.definitions.asset_checks.asset_check_evaluation import (
        AssetCheckEvaluationPlanned,
    )

    run = instance.create_run_for_job(dg.JobDefinition(graph_def=dg.GraphDefinition("check")))
    planned = AssetCheckEvaluationPlanned(
        asset_key=dg.AssetKey.from_user_string(asset), check_name=name
    )
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED.value
    instance.report_dagster_event(
        dg.DagsterEvent(kind, "check", event_specific_data=planned), run.run_id
    )


def give_up(ontology: OntologyResource, instance: dg.DagsterInstance, *orders: str) -> None:
    """Drain until each was tried three times, however soon its next try is due."""
    deadline = time.monotonic() + 240
    while any(shop.attempts.get(order, 0) < 3 for order in orders) and time.monotonic() < deadline:
        drain(ontology, instance)


def test_checks_dead_letters_and_lag_are_told_once(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_WEBHOOK", hook.url)
    ontology = storage(tmp_path, engine_options=FAST)
    definitions = build_platform([customers(tmp_path)], handlers=[MODELS])
    bound = resources(ontology, notifier=Notifier(webhook_url=dg.EnvVar("TEST_WEBHOOK")))
    sensor = Conditions(definitions, bound, hook, "ontology")
    tick, instance = sensor.tick, sensor.instance

    assert tick() == []
    sensor.checked("index_verify", "customer", passed=False)
    shop.attempts.clear()
    shop.failures.update({"dead": 9, "dying": 9, "lost": 9})
    place(ontology, "dead")
    give_up(ontology, instance, "dead")
    assert tick() == [
        "index_verify of customer failed",
        "tests.dagster.shop.bill gave up on OrderPlaced",
    ]
    said = hook.told[-1]
    assert "the printer is on fire (dead)" in said["text"]
    assert "ontology_redrive/playground/setup?config=" in said["facts"]["redrive"]
    assert tick() == []

    # A check that is run again has not passed yet; letters that come later are told, in one alert.
    check_begins(instance, "index_verify", "customer")
    assert tick() == []
    sensor.checked("index_verify", "customer", passed=False)
    assert tick() == []
    place(ontology, "dying", "lost")
    give_up(ontology, instance, "dying", "lost")
    assert tick() == ["tests.dagster.shop.bill gave up on 3 events"]
    sensor.checked("index_verify", "customer", passed=True)
    assert tick() == []
    sensor.checked("index_verify", "customer", passed=False)
    assert tick() == ["index_verify of customer failed"]


def test_events_that_wait_and_indices_that_lag_are_told(tmp_path: Path, hook: Hook) -> None:
    ontology = storage(tmp_path)
    with ontology.session() as session:
        session.ensure(shop.Customer(id="c1", name="Ada"))
    (Path(ontology.storage_uri) / "meta/indices/entities/Customer.json").unlink()
    place(ontology, "o1")
    lagging = dg.Definitions(
        sensors=[
            conditions_sensor("ontology", handlers=[shop.bill], oldest_event="0s", index_lag=0)
        ]
    )
    bound = resources(ontology, notifier=Notifier(webhook_url=hook.url))
    sensor = Conditions(lagging, bound, hook, "ontology")

    assert sensor.tick() == [
        "events wait too long",
        "the index of Customer is 1 commit behind",
    ]
    assert sensor.tick() == []


def test_what_was_told_is_not_told_again_when_the_hook_fails_or_is_slow(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    ontology = storage(tmp_path)
    checks = [customers(tmp_path), orders(tmp_path)]
    bound = resources(ontology, notifier=Notifier(webhook_url=hook.url))
    sensor = Conditions(build_platform(checks), bound, hook, "ontology")
    for asset in ("customer", "order"):
        sensor.checked("index_verify", asset, passed=False)

    hook.fails_after = 1
    assert sensor.tick() == ["index_verify of customer failed"]
    hook.fails_after = 0
    with pytest.raises(Exception, match="answered 500"):
        sensor.tick()
    hook.fails_after = None
    assert sensor.tick() == ["index_verify of order failed"]
    assert sensor.tick() == []

    sensor.cursor = None
    monkeypatch.setattr(alerts, "_TELLING_S", -1.0)  # one takes all the time there is
    assert sensor.tick() == ["index_verify of customer failed"]
    assert sensor.tick() == ["index_verify of order failed"]
    assert sensor.tick() == []


def test_each_storage_tells_of_its_own_checks(tmp_path: Path, hook: Hook) -> None:
    @dg.asset_check(asset="of_nobody")
    def tidy() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    definitions = dg.Definitions.merge(
        build_platform([customers(tmp_path)]),
        build_platform(
            [customers(tmp_path, storage="ontology_acme", key_prefix=["acme"])],
            storage="ontology_acme",
            first=False,
        ),
        dg.Definitions(assets=[dg.AssetSpec("of_nobody")], asset_checks=[tidy]),
    )
    ontology = storage(tmp_path)
    notifier = Notifier(webhook_url=hook.url)
    bound = resources(ontology, ontology_acme=ontology, notifier=notifier)
    sensors = [Conditions(definitions, bound, hook, name) for name in ("ontology", "ontology_acme")]
    for sensor in sensors:
        for asset in ("customer", "acme/customer"):
            sensor.checked("index_verify", asset, passed=False)
        sensor.checked("tidy", "of_nobody", passed=False)

    main, acme = (sensor.tick() for sensor in sensors)
    assert main == ["index_verify of customer failed", "tidy of of_nobody failed"]
    assert acme == ["index_verify of acme/customer failed"]


def test_a_silent_webhook_is_told_again_and_its_address_is_never_shown(hook: Hook) -> None:
    alert = Alert(key="k", title="the index is behind", text="run the repair job")
    hook.status = 500
    secret = hook.url.rpartition("/")[2]

    with pytest.raises(RuntimeError, match="answered 500; the alert 'the index is behind'") as no:
        Notifier(webhook_url=hook.url).notify(alert)
    with pytest.raises(RuntimeError, match="must begin with http") as wrong:
        Notifier(webhook_url=f"ftp://host/{secret}").notify(alert)

    assert secret not in str(no.value)
    assert secret not in str(wrong.value)
    assert Notifier().notify(alert) is False
