"""Carries out an ingestion for a step: in this process, or by spark-submit through Pipes.

Both give the same result. Through Pipes the child is the leader of a process group of its own,
which is ended as a whole when the run is cancelled: neither the JVM nor the Python driver in it
outlives the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.spark import PIPES, SparkResource

if TYPE_CHECKING:
    from jobs.orders import IngestOrder
    from ontologia_dagster.resources import OntologyResource
    from storage_engine.model.spec import TypeSpec
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

    with _spark_failures(), ontology.session(holder=holder) as session:
        return ingest(spark.session(), order, session=session, progress=_teller(context))


def earlier(order: IngestOrder, ontology: OntologyResource, spec: TypeSpec) -> WriteResult | None:
    """What this very work did before: a step that is tried again then starts no Spark."""
    from storage_engine.commitlog import state
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.spark.results import WriteResult

    assert order.idempotency is not None
    app_id, version = order.idempotency
    with ontology.repository() as repository:
        if not isinstance(repository, ObjectRepository):
            return None
        head = repository.chain.read_head().head
        mark = state.last_applied(repository.chain, head, app_id)
        if mark is None or not mark.covers(version):
            return None
        return WriteResult(
            type_name=spec.name,
            commit_id=mark.commit_id,
            type_commit_id=repository.type_head(spec),
            already_applied=True,
        )


def look_ahead(
    context: dg.AssetExecutionContext,
    order: IngestOrder,
    ontology: OntologyResource,
    spark: SparkResource,
) -> WriteResult:
    """What the order would do, without doing it."""
    if spark.mode == PIPES:
        return _submitted(context, order, ontology, spark, "--dry-run")
    from jobs.ingest import ingest

    with _spark_failures(), ontology.session() as session:
        return ingest(spark.session(), order, session=session, dry_run=True)


@contextmanager
def _spark_failures() -> Iterator[None]:
    """Spark's own errors: a mistake in an expression or a value is not tried again."""
    from pyspark.errors import PySparkException

    from jobs.boundary import describe

    try:
        yield
    except PySparkException as error:
        code, said, facts = describe(error)
        raise dg.Failure(
            said,
            metadata={"error": type(error).__name__, "condition": str(facts.get("condition"))},
            allow_retries=code not in {REFUSED, USAGE},
        ) from error


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

    # The result is a line of JSON; progress and errors go to stderr, which the run's log has.
    command = spark.command("ingest.py", [*order.to_arguments(), "--json", *options])
    env = {**spark.child_environment(), **ontology.child_environment()}
    said = submit(context, command, env, spark.termination_timeout_s)
    names = {field.name for field in fields(WriteResult)}
    return WriteResult(**{name: value for name, value in said.items() if name in names})


def submit(
    context: dg.AssetExecutionContext | dg.OpExecutionContext,
    command: Sequence[str],
    env: Mapping[str, str],
    termination_timeout_s: float,
) -> dict[str, Any]:
    """Run a program to its end; what it printed last, as JSON.

    What it reports through Pipes appears in the run. A program that refuses its input is not
    tried again; other failures may be.
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
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            printed, _ = child.communicate()
        except BaseException:
            context.log.info(f"ending the Spark driver, process group {child.pid}")
            _end(child, termination_timeout_s)
            raise
    said = _last_json(printed)
    if child.returncode == 0:
        return said
    error = said.get("error", {})
    raise dg.Failure(
        error.get("message") or f"the Spark job ended with exit code {child.returncode}",
        metadata={"exit_code": child.returncode, "error": str(error.get("type", "unknown"))},
        allow_retries=bool(error.get("retryable", child.returncode not in {REFUSED, USAGE})),
    )


def _last_json(printed: str) -> dict[str, Any]:
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return found
    return {}


def _end(child: subprocess.Popen[str], timeout_s: float) -> None:
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
