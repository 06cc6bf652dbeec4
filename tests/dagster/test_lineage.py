"""The graph is the ontology: relations depend on both ends, events stand between those who send
and those who handle them, and what handlers write has the handler before it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import dagster as dg
import pytest
import yaml

from ontologia_dagster.dagster_compat import version_tags
from ontologia_dagster.declaration import OntologyAsset, PartitionSpec, SourceSpec
from ontologia_dagster.demo.definitions import demo_definitions
from ontologia_dagster.ingestion import asset as ingestion
from ontologia_dagster.ingestion.expectation_checks import unlooked_results
from ontologia_dagster.ingestion.source_sensor import RANGE_END, RANGE_START
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage import dead_letters, drain, events
from ontologia_dagster.storage.lineage import emits
from ontologia_dagster.storage.storage_defs import build_platform
from storage_engine import HandlerContext, on_event
from tests.dagster import billing
from tests.dagster.shop import OrderPlaced
from tests.dagster.test_alerts import check_begins
from tests.dagster.world import MODELS, customers, facts, orders, resources, rows, storage, version

CSV = SourceSpec(format="csv", paths=["placed.csv"])


def placed(**more: Any) -> OntologyAsset:
    return OntologyAsset(type="Placed", models=MODELS, source=CSV, **more)


def with_resources(definitions: dg.Definitions, *more: dg.Definitions) -> dg.Definitions:
    nowhere = OntologyResource(storage_uri="/nowhere")
    bound = resources(nowhere, ontology_acme=nowhere)
    return dg.Definitions.merge(definitions, *more, dg.Definitions(resources=bound))


def edges(definitions: dg.Definitions) -> dict[str, list[str]]:
    """The assets that each depends on."""
    bound = definitions if definitions.resources else with_resources(definitions)
    graph = bound.resolve_asset_graph()
    return {
        key.to_user_string(): sorted(
            parent.to_user_string() for parent in graph.get(key).parent_keys
        )
        for key in graph.get_all_asset_keys()
    }


# -- relations ------------------------------------------------------------------------------------


def test_a_relation_depends_on_both_its_ends(tmp_path: Path) -> None:
    declared = [placed(deps=["landing"]), customers(tmp_path), orders(tmp_path)]
    assert edges(build_platform(declared))["placed"] == ["customer", "landing", "order"]


def test_ends_are_known_by_their_assets_and_never_dangle(tmp_path: Path) -> None:
    """Whatever the asset is called, wherever it was declared; of this storage alone."""
    named = customers(tmp_path, name="buyer", key_prefix=["crm"])
    elsewhere = build_platform([named])
    other = orders(tmp_path, storage="ontology_acme", key_prefix=["acme"])
    platform = build_platform([placed(), other], beside=elsewhere)

    assert edges(platform)["placed"] == ["crm/buyer"]
    assert edges(build_platform([placed()]))["placed"] == []


YAML = """
type: ontologia_dagster.components.OntologyTypeComponent
attributes:
  type: {type}
  models: tests.dagster.shop
  source: {{format: csv, paths: [rows.csv]}}
  {more}
"""


def test_ends_in_yaml_are_found_wherever_they_are_in_the_folder(tmp_path: Path) -> None:
    for place, type_name, more in (
        ("a/placed", "Placed", ""),
        ("b/customers", "Customer", "name: buyer"),
        ("c", "Order", "partitions: {kind: monthly, field: day, start: '2013-01-01'}"),
    ):
        folder = tmp_path / "shop_of_yaml" / "defs" / place
        folder.mkdir(parents=True)
        (folder / "defs.yaml").write_text(YAML.format(type=type_name, more=more))
    for package in ("", "defs"):
        (tmp_path / "shop_of_yaml" / package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\nversion = "1"\n[tool.dg]\ndirectory_type = "project"\n'
        '[tool.dg.project]\nroot_module = "shop_of_yaml"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        loaded = dg.load_from_defs_folder(path_within_project=tmp_path / "shop_of_yaml")
    assert edges(loaded)["placed"] == ["buyer", "order"]


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Ingestion that only says what it was asked for, and leaves a version."""
    asked: list[tuple[str, list[str]]] = []

    def ingest(context: Any, declared: OntologyAsset, *_: Any, **__: Any) -> Iterator[Any]:
        keys = list(context.partition_keys) if context.has_partition_key_range else []
        asked.append((declared.type, keys))
        yield from unlooked_results(declared, context.instance, "there is no Spark")
        yield dg.MaterializeResult(data_version=dg.DataVersion(str(len(asked))))

    monkeypatch.setattr(ingestion, "_ingest", ingest)
    return asked


CHANNELS = ["web", "shop", "phone"]
CUT = {"partitions": PartitionSpec(kind="static", field="channel", keys=CHANNELS)}


@pytest.mark.parametrize("ends_are_cut", [False, True])
def test_a_range_of_a_relation_runs_after_its_ends(
    tmp_path: Path, no_spark: list[tuple[str, list[str]]], ends_are_cut: bool
) -> None:
    """In one run where nothing else is cut, else each in a run of its own."""
    relation = placed(backfill="single_run", **CUT)
    whole = (
        orders(tmp_path)
        if ends_are_cut
        else orders(tmp_path).model_copy(update={"partitions": None})
    )
    definitions = dg.Definitions.merge(
        build_platform([relation, customers(tmp_path), whole]),
        dg.Definitions(resources=resources(storage(tmp_path))),
    )
    everything = ["customer", "placed"] if ends_are_cut else ["customer", "order", "placed"]
    job = dg.define_asset_job("every", selection=dg.AssetSelection.assets(*everything))
    definitions = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job]))
    with dg.DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("every").execute_in_process(
            instance=instance, tags={RANGE_START: "web", RANGE_END: "phone"}
        )
        assert result.success
        told = instance.get_materialized_partitions(dg.AssetKey("placed"))

    assert no_spark[-1] == ("Placed", CHANNELS)
    assert len(no_spark) == len(everything)
    assert told == set(CHANNELS)


@pytest.mark.parametrize("automation", ["on_new_data", "eager"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_change_at_an_end_asks_for_no_run_of_the_relation(
    tmp_path: Path, automation: str, cut: bool
) -> None:
    """Of no partition of it; a change of what it is made from does, when its ends are at rest."""
    relation = placed(deps=["landing"], automation=automation, **(CUT if cut else {}))
    definitions = with_resources(
        build_platform([relation, customers(tmp_path)]), dg.Definitions(assets=[landing])
    )
    keys = CHANNELS if cut else [None]
    with dg.DagsterInstance.ephemeral() as instance:
        cursor: Any = None

        def tick() -> int:
            nonlocal cursor
            result = dg.evaluate_automation_conditions(definitions, instance, cursor=cursor)
            cursor = result.cursor
            return result.get_num_requested(dg.AssetKey("placed"))

        def tell(name: str, version: int, *partitions: str | None) -> None:
            for partition in partitions or [None]:
                instance.report_runless_asset_event(
                    dg.AssetMaterialization(name, partition=partition, tags=version_tags(version))
                )

        tick()
        tell("landing", 1)
        assert tick() == 0  # there are no customers yet
        tell("customer", 1)
        assert tick() == len(keys)
        tell("placed", 1, *keys)
        assert tick() == 0
        tell("customer", 2)
        assert tick() == 0
        tell("landing", 2)
        assert tick() == len(keys)


@dg.asset
def landing() -> None: ...


# -- events and handlers --------------------------------------------------------------------------

BILLING = "tests.dagster.billing"


@dg.asset(metadata=emits("OrderPlaced"), group_name="findings")
def large_orders() -> None: ...


@dg.asset(deps=["delivery"], metadata=emits(billing.Billed, "Nobody"))
def complaints() -> None: ...


def location(ontology: OntologyResource, *declared: OntologyAsset) -> dg.Definitions:
    by_hand = dg.AssetSelection.checks(
        dg.AssetCheckKey(dg.AssetKey(["events", "order_placed"]), "no_dead_letters")
    )
    own = dg.Definitions(
        assets=[large_orders, complaints],
        jobs=[dg.define_asset_job("ontology_check_letters", selection=by_hand)],
    )
    platform = build_platform(declared, handlers=[BILLING], beside=own)
    return dg.Definitions.merge(platform, own, dg.Definitions(resources=resources(ontology)))


def test_events_are_between_who_sends_and_who_handles_them(tmp_path: Path) -> None:
    """And what handlers write is after them; a circle is cut where it closes, and told."""
    definitions = location(OntologyResource(storage_uri="/nowhere"), customers(tmp_path))
    dg.Definitions.validate_loadable(definitions)
    graph = definitions.resolve_asset_graph()
    drawn = edges(definitions)

    assert drawn["events/order_placed"] == ["large_orders"]
    assert drawn["handlers/write_bill"] == ["events/order_placed"]
    assert drawn["bill"] == ["handlers/write_bill", "large_orders"]  # so that runs send first
    assert drawn["events/billed"] == ["handlers/write_bill"]
    assert drawn["handlers/deliver"] == ["events/billed"]
    assert drawn["delivery"] == ["handlers/deliver", "large_orders"]
    assert drawn["events/nobody"] == ["complaints"]
    assert drawn["customer"] == []  # ingested: it has a producer
    nodes = {
        name: graph.get(dg.AssetKey.from_user_string(name))
        for name in ("events/order_placed", "events/billed", "handlers/deliver", "bill")
    }
    assert nodes["events/order_placed"].metadata["sent_in_a_circle_by"] == "handlers/deliver"
    assert nodes["events/billed"].metadata["sent_in_a_circle_by"] == "complaints"
    assert nodes["events/billed"].kinds == {"event"}
    assert nodes["handlers/deliver"].kinds == {"handler"}
    assert [node.is_materializable for node in nodes.values()] == [False, False, False, True]
    assert {node.group_name for node in nodes.values()} == {"findings"}
    assert nodes["bill"].description == "What a customer owes."
    checks = {key.to_user_string() for key in graph.asset_check_keys}
    assert checks >= {
        "events/order_placed:no_dead_letters",
        "events/billed:no_dead_letters",
        "bill:index_verify",
        "bill:deep_verify",
    }
    assert "events/nobody:no_dead_letters" not in checks


def test_the_graph_of_the_demo_is_the_ontology() -> None:
    drawn = edges(demo_definitions())

    assert drawn["flight"] == ["airport", "flight_data"]
    assert drawn["operates"] == ["airline", "flight_data", "plane"]
    assert drawn["observed_at"] == ["airport", "flight_data", "weather_observation"]
    assert drawn["events/severe_delay"] == ["severe_delays"]
    assert drawn["events/disrupted_day"] == ["disrupted_days"]
    assert drawn["events/airport_notice"] == ["airport_notices"]
    assert drawn["handlers/record_incident"] == ["events/severe_delay"]
    senders = ["airport_notices", "severe_delays"]  # so that runs send before they handle
    assert drawn["incident"] == sorted(
        [*senders, "handlers/file_notice", "handlers/record_incident"]
    )
    assert drawn["disruption"] == ["disrupted_days", "handlers/record_disruption"]


# -- runs that handle -----------------------------------------------------------------------------

FAST = {"event_backoff_base_ms": 0, "event_max_attempts": 1}


@pytest.fixture
def ontology(tmp_path: Path) -> Iterator[OntologyResource]:
    yield storage(tmp_path, engine_options=FAST)
    billing.broken.clear()


def place(ontology: OntologyResource, *order_ids: str) -> None:
    with ontology.session() as session:
        session.emit([OrderPlaced(order_id=each, id=f"placed/{each}") for each in order_ids])


def run_job(
    definitions: dg.Definitions, instance: dg.DagsterInstance, name: str, config: Any = None
) -> Any:
    job = definitions.resolve_job_def(f"ontology_{name}")
    return job.execute_in_process(instance=instance, run_config=config or {})


def told(instance: dg.DagsterInstance, name: str) -> list[tuple[int, dict[str, Any], str]]:
    """The materialisations of an asset: commit, facts, run."""
    key = dg.AssetKey.from_user_string(name)
    records = instance.fetch_materializations(key, limit=100, ascending=True).records
    found = []
    for record in records:
        made = record.asset_materialization
        assert made is not None
        found.append((int(version(made)), facts(made.metadata), record.run_id))
    return found


def observed(instance: dg.DagsterInstance, name: str) -> list[dict[str, Any]]:
    key = dg.AssetKey.from_user_string(name)
    records = instance.fetch_observations(key, limit=100, ascending=True).records
    return [facts(record.asset_observation.metadata) for record in records]  # type: ignore[union-attr]


def letters_check(instance: dg.DagsterInstance, name: str = "events/order_placed") -> Any:
    key = dg.AssetCheckKey(dg.AssetKey.from_user_string(name), "no_dead_letters")
    record = instance.get_latest_asset_check_evaluation_record(key)
    return record.evaluation if record is not None else None


def tail(
    definitions: dg.Definitions,
    bound: dict[str, Any],
    instance: dg.DagsterInstance,
    cursor: str | None = None,
) -> tuple[list[tuple[str, str]], str | None]:
    """A tick of the log tail, as the daemon makes it: what it told, and where it ended."""
    data = tick(definitions, bound, "log_tail", instance, cursor)
    return [(e.asset_key.to_user_string(), version(e)) for e in data.asset_events], data.cursor


def tick(
    definitions: dg.Definitions,
    bound: dict[str, Any],
    sensor: str,
    instance: dg.DagsterInstance,
    cursor: str | None = None,
) -> Any:
    with dg.build_sensor_context(
        instance=instance, resources=bound, definitions=definitions, cursor=cursor
    ) as context:
        data = definitions.get_sensor_def(f"ontology_{sensor}").evaluate_tick(context)
    for event in data.asset_events:
        instance.report_runless_asset_event(event)
    return data


def test_commits_of_handlers_are_materialisations_of_what_they_write_once(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    definitions, bound = location(ontology, customers(tmp_path)), resources(ontology)
    place(ontology, "a", "b", "x")
    with dg.DagsterInstance.ephemeral() as instance:
        result = run_job(definitions, instance, "drain_events")
        assert result.success
        with ontology.session() as session:
            commits = {c["id"]: c for c in session.list_commits()}
        last = {
            name: max(i for i, c in commits.items() if name in c["types"])
            for name in ("Bill", "Delivery", "Customer")
        }
        for asset, type_name in (
            ("bill", "Bill"),
            ("delivery", "Delivery"),
            ("customer", "Customer"),
        ):
            [(commit, about, run_id)] = told(instance, asset)
            assert (commit, run_id) == (last[type_name], result.run_id)
            assert (about["commits"], about["rows_inserted"]) == (3, 3)
            listed = rows(about["commit_list"])
            assert listed[0]["commit"] == commit
            assert len(listed) == 3
        bills = rows(told(instance, "bill")[0][1]["commit_list"])
        assert {line["event"] for line in bills} == {"placed/a", "placed/b", "placed/x"}
        assert told(instance, "bill")[0][1]["dagster/row_count"] == 3
        assert {c["metadata"]["dagster/run_id"] for c in commits.values()} == {result.run_id}
        [of_handler] = observed(instance, "handlers/write_bill")
        assert (of_handler["handled"], of_handler["commits"]) == (3, 3)
        assert of_handler["sent"] == {"Billed": 3}
        [of_event] = observed(instance, "events/order_placed")
        assert (of_event["handled"], of_event["pending"], of_event["dead_letters"]) == (3, 0, 0)
        assert of_event["handled_per_minute"] > 0
        # Beyond the declaration: nothing is lost, and a note says so.
        [of_log] = observed(instance, "ontology/log")
        assert "shop.deliver: it wrote Secret" in of_log["notes"]
        index = dg.AssetCheckKey(dg.AssetKey("bill"), "index_verify")
        checked = instance.get_latest_asset_check_evaluation_record(index)
        assert checked is not None
        assert checked.evaluation.passed  # type: ignore[union-attr]

        assert tail(definitions, bound, instance)[0] == []  # nobody tells it again
        again = run_job(definitions, instance, "drain_events")
        assert again.success
        assert len(told(instance, "bill")) == 1  # nothing was written

        with ontology.session() as session:  # a worker that is not Dagster's
            session.emit(OrderPlaced(order_id="elsewhere"))
            session.drain([billing.write_bill])
            [newest] = session.list_commits(limit=1)
        assert tail(definitions, bound, instance)[0] == [("bill", str(newest["id"]))]


def test_a_run_that_dies_behind_its_commits_is_told_by_the_log_tail(
    ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it goes on its commits are left to it; a second run that goes on from there tells its
    own, and nothing is told twice."""
    definitions, bound = location(ontology), resources(ontology)
    place(ontology, "a")
    with dg.DagsterInstance.ephemeral() as instance, monkeypatch.context() as patch:
        seen: list[Any] = []

        def die(*_: Any) -> None:
            seen.append(tail(definitions, bound, instance))
            raise KeyboardInterrupt

        patch.setattr(drain, "_materialisations", die)
        with pytest.raises(KeyboardInterrupt):
            run_job(definitions, instance, "drain_events")
        [(during, cursor)] = seen
        assert during == []
        assert told(instance, "bill") == []

        [run] = instance.get_runs()
        if not run.is_finished:
            instance.report_run_failed(run)
        after, cursor = tail(definitions, bound, instance, cursor)
        assert after == [("bill", "1"), ("customer", "2"), ("delivery", "2")]
        patch.undo()
        place(ontology, "b")
        assert run_job(definitions, instance, "drain_events").success
        assert tail(definitions, bound, instance, cursor)[0] == []
        assert [commit for commit, _, _ in told(instance, "bill")] == [1, 3]


def test_a_run_that_left_dead_letters_says_so_until_they_are_redriven(
    ontology: OntologyResource,
) -> None:
    definitions, bound = location(ontology), resources(ontology)
    billing.broken.add("a")
    place(ontology, "a", "b")
    with dg.DagsterInstance.ephemeral() as instance:
        result = run_job(definitions, instance, "drain_events")
        assert result.success  # the run did its work; the check says what is left
        [failed] = [e for e in result.get_asset_check_evaluations() if not e.passed]
        assert failed.asset_check_key.to_user_string() == "events/order_placed:no_dead_letters"
        assert failed.severity is dg.AssetCheckSeverity.ERROR
        assert failed.description.startswith(
            "shop.write_bill gave up on OrderPlaced (placed/a): LookupError: order a is not in"
        )
        assert "ontology_redrive" in failed.description
        about = facts(failed.metadata)
        assert about["dead_letters"] == 1
        assert [line["event"] for line in rows(about["dead_letter_list"])] == ["placed/a"]
        config = yaml.safe_load(about["redrive_config"].split("```yaml\n")[1].split("```")[0])
        step = config["ops"]["ontology_redrive_dead_letters"]["config"]
        assert step == {"handler": "shop.write_bill", "event_id": "placed/a"}
        link = about["redrive"]
        assert f"]({link})" in about["redrive_config"]
        assert "/jobs/ontology_redrive/playground/setup?config=" in link
        assert yaml.safe_load(unquote(link.partition("config=")[2])) == config
        assert observed(instance, "events/order_placed")[-1]["dead_letters"] == 1

        # Nothing new is told as long as nothing changes, nor by other runs.
        for _ in range(3):
            data = tick(definitions, bound, "events", instance)
            assert data.asset_events == []
            assert "1 dead letters" in str(data.skip_message)
        before = letters_check(instance)
        run_job(definitions, instance, "metrics")
        assert letters_check(instance) == before
        by_hand = run_job(definitions, instance, "check_letters").get_asset_check_evaluations()
        assert [(e.passed, e.description) for e in by_hand] == [(False, before.description)]
        billing.broken.clear()
        run_job(definitions, instance, "redrive", config)
        assert letters_check(instance).passed
        run_job(definitions, instance, "drain_events")
        assert letters_check(instance).passed
        with ontology.session() as session:
            assert session.query().entities(billing.Bill).count() == 2


def test_letters_that_others_redrive_or_make_are_seen_at_the_next_look(
    ontology: OntologyResource,
) -> None:
    definitions, bound = location(ontology), resources(ontology)
    billing.broken.update({"a", "b"})
    place(ontology, "a")
    with dg.DagsterInstance.ephemeral() as instance:
        assert tick(definitions, bound, "events", instance).run_requests
        assert letters_check(instance).passed  # evaluated once, at the first look
        with ontology.session() as session:
            session.drain([billing.write_bill])
        data = tick(definitions, bound, "events", instance)
        assert len(data.asset_events) == 2  # the check, and the event's figures
        assert not letters_check(instance).passed
        place(ontology, "b")
        with ontology.session() as session:
            session.drain([billing.write_bill])
        run_job(definitions, instance, "metrics")  # the other who looks
        assert facts(letters_check(instance).metadata)["dead_letters"] == 2
        assert "2 OrderPlaced events" in letters_check(instance).description

        with ontology.bus() as bus:
            for letter in bus.list_dead_letters("default", 10):
                bus.redrive(letter)
        # Somebody has begun to check by hand: it is left to that run, and not for ever.
        check_begins(instance, "no_dead_letters", "events/order_placed")
        tick(definitions, bound, "events", instance)
        assert not isinstance(letters_check(instance), dg.AssetCheckEvaluation)
        [run] = [run for run in instance.get_runs() if run.job_name == "check"]
        instance.report_run_failed(run)
        tick(definitions, bound, "events", instance)
        assert letters_check(instance).passed


def test_letters_are_told_by_type_and_never_as_fewer_than_they_are(
    ontology: OntologyResource,
) -> None:
    """Of a handler of two types, of whose letters not all are read."""

    @on_event(OrderPlaced, billing.Billed, id="shop.both")
    def both(ctx: HandlerContext[Any]) -> None:
        raise ValueError(ctx.event.order_id)

    with ontology.session() as session:
        session.emit(billing.Billed(order_id="old"))
        session.drain([both])
        session.emit([OrderPlaced(order_id=str(number)) for number in range(4)])
        session.drain([both])
    with ontology.bus() as bus:
        some = dead_letters.read_letters(bus, "default", [both], 3)
        every = dead_letters.read_letters(bus, "default", [both], 10)
    assert (some.total, some.counts, some.unclear) == (5, {"OrderPlaced": 3}, frozenset({"Billed"}))
    assert (every.total, every.counts) == (5, {"OrderPlaced": 4, "Billed": 1})
    assert every.unclear == set()


def test_figures_of_events_are_told_when_they_move_and_not_at_every_tick(
    ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions, bound = location(ontology), resources(ontology)
    with dg.DagsterInstance.ephemeral() as instance:

        def pending() -> list[int]:
            tick(definitions, bound, "events", instance)
            return [about["pending"] for about in observed(instance, "events/order_placed")]

        assert pending() == pending() == [0]
        place(ontology, "a", "b")
        assert pending() == [0]  # a moment ago
        monkeypatch.setattr(events, "_OBSERVED", timedelta(0))
        assert pending() == pending() == [0, 2]
        monkeypatch.setattr(events, "_AGING", timedelta(0))
        assert pending() == [0, 2, 2]  # its age is seen to grow
        assert observed(instance, "events/order_placed")[-1]["oldest_age_s"] >= 0
        assert observed(instance, "events/billed")[-1]["pending"] == 0
