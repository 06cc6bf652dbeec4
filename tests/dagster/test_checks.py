"""Checks and maintenance jobs: damage is found, named and repaired; figures before and after."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.storage import checks, maintenance
from ontologia_dagster.storage.storage_defs import build_platform
from tests.dagster.shop import Customer, Order, Placed
from tests.dagster.world import customers, facts, remote_job, rows, storage


@pytest.fixture
def ontology(tmp_path: Path) -> OntologyResource:
    found = storage(tmp_path)
    with found.session() as session:
        session.ensure(Customer(id="c1", name="Ada"))
    return found


def check(tmp_path: Path, ontology: OntologyResource) -> Any:
    declared = customers(tmp_path)
    definitions = dg.Definitions(
        assets=[dg.AssetSpec(declared.asset_key)],
        asset_checks=[checks.index_check(declared, maintenance.repair_job_name("ontology"))],
        jobs=[dg.define_asset_job("check", selection=dg.AssetSelection.all_asset_checks())],
        resources={"ontology": ontology},
    )
    result = definitions.resolve_job_def("check").execute_in_process()
    [evaluation] = result.get_asset_check_evaluations()
    return evaluation


def run(job: dg.JobDefinition, ontology: OntologyResource, **config: Any) -> dict[str, Any]:
    [op] = job.graph.node_defs
    result = job.execute_in_process(
        resources={"ontology": ontology, "spark": SparkResource()},
        run_config={"ops": {op.name: {"config": config}}},
    )
    [event] = [e for e in result.all_events if e.is_successful_output]
    [observed] = result.get_asset_observation_events()
    seen = observed.asset_observation_data.asset_observation
    assert seen.asset_key == dg.AssetKey(["ontology", "log"])
    assert facts(seen.metadata)["operation"] == facts(event.step_output_data.metadata)["operation"]
    return facts(event.step_output_data.metadata)


def test_damage_is_found_named_and_repaired(tmp_path: Path, ontology: OntologyResource) -> None:
    assert check(tmp_path, ontology).passed
    index = Path(ontology.storage_uri) / "meta" / "indices" / "entities" / "Customer.json"
    index.unlink()

    broken = check(tmp_path, ontology)
    assert not broken.passed
    said = facts(broken.metadata)
    findings = rows(said["finding_list"])
    assert {finding["type"] for finding in findings} == {"Customer"}
    assert {finding["reason"] for finding in findings} == {"missing_latest_entry", "lag"}
    assert "missing_latest_entry" in (broken.description or "")
    assert "ontology_index_repair" in (broken.description or "")
    assert broken.metadata["repair_job"].job_name == "ontology_index_repair"

    preview = run(maintenance.repair_job("ontology"), ontology, dry_run=True)
    assert [row["type"] for row in rows(preview["plan"])] == ["Customer"]
    assert not index.exists()
    assert run(maintenance.repair_job("ontology"), ontology)["indices_repaired"] == 1
    assert check(tmp_path, ontology).passed


def test_a_storage_that_cannot_be_read_is_a_failed_check(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    shutil.rmtree(ontology.storage_uri)

    seen = check(tmp_path, ontology)

    assert not seen.passed
    assert "onto init" in (seen.description or "")
    assert facts(seen.metadata)["error"] == "UninitializedStorageError"


def deep(ontology: OntologyResource) -> dict[str, Any]:
    definitions = build_platform(types=["Customer", "Placed"])
    bound = dg.Definitions.merge(
        definitions,
        dg.Definitions(
            resources={"ontology": ontology, "spark": SparkResource(), "notifier": object()}
        ),
    )
    result = bound.resolve_job_def("ontology_deep_verify").execute_in_process()
    return {e.check_name: e for e in result.get_asset_check_evaluations()}


def test_deep_verification_has_a_result_for_each_type(ontology: OntologyResource) -> None:
    assert {name: e.passed for name, e in deep(ontology).items()} == {
        "deep_verify_log": True,
        "deep_verify_customer": True,
        "deep_verify_placed": True,
    }
    with ontology.session() as session:
        session.ensure(Placed(left_key="c1", right_key="o1"))

    found = deep(ontology)
    took = facts(found["deep_verify_log"].metadata)
    assert took["requests"] > 0
    assert took["store_bytes_read"] > 0
    assert took["price_estimate_usd"] > 0
    assert found["deep_verify_customer"].passed
    assert not found["deep_verify_placed"].passed
    [finding] = rows(facts(found["deep_verify_placed"].metadata)["finding_list"])
    assert (finding["type"], finding["reason"]) == ("Placed", "missing_endpoint")

    with ontology.session() as session:
        session.ensure(Order(id="o1", day=date(2013, 1, 1), total=3))
    assert all(e.passed for e in deep(ontology).values())

    part = next(Path(ontology.storage_uri).glob("commits/1-*/**/*.parquet"))
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    assert not deep(ontology)["deep_verify_customer"].passed


def test_findings_beyond_those_kept_fail_their_types_too(
    ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_engine.maintenance.integrity.report._KEPT", 0)
    with ontology.session() as session:
        session.ensure(Placed(left_key="c1", right_key="o1"))

    found = deep(ontology)

    assert {name: one.passed for name, one in found.items()} == {
        "deep_verify_log": True,
        "deep_verify_customer": True,
        "deep_verify_placed": False,
    }
    assert found["deep_verify_placed"].description == "1 more that are counted only"


def test_the_link_to_the_repair_job_names_the_location_of_the_run(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    """Dagster's links need it, and so do app ids: each location has its own."""
    (Path(ontology.storage_uri) / "meta" / "indices" / "entities" / "Customer.json").unlink()
    named = OntologyResource(storage_uri=ontology.storage_uri, location_name="shop")
    assert check(tmp_path, named).metadata["repair_job"].location_name == "shop"

    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.create_run_for_job(
            dg.JobDefinition(graph_def=dg.GraphDefinition("check")),
            remote_job_origin=remote_job("flights", "check"),
        )
    resources = dg.build_init_resource_context().resources
    named.setup_for_execution(dg.InitResourceContext(None, resources, None, {}, dagster_run=run))
    assert named.location == "flights"


def test_compaction_and_garbage_collection(ontology: OntologyResource) -> None:
    for number in range(9):
        with ontology.session() as session:
            session.ensure(Customer(id="c1", name=f"Ada {number}"))

    compaction = maintenance.compaction_job("ontology", [])
    planned = run(compaction, ontology, dry_run=True)
    assert planned["rows_rewritten"] == 0
    [plan] = rows(planned["plan"])
    assert (plan["type"], plan["entries"], plan["entries_after"]) == ("Customer", 10, 1)
    done = run(compaction, ontology)
    assert done["rows_rewritten"] == 10
    figures = {row["figure"]: (row["before"], row["after"]) for row in rows(done["before_after"])}
    assert figures["entries"] == (10, 1)

    gc = maintenance.gc_job("ontology")
    everything = {"older_than": "0s", "purge_compacted": True}
    preview = run(gc, ontology, **everything)  # a dry run unless told otherwise
    assert preview["objects_deleted"] == 0
    assert preview["objects_planned"] >= 10
    swept = run(gc, ontology, dry_run=False, **everything)
    assert swept["objects_deleted"] == preview["objects_planned"]
    with ontology.session() as session:
        assert session.sql('select count(*) as n from "Customer"').collect() == [{"n": 1}]
