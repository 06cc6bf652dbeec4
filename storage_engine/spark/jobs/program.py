"""What makes a program of a job: its environment, its Spark session, its errors, whom it tells.

Whatever happens becomes one line and an exit code:

    0  done
    1  a defect, or Spark failed for a reason of its own
    2  the order, an option or an expression is wrong
    3  the data or its schema was refused
    4  the storage is in a state that does not allow it (as `onto`)
    5  the storage failed, or another writer was in the way

People get `error: ...` on stderr; with `--json` the same is one object on stdout. Tracebacks are
shown with `-v` only. How far a job is goes to stderr as well: a bar at a terminal, a line now and
then in a log file.

What must not stand on a command line, which everybody on the machine can read, comes from the
environment. Started by Dagster, a job reports through Pipes; that needs the package
`dagster-pipes` only, which has no Dagster in it and may be missing elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from storage_engine import errors
from storage_engine.cli.errors import (
    GENERAL,
    INTERRUPTED,
    MISMATCH,
    OK,
    STORAGE,
    USAGE,
    exit_code_of,
)
from storage_engine.cli.output import Advance, one_line, printable
from storage_engine.cli.output import progress as bar
from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError
from storage_engine.repository import MAIN
from storage_engine.spark.jobs.arguments import RunOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from storage_engine.runtime.session import Session

STORAGE_CONFIG = "ONTOLOGIA_JOB_CONFIG"  # options of OntologiaConfig, as a JSON object
SPARK_CONFIG = "ONTOLOGIA_JOB_SPARK_CONFIG"  # further settings of the Spark session, likewise
_REFERENCE = "env:"


def storage_config(environ: Mapping[str, str] = os.environ) -> OntologiaConfig:
    """How the job opens its storage; as the AWS environment says where nothing is given."""
    return OntologiaConfig(**_given(STORAGE_CONFIG, environ))


def spark_config(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: str(value) for name, value in _given(SPARK_CONFIG, environ).items()}


def revealed(name: str, text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A value as it is or, for `env:NAME`, that of the variable. `name` is for the error."""
    if not is_reference(text):
        return text
    variable = text.removeprefix(_REFERENCE)
    value = environ.get(variable)
    if value is None:
        raise ConfigurationError(
            f"{name} is to come from the environment variable {variable}, which is not set"
        )
    return value


def is_reference(text: str) -> bool:
    return text.startswith(_REFERENCE)


def reference(variable: str) -> str:
    return f"{_REFERENCE}{variable}"


def _given(variable: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Says nothing of the value when it is wrong: there may be secrets in it."""
    try:
        settings = json.loads(environ.get(variable) or "{}")
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{variable} is not a JSON object")
    return settings


_REFUSED = (
    errors.ValidationError,
    errors.MissingRowsError,
    errors.SchemaOutdatedError,
    errors.TypeDeclarationError,
)
__all__ = ["MISMATCH", "OK", "describe", "run", "spark_said"]

_LONGEST = 1000
_OF_SOURCES: dict[str, type[errors.OntologiaError]] = {
    "ValidationError": errors.ValidationError,
    "ConfigurationError": errors.ConfigurationError,
}
# By the class of the SQL state: 42 is a mistake in names or syntax, 22 a value in the data, KD a
# file that is not what its reader expects.
_STATE = re.compile(r"SQLSTATE: (\w{5})")
_OF_STATE = {"42": USAGE, "22": MISMATCH, "KD": MISMATCH}
# What our own code raised in a task, or on a Spark Connect server: only its text comes back.
_OURS = re.compile(r"storage_engine\.errors\.(\w+): (.*)")
_REST = ("JVM stacktrace", "\tat ", "\t...", "== ", "Driver stack", "Traceback")
_NOISE = re.compile(
    r"^((: )?[a-z]+(\.\w+)+(Exception|Error): |: |An error occurred while calling .*)"
)


def run(argv: Sequence[str] | None, work: Callable[[list[str]], int]) -> int:
    """The exit code of a program's work. Nothing but that comes out of here."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return work(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exit_request:  # after --help
        return exit_request.code if isinstance(exit_request.code, int) else OK
    except Exception as error:  # noqa: BLE001 - this is the boundary
        if {"-v", "--verbose"} & set(arguments):
            traceback.print_exception(error, file=sys.stderr)
        code, message, facts = describe(error)
        _tell(error, code, message, facts, "--json" in arguments)
        return code


def describe(error: Exception) -> tuple[int, str, dict[str, Any]]:
    """Exit code, one line, and facts for programs."""
    if isinstance(error, errors.OntologiaError):
        code = MISMATCH if isinstance(error, _REFUSED) else exit_code_of(type(error))
        return code, one_line(str(error)), {"retryable": error.retryable, "facts": error.facts()}
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    if isinstance(error, PySparkException | Py4JJavaError):
        if ours := _raised_in_task(str(error)):
            return ours
        state = _STATE.search(str(error))
        code = _OF_STATE.get((state.group(1) if state else "")[:2], GENERAL)
        condition = _condition(error)
        facts = {"condition": condition} if condition else {}
        # A mistake in an expression or a value is there the next time too.
        return code, spark_said(error), {"retryable": code == GENERAL, "facts": facts}
    message = f"unexpected {type(error).__name__}: {one_line(str(error))}; this is a defect in "
    return GENERAL, f"{message}ontologia, please report it with the traceback that -v shows", {}


def raised_there(error: Exception) -> errors.OntologiaError | None:
    """The error that Spark's tells of: one of ours about the data or the order, which a task has
    raised, or a file that is not what its reader expects, which is named."""
    for name, message in reversed(_OURS.findall(str(error))):
        kind = _OF_SOURCES.get(name)
        if kind is not None:
            return kind(one_line(message)[:_LONGEST])
    state = _STATE.search(str(error))
    if state is not None and state.group(1).startswith("KD"):
        return errors.ValidationError(spark_said(error))
    return None


@contextmanager
def explained() -> Iterator[None]:
    """Errors of Spark that tell of ours, or of a file that cannot be read, as such."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        ours = raised_there(error)
        if ours is None:
            raise
        raise ours from error


def _raised_in_task(text: str) -> tuple[int, str, dict[str, Any]] | None:
    """The last error of ours that a text of Spark's tells of."""
    for name, message in reversed(_OURS.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.OntologiaError):
            code = MISMATCH if issubclass(kind, _REFUSED) else exit_code_of(kind)
            return code, one_line(message)[:_LONGEST], {"retryable": code == STORAGE, "facts": {}}
    return None


def _condition(error: Exception) -> str | None:
    """Spark's name for what went wrong. It is asked of the JVM, which may be gone by now."""
    ask = getattr(error, "getCondition", None)  # py4j's own errors have none
    try:
        return str(ask() or "") or None if ask is not None else None
    except Exception:  # noqa: BLE001 - the error itself must be told
        return None


def spark_said(error: Exception) -> str:
    """The first sentence and the deepest cause, without the stack traces and plans around them."""
    parts = re.split(r"^Caused by: ", str(error), flags=re.M)
    # The one that names the file says more than those around it.
    first = next((part for part in parts if "FAILED_READ_FILE" in part), parts[0])
    causes = parts[1:]
    sentences = [_sentence(first)]
    if causes and (cause := _sentence(causes[-1])) not in sentences[0]:
        sentences.append(cause)
    return "; ".join(sentences)[:_LONGEST]


def _sentence(text: str) -> str:
    kept: list[str] = []
    for line in text.splitlines():
        if line.startswith(_REST):
            break
        kept.append(_NOISE.sub("", line))
    return one_line(" ".join(kept))


def _tell(error: Exception, code: int, message: str, facts: dict[str, Any], as_json: bool) -> None:
    if not as_json:
        sys.stderr.write(f"error: {printable(message)}\n")
        return
    described = {"type": type(error).__name__, "message": message, "exit_code": code, **facts}
    sys.stdout.write(json.dumps({"error": described}, default=str) + "\n")
    sys.stdout.flush()


def start_spark(name: str, run: RunOptions) -> SparkSession:
    """As the command line asks: a Connect server, a master, or what spark-submit says."""
    from storage_engine.spark.driver import spark_session

    config = {**spark_config(), **run.conf}
    if run.remote is not None:
        config["spark.remote"] = run.remote
    return spark_session(name, master=run.master, config=config)


@contextmanager
def opened(uri: str, session: Session | None, *, branch: str | None = None) -> Iterator[Session]:
    """A given session, which must be on the branch that is meant; else one for the job."""
    if session is not None:
        if branch not in (None, session.branch):
            raise ConfigurationError(
                f"the order is for branch {branch!r}, and the session that was given is on "
                f"{session.branch!r}: open it with Session(..., branch={branch!r})"
            )
        yield session
        return
    from storage_engine.runtime.session import Session as Opened

    with Opened(uri, config=storage_config(), branch=branch) as own:
        yield own


Tell = Callable[[str, int, int | None], None]  # stage, done, of all (None: not known)

_EVERY_S = 5.0


@contextmanager
def progress(what: str, log: Callable[[str], None]) -> Iterator[Tell]:
    """`log` hears of each new stage as well."""
    with bar(what) as advance:
        yield _Telling(what, advance, log).tell


class _Telling:
    def __init__(self, what: str, advance: Advance, log: Callable[[str], None]) -> None:
        self._what = what
        self._advance = advance
        self._log = log
        self._stage = ""
        self._said_at = 0.0
        self._plain = not sys.stderr.isatty()

    def tell(self, stage: str, done: int, total: int | None) -> None:
        self._advance(done, total)
        is_new = stage != self._stage
        if is_new:
            self._stage = stage
            self._log(f"{self._what}: {stage}")
        if self._plain and (is_new or time.monotonic() - self._said_at >= _EVERY_S):
            self._said_at = time.monotonic()
            of = f" of {total}" if total is not None else ""
            sys.stderr.write(f"{self._what}: {stage} {done}{of}\n")


CONTEXT = "DAGSTER_PIPES_CONTEXT"  # the variable by which Dagster says that it is there
_ASSET = "asset_key"  # in extras: which asset of several the job materialises


def version_of(commit_id: int | None, branch: str | None) -> str:
    """A commit by what no other chain calls one of its own: branches count from the same ids."""
    if commit_id is None:
        return ""
    return str(commit_id) if branch in (None, MAIN) else f"{branch}@{commit_id}"


class Reporter(Protocol):
    """Whom a job tells what it does."""

    def log(self, text: str) -> None: ...

    def materialized(self, metadata: Mapping[str, Any], data_version: str) -> None: ...


class Nobody:
    """Not started by Dagster."""

    def log(self, text: str) -> None:
        """Nobody listens."""

    def materialized(self, metadata: Mapping[str, Any], data_version: str) -> None:
        """Nobody listens."""


class _Pipes:
    def __init__(self, context: Any) -> None:
        self._context = context

    def log(self, text: str) -> None:
        self._context.log.info(text)

    def materialized(self, metadata: Mapping[str, Any], data_version: str) -> None:
        """The whole result goes as a message too: what the run does with it is its own affair."""
        self._context.report_custom_message({"data_version": data_version, **metadata})
        if self._context.is_asset_step:
            self._context.report_asset_materialization(
                metadata=_metadata(metadata),
                data_version=data_version,
                asset_key=self._context.extras.get(_ASSET),
            )


@contextmanager
def reporting() -> Iterator[Reporter]:
    """Open for the length of the job: an exception in it is reported as well."""
    if CONTEXT not in os.environ:
        yield Nobody()
        return
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as context:
        yield _Pipes(context)


def _metadata(result: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values as they are, so that numbers plot; the rest as JSON; nothing for None."""
    metadata: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, bool | int | float | str):
            metadata[name] = value
        elif value:
            metadata[name] = {"raw_value": value, "type": "json"}
    return metadata
