"""The code location loads without a storage, and observing the head tells the truth."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from click.testing import CliRunner
from dagster_dg_cli.cli import cli

from ontologia_dagster.definitions import defs
from ontologia_dagster.head import head_asset
from ontologia_dagster.resources import OntologyResource, default_storage_uri
from storage_engine import Entity, Field, Relation, initialize_storage

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
    definitions = dg.Definitions(
        assets=[head],
        jobs=[dg.define_asset_job("observe_head", selection=[head])],
        resources={"ontology": ontology},
    )
    result = definitions.resolve_job_def("observe_head").execute_in_process()
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

    for module in ("repository.open", "repository.initialize"):
        monkeypatch.setattr(f"storage_engine.{module}.open_store", opened)
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

    assert default_storage_uri() == str(tmp_path / ".ontologia" / "store")


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dg"]["project"]
    [workspace] = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"]
    [cloud] = yaml.safe_load((ROOT / "dagster_cloud.yaml").read_text())["locations"]

    assert workspace["python_module"]["location_name"] == project["code_location_name"]
    assert cloud["location_name"] == project["code_location_name"]
    assert cloud["code_source"]["module_name"] == workspace["python_module"]["module_name"]


def test_the_workspace_validates(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "dagster"
    done = subprocess.run(
        [program, "definitions", "validate", "-w", "workspace.yaml"],
        cwd=ROOT,
        env={
            "DAGSTER_HOME": str(tmp_path),
            "HOME": str(tmp_path),
            "PATH": str(program.parent),
            "PYTHONWARNINGS": "default",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    ours = [line for line in said.splitlines() if "Warning" in line and "ontologia_dagster" in line]
    assert ours == []


@pytest.mark.parametrize("what", ["yaml", "defs"])
def test_dg_finds_nothing_wrong(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)

    done = CliRunner().invoke(cli, ["check", what], catch_exceptions=False)

    assert done.exit_code == 0, done.output
