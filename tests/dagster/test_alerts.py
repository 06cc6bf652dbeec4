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

from ontologia_dagster.alerts import Alert, Notifier, failed_runs_sensor
from ontologia_dagster.platform import build_platform
from tests.dagster import shop
from tests.dagster.test_bus import FAST, drain, place
from tests.dagster.world import MODELS, customers, evaluated, resources, storage


class Hook:
    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.status = 200
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if hook.status == 200:
                    hook.told.append(json.loads(body))
                self.send_response(hook.status)
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


def test_checks_dead_letters_and_lag_are_told_once(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_WEBHOOK", hook.url)
    ontology = storage(tmp_path, engine_options=FAST)
    definitions = build_platform([customers(tmp_path)], handlers=[MODELS])
    bound = resources(ontology, notifier=Notifier(webhook_url=dg.EnvVar("TEST_WEBHOOK")))
    instance = dg.DagsterInstance.ephemeral()
    cursor: str | None = None

    def tick() -> list[str]:
        nonlocal cursor
        hook.told.clear()
        cursor = evaluated(definitions, "ontology_conditions", bound, instance, cursor).cursor
        return [told["title"] for told in hook.told]

    assert tick() == []
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey("customer"), check_name="index_verify", passed=False
        )
    )
    shop.attempts.clear()
    shop.failures.update({"dead": 9})
    place(ontology, "dead")
    for _ in range(3):
        drain(ontology, instance)
        time.sleep(0.01)
    assert tick() == [
        "index_verify of customer failed",
        "tests.dagster.shop.bill gave up on OrderPlaced",
    ]
    assert tick() == []

    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey("customer"), check_name="index_verify", passed=True
        )
    )
    assert tick() == []


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
