"""Checks and maintenance jobs: damage is found, named and repaired; figures before and after."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.dagster_compat import without_check
from ontologia_dagster.declaration import TypeAsset
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.storage import checks, maintenance
from ontologia_dagster.storage.checks import DEEP_VERIFY
from ontologia_dagster.storage.deep_checks import Verdicts, deep_checks, deep_report, log_asset
from ontologia_dagster.storage.storage_defs import build_platform
from storage_engine import Entity, Field, Relation, initialize_storage
from storage_engine.wording import counted
from tests.dagster.shop import Customer, Order, Placed
from tests.dagster.world import customers, facts, remote_job, rows, storage


class Stop(Entity):
    code: Field[str] = Field(primary_key=True)


class Line(Entity):
    name: Field[str] = Field(primary_key=True)


class Passenger(Entity):
    name: Field[str] = Field(primary_key=True, sensitive=True)


class Trip(Relation[Stop, Stop]):
    number: Field[str] = Field(instance_key=True)


class Serves(Relation[Line, Stop]): ...


class Rides(Relation[Passenger, Stop]): ...


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
        asset_checks=[
            checks.index_check(declared.type_asset, maintenance.repair_job_name("ontology"))
        ],
        jobs=[dg.define_asset_job("check", selection=dg.AssetSelection.all_asset_checks())],
        resources={"ontology": ontology},
    )
    result = definitions.resolve_job_def("check").execute_in_process()
    [evaluation] = result.get_asset_check_evaluations()
    return evaluation


def test_a_branch_has_no_index_of_types_that_it_has_not_written(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    with ontology.session() as session:
        session.create_branch("fork")
    on_branch = OntologyResource(storage_uri=ontology.storage_uri, branch="fork")
    assert check(tmp_path, on_branch).passed
    with on_branch.session() as session:
        session.ensure(Customer(id="c2", name="Bob"))
    assert check(tmp_path, on_branch).passed


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
    assert broken.description == (
        "The index of Customer is at commit 0, needs 1, and has no entry for the latest commit. "
        "Readers stay right, but slower. Run the job ontology_index_repair"
    )
    assert "ontology_repair_indices" in said["repair_config"]
    assert said["command"].startswith("onto index repair --apply --storage-uri")
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


def platform(ontology: OntologyResource, *declared: Any, **options: Any) -> dg.Definitions:
    return dg.Definitions.merge(
        build_platform(declared, **options),
        dg.Definitions(
            resources={"ontology": ontology, "spark": SparkResource(), "notifier": object()}
        ),
    )


def deep(
    ontology: OntologyResource, instance: dg.DagsterInstance | None = None
) -> dict[str, dg.AssetCheckEvaluation]:
    """By the check's key: Customer has an asset, the others are told of with the log."""
    folder = Path(ontology.storage_uri).parent
    definitions = platform(ontology, customers(folder), types=["Customer", "Placed"])
    job = definitions.resolve_job_def("ontology_deep_verify")
    result = job.execute_in_process(instance=instance)
    return {e.asset_check_key.to_user_string(): e for e in result.get_asset_check_evaluations()}


LOG, CUSTOMER, PLACED = (
    "ontology/log:deep_verify_log",
    "customer:deep_verify",
    "ontology/log:deep_verify_placed",
)


def test_deep_verification_has_a_result_for_each_type(ontology: OntologyResource) -> None:
    assert {name: e.passed for name, e in deep(ontology).items()} == {
        LOG: True,
        CUSTOMER: True,
        PLACED: True,
    }
    with ontology.session() as session:
        session.ensure(Placed(left_key="c1", right_key="o1"))

    found = deep(ontology)
    took = facts(found[LOG].metadata)
    assert took["requests"] > 0
    assert took["store_bytes_read"] > 0
    assert took["price_estimate_usd"] > 0
    assert found[CUSTOMER].passed
    assert not found[PLACED].passed
    [finding] = rows(facts(found[PLACED].metadata)["finding_list"])
    assert (finding["type"], finding["reason"]) == ("Placed", "missing_endpoint")

    with ontology.session() as session:
        session.ensure(Order(id="o1", day=date(2013, 1, 1), total=3))
    assert all(e.passed for e in deep(ontology).values())

    part = next(Path(ontology.storage_uri).glob("commits/1-*/**/*.parquet"))
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    damaged = deep(ontology)[CUSTOMER]
    assert not damaged.passed
    assert "has other content than was published" in (damaged.description or "")
    assert "Put the files back from a backup" in (damaged.description or "")


def test_findings_beyond_those_kept_fail_their_types_too(
    ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_engine.maintenance.integrity.report._KEPT", 0)
    with ontology.session() as session:
        session.ensure(Placed(left_key="c1", right_key="o1"))

    found = deep(ontology)

    assert {name: e.passed for name, e in found.items()} == {
        LOG: True,
        CUSTOMER: True,
        PLACED: False,
    }
    assert (found[PLACED].description or "").startswith("1 further finding.")


@pytest.mark.parametrize("backend", ["directory", "sqlite"])
def test_a_failed_check_says_what_is_wrong_in_the_words_of_the_data(
    tmp_path: Path, backend: str
) -> None:
    uri = str(tmp_path / "flights") if backend == "directory" else f"sqlite:///{tmp_path}/f.db"
    initialize_storage(uri)
    ontology = OntologyResource(storage_uri=uri)
    with ontology.session() as session:
        session.ensure(Stop(code="JFK"))
        session.ensure(Line(name="Blue"))
        for number in range(5):
            session.ensure(Trip(left_key="JFK", right_key="BQN", number=f"b{number}"))
        session.ensure(Trip(left_key="JFK", right_key="SJU", number="s1"))
        session.ensure(Serves(left_key="Blue", right_key="XXX"))
        session.ensure(Rides(left_key="ann", right_key="JFK"))
    report, _ = deep_report(ontology)
    types = {
        name: TypeAsset(dg.AssetKey(name.lower()), name, models=__name__, ingest_job=job)
        for name, job in {"Stop": "ontology_ingest_stop", "Trip": None, "Rides": None}.items()
    }
    verdicts = Verdicts(ontology, "ontology", {**types, "Serves": None}, report)

    def told(name: str) -> dg.AssetCheckResult:
        return verdicts.of_type(dg.AssetCheckKey(dg.AssetKey(name), "deep_verify"), name)

    trip = told("Trip")
    assert trip.description == (
        "6 trips go to 2 stops that are not there: BQN, SJU. Bring in what is missing (job "
        "ontology_ingest_stop) or correct Trip, then run ontology_deep_verify again"
    )
    shown = facts(trip.metadata or {})
    assert (shown["missing_right_end_count"], shown["rows_without_right_end"]) == (2, 6)
    assert rows(shown["missing_right_ends"]) == [
        {"missing stop": "BQN", "Trip": 5},
        {"missing stop": "SJU", "Trip": 1},
    ]
    assert (told("Serves").description or "").startswith(
        "1 Serves relation goes to 1 stop that is not there: XXX. "
    )
    rides = told("Rides")
    assert (rides.description or "").startswith(
        "1 Rides relation comes from 1 passenger that is not there. Bring in what is missing "
        "(write passengers)"
    )
    assert "ann" not in str(rides)
    assert told("Stop").passed


@pytest.mark.parametrize("noun", ["flight:flights", "city:cities", "bus:buses", "day:days"])
def test_nouns_have_plurals(noun: str) -> None:
    one, many = noun.split(":")
    assert counted(1, one) == f"1 {one}"
    assert counted(7602, one) == f"7,602 {many}"


def test_a_run_that_materialises_repeats_what_was_found(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster adds all checks of an asset to its runs: a storage is not read back for that, but
    for a small one that never was."""

    @dg.asset(key="customer")
    def made() -> None: ...

    asset = TypeAsset(dg.AssetKey("customer"), "Customer")
    definitions = dg.Definitions(
        assets=[made, log_asset("ontology")],
        asset_checks=[deep_checks("ontology", {"Customer": asset})],
        jobs=[
            dg.define_asset_job("verify", selection=dg.AssetSelection.all_asset_checks()),
            dg.define_asset_job(
                "ours", selection=without_check(dg.AssetSelection.assets("customer"), DEEP_VERIFY)
            ),
        ],
        resources={"ontology": ontology},
    )
    with dg.DagsterInstance.ephemeral() as instance:

        def run(name: str) -> list[dg.AssetCheckEvaluation]:
            job = definitions.resolve_job_def(name)
            return list(job.execute_in_process(instance=instance).get_asset_check_evaluations())

        job = definitions.resolve_implicit_global_asset_job_def()
        only: dict[str, Any] = {"asset_selection": [dg.AssetKey("customer")], "instance": instance}
        with monkeypatch.context() as large:
            large.setattr("ontologia_dagster.storage.deep_checks._SMALL_ROWS", 0)
            assert job.execute_in_process(**only).get_asset_check_evaluations() == []
        [first] = job.execute_in_process(**only).get_asset_check_evaluations()
        assert first.passed
        part = next(Path(ontology.storage_uri).glob("commits/1-*/**/*.parquet"))
        part.write_bytes(part.read_bytes()[:-1] + b"!")
        assert [e.passed for e in run("verify") if e.check_name == DEEP_VERIFY] == [False]
        assert run("ours") == []
        monkeypatch.setattr("ontologia_dagster.storage.deep_checks.deep_report", None)
        for _ in range(2):
            [repeated] = job.execute_in_process(**only).get_asset_check_evaluations()
            assert not repeated.passed
            assert (repeated.description or "").count("As of commit 1: ") == 1
            assert "ontology_deep_verify" in facts(repeated.metadata)["repeated"]


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
