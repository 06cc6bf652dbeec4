"""Spark for ingestion and large compactions: in this process, or on a cluster through Pipes.

One field decides, the assets are the same. In process, one JVM serves all steps of a run (it
starts when the first step asks for it). Through Pipes, `spark-submit` is started with an argument
list, never a shell, as the leader of a process group of its own, which is ended as a whole when
the run is cancelled: neither the JVM nor the Python driver in it outlives the run. Both ways give
the same result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pydantic import Field, PrivateAttr

import storage_engine
from ontologia_dagster.dagster_compat import FixedResource
from ontologia_dagster.resources.ontology import failure
from ontologia_dagster.resources.secrets import hide_options, is_secret
from storage_engine.errors import BadRowsError, ConfigurationError
from storage_engine.spark.jobs import program
from storage_engine.spark.jobs.program import SPARK_CONFIG, is_reference, revealed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.model.spec import TypeSpec
    from storage_engine.spark.ingest_spec import IngestSpec
    from storage_engine.spark.results import WriteResult

IN_PROCESS: Literal["in_process"] = "in_process"
PIPES: Literal["pipes"] = "pipes"
_LAUNCHER = Path(program.__file__).with_name("__main__.py")
_ROOT = Path(storage_engine.__file__).parents[1]
# Exit codes of a program that could not say more: trying again cannot help.
REFUSED = 3
USAGE = 2


class SparkResource(FixedResource, LazyPySparkResource):
    """Spark, started when it is first used."""

    mode: Literal["in_process", "pipes"] = Field(
        default=IN_PROCESS, description="pipes: one spark-submit for each step"
    )
    master: str | None = Field(
        default=None, description="local[2], spark://host:7077, yarn, k8s://...; Spark's own choice"
    )
    app_name: str = "ontologia"
    spark_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of Spark; a value env:NAME is read from the environment",
    )
    spark_submit: str | None = Field(
        default=None, description="The program; PySpark's own unless told"
    )
    submit_arguments: list[str] = Field(
        default_factory=list, description="Further arguments of spark-submit, such as --py-files"
    )
    termination_timeout_s: float = Field(
        default=20.0, description="How long a cancelled driver may take before it is killed"
    )

    _session: Any = PrivateAttr(default=None)

    @property
    def spark_session(self) -> Any:
        """With what executors need set as the engine's own sessions have it."""
        if self._session is None:
            from storage_engine.spark import spark_session

            self._session = spark_session(self.app_name, master=self.master, config=self.settings())
        return self._session

    @property
    def spark_context(self) -> Any:
        return self.spark_session.sparkContext

    def settings(self) -> dict[str, str]:
        """All settings, with what references stand for."""
        return {
            name: revealed(f"spark_config.{name}", str(value))
            for name, value in self.spark_config.items()
        }

    def session(self) -> SparkSession:
        started: SparkSession = self.spark_session
        return started

    def command(self, job: str, arguments: Sequence[str]) -> list[str]:
        """spark-submit for one of the programs of `storage_engine.spark.jobs`. Everybody on the
        machine can read it: secrets go by the environment."""
        options = ["--name", self.app_name]
        if self.master:
            options += ["--master", self.master]
        hidden = self._hidden()
        for name, value in sorted(self.spark_config.items()):
            if name not in hidden:
                options += ["--conf", f"{name}={value}"]
        for argument in self.submit_arguments:
            name, equals, _ = argument.partition("=")
            if equals and is_secret(name):
                raise ConfigurationError(
                    f"submit_arguments hold {name}, which a command line would show: give it in "
                    "spark_config, best as env:NAME"
                )
        return [
            self.spark_submit or str(_pyspark_home() / "bin" / "spark-submit"),
            *options,
            *self.submit_arguments,
            str(_LAUNCHER),
            job,
            *arguments,
        ]

    def child_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment that is inherited, so that the driver and its workers run our own
        interpreter, find our packages, and have the settings that `command` leaves out."""
        paths = [str(_ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
        settings, hidden = self.settings(), self._hidden()
        return {
            **inherited,
            "SPARK_HOME": inherited.get("SPARK_HOME") or str(_pyspark_home()),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(paths),
            SPARK_CONFIG: json.dumps({name: settings[name] for name in hidden}),
        }

    def _hidden(self) -> list[str]:
        """Settings that are secrets, by their names or as references."""
        return [
            name
            for name, value in self.spark_config.items()
            if is_secret(name) or is_reference(str(value))
        ]


def _pyspark_home() -> Path:
    """Without importing it: that costs, and starts nothing here."""
    from importlib.util import find_spec

    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


# -- what a step has done -------------------------------------------------------------------------


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

    with (
        _spark_failures(context.instance),
        ontology.session(holder=holder, branch=order.branch) as session,
    ):
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
            context.log.debug("%s", progress.stage)

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
    if error.get("type") == BadRowsError.__name__:
        raise _bad_rows(error)
    raise failure(
        str(error.get("type", "unknown")),
        error.get("message") or f"the Spark job {ended}; the step's stderr tells more",
        {"exit_code": child.returncode, **error.get("facts", {})},
        bool(error.get("retryable", child.returncode not in {REFUSED, USAGE})),
        context.instance,
    )


def _bad_rows(error: Mapping[str, Any]) -> BadRowsError:
    """As it was raised there: whoever asked tells what became of expectations."""
    facts = error.get("facts", {})
    names = ("type", "rows", "reasons", "examples")
    return BadRowsError(str(error.get("message")), **{name: facts[name] for name in names})


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
