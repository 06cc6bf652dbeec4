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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.resources.ontology import failure
from ontologia_dagster.resources.secrets import hide_options
from ontologia_dagster.resources.spark import PIPES, SparkResource

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.model.spec import TypeSpec
    from storage_engine.spark.ingest_spec import IngestSpec
    from storage_engine.spark.results import WriteResult

# Exit codes of a program that could not say more: trying again cannot help.
REFUSED = 3
USAGE = 2


def run_ingest(
    context: dg.AssetExecutionContext,
    order: IngestSpec,
    ontology: OntologyResource,
    spark: SparkResource,
    holder: Mapping[str, str],
) -> WriteResult:
    """Write what the order says; at most one commit."""
    if spark.mode == PIPES:
        return _submit_ingest(context, order, ontology, spark)
    from storage_engine.spark.jobs.ingest import ingest

    with _spark_failures(context.instance), ontology.session(holder=holder) as session:
        return ingest(spark.session(), order, session=session, progress=_teller(context))


def find_earlier(
    order: IngestSpec, ontology: OntologyResource, spec: TypeSpec
) -> WriteResult | None:
    """What this very work did before: a step that is tried again then starts no Spark."""
    from storage_engine.repository.protocol import Idempotency
    from storage_engine.spark.results import WriteResult

    assert order.idempotency is not None
    with ontology.repository() as repository:
        applied = repository.applied(Idempotency(*order.idempotency))
        if applied is None:
            return None
        return WriteResult(
            type_name=spec.name,
            commit_id=applied.commit_id,
            type_commit_id=repository.type_head(spec),
            already_applied=True,
        )


def preview_ingest(
    context: dg.AssetExecutionContext,
    order: IngestSpec,
    ontology: OntologyResource,
    spark: SparkResource,
) -> WriteResult:
    """What the order would do, without doing it."""
    if spark.mode == PIPES:
        # Without Pipes: after it Dagster insists on an output, and a preview has none.
        return _submit_ingest(context, order, ontology, spark, "--dry-run", piped=False)
    from storage_engine.spark.jobs.ingest import ingest

    with _spark_failures(context.instance), ontology.session() as session:
        return ingest(spark.session(), order, session=session, dry_run=True)


@contextmanager
def _spark_failures(instance: dg.DagsterInstance) -> Iterator[None]:
    """Spark's own errors: a mistake in an expression or a value is not tried again."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    from storage_engine.spark.jobs.program import describe

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        _, message, more = describe(error)
        name, facts = type(error).__name__, more["facts"]
        raise failure(name, message, facts, more["retryable"], instance) from error


def _teller(context: dg.AssetExecutionContext) -> Any:
    """Logs a stage once, when it begins."""
    told: set[str] = set()

    def tell(progress: Any) -> None:
        if progress.stage not in told:
            told.add(progress.stage)
            context.log.info("%s", progress.stage)

    return tell


def _submit_ingest(
    context: dg.AssetExecutionContext,
    order: IngestSpec,
    ontology: OntologyResource,
    spark: SparkResource,
    *options: str,
    piped: bool = True,
) -> WriteResult:
    from storage_engine.spark.results import WriteResult

    order, secrets = hide_options(order)
    arguments = [*order.to_arguments(), *options]
    result = submit(context, ontology, spark, "ingest", arguments, env=secrets, piped=piped)
    names = {field.name for field in fields(WriteResult)}
    return WriteResult(**{name: value for name, value in result.items() if name in names})


def submit(
    context: dg.AssetExecutionContext | dg.OpExecutionContext,
    ontology: OntologyResource,
    spark: SparkResource,
    program: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    piped: bool = True,
) -> dict[str, Any]:
    """Run one of the programs in `jobs/` to its end; the result that it prints.

    What it reports through Pipes appears in the run, progress and warnings in the step's stderr.
    Its errors become what they would have become here.
    """
    command = spark.command(program, [*arguments, "--json"])
    environment = ontology.child_environment(spark.child_environment(os.environ))
    nothing: AbstractContextManager[Mapping[str, str]] = nullcontext({})
    with _pipes(context) if piped else nothing as bootstrap:
        child = subprocess.Popen(
            command,
            env={**environment, **env, **bootstrap},
            start_new_session=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            printed, _ = child.communicate()
        except BaseException:
            context.log.info(f"ending the Spark driver, process group {child.pid}")
            _end(child, spark.termination_timeout_s)
            raise
    result = _last_json(printed)
    if child.returncode == 0 or result.get("dry_run"):
        return result  # a preview of what would be refused is a preview too
    error = result.get("error", {})
    ended = f"ended with exit code {child.returncode}"
    raise failure(
        str(error.get("type", "unknown")),
        error.get("message") or f"the Spark job {ended}; the step's stderr tells more",
        {"exit_code": child.returncode, **error.get("facts", {})},
        bool(error.get("retryable", child.returncode not in {REFUSED, USAGE})),
        context.instance,
    )


@contextmanager
def _pipes(
    context: dg.AssetExecutionContext | dg.OpExecutionContext,
) -> Iterator[Mapping[str, str]]:
    """What a program must find in its environment to report to this run."""
    with dg.open_pipes_session(
        context=context,
        context_injector=dg.PipesTempFileContextInjector(),
        message_reader=dg.PipesTempFileMessageReader(),
    ) as session:
        yield session.get_bootstrap_env_vars()


def _last_json(printed: str) -> dict[str, Any]:
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            try:
                result: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return result
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
