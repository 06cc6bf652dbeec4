"""Carries out an ingestion for a step: in this process, or by spark-submit through Pipes.

Both give the same result. Through Pipes the child is the leader of a process group of its own,
which is ended as a whole when the run is cancelled: neither the JVM nor the Python driver in it
outlives the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.spark import PIPES, SparkResource

if TYPE_CHECKING:
    from jobs.orders import IngestOrder
    from ontologia_dagster.resources import OntologyResource
    from storage_engine.spark.results import WriteResult

REFUSED = 3  # exit code: the data or the schema; trying again cannot help
USAGE = 2


def carry_out(
    context: dg.AssetExecutionContext,
    order: IngestOrder,
    ontology: OntologyResource,
    spark: SparkResource,
    holder: Mapping[str, str],
) -> WriteResult:
    """Write what the order says; at most one commit."""
    if spark.mode == PIPES:
        return _submitted(context, order, ontology, spark)
    from jobs.ingest import ingest

    with ontology.session(holder=holder) as session:
        return ingest(spark.session(), order, session=session, progress=_teller(context))


def look_ahead(
    context: dg.AssetExecutionContext,
    order: IngestOrder,
    ontology: OntologyResource,
    spark: SparkResource,
) -> WriteResult:
    """What the order would do, without doing it."""
    if spark.mode == PIPES:
        return _submitted(context, order, ontology, spark, "--dry-run")
    from jobs.ingest import preview

    with ontology.session() as session:
        return preview(spark.session(), order, session=session)


def _teller(context: dg.AssetExecutionContext) -> Any:
    """Logs a stage once, when it begins."""
    told: set[str] = set()

    def tell(progress: Any) -> None:
        if progress.stage not in told:
            told.add(progress.stage)
            context.log.info("%s", progress.stage)

    return tell


def _submitted(
    context: dg.AssetExecutionContext,
    order: IngestOrder,
    ontology: OntologyResource,
    spark: SparkResource,
    *options: str,
) -> WriteResult:
    from storage_engine.spark.results import WriteResult

    command = spark.command("ingest.py", [*order.to_arguments(), *options])
    env = {**spark.child_environment(), **ontology.child_environment()}
    messages = submit(context, command, env, spark.termination_timeout_s)
    results = [message for message in messages if "type_commit_id" in message]
    if not results:
        raise dg.Failure(
            "the Spark job ended without saying what it wrote; its output says more",
            allow_retries=True,
        )
    names = {field.name for field in fields(WriteResult)}
    return WriteResult(**{name: value for name, value in results[-1].items() if name in names})


def submit(
    context: dg.AssetExecutionContext | dg.OpExecutionContext,
    command: Sequence[str],
    env: Mapping[str, str],
    termination_timeout_s: float,
) -> list[Mapping[str, Any]]:
    """Run a program to its end; what it reported as custom messages.

    A program that refuses its input is not tried again; other failures may be.
    """
    with dg.open_pipes_session(
        context=context,
        context_injector=dg.PipesTempFileContextInjector(),
        message_reader=dg.PipesTempFileMessageReader(),
    ) as pipes:
        child = subprocess.Popen(
            list(command),
            env={**os.environ, **env, **pipes.get_bootstrap_env_vars()},
            start_new_session=True,
        )
        try:
            code = child.wait()
        except BaseException:
            context.log.info("ending the Spark driver, process group %d", child.pid)
            _end(child, termination_timeout_s)
            raise
    if code != 0:
        raise dg.Failure(
            f"the Spark job ended with exit code {code}",
            metadata={"exit_code": code},
            allow_retries=code not in {REFUSED, USAGE},
        )
    return [message for message in pipes.get_custom_messages() if isinstance(message, Mapping)]


def _end(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Ask the whole group to end, then make it."""
    for sent, patience in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(child.pid, sent)
        except ProcessLookupError:
            return
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            continue
