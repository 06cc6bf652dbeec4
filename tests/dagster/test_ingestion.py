"""Ingestion assets in process: what they write, what they say, and that nothing is done twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.declaration import (
    OntologyAsset,
    PartitionSpec,
    SourceSpec,
    on_new_data,
)
from ontologia_dagster.ingestion import partitions
from ontologia_dagster.ingestion.asset import ingestion_asset
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage.checks import index_check
from tests.dagster.shop import Order, Visit
from tests.dagster.world import (
    MODELS,
    ORDERS,
    customers,
    facts,
    materialisations,
    orders,
    resources,
    rows,
    storage,
    version,
)

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def _one_jvm(spark: Any) -> None:
    """The resource finds the session of the tests."""


def test_a_run_its_retry_and_a_run_after_a_correction(tmp_path: Path) -> None:
    """The same root run: done once. After the source changed: written. Nothing new: no commit."""
    ontology = storage(tmp_path)
    declared = customers(tmp_path)
    job: Any = dg.build_reconstructable_job(
        "tests.dagster.world", "ingest_job", reconstructable_args=(str(tmp_path),)
    )
    (tmp_path / "home").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:

        def run(parent: str | None = None) -> tuple[str, dg.AssetMaterialization]:
            again = dg.ReexecutionOptions(parent_run_id=parent) if parent else None
            with dg.execute_job(job, instance, reexecution_options=again) as result:
                [event] = [e for e in result.all_events if e.is_step_materialization]
                return result.run_id, event.step_materialization_data.materialization

        first, one = run()
        _, retried = run(first)
        customers(tmp_path, "id,name\nc1,Ada\nc2,Bob\nc3,Cy\n")
        corrected, two = run(first)
        _, unchanged = run()

    assert [version(each) for each in (one, retried, two, unchanged)] == ["1", "1", "2", "2"]
    said = facts(one.metadata)
    assert (
        said
        | {
            "dagster/row_count": 2,
            "dagster/table_name": "Customer",
            "dagster/uri": ontology.storage_uri,
            "commit": "1",
            "rows_inserted": 2,
            "rows_changed": 0,
            "files": 1,
            "cas_attempts": 1,
        }
        == said
    )
    assert said["requests"] > 0
    assert said["price_estimate_usd"] > 0
    assert [c.name for c in said["dagster/column_schema"].columns] == ["id", "name", "visits"]
    done_before = {"what": "unit of work was done before", "value": "yes"}
    assert done_before in rows(facts(retried.metadata)["details"])
    assert facts(two.metadata) | {"rows_inserted": 1, "rows_changed": 1} == facts(two.metadata)
    assert facts(unchanged.metadata)["commit"] is None
    assert facts(unchanged.metadata)["rows_unchanged"] == 3
    with ontology.repository() as repository:
        newest, _ = repository.list_commits()
    assert newest.metadata == {
        "dagster/run_id": corrected,
        "dagster/step": "customer",
        "dagster/asset_key": "customer",
        "dagster/code_version": declared.code_version,
    }


def test_partitions_in_one_run_and_in_many(tmp_path: Path) -> None:
    ontology = storage(tmp_path)
    asset = ingestion_asset(orders(tmp_path, backfill="single_run"))

    ranged = dg.materialize(
        [asset],
        resources=resources(ontology),
        tags={
            "dagster/asset_partition_range_start": "2013-01-01",
            "dagster/asset_partition_range_end": "2013-02-01",
        },
    )
    preview = dg.materialize(
        [asset],
        resources=resources(ontology),
        partition_key="2013-03-01",
        run_config={"ops": {"order": {"config": {"dry_run": True}}}},
    )

    def one(key: str) -> dg.AssetMaterialization:
        result = dg.materialize([asset], resources=resources(ontology), partition_key=key)
        [found] = materialisations(result)
        return found

    with ThreadPoolExecutor(2) as pool:  # as two runs of a backfill
        march, april = pool.map(one, ["2013-03-01", "2013-04-01"])

    found = {m.partition: m for m in materialisations(ranged)}
    counts = {k: facts(m.metadata)["dagster/partition_row_count"] for k, m in found.items()}
    assert counts == {"2013-01-01": 2, "2013-02-01": 1}
    assert {version(m) for m in found.values()} == {"1"}
    assert written_by_partition(ranged) == {"2013-01-01": (2, 0, 0), "2013-02-01": (1, 0, 0)}
    [observed] = preview.get_asset_observation_events()
    counted = facts(observed.asset_observation_data.asset_observation.metadata)
    assert counted["preview_rows_inserted"] == 1
    assert materialisations(preview) == []
    assert [e.passed for e in preview.get_asset_check_evaluations()] == [True]
    assert {version(march), version(april)} == {"2", "3"}
    with ontology.repository() as repository:
        said = [commit.metadata["dagster/partitions"] for commit in repository.list_commits()]
    assert {*said[:2]} == {'["2013-03-01"]', '["2013-04-01"]'}
    assert said[2] == '[["2013-01-01", "2013-02-01"]]'


def written_by_partition(result: Any) -> dict[str | None, tuple[int, int, int]]:
    names = ("rows_inserted", "rows_changed", "rows_unchanged")
    shown = {m.partition: facts(m.metadata) for m in materialisations(result)}
    return {key: tuple(of_key[name] for name in names) for key, of_key in shown.items()}  # type: ignore[misc]


@pytest.mark.parametrize("in_driver", [True, False])
def test_each_partition_of_a_range_has_its_own_figures(
    tmp_path: Path, in_driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was inserted, changed and left as it was, on both ways to compare."""
    if not in_driver:
        monkeypatch.setattr("storage_engine.spark.writer.fits", lambda *_, **__: False)
    ontology = storage(tmp_path)
    asset = ingestion_asset(orders(tmp_path, backfill="single_run"))
    tags = {
        "dagster/asset_partition_range_start": "2013-01-01",
        "dagster/asset_partition_range_end": "2013-04-01",
    }

    def run() -> Any:
        return dg.materialize([asset], resources=resources(ontology), tags=tags)

    run()
    lines = ORDERS.replace("2,2013-01-30,20", "2,2013-01-30,21") + "6,2013-02-03,1\n"
    orders(tmp_path, lines.replace("5,2013-04-01,50\n", ""))
    second = run()
    assert written_by_partition(second) == {
        "2013-01-01": (0, 1, 1),
        "2013-02-01": (1, 0, 1),
        "2013-03-01": (0, 0, 1),
        "2013-04-01": (0, 0, 0),
    }
    [table] = {str(facts(m.metadata)["run"]) for m in materialisations(second)}
    totals = {
        row["figure"]: row["of all 4 partitions"]
        for row in rows(facts(materialisations(second)[0].metadata)["run"])
    }
    assert (totals["rows_read"], totals["rows_inserted"], totals["rows_changed"]) == (5, 1, 1)
    assert "bytes" in table


# Texts, with the partitions that they belong to in UTC, and in New York by months.
VISITS = {
    "2013-01-31": ("2013-01-01", "2013-01-01"),
    "2013-02-01": ("2013-02-01", "2013-02-01"),
    " 2013-02-28 ": ("2013-02-01", "2013-02-01"),
    "2013-02-01T04:59:59": ("2013-02-01", "2013-01-01"),
    "2013-02-01 05:00": ("2013-02-01", "2013-02-01"),
    "2013-01-31T23:30:00.25-05:00": ("2013-02-01", "2013-01-01"),
    "2013-02-01T00:30:00+01": ("2013-01-01", "2013-01-01"),
    "2013-03-01T00:00:00Z": ("2013-03-01", "2013-02-01"),
    # Before, after, no time at all, and none that a calendar has.
    "2012-12-31": (None, None),
    "2013-05-01": (None, None),
    "May 2013": (None, None),
    "2013-02-30": (None, None),
    "2013-2-1": (None, None),
    "": (None, None),
}
WEEKS = {"2013-01-06": 2, "2013-01-27": 6}
HOURS = {"2013-02-01-04:00": 3, "2013-01-31-23:00": 1}


def visits(folder: Path, cut: PartitionSpec, path: str, rows: Mapping[str, str]) -> OntologyAsset:
    """Of rows by id; where they have no value the source has none."""
    named = path.replace("{partition_key}", "2013-02-01")
    lines = [f'{id},"{text}"' if text else f"{id}," for id, text in rows.items()]
    (folder / named).write_text("\n".join(["id,at", *lines]) + "\n")
    return OntologyAsset(
        type="Visit",
        models=MODELS,
        source=SourceSpec(paths=[str(folder / path)]),
        where="id <> 'not wanted'",
        columns={"at": "coalesce(at, 'never')"},
        partitions=cut,
        backfill="single_run",
    )


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_texts_that_hold_dates_are_compared_as_dates(tmp_path: Path, zone: str) -> None:
    """By months: in the source, in the storage and by the log tail alike; what belongs to no
    partition is counted and told of."""
    ontology = storage(tmp_path)
    cut = PartitionSpec(
        kind="monthly", field="at", start="2013-01-01", end="2013-05-01", timezone=zone
    )
    rows = {str(number): text for number, text in enumerate(VISITS)} | {"not wanted": "1999-01-01"}
    asset = ingestion_asset(visits(tmp_path, cut, "visits.csv", rows))
    belongs = {
        text: key for text, keys in VISITS.items() if (key := keys[zone != "UTC"]) is not None
    }
    ends = {
        "dagster/asset_partition_range_start": "2013-01-01",
        "dagster/asset_partition_range_end": "2013-04-01",
    }

    february = dg.materialize([asset], resources=resources(ontology), partition_key="2013-02-01")
    first = {visit.at for visit in stored_visits(ontology)}
    every = dg.materialize([asset], resources=resources(ontology), tags=ends)

    assert {text: partitions.key_of(cut, text) for text in VISITS} == {
        text: belongs.get(text) for text in VISITS
    }
    assert first == {text for text, key in belongs.items() if key == "2013-02-01"}
    assert {visit.at for visit in stored_visits(ontology)} == set(belongs)
    shown = [facts(made.metadata) for made in materialisations(february)]
    assert [made["rows_in_no_partition"] for made in shown] == [6]
    counts = {
        made.partition: facts(made.metadata)["dagster/partition_row_count"]
        for made in materialisations(every)
    }
    months = [f"2013-0{month}-01" for month in range(1, 5)]
    assert counts == {month: Counter(belongs.values())[month] for month in months}


def stored_visits(ontology: OntologyResource) -> list[Visit]:
    with ontology.session() as session:
        return session.query().entities(Visit).collect()


def test_weeks_and_hours_of_texts_and_rows_in_the_file_of_another_partition(
    tmp_path: Path,
) -> None:
    ontology = storage(tmp_path)
    weeks = PartitionSpec(kind="weekly", field="at", start="2013-01-01", end="2013-03-03")
    days = {str(number): f"2013-01-{number:02}" for number in (6, 12, 27, 28, 31)}
    days |= {"1": "2013-02-01", "2": "2013-02-02", "m": "2013-02-01T10:00", "n": "2013-02-03"}
    weekly = ingestion_asset(visits(tmp_path, weeks, "weeks.csv", days))
    results = [
        dg.materialize([weekly], resources=resources(ontology), partition_key=key) for key in WEEKS
    ]
    shown = [facts(made.metadata) for result in results for made in materialisations(result)]
    assert {
        key: made["dagster/partition_row_count"] for key, made in zip(WEEKS, shown, strict=True)
    } == WEEKS
    assert [made["rows_in_no_partition"] for made in shown] == [0, 0]

    hours = PartitionSpec(kind="hourly", field="at", start="2013-01-01", end="2013-03-01")
    texts = {"k": "2013-02-01-04:00", "t": "2013-02-01T04:59:59", "z": "2013-02-01T05:10:00+01:00"}
    texts |= {"d": "2013-02-01", "o": "2013-01-31 23:00"}
    hourly = ingestion_asset(visits(tmp_path, hours, "hours.csv", texts))
    for key, count in HOURS.items():
        result = dg.materialize([hourly], resources=resources(ontology), partition_key=key)
        [made] = materialisations(result)
        assert facts(made.metadata)["dagster/partition_row_count"] == count
        assert facts(made.metadata)["rows_in_no_partition"] == 1  # a date does not tell the hour

    monthly = PartitionSpec(kind="monthly", field="at", start="2013-01-01", end="2013-05-01")
    own = ingestion_asset(
        visits(tmp_path, monthly, "{partition_key}.csv", {"x": "2013-02-05", "y": "2013-03-01"})
    )
    result = dg.materialize([own], resources=resources(ontology), partition_key="2013-02-01")
    [made] = materialisations(result)
    assert facts(made.metadata)["rows_in_no_partition"] == 1


def test_a_run_on_no_partition_says_what_to_do(tmp_path: Path) -> None:
    asset = ingestion_asset(orders(tmp_path))
    with pytest.raises(dg.Failure) as caught:
        dg.materialize([asset], resources=resources(storage(tmp_path)))
    said = str(caught.value.description)
    assert "order has monthly partitions, and this run is on none of them: launch it with" in said
    assert caught.value.allow_retries is False


def test_each_partition_has_the_version_of_its_own_last_change(tmp_path: Path) -> None:
    """In ranges as in single runs: what a run leaves as it was re-triggers nothing."""
    ontology = storage(tmp_path)
    asset = ingestion_asset(orders(tmp_path, backfill="single_run", deps=["landing"]))
    months = asset.partitions_def

    @dg.asset(deps=[asset], partitions_def=months, automation_condition=on_new_data())
    def report() -> None: ...

    bound = resources(ontology)
    definitions = dg.Definitions(
        assets=[asset, report, dg.AssetSpec("landing")],
        asset_checks=[index_check(orders(tmp_path).type_asset, "repair")],
        resources=bound,
    )
    instance = dg.DagsterInstance.ephemeral()
    cursor = None

    def ingest(first: str, last: str) -> dict[str, str]:
        """The versions that a run reports, by partition."""
        tags = {
            "dagster/asset_partition_range_start": f"2013-{first}-01",
            "dagster/asset_partition_range_end": f"2013-{last}-01",
        }
        result = definitions.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, tags=tags, asset_selection=[asset.key]
        )
        checked = {e.check_name: e.passed for e in result.get_asset_check_evaluations()}
        assert checked == {"index_verify": True, "expect_rows_fit": True}
        made = materialisations(result)
        assert len(made) == len({m.partition for m in made})
        for one in made:
            assert one.tags is not None
            assert one.tags["dagster/code_version"] == orders(tmp_path).code_version
            assert "dagster/input_data_version/landing" in one.tags
            assert facts(one.metadata)["dagster/row_count"] == 5
        return {(m.partition or "")[5:7]: version(m) for m in made}

    def asked() -> set[str]:
        """Partitions of `report` that are asked for, and then are there."""
        nonlocal cursor
        done = dg.evaluate_automation_conditions(definitions, instance, cursor=cursor)
        cursor = done.cursor
        keys = done.get_requested_partitions(report.key)
        for key in keys:
            event = dg.AssetMaterialization(report.key, partition=key)
            instance.report_runless_asset_event(event)
        return {str(key)[5:7] for key in keys}

    asked()
    with ontology.session() as session:  # each partition by a commit of its own
        session.ensure([Order(id=str(n), day=date(2013, 1, 1), total=n) for n in (1, 2)])
        session.commit()
        for n, day in ((3, date(2013, 2, 1)), (4, date(2013, 3, 31)), (5, date(2013, 4, 1))):
            session.ensure(Order(id=str(n), day=day, total=n * 10))
            session.commit()
    lines = ORDERS.replace("1,2013-01-02,10", "1,2013-01-01,1")
    orders(tmp_path, lines.replace("2,2013-01-30,20", "2,2013-01-01,2"))

    assert ingest("01", "04") == {"01": "1", "02": "2", "03": "3", "04": "4"}
    assert asked() == {"01", "02", "03", "04"}
    assert ingest("02", "03") == {"02": "2", "03": "3"}
    assert asked() == set()
    orders(tmp_path, ORDERS)
    assert ingest("01", "02") == {"01": "5", "02": "2"}
    assert asked() == {"01"}
    assert ingest("02", "02") == {"02": "2"}
    assert asked() == set()


def test_bad_data_is_never_published(tmp_path: Path) -> None:
    ontology = storage(tmp_path)
    declared = customers(tmp_path, "id,name\nc1,Ada\nc2,\n", expectations=[{"not_null": "name"}])

    with pytest.raises(dg.Failure) as caught:
        dg.materialize([ingestion_asset(declared)], resources=resources(ontology))

    assert caught.value.allow_retries is False
    assert "name" in (caught.value.description or "")
    declared = customers(tmp_path, columns={"visits": "CAST(name AS BIGINT)"})
    with pytest.raises(dg.Failure) as spark_said:
        dg.materialize([ingestion_asset(declared)], resources=resources(ontology))

    assert spark_said.value.allow_retries is False
    assert spark_said.value.metadata["condition"].value == "CAST_INVALID_INPUT"
    with ontology.repository() as repository:
        assert repository.head_commit_id() == 0
