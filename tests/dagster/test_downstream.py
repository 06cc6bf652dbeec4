"""Query assets, the IO manager and metrics: what is built on top of what is stored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from ontologia_dagster.downstream.io_manager import OntologyIOManager
from ontologia_dagster.downstream.queries import query_asset
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage.lineage import EventLineage
from ontologia_dagster.storage.maintenance import look_at_all, metrics_job
from storage_engine import View
from tests.dagster.shop import Customer, bill
from tests.dagster.world import MODELS, facts, materialisations, storage, version


@pytest.fixture
def ontology(tmp_path: Path) -> OntologyResource:
    found = storage(tmp_path)
    for visits in (3, 5):
        with found.session() as session:
            session.ensure([Customer(id="c1", name="A|da", visits=visits)])
    return found


def test_a_typed_query_with_as_of(ontology: OntologyResource) -> None:
    def frequent(view: View) -> Any:
        return view.query().entities(Customer).where(Customer.visits > 2).to_arrow()

    typed = query_asset("frequent", frequent, deps=["customer"], plot={"visits": "visits"})
    counted = query_asset("counted", "select count(*) as n from Customer")

    def ask(**config: Any) -> dict[str, dg.AssetMaterialization]:
        result = dg.materialize(
            [typed, counted],
            resources={"ontology": ontology},
            run_config={"ops": {"frequent": {"config": config}}},
        )
        return {m.asset_key.path[-1]: m for m in materialisations(result)}

    now, again, before = ask(), ask(), ask(as_of="1")

    said = facts(now["frequent"].metadata)
    assert said | {"as_of_commit": 2, "dagster/row_count": 1, "visits": 5.0} == said
    assert "| name |" in said["preview"]
    assert "A\\|da" in said["preview"]
    assert facts(before["frequent"].metadata)["visits"] == 3.0
    assert version(now["frequent"]) == version(again["frequent"]) != version(before["frequent"])
    counts = facts(now["counted"].metadata)
    assert counts["dagster/row_count"] == 1
    assert counts["requests"] > 0


def test_frames_become_rows_and_come_back(ontology: OntologyResource) -> None:
    kept: dict[str, Any] = {"ontologia/type": "Customer", "ontologia/models": MODELS}

    @dg.asset(metadata=kept, io_manager_key="ontology_io")
    def customers() -> pa.Table:
        return pa.table({"id": ["c2"], "name": ["Bo"], "visits": [1]})

    @dg.asset
    def by_pandas(customers: pd.DataFrame) -> dg.MaterializeResult[None]:
        return dg.MaterializeResult(metadata={"names": sorted(customers["name"])})

    @dg.asset
    def by_polars(customers: pl.DataFrame) -> dg.MaterializeResult[None]:
        return dg.MaterializeResult(metadata={"rows": customers.height})

    bound = {"ontology_io": OntologyIOManager(ontology=ontology)}
    result = dg.materialize([customers, by_pandas, by_polars], resources=bound)

    made = {m.asset_key.path[-1]: m for m in materialisations(result)}
    found = {name: facts(m.metadata) for name, m in made.items()}
    assert version(made["customers"]) == "3"
    assert found["customers"] | {"commit": "3", "rows_inserted": 1} == found["customers"]
    assert found["by_pandas"]["names"] == ["A|da", "Bo"]
    assert found["by_polars"]["rows"] == 2


class Dies(OntologyIOManager):
    """Right after the commit, at the first attempt."""

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        super().handle_output(context, obj)
        if context.step_context.previous_attempt_count == 0:
            raise RuntimeError("killed")


def test_a_frame_is_kept_once_for_each_run(ontology: OntologyResource) -> None:
    kept: dict[str, Any] = {"ontologia/type": "Customer", "ontologia/models": MODELS}
    made: list[int] = []

    @dg.asset(
        metadata=kept,
        io_manager_key="ontology_io",
        partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
        retry_policy=dg.RetryPolicy(max_retries=1, delay=0),
    )
    def customers() -> pa.Table:
        made.append(1)
        return pa.table({"id": ["c2"], "name": ["Bo"], "visits": [len(made)]})

    def run(key: str, io: OntologyIOManager) -> dg.AssetMaterialization:
        result = dg.materialize([customers], resources={"ontology_io": io}, partition_key=key)
        [found] = materialisations(result)
        return found

    retried = run("a", Dies(ontology=ontology))
    assert len(made) == 2
    assert (version(retried), facts(retried.metadata)["commit"]) == ("3", "3")
    again = run("a", OntologyIOManager(ontology=ontology))
    assert (version(again), facts(again.metadata)["rows_changed"]) == ("4", 1)
    made.pop()
    same = run("b", OntologyIOManager(ontology=ontology))
    assert (version(same), facts(same.metadata)["commit"]) == ("4", None)


def test_metrics_as_prometheus_text(tmp_path: Path, ontology: OntologyResource) -> None:
    text, _, _ = look_at_all(ontology, [bill])
    sample = re.compile(r'ontologia_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? -?\d+(\.\d+)?(e-?\d+)?')
    wrong = [
        one for one in text.splitlines() if not one.startswith("# ") and not sample.fullmatch(one)
    ]
    assert wrong == []
    assert 'type="Customer"' in text
    assert "ontologia_events_due" in text
    assert "ontologia_dead_letters" in text

    metrics_job(EventLineage.of("ontology", [bill])).execute_in_process(
        resources={"ontology": ontology},
        run_config={
            "ops": {"ontology_collect_metrics": {"config": {"directory": str(tmp_path / "prom")}}}
        },
    )
    assert "ontologia_head_commit_id" in (tmp_path / "prom" / "ontology.prom").read_text()
