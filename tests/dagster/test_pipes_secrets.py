"""Ingestion and compaction by real drivers through Pipes, on S3 with credentials of its
own: what they do, and that no secret is to be seen anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource

from ontologia_dagster.ingestion.asset import ingestion_asset
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.storage.maintenance import compaction_job
from storage_engine import initialize_storage
from tests.dagster.shop import Customer
from tests.dagster.world import customers, facts, materialisations, rows, version
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, S3Server

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PASSWORD = "hush-of-the-source"
SECRETS = (ACCESS_KEY, SECRET_KEY, PASSWORD)


@contextmanager
def command_lines(uri: str) -> Iterator[set[str]]:
    """Of all processes that name the storage while this is open."""
    found: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if uri in line:
                    found.add(line)
            time.sleep(0.5)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def spark(events: Path) -> SparkResource:
    return SparkResource(
        mode="pipes",
        master="local[1]",
        spark_config={
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            "spark.sql.shuffle.partitions": "1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": events.as_uri(),
            "spark.hadoop.fs.s3a.access.key": ACCESS_KEY,
            "spark.hadoop.fs.s3a.secret.key": "env:ACME_SECRET",
        },
    )


def test_ingestion_and_compaction_with_secrets_that_nobody_sees(
    tmp_path: Path, seaweedfs_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"s3://{seaweedfs_s3.make_bucket()}/store"
    initialize_storage(uri, config=seaweedfs_s3.config())
    given = {"endpoint_url": seaweedfs_s3.endpoint, "region_name": REGION}
    monkeypatch.setenv("ACME_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("ACME_SECRET", SECRET_KEY)
    # Whoever inherits these gets nowhere.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "of-somebody-else")
    ontology = OntologyResource(
        storage_uri=uri,
        runtime_id="nightly",
        s3=S3Resource(
            aws_access_key_id=dg.EnvVar("ACME_KEY_ID"),
            aws_secret_access_key=dg.EnvVar("ACME_SECRET"),
            **given,  # type: ignore[arg-type]
        ),
    )
    ours = OntologyResource(
        storage_uri=uri,
        s3=S3Resource(
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            **given,  # type: ignore[arg-type]
        ),
    )
    declared = customers(tmp_path)
    options = {"options": {"password": PASSWORD}}
    declared = declared.model_copy(update={"source": declared.source.model_copy(update=options)})
    (tmp_path / "home").mkdir()
    (tmp_path / "events").mkdir()
    bound = {"ontology": ontology, "spark": spark(tmp_path / "events")}

    with (
        dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance,
        command_lines(uri) as commands,
    ):
        ingested = dg.materialize([ingestion_asset(declared)], resources=bound, instance=instance)
        with ours.session() as session:
            session.ensure(Customer(id="c2", name="Bob"))
        compacted = compaction_job("ontology", []).execute_in_process(
            instance=instance,
            resources=bound,
            run_config={
                "ops": {
                    "ontology_compact_types": {"config": {"min_entries": 2, "spark_above_bytes": 1}}
                }
            },
        )

    [made] = materialisations(ingested)
    assert (version(made), facts(made.metadata)["rows_inserted"]) == ("1", 2)
    with ours.repository() as repository:
        first = repository.get_commit(1)
        assert first is not None
        assert (first.runtime_id, first.metadata["dagster/run_id"]) == ("nightly", ingested.run_id)

    [event] = [e for e in compacted.all_events if e.is_successful_output]
    said = facts(event.step_output_data.metadata)
    [plan], [done] = rows(said["plan"]), rows(said["done"])
    assert (plan["type"], plan["runs"], plan["by_spark"]) == ("Customer", 1, 1)
    assert (done["type"], done["commits"], done["outcome"]) == ("Customer", "1-2", "published")
    assert said["rows_rewritten"] == 3
    figures = {row["figure"]: (row["before"], row["after"]) for row in rows(said["before_after"])}
    assert figures["entries"] == (2, 1)

    applications = [file.read_text() for file in (tmp_path / "events").rglob("*") if file.is_file()]
    for name in ("ingest", "compact"):  # both by Spark, each in a process of its own
        assert any(f"ontologia {name}" in one for one in applications)
        assert any(f"jobs/__main__.py {name}" in line for line in commands)
    home = {file: file.read_bytes() for file in (tmp_path / "home").rglob("*") if file.is_file()}
    assert any(file.suffix == ".err" and b"ingest Customer" in text for file, text in home.items())
    assert any(b"ASSET_MATERIALIZATION" in text for text in home.values())
    for secret in SECRETS:
        assert not [line for line in commands if secret in line]
        assert not [file for file, text in home.items() if secret.encode() in text]
        assert not [one for one in applications if secret in one]
