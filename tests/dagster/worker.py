"""A run of the orders asset in a process of its own: to be killed or cancelled.

python -m tests.dagster.worker HOME FOLDER MASTER killed|slow

MASTER is a cluster's, to which Pipes submits, or `in_process`.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import dagster as dg

from ontologia_dagster.declaration import (
    OntologyAsset,
    PartitionSpec,
    RetrySpec,
    SourceSpec,
)
from ontologia_dagster.ingestion import asset as ingestion
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.resources.spark import SparkResource, run_ingest
from tests.dagster.world import MODELS

IN_PROCESS = "in_process"
RANGE = {
    "dagster/asset_partition_range_start": "2013-01-01",
    "dagster/asset_partition_range_end": "2013-02-01",
}
MARK = "slow-transform-began"


def declared(folder: Path, *, slow: bool = False) -> OntologyAsset:
    return OntologyAsset(
        type="Order",
        models=MODELS,
        source=SourceSpec(format="csv", paths=[str(folder / "orders.csv")]),
        columns={"day": "CAST(day AS DATE)", "total": "CAST(total AS BIGINT)"},
        transform="tests.dagster.worker:sleep" if slow else None,
        partitions=PartitionSpec(kind="monthly", field="day", start="2013-01-01", end="2013-04-01"),
        backfill="single_run",
        retry=RetrySpec(max_retries=0),
    )


def sleep(frame: Any) -> Any:
    """In the Spark driver: long enough to be cancelled."""
    Path(os.environ["TEST_FOLDER"], MARK).write_text(str(os.getpid()))
    time.sleep(120)
    return frame


def definitions(folder: Path, master: str, *, slow: bool = False) -> dg.Definitions:
    asset = ingestion.ingestion_asset(declared(folder, slow=slow))
    return dg.Definitions(
        assets=[asset],
        jobs=[
            dg.define_asset_job(
                "ingest_order", selection=[asset], executor_def=dg.in_process_executor
            )
        ],
        resources={
            "ontology": OntologyResource(storage_uri=str(folder / "store")),
            "spark": SparkResource(
                mode="in_process" if master == IN_PROCESS else "pipes",
                master="local[1]" if master == IN_PROCESS else master,
                spark_config={
                    "spark.ui.enabled": "false",
                    "spark.log.level": "ERROR",
                    "spark.sql.shuffle.partitions": "2",
                    "spark.driver.host": "127.0.0.1",
                    "spark.driver.bindAddress": "127.0.0.1",
                    "spark.cores.max": "1",
                    "spark.executor.memory": "512m",
                },
                termination_timeout_s=10.0,
            ),
        },
    )


def job(folder: str, master: str, slow: bool) -> dg.JobDefinition:
    return definitions(Path(folder), master, slow=slow).resolve_job_def("ingest_order")


def reconstructable(folder: str, master: str, *, slow: bool) -> Any:
    arguments: Any = (folder, master, slow)
    return dg.build_reconstructable_job(
        "tests.dagster.worker", "job", reconstructable_args=arguments
    )


def main() -> None:
    home, folder, master, how = sys.argv[1:]
    os.environ["TEST_FOLDER"] = folder
    if how == "killed":

        def dies_after(*args: Any, **kwargs: Any) -> Any:
            run_ingest(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        vars(ingestion)["run_ingest"] = dies_after
    with dg.DagsterInstance.from_config(home) as instance:
        made = reconstructable(folder, master, slow=how == "slow")
        run = instance.create_run_for_job(made.get_definition(), tags=RANGE)
        from dagster._core.execution.api import execute_run

        execute_run(made, run, instance)


if __name__ == "__main__":
    main()
