"""What people meet in both locations of the workspace: names, descriptions, launchpads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._config import ConfigType
from dagster._core.snap.snap_to_yaml import default_values_yaml_from_type_snap

from ontologia_dagster import STORAGE
from ontologia_dagster.definitions import defs
from ontologia_dagster.demo.definitions import demo_definitions
from ontologia_dagster.demo.instance import STORAGE as FLIGHTS

LOCATIONS = {STORAGE: defs, FLIGHTS: demo_definitions}
# Of the location, whichever storages it has; the last is Dagster's own.
SHARED = {"ontologia_failed_runs", "default_automation_condition_sensor"}
NOTHING: dict[str, Any] = {"io_manager": {"config": {}}}
# What deletes asks to be told so.
DELETING = {"collect_garbage"}


@pytest.fixture(scope="module", params=LOCATIONS)
def location(request: pytest.FixtureRequest) -> Iterator[tuple[str, dg.RepositoryDefinition]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[2])
        yield request.param, LOCATIONS[request.param]().get_repository_def()


def jobs_of(repository: dg.RepositoryDefinition) -> list[dg.JobDefinition]:
    return [job for job in repository.get_all_jobs() if not job.name.startswith("__")]


def test_everything_has_a_description(location: tuple[str, dg.RepositoryDefinition]) -> None:
    _, repository = location
    graph = repository.asset_graph
    described: dict[str, str | None] = {
        **{f"job {job.name}": job.description for job in jobs_of(repository)},
        **{f"schedule {each.name}": each.description for each in repository.schedule_defs},
        **{f"sensor {each.name}": each.description for each in repository.sensor_defs},
        **{
            f"asset {key.to_user_string()}": graph.get(key).description
            for key in graph.get_all_asset_keys()
        },
        **{
            f"check {key.to_user_string()}": graph.get(key).description
            for key in graph.asset_check_keys
        },
        **{
            f"config {job.name}: {path}": field.description
            for job in jobs_of(repository)
            for path, field in config_fields(job)
        },
    }
    assert len(described) > 40
    # Dagster's own sensor takes none.
    shared = "sensor default_automation_condition_sensor"
    assert [name for name, text in described.items() if not text and name != shared] == []


def test_names_of_a_storage_begin_with_it(location: tuple[str, dg.RepositoryDefinition]) -> None:
    storage, repository = location
    names = [
        *(job.name for job in jobs_of(repository)),
        *(each.name for each in repository.schedule_defs),
        *(each.name for each in repository.sensor_defs),
    ]
    assert [n for n in names if not n.startswith(f"{storage}_") and n not in SHARED] == []


def test_launchpads_offer_what_a_person_may_choose(
    location: tuple[str, dg.RepositoryDefinition],
) -> None:
    """Not where the storage is, whether production is guarded, or how steps are executed."""
    _, repository = location
    whole = repository.get_all_jobs()
    assert len(whole) > 10
    for job in whole:
        offered = launchpad(job)
        assert offered.keys() <= {"ops", "resources"}, job.name
        # Dagster's own, of which nothing has to be said.
        assert (offered.get("resources") or NOTHING) == NOTHING, job.name


def test_what_deletes_only_shows_unless_it_is_told(
    location: tuple[str, dg.RepositoryDefinition],
) -> None:
    storage, repository = location
    for name in DELETING:
        op = f"{storage}_{name}"
        [job] = [job for job in jobs_of(repository) if op in job.graph.node_dict]
        assert launchpad(job)["ops"][op]["config"]["dry_run"] is True
        first = next(iter(dict(config_fields(job))))
        assert first.endswith(".dry_run")  # before anything else that can be said


def launchpad(job: dg.JobDefinition) -> dict[str, Any]:
    """What it shows before anything is typed into it."""
    snapshot = job.get_job_snapshot()
    schema = snapshot.config_schema_snapshot
    root = schema.get_config_snap(str(snapshot.mode_def_snaps[0].root_config_key))
    shown: dict[str, Any] = yaml.safe_load(default_values_yaml_from_type_snap(schema, root))
    return shown


def root_of(job: dg.JobDefinition) -> ConfigType:
    return job.run_config_schema.config_type


def config_fields(job: dg.JobDefinition) -> Iterator[tuple[str, Any]]:
    """The members of all ops' config, as a launchpad shows them."""
    ops: Any = root_of(job).fields["ops"].config_type  # type: ignore[attr-defined]
    for name, op in ops.fields.items():
        config = op.config_type.fields.get("config")
        for member, field in getattr(getattr(config, "config_type", None), "fields", {}).items():
            yield f"{name}.{member}", field
