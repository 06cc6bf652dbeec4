"""Environments: what ONTOLOGIA_ENV selects, what is refused, and that secrets stay secret."""

import json
import logging
from pathlib import Path

import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource

from ontologia_dagster.declaration import asset_specs
from ontologia_dagster.resources.environments import Environments
from ontologia_dagster.resources.ontology import OntologyResource, report_failures
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.storage.storage_defs import build_platforms, location_resources
from storage_engine.errors import ConfigurationError, LockContentionError

FILE = """
[development]
storage_uri = "s3://company/ontology"
prefix = "dev"

[staging]
storage_uri = "s3://company/ontology"
prefix = "staging"

[production]
storage_uri = "s3://company/ontology"
prefix = "live"
engine = {s3_lock_timeout_ms = 20000}
handlers = ["shop.handlers"]

[production.s3]
region = "eu-west-1"
access_key_id_variable = "ACME_KEY_ID"
secret_access_key_variable = "ACME_SECRET"

[production.spark]
mode = "pipes"
master = "spark://master:7077"
config = {"spark.executor.memory" = "8g"}

[production.tenants.acme]
prefix = "live-acme"
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "environments.toml"
    path.write_text(FILE)
    return {"ONTOLOGIA_ENVIRONMENTS": str(path)}


def test_the_environment_selects_storage_prefix_and_spark(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_KEY_ID", "AKIA123")
    monkeypatch.setenv("ACME_SECRET", "s3cr3t-value")
    default = location_resources(Environments.load(variables))
    live = location_resources(Environments.load({**variables, "ONTOLOGIA_ENV": "production"}))

    assert default["ontology"].storage_uri == "s3://company/ontology/dev"
    assert default["spark"].mode == "in_process"
    assert sorted(live) == ["notifier", "ontology", "ontology_acme", "spark"]
    assert live["ontology"].storage_uri == "s3://company/ontology/live"
    assert live["ontology_acme"].storage_uri == "s3://company/ontology/live-acme"
    assert live["ontology"].engine_options == {"s3_lock_timeout_ms": 20000}
    assert (live["spark"].mode, live["spark"].master) == ("pipes", "spark://master:7077")


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("s3://company/ontology/live", "it is production's s3://company/ontology/live"),
        ("s3://company/ontology/live/", "it is production's"),
        ("s3://company/ontology/live/sub", "it is production's"),
        ("s3://company/ontology/live-acme", "it is production's s3://company/ontology/live-acme"),
        ("S3://company//ontology/dev/../live", "it is production's"),
        ("s3://company", "production's s3://company/ontology/live-acme is inside it"),
        ("s3://other/prod/ontology", "its prefix says production"),
        ("/data/production/store", "its prefix says production"),
    ],
)
def test_development_refuses_a_production_prefix(
    variables: dict[str, str], uri: str, why: str
) -> None:
    for name in ("development", "staging"):
        chosen = {**variables, "ONTOLOGIA_ENV": name, "ONTOLOGIA_STORAGE_URI": uri}
        with pytest.raises(ConfigurationError, match=f"the {name} location refuses .* {why}"):
            Environments.load(chosen)


def test_production_may(variables: dict[str, str]) -> None:
    for uri in ("s3://company/ontology/live", "/data/production/store"):
        allowed = {**variables, "ONTOLOGIA_ENV": "production", "ONTOLOGIA_STORAGE_URI": uri}
        current = Environments.load(allowed).current
        assert current.uris == [uri, "s3://company/ontology/live-acme"]  # tenants keep theirs


@pytest.mark.parametrize("production", ["{0}/onto", "file://{0}/onto/", "file://localhost{0}/onto"])
@pytest.mark.parametrize("own", ["{0}/onto", "{0}/x/../onto/", "file://{0}//onto", "{0}/link"])
def test_no_spelling_of_a_path_gets_past_the_guard(
    tmp_path: Path, production: str, own: str
) -> None:
    (tmp_path / "onto").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "onto")
    file = tmp_path / "environments.toml"
    file.write_text(
        f"[development]\nstorage_uri = '{own.format(tmp_path)}'\n"
        f"[production]\nstorage_uri = '{production.format(tmp_path)}'\n"
    )
    with pytest.raises(ConfigurationError, match="it is production's"):
        Environments.load({"ONTOLOGIA_ENVIRONMENTS": str(file)})
    guarded = OntologyResource(
        storage_uri=own.format(tmp_path),
        environment="development",
        guarded=True,
        production_uris=[production.format(tmp_path)],
    )
    with pytest.raises(ConfigurationError, match="refuses"):
        guarded.session()


def test_a_database_file_is_one_file(tmp_path: Path) -> None:
    file = tmp_path / "environments.toml"
    file.write_text(
        f"[development]\nstorage_uri = 'sqlite:///{tmp_path}/onto.db'\n"
        f"[production]\nstorage_uri = '{tmp_path}/onto.db'\n"
    )
    with pytest.raises(ConfigurationError, match="it is production's"):
        Environments.load({"ONTOLOGIA_ENVIRONMENTS": str(file)})


TENANTS = """
[development]
storage_uri = "s3://company/ontology"
prefix = "dev"
[development.tenants.acme]
[development.tenants.blue]
storage_uri = "s3://blue/ontology"

[staging]
storage_uri = "s3://company/ontology"
prefix = "staging"
[staging.tenants.acme]
"""


def test_tenants_are_beside_their_environment_and_apart_from_others(tmp_path: Path) -> None:
    file = tmp_path / "environments.toml"
    file.write_text(TENANTS)
    variables = {"ONTOLOGIA_ENVIRONMENTS": str(file)}

    assert Environments.load(variables).current.uris == [
        "s3://company/ontology/dev",
        "s3://company/ontology/dev-acme",
        "s3://blue/ontology",
    ]
    staging = Environments.load({**variables, "ONTOLOGIA_ENV": "staging"})
    assert staging.current.uri_of("acme") == "s3://company/ontology/staging-acme"

    for wrong in ('prefix = ""', 'prefix = "dev"\ntenants.red.prefix = "dev/red"'):
        file.write_text(TENANTS.replace('prefix = "dev"', wrong))
        with pytest.raises(ConfigurationError, match=r"tenant (acme|red)'s .* is inside the env"):
            Environments.load(variables)


def test_a_secret_that_is_named_and_not_set_is_an_error_that_names_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACME_KEY_ID", "ACME_SECRET", "ONTOLOGIA_WEBHOOK_URL", "HOOK"):
        monkeypatch.delenv(name, raising=False)
    known = Environments.load({**variables, "ONTOLOGIA_ENV": "production"})
    bound = location_resources(known)  # code servers need no secrets

    with (
        pytest.raises(Exception, match='"ACME_KEY_ID" which is not set'),
        bound["ontology"].process_config_and_initialize_cm(),
    ):
        pass
    assert bound["notifier"].process_config_and_initialize().webhook_url is None
    named = known.current.model_copy(update={"webhook_url_variable": "HOOK"})
    told = location_resources(known.model_copy(update={"current": named}))["notifier"]
    with pytest.raises(Exception, match='"HOOK" which is not set'):
        told.process_config_and_initialize()


def test_settings_of_s3_that_nobody_would_follow_are_refused() -> None:
    for settings in ({"use_ssl": False}, {"verify": False}, {"max_attempts": 9}):
        ontology = OntologyResource(storage_uri="s3://bucket", s3=S3Resource(**settings))
        with pytest.raises(ConfigurationError, match=f"S3Resource.{next(iter(settings))} has no"):
            ontology.config()


def test_the_resource_refuses_it_too(variables: dict[str, str]) -> None:
    guarded = OntologyResource(
        storage_uri="s3://company/ontology/live",
        environment="development",
        guarded=True,
        production_uris=["s3://company/ontology/live"],
    )
    with pytest.raises(ConfigurationError, match="the development location refuses"):
        guarded.session()
    with pytest.raises(ConfigurationError, match="refuses"), guarded.repository():
        pass


def test_names_that_are_not_there(variables: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="none of the environments: development, prod"):
        Environments.load({**variables, "ONTOLOGIA_ENV": "qa"})
    with pytest.raises(ConfigurationError, match="is no file"):
        Environments.load({"ONTOLOGIA_ENVIRONMENTS": str(tmp_path / "nowhere.toml")})
    (tmp_path / "environments.toml").write_text("[development]\nstorage = 'x'\n")
    with pytest.raises(ConfigurationError, match=r"\[development\]: storage: Extra inputs"):
        Environments.load(variables)


def test_secrets_are_in_no_log_event_config_or_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACME_KEY_ID", "AKIA-acme-key")
    monkeypatch.setenv("ACME_SECRET", "very-s3cr3t-value")
    ontology = OntologyResource(
        storage_uri=str(tmp_path / "nothing"),
        s3=S3Resource(
            aws_access_key_id=dg.EnvVar("ACME_KEY_ID"),
            aws_secret_access_key=dg.EnvVar("ACME_SECRET"),
        ),
    )
    spark = SparkResource(mode="pipes", master="spark://m:7077")
    seen: dict[str, str] = {}

    @dg.asset
    def ingest(
        context: dg.AssetExecutionContext, ontology: OntologyResource, spark: SparkResource
    ) -> None:
        context.log.info("%r %s", ontology.config(), spark.command("ingest.py", ["--type", "T"]))
        seen.update(ontology.child_environment({}))
        with report_failures(context.instance), ontology.repository():
            pass

    caplog.set_level(logging.DEBUG)
    instance = dg.DagsterInstance.ephemeral()
    result = dg.materialize(
        [ingest],
        resources={"ontology": ontology, "spark": spark},
        instance=instance,
        raise_on_error=False,
    )

    assert not result.success
    assert seen["AWS_SECRET_ACCESS_KEY"] == "very-s3cr3t-value"  # by the environment alone
    record = instance.get_run_by_id(result.run_id)
    assert record is not None
    written = [
        caplog.text,
        json.dumps(record.run_config, default=str),
        str(record.tags),
        *(str(entry) for entry in instance.all_logs(result.run_id)),
    ]
    for text in written:
        assert "very-s3cr3t-value" not in text
        assert "AKIA-acme-key" not in text


def test_a_failure_links_to_the_run_that_holds_the_lock() -> None:
    def failure(run_id: str, instance: dg.DagsterInstance) -> dg.Failure:
        with pytest.raises(dg.Failure) as caught, report_failures(instance):
            raise LockContentionError(
                waited_ms=5, owner_id="dagster", holder={"dagster/run_id": run_id}
            )
        return caught.value

    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.create_run_for_job(
            dg.JobDefinition(graph_def=dg.GraphDefinition("other")),
            status=dg.DagsterRunStatus.STARTED,
        )
        ours, other = failure(run.run_id, instance), failure("unknown", instance)

    assert ours.allow_retries is True
    assert ours.metadata["lock_held_by_run"] == dg.MetadataValue.dagster_run(run.run_id)
    assert other.metadata["lock_held_by_run"].value == "unknown of another instance"


def test_publication_and_branch_are_the_environments(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """For the storage and its tenants, in their resources and their definitions."""
    path = tmp_path / "audited.toml"
    text = FILE.replace('prefix = "dev"', 'prefix = "dev"\npublish = "audited"\nrecheck = true')
    path.write_text(text + "[development.tenants.acme]\n")
    variables = {"ONTOLOGIA_ENVIRONMENTS": str(path)}
    environments = Environments.load(variables)
    resources = location_resources(environments)

    for key in ("ontology", "ontology_acme"):
        assert resources[key].publish == "audited"
        assert resources[key].recheck
        assert resources[key].home == "main"
    built = build_platforms(environments.current, dg.Definitions())
    keys = {spec.key.to_user_string() for spec in asset_specs(built)}
    assert {"ontology_publication", "ontology_acme_publication"} <= keys
    assert built.schedules

    deployed = {"DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT": "1", "DAGSTER_CLOUD_PULL_REQUEST_ID": "9"}
    environments = Environments.load({**variables, **deployed})
    assert location_resources(environments)["ontology"].home == "pr/9"
    assert not build_platforms(environments.current, dg.Definitions()).schedules

    path.write_text(FILE.replace('prefix = "dev"', 'prefix = "dev"\nbranch_retention = "soon"'))
    with pytest.raises(ConfigurationError, match=r"branch_retention.*no duration"):
        Environments.load(variables)
