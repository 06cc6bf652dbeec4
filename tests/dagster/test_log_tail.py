"""Commits that no run has reported become materialisations; those that one has do not."""

from __future__ import annotations

import shutil
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.declaration import PartitionSpec, on_new_data
from ontologia_dagster.ingestion import partitions, provenance
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage import log_tail
from ontologia_dagster.storage.storage_defs import build_platform
from storage_engine import initialize_storage
from tests.dagster.shop import Customer, Order
from tests.dagster.world import customers, evaluated, orders, resources, storage


@pytest.fixture
def ontology(tmp_path: Path) -> OntologyResource:
    return storage(tmp_path)


class Tail:
    """The sensor with its cursor; what it reports goes into the instance, as the daemon does."""

    def __init__(
        self,
        folder: Path,
        ontology: OntologyResource,
        instance: dg.DagsterInstance | None = None,
    ) -> None:
        self.definitions = build_platform([customers(folder), orders(folder)])
        self.bound = resources(ontology)
        self.instance = instance or dg.DagsterInstance.ephemeral()
        self.cursor: str | None = None

    def tick(self) -> list[tuple[str, str | None, str]]:
        name = "ontology_log_tail"
        data = evaluated(self.definitions, name, self.bound, self.instance, self.cursor)
        self.cursor = data.cursor
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
        return [
            (e.asset_key.to_user_string(), e.partition, e.tags["dagster/data_version"])
            for e in data.asset_events
        ]


def ensure(ontology: OntologyResource, *objects: Any, **meta: str) -> None:
    with ontology.session() as session:
        session.ensure(objects)
        session.commit(meta={name.replace("__", "/"): text for name, text in meta.items()})


def order(number: int, day: str) -> Order:
    return Order(id=str(number), day=date.fromisoformat(day), total=number)


def test_commits_from_elsewhere_are_reported_once(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    ensure(ontology, Customer(id="c1", name="Ada"))
    ensure(ontology, order(1, "2013-01-05"), order(2, "2013-03-05"), order(3, "2014-01-01"))

    assert tail.tick() == [
        ("customer", None, "1"),
        ("order", "2013-01-01", "2"),
        ("order", "2013-03-01", "2"),
    ]
    assert tail.tick() == []
    ensure(ontology, Customer(id="c1", name="Bo"))
    assert tail.tick() == [("customer", None, "3")]


def test_what_a_run_has_reported_is_known(tmp_path: Path, ontology: OntologyResource) -> None:
    tail = Tail(tmp_path, ontology)
    ensure(ontology, Customer(id="c1", name="Ada"))
    reported = dg.AssetMaterialization("customer", tags={"dagster/data_version": "1"})
    tail.instance.report_runless_asset_event(reported)

    assert tail.tick() == []


@pytest.mark.parametrize("dead", [False, True])
def test_the_commit_of_a_going_run_is_left_to_it_and_that_of_a_killed_one_is_not(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    tail = Tail(tmp_path, ontology)
    job = dg.JobDefinition(graph_def=dg.GraphDefinition("ingest"))
    run = tail.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    ensure(
        ontology,
        order(1, "2013-02-05"),
        dagster__run_id=run.run_id,
        dagster__asset_key="order",
        dagster__partitions='[["2013-02-01", "2013-03-01"]]',
    )
    ensure(ontology, Customer(id="c1", name="Ada"), dagster__run_id="of-another-instance")
    assert provenance.RUN_ID == "dagster/run_id"

    assert tail.tick() == [("customer", None, "2")]
    assert tail.tick() == []
    again = Tail(tmp_path, ontology, tail.instance)  # another sensor's first look holds it too
    assert again.tick() == []
    if dead:
        # Nobody noticed: the commit is not left to the run for ever.
        monkeypatch.setattr(log_tail, "_LEFT_TO_RUN", timedelta(0))
    else:
        tail.instance.report_run_failed(run)  # as run monitoring does when the process is gone
    # Of March it found nothing, and changed nothing.
    assert tail.tick() == [("order", "2013-02-01", "1"), ("order", "2013-03-01", "0")]
    assert tail.tick() == []
    assert again.tick() == []


def test_what_a_run_left_as_it_was_is_told_at_the_version_that_it_has(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    ensure(ontology, order(1, "2013-01-05"), order(2, "2013-02-05"))
    assert len(tail.tick()) == 2
    ensure(
        ontology,
        order(3, "2013-02-06"),
        dagster__asset_key="order",
        dagster__partitions='[["2013-01-01", "2013-02-01"]]',
    )
    assert tail.tick() == [("order", "2013-02-01", "2")]
    assert tail.tick() == []


def test_the_first_look_tells_the_last_change_of_every_type(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago it was: nothing downstream of a type that rarely changes may wait."""
    monkeypatch.setattr(log_tail, "_PER_TICK", 2)
    monkeypatch.setattr(log_tail, "_PER_QUERY", 3)
    ensure(ontology, Customer(id="c1", name="Ada"))
    ensure(ontology, order(1, "2013-01-05"), order(2, "2013-03-05"))
    for number in range(3, 7):
        ensure(ontology, order(number, "2013-04-05"))
    tail = Tail(tmp_path, ontology)

    assert sorted(tail.tick()) == [
        ("customer", None, "1"),
        ("order", "2013-01-01", "2"),
        ("order", "2013-03-01", "2"),
        ("order", "2013-04-01", "6"),
    ]
    assert tail.tick() == []
    ensure(ontology, order(7, "2013-01-06"))
    assert tail.tick() == [("order", "2013-01-01", "7")]
    tail.cursor = None  # somebody reset it
    assert tail.tick() == []


def test_a_storage_that_was_begun_anew_is_told_as_it_is(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    for name in ("Ada", "Bo"):
        ensure(ontology, Customer(id="c1", name=name))
    assert tail.tick() == [("customer", None, "2")]

    shutil.rmtree(ontology.storage_uri)
    initialize_storage(ontology.storage_uri)
    ensure(ontology, Customer(id="c1", name="Cy"))
    assert tail.tick() == [("customer", None, "1")]
    assert tail.tick() == []


def test_a_manifest_keeps_every_partition_key() -> None:
    days = PartitionSpec(kind="daily", field="day", start="2010-01-01", timezone="Europe/Berlin")
    keys = partitions.partitions_def(days).get_partition_keys()[:2_500]
    gaps = [*keys[:2], *keys[5:8], keys[2_000]]
    named = PartitionSpec(kind="static", field="region", keys=["a,b", "c", '["d"]'])

    for spec, some in ((days, keys), (days, gaps), (named, ["a,b", '["d"]']), (named, ["c"])):
        text = partitions.format_keys(spec, some)
        assert partitions.parse_keys(spec, text) == some
        assert len(text) < 150
    for old in ("2010-01-01,2010-01-02", "7", '["1999-01-01"]', '[["c"]]', "[1]"):
        assert partitions.parse_keys(days, old) is None


def test_a_change_asks_for_downstream_runs_and_a_run_without_one_does_not(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    """Through `data_version_changed`: what counts is the version, not that something ran."""
    tail = Tail(tmp_path, ontology)

    @dg.asset(deps=["customer"], automation_condition=on_new_data())
    def report() -> None: ...

    definitions = dg.Definitions.merge(
        tail.definitions,
        dg.Definitions(assets=[report], resources=tail.bound),
    )
    instance, cursor = tail.instance, None

    def asked() -> int:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(definitions, instance, cursor=cursor)
        cursor = result.cursor
        return result.get_num_requested(dg.AssetKey("report"))

    def materialised(key: str, version: str) -> None:
        event = dg.AssetMaterialization(key, tags={"dagster/data_version": version})
        instance.report_runless_asset_event(event)

    assert asked() == 0  # nothing is there yet
    ensure(ontology, Customer(id="c1", name="Ada"))
    tail.tick()
    assert asked() == 1
    materialised("report", "a")
    assert asked() == 0
    materialised("customer", "1")  # a run that changed nothing reports the version there was
    assert asked() == 0
    ensure(ontology, Customer(id="c1", name="Bo"))
    tail.tick()
    assert asked() == 1
    materialised("report", "b")
    assert asked() == 0
