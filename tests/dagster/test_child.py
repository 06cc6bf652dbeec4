"""What a process that is started through Pipes gets: the storage's configuration, who to be, and
secrets, none of them by its command line; and what becomes of its errors. Spark is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource

from ontologia_dagster.ingestion.asset import ingest_spec, ingestion_asset
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.resources.secrets import hide_options, is_secret
from ontologia_dagster.resources.spark import SparkResource
from storage_engine.errors import ConfigurationError
from storage_engine.objectstore.s3 import S3Settings
from storage_engine.spark.jobs.program import spark_config, storage_config
from tests.dagster import driver
from tests.dagster.world import customers, storage

URI = "s3://company/ontology"
INHERITED = {
    "PATH": "/bin",
    "AWS_ACCESS_KEY_ID": "of-somebody-else",
    "AWS_SECRET_ACCESS_KEY": "of-somebody-else",
    "AWS_SESSION_TOKEN": "of-somebody-else",
    "AWS_ROLE_ARN": "of-somebody-else",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "of-somebody-else",
    "AWS_PROFILE": "of-somebody-else",
}


@pytest.mark.parametrize(
    ("given", "who"),
    [
        ({}, {name: value for name, value in INHERITED.items() if name != "PATH"}),
        ({"profile_name": "acme"}, {"AWS_PROFILE": "acme"}),
        (
            {"aws_access_key_id": "AKIA1", "aws_secret_access_key": "hush"},
            {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "hush"},
        ),
        (
            {
                "aws_access_key_id": "AKIA1",
                "aws_secret_access_key": "hush",
                "aws_session_token": "tok",
            },
            {
                "AWS_ACCESS_KEY_ID": "AKIA1",
                "AWS_SECRET_ACCESS_KEY": "hush",
                "AWS_SESSION_TOKEN": "tok",
            },
        ),
    ],
)
def test_the_child_opens_the_storage_as_we_do(given: dict[str, Any], who: dict[str, str]) -> None:
    ontology = OntologyResource(
        storage_uri=URI,
        runtime_id="nightly",
        engine_options={"s3_lock_timeout_ms": 20_000, "cache_dir": "/tmp/cache"},
        s3=S3Resource(endpoint_url="http://minio:9000", region_name="eu-west-1", **given),
    )

    child = ontology.child_environment(INHERITED)

    assert storage_config(child) == ontology.config()
    there = S3Settings.resolve(storage_config(child), child)
    assert there == S3Settings.resolve(ontology.config(), INHERITED)
    # Other programs in it, such as Hadoop's s3a, are nobody else either.
    identity = {name: value for name, value in child.items() if name in INHERITED}
    assert identity == {"PATH": "/bin", **who}
    assert child["AWS_ENDPOINT_URL_S3"] == "http://minio:9000"
    assert child["AWS_ALLOW_HTTP"] == "true"
    plain = OntologyResource(storage_uri=URI).child_environment(INHERITED)
    assert storage_config(plain) == OntologyResource(storage_uri=URI).config()
    assert {name: plain[name] for name in INHERITED} == INHERITED
    with pytest.raises(ConfigurationError, match=r"^ONTOLOGIA_JOB_CONFIG is not a JSON object$"):
        storage_config({"ONTOLOGIA_JOB_CONFIG": '"hush"'})


def test_secrets_of_spark_and_of_sources_are_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_PROXY", "proxy-with-hush")
    spark = SparkResource(
        mode="pipes",
        spark_config={
            "spark.executor.memory": "8g",
            "spark.hadoop.fs.s3a.access.key": "AKIA1",
            "spark.hadoop.fs.s3a.secret.key": "hush-s3a",
            "spark.hadoop.fs.azure.account.key.acme": "hush-azure",
            "spark.ssl.keyPassword": "hush-ssl",
            "spark.proxy": "env:ACME_PROXY",
        },
    )
    command = spark.command("ingest.py", ["--type", "Customer"])
    assert "spark.executor.memory=8g" in command
    assert not any("hush" in one or "AKIA1" in one or "ACME" in one for one in command)
    assert spark_config(spark.child_environment({})) == {
        "spark.hadoop.fs.s3a.access.key": "AKIA1",
        "spark.hadoop.fs.s3a.secret.key": "hush-s3a",
        "spark.hadoop.fs.azure.account.key.acme": "hush-azure",
        "spark.ssl.keyPassword": "hush-ssl",
        "spark.proxy": "proxy-with-hush",
    }
    assert spark.settings()["spark.proxy"] == "proxy-with-hush"  # in process
    monkeypatch.delenv("ACME_PROXY")
    with pytest.raises(ConfigurationError, match="the environment variable ACME_PROXY"):
        spark.settings()
    told = ["--conf", "spark.hadoop.fs.s3a.secret.key=hush"]
    with pytest.raises(ConfigurationError, match="submit_arguments hold spark") as caught:
        SparkResource(mode="pipes", submit_arguments=told).command("ingest.py", [])
    assert "hush" not in str(caught.value)

    declared = customers(tmp_path)
    source = {"password": "hush", "user": "ada", "token": "env:TOKEN"}
    update = {"source": declared.source.model_copy(update={"options": source})}
    order, _ = ingest_spec(declared.model_copy(update=update), URI, [])
    shown, variables = hide_options(order)
    assert "hush" not in " ".join(shown.to_arguments())
    assert variables == {"ONTOLOGIA_JOB_OPTION_0": "hush"}
    assert shown.source.options == {**source, "password": "env:ONTOLOGIA_JOB_OPTION_0"}
    database = {
        "format": "jdbc",
        "paths": ["jdbc:h2:mem:x;PASSWORD=hush"],
        "options": {"dbtable": "customer"},
    }
    update = {"source": declared.source.model_copy(update=database)}
    order, _ = ingest_spec(declared.model_copy(update=update), URI, [])
    with pytest.raises(ConfigurationError, match=r"source\.options\.PASSWORD as env:NAME"):
        hide_options(order)
    assert not is_secret("spark.sql.shuffle.partitions")


class Driver:
    """The customers asset, with a driver that does as it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instance = dg.DagsterInstance.ephemeral()
        self._folder, self._patch = folder, monkeypatch
        self.ontology = storage(folder, runtime_id="nightly")
        self._spark = SparkResource(
            mode="pipes",
            spark_submit=driver.executable(folder),
            spark_config={"spark.hadoop.fs.s3a.secret.key": "hush"},
        )
        monkeypatch.setenv("TEST_FOLDER", str(folder))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def run(self, how: str, **config: Any) -> Any:
        self._patch.setenv("TEST_DRIVER", how)
        return dg.materialize(
            [ingestion_asset(customers(self._folder, retry={"max_retries": 0}))],
            resources={"ontology": self.ontology, "spark": self._spark},
            instance=self.instance,
            run_config={"ops": {"customer": {"config": config}}},
            raise_on_error=False,
        )

    def failure(self, how: str) -> tuple[Any, bool]:
        """What is said of it, and whether it might have been tried again."""
        [event] = self.run(how).get_step_failure_events()
        data = event.step_failure_data
        return data.user_failure_data, "Exceeded max_retries" in data.error.message


def test_errors_of_the_child_are_what_they_are_in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Driver(tmp_path, monkeypatch)
    holding = made.instance.create_run_for_job(
        dg.JobDefinition(graph_def=dg.GraphDefinition("other")),
        status=dg.DagsterRunStatus.STARTED,
    )
    monkeypatch.setenv(driver.HOLDER, holding.run_id)

    contended, again = made.failure("contended")
    refused, refused_again = made.failure("refused")
    gone, gone_again = made.failure("gone")
    assert made.run("well").success

    said = {name: value.value for name, value in contended.metadata.items()}
    assert contended.metadata["lock_held_by_run"] == dg.MetadataValue.dagster_run(holding.run_id)
    assert said["error"] == "LockContentionError"
    assert (said["waited_ms"], said["owner_id"], said["exit_code"]) == (7, "somebody", 5)
    assert "held by 'somebody'" in contended.description
    assert refused.metadata["error"].value == "ValidationError"
    assert refused.metadata["field"].value == "name"
    assert "ended with exit code 9" in gone.description
    assert (again, refused_again, gone_again) == (True, False, True)

    seen = driver.seen(tmp_path)
    assert seen["runtime_id"] == "nightly"
    assert seen["spark"] == {"spark.hadoop.fs.s3a.secret.key": "hush"}
    assert not any("hush" in one for one in seen["command"])


def test_a_preview_by_the_child_writes_and_materialises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Driver(tmp_path, monkeypatch).run("well", dry_run=True)

    assert result.success
    assert "--dry-run" in driver.seen(tmp_path)["command"]
    assert result.get_asset_materialization_events() == []
    [observed] = result.get_asset_observation_events()
    counted = observed.asset_observation_data.asset_observation.metadata
    assert counted["preview_rows_inserted"].value == 3
