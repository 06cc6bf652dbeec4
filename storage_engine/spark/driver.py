"""What readers and writers begin with: a Spark session with the settings that Ontologia relies on,
an opened storage, a type in it, a point in its history, and the jobs of a write.

The jobs of one write are named, watched, and cancelled when it cannot be published.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError, UnknownBranchError
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.query.reference import Reference, checked_reference
from storage_engine.repository.open import open_repository
from storage_engine.repository.protocol import Repository
from storage_engine.runtime.arguments import declared_types
from storage_engine.runtime.branches import branches_of, named_elsewhere
from storage_engine.runtime.core import internals
from storage_engine.runtime.session import Session, session_on
from storage_engine.spark.results import Stage, WriteProgress
from storage_engine.spark.schema import type_spec

_SHOWN = 20  # names in a message


@contextmanager
def opened(
    source: Session | str,
    config: OntologiaConfig | None = None,
    *,
    branch: str | None = None,
    as_of: Reference | None = None,
) -> Iterator[Repository]:
    """The storage of a session, or the one at a URI, which is closed afterwards.

    On `branch`, if one is given; where `as_of` is a commit of another one (`run/42@17`), on that.
    """
    if isinstance(source, Session):
        with _on_branch(source.repository, branch, as_of) as repository:
            yield repository
        return
    own = open_repository(source, config, branch=branch)
    try:
        with _on_branch(own, None, as_of) as repository:
            yield repository
    finally:
        own.close()


@contextmanager
def _on_branch(
    repository: Repository, branch: str | None, as_of: Reference | None
) -> Iterator[Repository]:
    with ExitStack() as others:
        if branch not in (None, repository.branch):
            repository = others.enter_context(branches_of(repository).opened(str(branch)))
        if isinstance(as_of, str) and (name := named_elsewhere(repository, as_of)) is not None:
            repository = others.enter_context(branches_of(repository).opened(name))
        yield repository


@contextmanager
def on_branch(session: Session, branch: str | None) -> Iterator[Session]:
    """The session itself, or one like it on another branch, beside it."""
    if branch in (None, session.branch):
        yield session
        return
    settings = internals(session).settings.fresh()
    with _on_branch(session.repository, branch, None) as repository:
        yield session_on(repository, settings)


def incarnation_of(repository: Repository) -> str:
    """Which branch of its name it is; empty: main."""
    objects = repository.objects
    return objects.chain.incarnation if objects is not None else ""


class SameBranch:
    """Holds those who open a branch by its name, again and again, to the one that they found
    first: another that was made under that name has nothing of what they wrote or read before."""

    def __init__(self, incarnation: str | None = None) -> None:
        self._incarnation = incarnation

    def check(self, repository: Repository) -> None:
        """UnknownBranchError when it is another one."""
        incarnation = incarnation_of(repository)
        if self._incarnation is None:
            self._incarnation = incarnation
        elif self._incarnation != incarnation:
            raise UnknownBranchError(repository.branch, gone=True)


def find_type(
    repository: Repository, type: Any, *, kind: Kind | None = None, models: str | None = None
) -> TypeSpec:
    """The type that a class, a spec or a stored name stands for; `models` is a module that
    declares types which may not be stored yet."""
    spec = _named(repository, type, models) if isinstance(type, str) else type_spec(type)
    if kind is not None and spec.kind != kind:
        raise ConfigurationError(
            f"{spec.name} is a type of {_PLURAL[spec.kind]}, not of {_PLURAL[kind]}: use "
            f"read_{_PLURAL[spec.kind]}, or read_type for either"
        )
    return spec


_PLURAL: dict[Kind, str] = {"entity": "entities", "relation": "relations"}


def _named(repository: Repository, name: str, models: str | None) -> TypeSpec:
    declared = declared_types(models, option="models") if models else {}
    for specs in (declared.values(), repository.known_types()):
        named = [spec for spec in specs if spec.name == name]
        if len(named) > 1:
            raise ConfigurationError(
                f"{name} is the name of an entity type and of a relation type in "
                f"{repository.uri}; give the class, or use read_entities or read_relations"
            )
        if named:
            return named[0]
    names = sorted({spec.name for spec in [*declared.values(), *repository.known_types()]})
    listed = ", ".join(names[:_SHOWN]) or "no types yet"
    hint = "" if models else "; a type that is declared but not stored needs the option models"
    raise ConfigurationError(
        f"{unknown_name(name, names, what='type')} in {repository.uri} (there are {listed}){hint}"
    )


def commit_of(repository: Repository, as_of: Reference | None) -> int:
    """The commit that a read is pinned to."""
    if as_of is None:
        return repository.head_commit_id()
    return repository.commit_at(checked_reference(as_of))


_SQL_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
_SETTINGS = {
    # A second copy of a task would stage its parts twice, for nothing.
    "spark.speculation": "false",
    "spark.ui.showConsoleProgress": "false",
    # On a busy machine a Python worker takes its time to come up: Spark's own 15 s are few.
    "spark.python.authenticate.socketTimeout": "120s",
}
_FITTING = {
    # Shuffles end in as many partitions as the data needs, in what a write caches too.
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true",
}
_PARTITIONS = "spark.sql.shuffle.partitions"
_PARTITIONS_PER_CORE, _MOST_PARTITIONS = 8, 200  # of a machine; adaptive execution merges them


def spark_session(
    app_name: str = "ontologia",
    *,
    master: str | None = None,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """The running Spark session, or a new one.

    Left out, `master` is what spark-submit or SPARK_REMOTE (Spark Connect) says, else `local[*]`.
    Executors run the driver's own Python unless `PYSPARK_PYTHON` names another one.

    A new one shuffles into partitions that fit the machine and the data. What `config`,
    spark-submit or spark-defaults.conf say of that stands, and so does all of a running session.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    given = dict(config or {})
    builder = SparkSession.builder.appName(app_name)
    remote = master is None and ("spark.remote" in given or bool(os.environ.get("SPARK_REMOTE")))
    settings = {**_SQL_SETTINGS, **given} if remote else {**_SQL_SETTINGS, **_SETTINGS, **given}
    if not remote:
        submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which has its own
        if master is not None:
            settings["spark.master"] = master
        elif not submitted:
            settings.setdefault("spark.master", "local[*]")
        if not submitted and SparkSession.getActiveSession() is None:
            _check_java()
    for key, value in settings.items():
        builder = builder.config(key, value)
    is_new = not remote and SparkContext._active_spark_context is None
    session = builder.getOrCreate()
    if is_new:
        _fit(session)
    return session


def _fit(spark: SparkSession) -> None:
    """Settings of a new session that nobody has made."""
    made = spark.sparkContext.getConf()
    wanted = dict(_FITTING)
    if str(spark.sparkContext.master).startswith("local"):
        partitions = spark.sparkContext.defaultParallelism * _PARTITIONS_PER_CORE
        wanted[_PARTITIONS] = str(min(partitions, _MOST_PARTITIONS))
    for name, value in wanted.items():
        if not made.contains(name):
            spark.conf.set(name, value)


def _check_java() -> None:
    """Spark's own message for a missing Java is a line of shell; say what to do instead."""
    home = os.environ.get("JAVA_HOME")
    noted = Path(sys.prefix) / "java-home"  # where `make setup` has found or put one
    if not home and shutil.which("java") is None and noted.is_file():
        home = os.environ["JAVA_HOME"] = noted.read_text(encoding="utf-8").strip()
    if home:
        if not (Path(home) / "bin" / "java").exists():
            raise ConfigurationError(
                f"JAVA_HOME is {home}, where there is no bin/java: let it name a Java 17 or later"
            )
    elif shutil.which("java") is None:
        raise ConfigurationError(
            "Spark needs Java 17 or later, and there is none: install one (on Debian "
            "`apt install openjdk-17-jre-headless`) and let JAVA_HOME name it"
        )


log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_DEFAULT_MEMORY = 1 << 30

Progress = Callable[[WriteProgress], None]


def is_connect(spark: SparkSession) -> bool:
    """Whether the session talks to a Spark Connect server: there is no SparkContext then."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def driver_memory(spark: SparkSession) -> int:
    """Bytes that the driver's JVM may have."""
    classic: Any = spark
    return int(classic._jvm.java.lang.Runtime.getRuntime().maxMemory())


def smallest_memory(spark: SparkSession) -> int:
    """Bytes that the JVMs of driver and executors may have, whichever is less. A Spark Connect
    client is not told, and takes Spark's default."""
    if is_connect(spark):
        return _DEFAULT_MEMORY
    driver, context = driver_memory(spark), spark.sparkContext
    if str(context.master).startswith("local"):
        return driver
    classic: Any = spark
    text = context.getConf().get("spark.executor.memory", "1g")
    executor = int(classic._jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(text))
    return min(driver, executor)


def expected_bytes(df: DataFrame) -> int | None:
    """How large Catalyst expects a frame to be: the size of its files, beyond all bounds where it
    does not know. None on Spark Connect, which does not tell."""
    if is_connect(df.sparkSession):
        return None
    classic: Any = df
    stats = classic._jdf.queryExecution().optimizedPlan().stats()
    return int(str(stats.sizeInBytes()))


def shuffles(df: DataFrame) -> bool:
    """Whether evaluating a frame moves rows between executors, so that doing so once more than
    need be could cost as much as all the rest."""
    plan: Any = df
    if is_connect(df.sparkSession):
        return "Exchange" in plan._explain_string(extended=True)
    return "Exchange" in plan._jdf.queryExecution().executedPlan().toString()


# What gives other values each time: on Spark Connect only the text of a plan can be had.
_UNSTEADY = re.compile(
    r"\b(current_\w+|now|localtimestamp|uuid|randn?|random|randstr|uniform|shuffle|"
    r"monotonically_increasing_id|spark_partition_id)\(|\bmore fields\b"
)


def is_steady(df: DataFrame) -> bool:
    """Whether reading the frame again gives the same rows, as far as its plan tells."""
    if is_connect(df.sparkSession):
        connected: Any = df
        return _UNSTEADY.search(connected._explain_string(extended=True)) is None
    classic: Any = df
    plan = classic._jdf.queryExecution().analyzed()
    # The time of day and such stay the same within one job, and a write has several.
    patterns = classic.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    return bool(plan.deterministic()) and not plan.containsPattern(patterns.CURRENT_LIKE())


def evaluated_once(df: DataFrame, label: str) -> DataFrame:
    """The same rows however often they are read, until `unpersist`. Others who cache the same plan
    under another label, and give it up, do not matter."""
    return df.filter(F.lit(label).isNotNull()).persist()


class Cancelled(Exception):
    """The write was cancelled between two of its jobs; whoever cancelled it says why."""


class Jobs:
    """Runs the Spark actions of one write under one tag."""

    def __init__(self, spark: SparkSession, name: str, progress: Progress | None) -> None:
        self._spark = spark
        self._tag = f"ontologia-{name}"
        self._progress = progress
        self._connect = is_connect(spark)
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop what runs and let nothing more begin. Safe to call from any thread."""
        self._cancelled.set()
        try:
            if self._connect:
                self._spark.interruptTag(self._tag)
            else:
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
        except Exception as error:  # noqa: BLE001 - Spark may be gone, and the write ends anyway
            log.warning("jobs of %s could not be cancelled: %s", self._tag, error)

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @contextmanager
    def running(self, stage: Stage, description: str) -> Iterator[None]:
        """Spark actions in this block belong to the write; leaving by an error cancels them."""
        if self.cancelled:
            raise Cancelled(f"{description}: the write was cancelled")
        self._add_tag()
        self.tell(stage, 0, 0)
        done = threading.Event()
        watcher = None
        if self._progress is not None and not self._connect:
            watcher = threading.Thread(
                target=self._watch, args=(stage, done), name="onto-spark-progress", daemon=True
            )
            watcher.start()
        if not self._connect:
            self._spark.sparkContext.setJobDescription(description)
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        finally:
            done.set()
            if watcher is not None:
                watcher.join()
            if not self._connect:
                self._spark.sparkContext.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
            self._remove_tag()

    def tell(self, stage: Stage, done: int, total: int) -> None:
        if self._progress is None:
            return
        try:
            self._progress(WriteProgress(stage, done, total))
        except Exception:  # a write must not fail for want of being watched
            log.exception("the progress callback of a write failed; it is not called again")
            self._progress = None

    def _watch(self, stage: Stage, done: threading.Event) -> None:
        while not done.wait(_LOOK_EVERY_S):
            try:
                finished, total = self._tasks()
            except Exception as error:  # noqa: BLE001 - figures to look at, no more
                log.debug("no progress of %s: %s", self._tag, error)
                return
            self.tell(stage, finished, total)

    def _tasks(self) -> tuple[int, int]:
        """Tasks done and known of, over the write's jobs so far."""
        context: Any = self._spark.sparkContext
        tracker = context.statusTracker()
        finished = total = 0
        for job_id in context._jsc.sc().statusTracker().getJobIdsForTag(self._tag):
            job = tracker.getJobInfo(job_id)
            for stage_id in job.stageIds if job is not None else ():
                info = tracker.getStageInfo(stage_id)
                if info is not None:
                    finished += info.numCompletedTasks
                    total += info.numTasks
        return finished, total

    def _add_tag(self) -> None:
        if self._connect:
            self._spark.addTag(self._tag)
        else:
            self._spark.sparkContext.addJobTag(self._tag)

    def _remove_tag(self) -> None:
        if self._connect:
            self._spark.removeTag(self._tag)
        else:
            self._spark.sparkContext.removeJobTag(self._tag)
