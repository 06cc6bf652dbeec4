"""What we use of Dagster beyond its documentation does what we rely on, and stays in one file."""

# No `from __future__ import annotations`: Dagster reads the annotations of ops and assets here.

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource

import ontologia_dagster
from ontologia_dagster import dagster_compat
from ontologia_dagster.resources.spark import SparkResource
from tests.dagster.world import materialisations

PACKAGE = Path(ontologia_dagster.__file__).parent
THE_FILE = Path(dagster_compat.__file__)
# Attributes of public objects that lead into Dagster's insides.
INSIDES = {"event_log_storage", "get_step_execution_context", "step_context", "run_storage"}
DAILY = dg.DailyPartitionsDefinition("2013-01-01", end_date="2013-01-04")


def _modules_imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _is_private(module: str) -> bool:
    """Of Dagster's packages: what begins with an underscore, all of the one that is only shared
    between them, and of `dagster` itself whatever is not imported from its top."""
    package, *parts = module.split(".")
    if not package.startswith("dagster"):
        return False
    private = any(part.startswith("_") for part in parts)
    return private or package == "dagster_shared" or (package == "dagster" and len(parts) > 1)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=str)
def test_one_file_alone_touches_dagsters_insides(path: Path) -> None:
    tree = ast.parse(path.read_text())
    private = {module for module in _modules_imported(tree) if _is_private(module)}
    private |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (node.attr in INSIDES or _is_attribute_of_dagster(node))
    }
    assert bool(private) == (path == THE_FILE), private


def _is_attribute_of_dagster(node: ast.Attribute) -> bool:
    """`dg._core`, `context._step`, and so on: underscores behind anything but ourselves."""
    if not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    root: ast.expr = node.value
    return not (isinstance(root, ast.Name) and root.id in {"self", "cls"} | _OUR_OWN)


_OUR_OWN = {"os"}  # os._exit


def test_dagster_has_the_private_names() -> None:
    """Each is imported by itself, so that what a new release has moved is named."""
    tree = ast.parse(THE_FILE.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dagster"):
            module = __import__(node.module, fromlist=["*"])
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name} any more"


def test_versions_are_read_as_they_are_written() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        key = dg.AssetKey("a")
        for partition, version in (("x", 3), ("y", 7), ("x", 5)):
            instance.report_runless_asset_event(
                dg.AssetMaterialization(
                    key, partition=partition, tags=dagster_compat.version_tags(version)
                )
            )
        assert dagster_compat.latest_versions(instance, key, None) == {"x": 5, "y": 7}
        assert dagster_compat.latest_versions(instance, key, ["y"]) == {"y": 7}
        event = instance.get_latest_materialization_event(key)
        assert event is not None
        assert event.asset_materialization is not None
        assert dagster_compat.version_of(event.asset_materialization.tags or {}) == 5
    assert dagster_compat.version_of({}) == 0
    assert (
        dagster_compat.version_of(
            {**dagster_compat.version_tags(0), "dagster/data_version": "a1b2"}
        )
        == 0
    )


def test_our_tags_are_those_of_dagsters_own_events() -> None:
    """Of the same step: what we would log, beside what Dagster did log."""
    seen: dict[str, Any] = {}

    @dg.asset
    def upstream() -> dg.MaterializeResult[None]:
        return dg.MaterializeResult(data_version=dg.DataVersion("41"))

    @dg.asset(deps=[upstream], code_version="c1")
    def downstream(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        tags = dagster_compat.provenance_tags(context, context.asset_key, "c1")
        seen["tags"] = {**tags, **dagster_compat.version_tags(42)}
        seen["step"] = dagster_compat.step_key(context)
        return dg.MaterializeResult(data_version=dg.DataVersion("42"))

    result = dg.materialize([upstream, downstream])
    [made] = [one for one in materialisations(result) if one.asset_key.path == ["downstream"]]
    assert seen["tags"] == made.tags
    assert "41" in seen["tags"].values()
    assert seen["step"] == "downstream"


def test_a_result_without_events_makes_none_and_lets_the_run_go_on() -> None:
    ran: list[str] = []

    @dg.asset(partitions_def=DAILY, backfill_policy=dg.BackfillPolicy.single_run())
    def own(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        for number, key in enumerate(context.partition_keys):
            tags = dagster_compat.version_tags(number + 1)
            context.log_event(dg.AssetMaterialization(context.asset_key, partition=key, tags=tags))
        return dagster_compat.result_without_events()

    @dg.asset_check(asset=own)
    def looked_at() -> dg.AssetCheckResult:
        ran.append("check")
        return dg.AssetCheckResult(passed=True)

    @dg.asset(deps=[own], partitions_def=DAILY, backfill_policy=dg.BackfillPolicy.single_run())
    def after() -> None:
        ran.append("after")

    with dg.DagsterInstance.ephemeral() as instance:
        job = dg.Definitions(
            assets=[own, after],
            asset_checks=[looked_at],
            jobs=[dg.define_asset_job("all", executor_def=dg.in_process_executor)],
        ).resolve_job_def("all")
        result = job.execute_in_process(
            instance=instance,
            tags={
                "dagster/asset_partition_range_start": "2013-01-01",
                "dagster/asset_partition_range_end": "2013-01-03",
            },
        )
        made = [one for one in materialisations(result) if one.asset_key.path == ["own"]]
        key = dg.AssetKey("own")
        assert [one.partition for one in made] == ["2013-01-01", "2013-01-02", "2013-01-03"]
        assert list(dagster_compat.latest_versions(instance, key, None).values()) == [1, 2, 3]
    assert sorted(ran) == ["after", "check"]


def test_an_io_manager_sets_the_data_version() -> None:
    class Keeper(dg.IOManager):
        def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
            dagster_compat.set_data_version(context, 17)

        def load_input(self, context: dg.InputContext) -> Any:
            raise NotImplementedError

    @dg.asset
    def kept() -> int:
        return 1

    [made] = materialisations(dg.materialize([kept], resources={"io_manager": Keeper()}))
    assert dagster_compat.version_of(made.tags or {}) == 17


def test_a_job_that_is_run_by_itself_has_no_location() -> None:
    """One that has a location is given it by Dagster's public `repository_def`."""
    seen: list[Any] = []

    @dg.op
    def look(context: dg.OpExecutionContext) -> None:
        seen.append(dagster_compat.location_of(context))

    @dg.job(executor_def=dg.in_process_executor)
    def looking() -> None:
        look()

    looking.execute_in_process()
    assert seen == [None]


def test_pools_are_limited_and_dead_runs_give_their_slots_back(tmp_path: Path) -> None:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        dagster_compat.limit_pool(instance, "narrow", 1)
        storage = instance.event_log_storage
        storage.claim_concurrency_slot("narrow", "dead", "step")
        waiting = storage.claim_concurrency_slot("narrow", "next", "step")
        assert not waiting.is_claimed
        dagster_compat.free_slots(instance, "dead")
        assert storage.claim_concurrency_slot("narrow", "next", "step").is_claimed


def test_sparks_resource_starts_by_its_public_property(monkeypatch: pytest.MonkeyPatch) -> None:
    """dagster-pyspark's own start is private: both doors of its public face lead to ours."""
    started: list[Any] = []

    class Session:
        sparkContext = "context"

    def start(name: str, **settings: Any) -> Session:
        started.append((name, settings))
        return Session()

    monkeypatch.setattr("storage_engine.spark.spark_session", start)
    spark = SparkResource(master="local[1]", spark_config={"spark.ui.enabled": "false"})
    assert isinstance(spark, LazyPySparkResource)
    assert not started
    assert spark.spark_context == "context"
    assert spark.session() is spark.spark_session
    assert started == [
        ("ontologia", {"master": "local[1]", "config": {"spark.ui.enabled": "false"}})
    ]


def test_a_fixed_resource_offers_no_config_and_is_what_the_location_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """References to variables are read when a run needs them, as with any resource of Dagster's."""
    monkeypatch.setenv("SHOP_SECRET", "hidden")
    seen: list[Any] = []

    class Nested(dg.ConfigurableResource[Any]):
        secret: str

    class Fixed(dagster_compat.FixedResource, dg.ConfigurableResource[Any]):
        uri: str
        nested: Nested
        more: dict[str, Any]

    @dg.op(required_resource_keys={"fixed"})
    def look(context: dg.OpExecutionContext) -> None:
        fixed: Fixed = context.resources.fixed
        seen.append((type(fixed), fixed.uri, fixed.nested.secret, fixed.more))

    @dg.job
    def looking() -> None:
        look()

    resource = Fixed(uri="a", nested=Nested(secret=dg.EnvVar("SHOP_SECRET")), more={"b": 1})
    job = dg.Definitions(jobs=[looking], resources={"fixed": resource}).resolve_job_def("looking")
    assert job.execute_in_process().success
    # Whatever is said there nevertheless.
    other = {"resources": {"fixed": {"config": {"uri": "b"}}}}
    assert job.execute_in_process(run_config=other).success
    assert seen == [(Fixed, "a", "hidden", {"b": 1})] * 2


def test_runs_that_a_process_executes_itself_can_belong_to_a_location() -> None:
    @dg.op
    def nothing() -> None: ...

    @dg.job
    def idle() -> None:
        nothing()

    with dg.DagsterInstance.ephemeral() as instance:
        with dagster_compat.runs_of_location(instance, "shop.definitions", "shop", idle):
            inside = idle.execute_in_process(instance=instance).run_id
        outside = idle.execute_in_process(instance=instance).run_id
        run, other = instance.get_run_by_id(inside), instance.get_run_by_id(outside)

    assert run is not None
    assert other is not None
    assert other.remote_job_origin is None
    assert run.remote_job_origin is not None
    assert run.remote_job_origin.location_name == "shop"
    # As those that are launched from the location have it: pages of jobs look for this tag.
    assert run.tags_for_storage()[".dagster/repository"] == "__repository__@shop"
