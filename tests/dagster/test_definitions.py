"""The code location loads without a storage, and observing the head tells the truth."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from click.testing import CliRunner
from dagster_dg_cli.cli import cli

from ontologia_dagster import definitions
from ontologia_dagster.definitions import defs
from ontologia_dagster.defs.shop.assets import find_large_orders
from ontologia_dagster.defs.shop.models import Voucher
from ontologia_dagster.demo import program
from ontologia_dagster.demo.definitions import LOCATION
from ontologia_dagster.resources.environments import Environment, Environments
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage.storage_defs import (
    build_platform,
    handler_modules,
    head_asset,
    location_resources,
)
from storage_engine import (
    ConfigurationError,
    Entity,
    Field,
    Relation,
    Session,
    initialize_storage,
)
from storage_engine.errors import UninitializedStorageError
from storage_engine.transfer import copy_storage
from tests.dagster import shop

ROOT = Path(__file__).parents[2]


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]


class Knows(Relation[Customer, Customer]):
    since: Field[int]


@pytest.fixture(params=["directory", "sqlite"])
def ontology(request: pytest.FixtureRequest, tmp_path: Path) -> OntologyResource:
    uri = str(tmp_path / "store") if request.param == "directory" else str(tmp_path / "onto.db")
    initialize_storage(uri)
    return OntologyResource(storage_uri=uri, runtime_id="test")


def observe(ontology: OntologyResource) -> dg.AssetObservation:
    head = head_asset("ontology")
    location = dg.Definitions(
        assets=[head],
        jobs=[dg.define_asset_job("observe_head", selection=[head])],
        resources={"ontology": ontology},
    )
    result = location.resolve_job_def("observe_head").execute_in_process()
    [event] = result.get_asset_observation_events()
    return event.asset_observation_data.asset_observation


def facts(observation: dg.AssetObservation) -> dict[str, object]:
    return {name: value.value for name, value in observation.metadata.items()}


def write(ontology: OntologyResource, *objects: Entity | Relation[Any, Any]) -> None:
    with ontology.session(entity_types=[Customer], relation_types=[Knows]) as session:
        session.ensure(objects)


def test_loading_definitions_needs_no_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONTOLOGIA_STORAGE_URI", "s3://no-such-bucket/nowhere")
    monkeypatch.chdir(tmp_path)

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a store was opened")

    monkeypatch.setattr("storage_engine.repository.open.open_store", opened)
    monkeypatch.setattr("socket.socket.connect", opened)

    loaded = defs()
    dg.Definitions.validate_loadable(loaded)

    asset = loaded.resolve_asset_graph().get(dg.AssetKey("ontology_head"))
    assert asset.is_observable
    assert asset.group_name == "ontologia"
    assert loaded.resources is not None
    assert loaded.resources["ontology"].storage_uri == "s3://no-such-bucket/nowhere"
    assert list(tmp_path.iterdir()) == []


def test_the_default_storage_is_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONTOLOGIA_STORAGE_URI", raising=False)
    monkeypatch.chdir(tmp_path)

    assert Environments.load().current.uri == str(tmp_path / ".ontologia" / "store")


def test_the_default_storage_is_not_made_beside_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONTOLOGIA_STORAGE_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    initialize_storage("onto.db")
    with Session() as session:
        session.ensure(Customer(id="c1", name="Ann"))
    ontology = location_resources(Environments.load())["ontology"]

    with (
        pytest.raises(ConfigurationError, match=r"onto copy \S+/onto.db \S+/.ontologia/store"),
        ontology.repository(),
    ):
        raise AssertionError("it was made")
    assert [path.name for path in tmp_path.iterdir()] == ["onto.db"]

    copy_storage("onto.db", ".ontologia/store", apply=True)
    (tmp_path / "onto.db").rename(tmp_path / "old.db")
    with ontology.repository() as repository, Session() as session:  # all mean the same one now
        assert repository.head_commit_id() == 1
        assert session.storage_info()["uri"] == repository.uri


def test_a_typo_in_the_environment_never_opens_the_default_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing the module does nothing yet; Dagster calls `defs` when it loads the location."""
    monkeypatch.chdir(tmp_path)
    for name in ("ONTOLOGIA_STORAGE_URI", "ONTOLOGIA_ENVIRONMENTS"):
        monkeypatch.delenv(name, raising=False)
    for typo in ("prd", "Development", "development "):
        monkeypatch.setenv("ONTOLOGIA_ENV", typo)
        with pytest.raises(ConfigurationError) as refused:
            defs()
        said = str(refused.value)
        assert f"ONTOLOGIA_ENV is {typo!r}, which is none of the environments: development" in said
        assert f"there is no {tmp_path}/environments.toml" in said
    (tmp_path / "environments.toml").write_text("[staging]\n")
    with pytest.raises(ConfigurationError, match=f"or add .* to {tmp_path}/environments.toml"):
        defs()
    assert [path.name for path in tmp_path.iterdir()] == ["environments.toml"]


ENVIRONMENTS = """
[development]
storage_uri = "{folder}"
prefix = "main"
handlers = ["tests.dagster.shop"]
[development.tenants.acme]
"""
ORDERS = """
type: ontologia_dagster.components.OntologyTypeComponent
attributes:
  type: Order
  models: shop.models
  source: {format: csv, paths: ["orders/{partition_key}.csv"]}
  partitions: {kind: monthly, field: day, start: "2013-01-01", end: "2013-04-01"}
  backfill: single_run
  schedule: "0 6 2 * *"
  watch_source: true
  freshness: {fail_after: 33d}
  automation: on_new_data
  owners: [team:data]
"""
CUSTOMERS = """
type: ontologia_dagster.components.OntologyTypeComponent
attributes:
  type: Customer
  models: shop.models
  source: {format: csv, paths: [customers.csv]}
  storage: ontology_acme
  key_prefix: [acme]
"""
MODELS = """
from datetime import date
from storage_engine import Entity, Field


class Order(Entity):
    id: Field[str] = Field(primary_key=True)
    day: Field[date]


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
"""
LOADING = """
import json, socket, sys, time, traceback, warnings
import dagster as dg
import ontologia_dagster.components, ontologia_dagster.definitions
from shop import definitions

def connect(*_):
    raise AssertionError("a connection was made")

def hear(message, category, filename, lineno, *_):
    ours = [f for f in traceback.extract_stack() if "ontologia_dagster" in f.filename]
    if ours or "ontologia_dagster" in filename:
        heard.append(f"{category.__name__}: {message} {ours[-1:]}")

heard = []
socket.socket.connect = connect
warnings.simplefilter("always")
warnings.showwarning = hear
began = time.process_time()
loaded = definitions.defs()
dg.Definitions.validate_loadable(loaded)
repository = loaded.get_repository_def()
seconds = time.process_time() - began
print(json.dumps({
    "seconds": seconds,
    "heard": heard,
    "heavy": sorted({"duckdb"} & sys.modules.keys()),
    "sensors": sorted(one.name for one in repository.sensor_defs),
    "checks": sorted(key.to_user_string() for key in repository.asset_graph.asset_check_keys),
}))
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A location with types in YAML and a tenant, on storages that are not there."""
    package = tmp_path / "shop"
    for name, text in (("orders", ORDERS), ("customers", CUSTOMERS)):
        (package / "defs" / name).mkdir(parents=True)
        (package / "defs" / name / "defs.yaml").write_text(text)
    (package / "__init__.py").touch()
    (package / "models.py").write_text(MODELS)
    (package / "defs" / "__init__.py").touch()
    # The location that is shipped is what a project of one's own starts from.
    shipped = Path(definitions.__file__).read_text()
    (package / "definitions.py").write_text(shipped)
    (tmp_path / "environments.toml").write_text(ENVIRONMENTS.format(folder="s3://nowhere/x"))
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "shop"\nversion = "1"\n[tool.dg]\ndirectory_type = "project"\n'
        '[tool.dg.project]\nroot_module = "shop"\n'
    )
    (tmp_path / "workspace.yaml").write_text(
        "load_from:\n  - python_module: {module_name: shop.definitions, location_name: shop}\n"
    )
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    yield tmp_path
    for name in [one for one in sys.modules if one.partition(".")[0] == package.name]:
        del sys.modules[name]  # what `dg` imported in this process


def run_in(project: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=project,
        env={
            "DAGSTER_HOME": str(project),
            "HOME": str(project),
            "PATH": str(Path(sys.executable).parent),
            "PYTHONPATH": f"{project}{os.pathsep}{ROOT}",
            "PYTHONWARNINGS": "default",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_a_location_with_types_loads_fast_without_a_connection_or_a_warning(
    project: Path,
) -> None:
    before = sorted(project.rglob("*.yaml"))
    done = run_in(project, sys.executable, "-c", LOADING)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["heard"] == []
    assert found["heavy"] == []
    assert found["checks"] == [
        "acme/customer:deep_verify",
        "acme/customer:expect_rows_fit",
        "acme/customer:index_verify",
        "acme/customer:schema_matches",
        "acme/events/order_placed:no_dead_letters",
        "events/order_placed:no_dead_letters",
        "ontology/log:deep_verify_log",
        "ontology_acme/log:deep_verify_log",
        "order:deep_verify",
        "order:expect_rows_fit",
        "order:index_verify",
        "order:schema_matches",
    ]
    assert found["sensors"] == [
        "default_automation_condition_sensor",
        "ontologia_failed_runs",
        "ontology_acme_conditions",
        "ontology_acme_events",
        "ontology_acme_log_tail",
        "ontology_conditions",
        "ontology_events",
        "ontology_log_tail",
        "ontology_order_source",
    ]
    assert found["seconds"] < 2  # of the processor, which others share with this test
    assert sorted(project.rglob("*.yaml")) == before


def test_what_runs_on_a_tenant_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "environments.toml"
    file.write_text(ENVIRONMENTS.format(folder=tmp_path / "stores"))
    monkeypatch.setenv("ONTOLOGIA_ENVIRONMENTS", str(file))
    loaded = defs()
    main, acme = tmp_path / "stores" / "main", tmp_path / "stores" / "main-acme"
    for folder in (main, acme):
        initialize_storage(str(folder))
    with Session(acme) as session:
        session.emit(shop.OrderPlaced(order_id="acme-1"))  # which no other test lets fail

    def run(job: str) -> Any:
        return loaded.resolve_job_def(job).execute_in_process()

    assert run("ontology_drain_events").success
    assert run("ontology_acme_drain_events").success
    checks = run("ontology_acme_deep_verify").get_asset_check_evaluations()

    for folder, expected in ((main, 0), (acme, 1)):
        with Session(folder) as session:
            assert len(session.list_commits()) == expected
    assert sorted((one.asset_key.to_user_string(), one.passed) for one in checks) == [
        ("acme/voucher", True),
        ("ontology_acme/log", True),
    ]


def test_running_turns_everything_on_and_one_platform_has_what_a_location_needs_once() -> None:
    off, on = build_platform(), build_platform(running=True, handlers=[shop.__name__])
    other = build_platform(storage="ontology_acme", running=True, first=False)

    def states(found: dg.Definitions) -> dict[str, bool]:
        every = [*(found.sensors or []), *(found.schedules or [])]
        return {one.name: one.default_status.value == "RUNNING" for one in every}

    assert set(states(off).values()) == {False}
    assert set(states(on).values()) == {True}
    assert states(on).keys() - states(off).keys() == {
        "default_automation_condition_sensor",
        "ontology_events",
    }
    assert "ontologia_failed_runs" in states(off)
    assert not states(other).keys() & states(on).keys()


def test_observing_an_empty_ontology(ontology: OntologyResource) -> None:
    seen = observe(ontology)

    assert seen.data_version == "0"
    assert facts(seen)["commits"] == 0
    assert facts(seen)["type_count"] == 0


def test_the_data_version_follows_the_head(ontology: OntologyResource) -> None:
    write(ontology, Customer(id="c1", name="Ada"))
    first = observe(ontology)
    write(ontology, Customer(id="c2", name="Bo"), Knows(left_key="c1", right_key="c2", since=3))
    second = observe(ontology)
    write(ontology, Customer(id="c2", name="Bo"))  # nothing new: no commit
    third = observe(ontology)

    assert [seen.data_version for seen in (first, second, third)] == ["1", "2", "2"]
    assert facts(first)["types"] == "- Customer"
    assert facts(second) | {"types": "- Customer\n- Knows", "type_count": 2, "commits": 2} == facts(
        second
    )


def test_commits_carry_the_runtime_id(ontology: OntologyResource) -> None:
    write(ontology, Customer(id="c1", name="Ada"))

    with ontology.repository() as repository:
        [commit] = repository.list_commits()

    assert commit.runtime_id == "test"


def test_observing_an_uninitialised_storage_says_what_to_do(tmp_path: Path) -> None:
    uri = (tmp_path / "nothing").as_uri()

    with pytest.raises(dg.Failure) as caught:
        observe(OntologyResource(storage_uri=uri))

    assert f"onto init --storage-uri {uri}" in (caught.value.description or "")
    assert caught.value.allow_retries is False
    assert caught.value.metadata["error"].value == "UninitializedStorageError"
    assert caught.value.metadata["uri"].value == uri
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_uri_is_a_failure_too() -> None:
    with pytest.raises(dg.Failure, match="unknown scheme"):
        observe(OntologyResource(storage_uri="ftp://somewhere/else"))


def test_every_file_names_the_same_location() -> None:
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = whole["tool"]["dg"]["project"]
    workspace, demo = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"]
    [cloud] = yaml.safe_load((ROOT / "dagster_cloud.yaml").read_text())["locations"]

    assert workspace["python_module"]["location_name"] == project["code_location_name"]
    assert demo["python_module"]["location_name"] == LOCATION
    alone = yaml.safe_load(Path(program.__file__).with_name("workspace.yaml").read_text())
    assert alone["load_from"][0]["python_module"].items() <= demo["python_module"].items()
    assert cloud["location_name"] == project["code_location_name"]
    assert cloud["code_source"]["module_name"] == workspace["python_module"]["module_name"]
    extras = whole["project"]["optional-dependencies"]
    assert any(one.startswith("dagster-dg-cli>=") for one in extras["dagster"])  # `dg` is there


def test_the_workspace_and_a_location_with_types_validate(project: Path) -> None:
    dagster = Path(sys.executable).parent / "dagster"
    workspaces = ["-w", str(ROOT / "workspace.yaml"), "-w", "workspace.yaml"]
    done = run_in(project, dagster, "definitions", "validate", *workspaces)

    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert [line for line in said.splitlines() if "Warning" in line and "ontologia" in line] == []
    assert "code location ontologia" in said
    assert "code location flights" in said
    assert "code location shop" in said


@pytest.mark.parametrize("what", ["yaml", "defs"])
def test_dg_finds_nothing_wrong(what: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(project))
    monkeypatch.syspath_prepend(project)
    for folder in (ROOT, project):
        monkeypatch.chdir(folder)
        done = CliRunner().invoke(cli, ["check", what], catch_exceptions=False)

        assert done.exit_code == 0, done.output
        assert "ontologia_dagster" not in done.output  # no warning of ours


SAMPLE = ROOT / "docs" / "dagster" / "dagster.yaml"


def test_the_sample_instance_is_one(tmp_path: Path) -> None:
    """Loaded as Dagster loads it, and what the docs promise of it is in it."""
    shutil.copy(SAMPLE, tmp_path / "dagster.yaml")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        monitoring = instance.run_monitoring_settings
        pools = instance.get_concurrency_config().pool_config

        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_max_runtime_seconds > 0
        assert monitoring["free_slots_after_run_end_seconds"] > 0
        assert not instance.run_launcher.supports_check_run_worker_health  # as its comment says
        assert instance.run_retries_enabled
        assert pools.default_pool_limit is not None


def test_the_docs_python_example_is_a_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "dagster.md").read_text()
    [example] = [one for one in re.findall(r"```python\n(.*?)```", text, re.S) if "defs =" in one]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "shop.handlers", shop)  # which a reader has
    made: dict[str, Any] = {}

    exec(compile(example, "docs/dagster.md", "exec"), made)
    dg.Definitions.validate_loadable(made["defs"])

    graph = made["defs"].resolve_asset_graph()
    assert graph.get(dg.AssetKey("order")).partitions_def is not None
    assert list(tmp_path.iterdir()) == []


# -- the example ----------------------------------------------------------------------------------


@pytest.fixture
def own_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkout's location, with a storage that is not there yet."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ONTOLOGIA_STORAGE_URI", str(tmp_path / "store"))
    monkeypatch.delenv("ONTOLOGIA_ENV", raising=False)
    return tmp_path / "store"


@pytest.mark.spark
def test_the_example_works_from_the_first_click(own_storage: Path, spark: Any) -> None:
    """All assets at once, on a storage that nobody has made, with what handlers make of their
    events, and an answer of every check; then nothing new."""
    loaded = defs()
    everything = loaded.resolve_implicit_global_asset_job_def()
    first = everything.execute_in_process()
    assert first.success
    planned = set(everything.asset_layer.asset_graph.asset_check_keys)
    answered = {check.asset_check_key for check in first.get_asset_check_evaluations()}
    assert planned - answered == set(), "no check is left without an answer"
    with Session(own_storage) as session:
        counts = {
            name: session.sql(f"select count(*) as n from {name}").collect()[0]["n"]
            for name in ("Customer", "Product", "OrderLine", "Recommended")
        }
        large = {order.order for order in find_large_orders(session)}
        vouchers = session.query().entities(Voucher).collect()
        head = session.snapshot
    data = ROOT / "ontologia_dagster" / "defs" / "shop" / "data"
    lines = {path.name: len(path.read_text().splitlines()) - 1 for path in data.rglob("*.csv")}
    assert counts["Customer"] == lines["customers.csv"]
    assert counts["Product"] == lines["products.csv"]
    assert counts["OrderLine"] == sum(n for name, n in lines.items() if name.startswith("2026-"))
    assert counts["Recommended"] > 5
    assert large
    assert {voucher.order for voucher in vouchers} == large, "events are handled after these"

    assert everything.execute_in_process().success
    assert loaded.resolve_job_def("ontology_drain_events").execute_in_process().success
    with Session(own_storage) as session:
        assert session.snapshot == head


def test_a_location_without_the_example_loads(project: Path) -> None:
    """Everything but the shop; then without types at all."""
    assert handler_modules(ROOT / "ontologia_dagster" / "defs") == [
        "ontologia_dagster.defs.shop.handlers"
    ]
    shutil.rmtree(project / "shop" / "defs" / "orders")
    shutil.rmtree(project / "shop" / "defs" / "customers")
    assert handler_modules(project / "shop" / "defs") == []
    (project / "environments.toml").unlink()
    done = run_in(project, sys.executable, "-c", LOADING)

    assert done.returncode == 0, done.stderr
    assert "ontology_events" not in json.loads(done.stdout)["sensors"]
    assert json.loads(done.stdout)["checks"] == ["ontology/log:deep_verify_log"]


@pytest.mark.parametrize(
    ("table", "uri", "made"),
    [
        ({}, "store", True),
        ({}, "s3://bucket/x", False),  # a wrong name would make an empty one
        ({"name": "staging"}, "store", False),
        ({"name": "production", "production": True}, "store", False),
        ({"name": "staging", "create_storage": True}, "s3://bucket/x", True),
        ({"create_storage": False}, "store", False),
    ],
)
def test_which_storages_are_made_when_they_are_first_used(
    table: dict[str, Any], uri: str, made: bool, tmp_path: Path
) -> None:
    environment = Environment(storage_uri=uri if "://" in uri else str(tmp_path / uri), **table)
    assert environment.creates(environment.uri) is made
    environments = Environments(known={environment.name: environment}, current=environment)
    ontology = location_resources(environments)["ontology"]
    assert ontology.creates_storage is made
    if "://" not in uri:
        expected: Any = nullcontext() if made else pytest.raises(UninitializedStorageError)
        with expected, ontology.repository() as repository:
            assert repository.head_commit_id() == 0


def test_two_that_make_a_storage_at_once_both_have_it(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    ontology = OntologyResource(storage_uri=uri, creates_storage=True)

    def head(_: int) -> int:
        with ontology.repository() as repository:
            return repository.head_commit_id()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(head, range(16))) == [0] * 16
