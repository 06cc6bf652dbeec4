"""Classes that change: runs stop before they do harm and say what to do, the job migrates, and
assets show what became of their columns."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from ontologia_dagster.declaration import OntologyAsset, SourceSpec
from ontologia_dagster.downstream.io_manager import OntologyIOManager
from ontologia_dagster.downstream.queries import query_asset
from ontologia_dagster.ingestion.asset import agree_on_schema
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.storage.storage_defs import build_platform
from storage_engine import View
from storage_engine.runtime import migration
from storage_engine.runtime.arguments import declared_types
from storage_engine.schema.migration import plan_migration
from storage_engine.spark.jobs import migrate as program
from tests.dagster.world import (
    evaluated,
    facts,
    materialisations,
    orders,
    resources,
    rows,
    storage,
)

MODELS = "evolving_shop"
HEADER = """
from storage_engine import Entity, Event, Field, HandlerContext, Relation, on_event, upgrader

class Greeted(Event):
    customer: Field[str]
"""
FIRST = """
class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    visits: Field[int] = Field(default=0)

@on_event(Greeted)
def greet(ctx):
    ctx.ensure(Customer(id=ctx.event.customer, name="new"))
"""
WITH_TIER = FIRST.replace("    visits", '    tier: Field[str] = Field(default="basic")\n    visits')
WIDENED = WITH_TIER.replace("visits: Field[int]", "visits: Field[float]")
WITHOUT_NAME = WIDENED.replace("    name: Field[str]\n", "    label: Field[str]\n").replace(
    "name=", "label="
)
UPGRADER = """
from storage_engine import upgrader

@upgrader("Customer", from_version=3)
def labelled(row):
    row["label"] = row.pop("name").upper()
    return row
"""


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """A module of this text, as a process that starts now would import it."""

    def module(text: str, name: str = MODELS) -> ModuleType:
        made = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        exec(HEADER + text if name == MODELS else text, vars(made))
        return made

    return module


def customers(folder: Path, **more: Any) -> OntologyAsset:
    path = folder / "customers.csv"
    if not path.exists():
        path.write_text("id,name\nc1,Ada\nc2,Bo\n")
    source = SourceSpec(format="csv", paths=[str(path)])
    return OntologyAsset(type="Customer", models=MODELS, source=source, **more)


def failure_of(result: Any) -> tuple[str, dict[str, Any]]:
    [event] = [e for e in result.all_node_events if e.is_step_failure]
    data = event.step_failure_data.user_failure_data
    assert data is not None, event.step_failure_data.error
    assert not [e for e in result.all_node_events if e.is_step_up_for_retry]
    return data.description, facts(data.metadata)


class World:
    """A location on a storage of which runs are made, by an instance that remembers them."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.ontology = storage(folder)
        self.folder = folder
        self.instance = instance
        self.spark = SparkResource()

    def run(self, job: str, config: dict[str, Any] | None = None, **declaration: Any) -> Any:
        definitions = dg.Definitions.merge(
            build_platform([customers(self.folder, **declaration)], handlers=[MODELS]),
            dg.Definitions(
                resources=resources(self.ontology, spark=self.spark),
                executor=dg.in_process_executor,
            ),
        )
        defined = definitions.resolve_job_def(job)
        op = "customer" if job == "ontology_ingest_customer" else "ontology_migrate_types"
        return defined.execute_in_process(
            instance=self.instance,
            raise_on_error=False,
            run_config={"ops": {op: {"config": config}}} if config else {},
        )

    def ingest(self, **declaration: Any) -> dict[str, Any]:
        result = self.run("ontology_ingest_customer", **declaration)
        [made] = materialisations(result)
        assert all(e.passed for e in result.get_asset_check_evaluations())
        return facts(made.metadata)

    def migrate(self, **config: Any) -> tuple[dict[str, Any], Any]:
        result = self.run("ontology_migration", config)
        assert result.success
        [event] = [e for e in result.all_events if e.is_successful_output]
        return facts(event.step_output_data.metadata), result

    @property
    def head(self) -> int:
        with self.ontology.repository() as repository:
            return repository.head_commit_id()

    def stored(self) -> list[dict[str, Any]]:
        with self.ontology.session() as session:
            answer = session.sql("select * exclude (commit_id) from Customer order by id")
            return answer.collect()


@pytest.fixture
def world(tmp_path: Path) -> Any:
    with dg.DagsterInstance.ephemeral() as instance:
        yield World(tmp_path, instance)


@pytest.mark.spark
def test_a_class_that_changes_from_its_first_run_to_an_upgrader(
    world: World,
    declare: Callable[..., ModuleType],
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    declare(FIRST)
    first = world.ingest()
    assert first["schema_version"] == 1
    assert "column_changes" not in first

    # Strict: additive or not, the run stops before it reads its source.
    declare(WITH_TIER)
    stopped = world.run("ontology_ingest_customer")
    told, shown = failure_of(stopped)
    assert "Customer (stored version 1): field 'tier' added" in told
    assert "ontology_migration" in told
    assert shown["error"] == "SchemaOutdatedError"
    [change] = rows(shown["schema_diff"])
    assert change | {"field": "tier", "change": "added", "takes": "nothing"} == change
    assert rows(shown["missing_upgraders"]) == []
    command = f"onto migrate --models {MODELS} --storage-uri {world.ontology.storage_uri}"
    assert shown["command"] == command
    assert world.head == 1

    # A preview, and a second run with what it shows.
    preview, _ = world.migrate(spark_above_bytes=0)
    assert (preview["possible"], preview["estimated_rows"], world.head) == (True, 2, 1)
    assert preview["estimated_bytes"] > 0
    assert preview["estimated_price_usd"] > 0
    assert rows(preview["diff"]) == [change]
    [planned] = rows(preview["plan"])
    assert (
        planned | {"type": "Customer", "rows": 2, "upgraders": False, "by_spark": True} == planned
    )
    assert f'token: "{preview["token"]}"' in preview["next"]
    refused, because = failure_of(world.run("ontology_migration", {"apply": True, "token": "1-0"}))
    assert because["error"] == "MigrationTokenError", refused
    applied, result = world.migrate(apply=True, token=preview["token"], spark_above_bytes=0)
    assert (applied["commit"], applied["rows_rewritten"]) == (2, 2)
    observed = {
        e.asset_observation_data.asset_observation.asset_key.to_user_string(): facts(
            e.asset_observation_data.asset_observation.metadata
        )
        for e in result.get_asset_observation_events()
    }
    assert observed["customer"]["schema_version"] == 2
    assert world.migrate()[0]["has_changes"] is False

    second = world.ingest()
    assert (second["schema_version"], second["schema_version_before"]) == (2, 1)
    assert rows(second["column_changes"]) == [
        {"column": "tier", "change": "added", "before": "", "after": "str"}
    ]
    assert "column_changes" not in world.ingest()

    # By itself where the declaration says so; a preview of the run says that it would.
    declare(WIDENED)
    dry = world.run("ontology_ingest_customer", {"dry_run": True}, schema="additive")
    [event] = dry.get_asset_observation_events()
    pending = facts(event.asset_observation_data.asset_observation.metadata)
    assert "was int, is float" in pending["preview_problem"]
    assert (materialisations(dry), world.head) == ([], 2)
    third = world.ingest(schema="additive")
    assert third["schema_version"] == 3
    assert (third["schema_commit"], third["schema_rows_rewritten"]) == (3, 2)
    changes = [(line["column"], line["change"]) for line in rows(third["column_changes"])]
    assert changes == [("visits", "retyped"), ("visits", "default")]
    columns = {c.name: c.type for c in third["dagster/column_schema"].columns}
    assert columns["visits"] == "float"

    # But not what needs an upgrader.
    declare(WITHOUT_NAME)
    told, shown = failure_of(world.run("ontology_ingest_customer", schema="additive"))
    assert "@upgrader('Customer', from_version=3)" in told
    assert "--upgraders MODULE" in shown["command"]
    assert [line["type"] for line in rows(shown["missing_upgraders"])] == ["Customer"]
    missing, _ = world.migrate()
    assert missing["possible"] is False
    assert [line["from_version"] for line in rows(missing["missing_upgraders"])] == [3]
    _, shown = failure_of(world.run("ontology_migration", {"apply": True, "force": True}))
    assert shown["error"] == "MissingUpgraderError"
    upgraders = "evolving_upgraders"
    declare(UPGRADER, upgraders)
    unreachable = {"apply": True, "force": True, "upgraders": upgraders, "spark_above_bytes": 0}
    told, _ = failure_of(world.run("ontology_migration", unreachable))
    assert "executors cannot import 'evolving_upgraders'" in told
    # Through Pipes it is a program's: here one that finds the type smaller than Dagster did.
    world.spark = SparkResource(mode="pipes")
    asked: list[str] = []

    def submitted(
        _context: Any, _ontology: Any, _spark: Any, name: str, given: Any, **_: Any
    ) -> Any:
        asked.append(name)
        assert program.main([*given, "--spark-above", "1GB", "--json"]) == 0
        printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return printed

    monkeypatch.setattr("ontologia_dagster.schema.migration.submit", submitted)
    capsys.readouterr()
    done, _ = world.migrate(**unreachable)
    assert (done["commit"], done["rows_rewritten"], asked) == (4, 2, ["migrate"])
    assert [(row["id"], row["label"], row["tier"]) for row in world.stored()] == [
        ("c1", "ADA", "basic"),
        ("c2", "BO", "basic"),
    ]


def test_whatever_uses_a_class_that_differs_says_what_to_do(
    world: World, declare: Callable[..., ModuleType], tmp_path: Path
) -> None:
    """Checks, handlers, queries and returned tables; no event is tried in vain."""
    old = declare(FIRST)
    with world.ontology.session() as session:
        session.ensure(old.Customer(id="c1", name="Ada"))
        session.emit(old.Greeted(customer="c2"))
    new = declare(WITH_TIER)

    job = dg.Definitions.merge(
        build_platform([customers(tmp_path)]),
        dg.Definitions(
            jobs=[
                dg.define_asset_job(
                    "look",
                    selection=dg.AssetSelection.checks(
                        dg.AssetCheckKey(dg.AssetKey("customer"), "schema_matches")
                    ),
                )
            ],
            resources=resources(world.ontology),
        ),
    ).resolve_job_def("look")
    [seen] = job.execute_in_process().get_asset_check_evaluations()
    assert not seen.passed
    assert seen.severity is dg.AssetCheckSeverity.ERROR
    assert "ontology_migration" in (seen.description or "")
    assert [line["field"] for line in rows(facts(seen.metadata)["schema_diff"])] == ["tier"]

    told, shown = failure_of(world.run("ontology_drain_events"))
    assert "field 'tier' added" in told
    with world.ontology.bus() as bus:
        assert bus.count_dead_letters(world.ontology.namespace) == {}

    def by_class(view: View) -> Any:
        return view.query().entities(new.Customer).to_arrow()

    asked = query_asset("asked", by_class)

    @dg.asset(
        metadata={"ontologia/type": "Customer", "ontologia/models": MODELS},
        io_manager_key="ontology_io",
    )
    def returned() -> pa.Table:
        return pa.table({"id": ["c9"], "name": ["Cy"]})

    bound = {
        **resources(world.ontology),
        "ontology_io": OntologyIOManager(ontology=world.ontology),
    }
    for asset in (asked, returned):
        told, shown = failure_of(dg.materialize([asset], resources=bound, raise_on_error=False))
        assert shown["error"] == "SchemaOutdatedError"
        assert "tier" in shown["differences"]
        assert shown["command"].startswith("onto migrate --models ")

    assert world.migrate(apply=True, force=True)[0]["commit"] == 2
    assert world.run("ontology_drain_events").success
    assert [row["tier"] for row in world.stored()] == ["basic", "basic"]
    made = dg.materialize([asked, returned], resources=bound)
    told_of = {m.asset_key.path[-1]: facts(m.metadata) for m in materialisations(made)}
    assert told_of["returned"]["schema_version"] == 2


def test_the_log_tail_tells_of_a_migration(
    world: World, declare: Callable[..., ModuleType], tmp_path: Path
) -> None:
    """Made elsewhere, in the middle of other commits, of a type with partitions."""
    order = """
class Order(Entity):
    id: Field[str] = Field(primary_key=True)
    day: Field[str]
    total: Field[int]
"""
    declared = orders(tmp_path).model_copy(update={"models": MODELS})
    platform = build_platform([declared])
    bound = resources(world.ontology)

    def tick(cursor: str | None) -> tuple[list[dict[str, Any]], str]:
        told = evaluated(platform, "ontology_log_tail", bound, world.instance, cursor)
        for event in told.asset_events:
            world.instance.report_runless_asset_event(event)
        shown = [{"partition": e.partition, **facts(e.metadata)} for e in told.asset_events]
        return shown, told.cursor

    old = declare(order)
    with world.ontology.session() as session:
        session.ensure(old.Order(id="1", day="2013-01-02", total=1))
    first, cursor = tick(None)
    assert [(e["partition"], e["schema_version"]) for e in first] == [("2013-01-01", 1)]

    with world.ontology.session() as session:
        session.ensure(old.Order(id="2", day="2013-02-02", total=1))
    new = declare(f"{order}    note: Field[str | None]\n")
    with world.ontology.session(entity_types=[new.Order]) as session:
        session.migrate(dry_run=False, force=True)
        session.ensure(new.Order(id="3", day="2013-03-02", total=1, note=None))
    later, _ = tick(cursor)  # commit 2 wrote rows that the migration wrote again

    assert [(e["commit"], e["partition"], e["schema_version"]) for e in later] == [
        (3, "2013-01-01", 2),
        (3, "2013-02-01", 2),
        (4, "2013-03-01", 2),
    ]
    changed = [rows(e["column_changes"]) if "column_changes" in e else None for e in later]
    added = {"column": "note", "change": "added", "before": "", "after": "str | None"}
    assert changed == [[added], None, None]


def test_runs_at_the_same_time_apply_an_additive_change_once(
    world: World,
    declare: Callable[..., ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = declare(FIRST)
    with world.ontology.session() as session:
        session.ensure(old.Customer(id="c1", name="Ada"))
    spec = declared_types(declare(WITH_TIER).__name__)["entity", "Customer"]
    both, plan = threading.Barrier(2), plan_migration

    def planned(*arguments: Any) -> Any:
        """Both have planned on the storage as it was before one applies its plan."""
        made = plan(*arguments)
        both.wait(240)
        return made

    context: Any = SimpleNamespace(
        log=logging.getLogger("run"),
        run=SimpleNamespace(run_id="r", job_name="j"),
        resources=SimpleNamespace(spark=SparkResource()),
    )
    declared = customers(tmp_path, schema="additive")

    def begin(_: int) -> Any:
        return agree_on_schema(context, declared, world.ontology, spec, dry_run=False)

    with (
        monkeypatch.context() as patch,
        caplog.at_level(logging.INFO, "run"),
        ThreadPoolExecutor(2) as pool,
    ):
        patch.setattr(migration, "plan_migration", planned)
        shown = list(pool.map(begin, range(2)))

    assert sorted(len(each) for each in shown) == [0, 3]
    assert len([r for r in caplog.records if "were applied" in r.getMessage()]) == 1
    assert (world.head, [row["tier"] for row in world.stored()]) == (2, ["basic"])

    # A type that takes another's place, and one that was dropped, are for the job alone.
    renamed = FIRST.replace("Customer", "Client").replace(
        "(Entity", '(Entity, renamed_from="Customer"'
    )
    client = declared_types(declare(renamed).__name__)["entity", "Client"]
    with pytest.raises(dg.Failure, match="takes the place of Customer"):
        agree_on_schema(context, declared, world.ontology, client, dry_run=False)
    declare(WITH_TIER)
    with world.ontology.repository() as repository:
        token = migration.preview_drop(repository, "Customer").token
        migration.apply_drop(repository, "Customer", token=token)
    with pytest.raises(dg.Failure, match="Customer was dropped by commit 3") as stopped:
        begin(0)
    assert stopped.value.metadata["error"].value == "TypeDroppedError"
    again, _ = world.migrate(apply=True, force=True)
    assert [line["change"] for line in rows(again["diff"])] == ["created anew"]
    assert begin(0) == {}
