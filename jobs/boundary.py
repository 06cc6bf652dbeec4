"""The jobs' single error boundary: whatever happens becomes one line and an exit code.

    0  done
    1  a defect, or Spark failed for a reason of its own
    2  the order, an option or an expression is wrong
    3  the data or its schema was refused
    4  the storage is in a state that does not allow it (as `onto`)
    5  the storage failed, or another writer was in the way

People get `error: ...` on stderr; with `--json` the same is one object on stdout. Tracebacks are
shown with `-v` only.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from storage_engine import errors
from storage_engine.cli.boundary import (
    GENERAL,
    INTERRUPTED,
    MISMATCH,
    OK,
    STORAGE,
    USAGE,
    exit_code_of,
)
from storage_engine.cli.output import one_line, printable

_REFUSED = (errors.ValidationError, errors.SchemaOutdatedError, errors.TypeDeclarationError)
__all__ = ["MISMATCH", "OK", "describe", "run", "spark_said"]

_LONGEST = 1000
# By the class of the SQL state: 42 is a mistake in names or syntax, 22 a value in the data, KD a
# file that is not what its reader expects.
_STATE = re.compile(r"SQLSTATE: (\w{5})")
_OF_STATE = {"42": USAGE, "22": MISMATCH, "KD": MISMATCH}
# What our own code raised in a task, or on a Spark Connect server: only its text comes back.
_OURS = re.compile(r"storage_engine\.errors\.(\w+): (.*)")
_NOISE = re.compile(r"^(: |An error occurred while calling .*|[a-z]+(\.\w+)+(Exception|Error): )")


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
        if ours := _raised_there(str(error)):
            return ours
        found = _STATE.search(str(error))
        state = (found.group(1) if found else "")[:2]
        return _OF_STATE.get(state, GENERAL), spark_said(error), {}
    said = f"unexpected {type(error).__name__}: {one_line(str(error))}; this is a defect in "
    return GENERAL, f"{said}ontologia, please report it with the traceback that -v shows", {}


def _raised_there(text: str) -> tuple[int, str, dict[str, Any]] | None:
    """The last error of ours that a text of Spark's tells of."""
    for name, message in reversed(_OURS.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.OntologiaError):
            code = MISMATCH if issubclass(kind, _REFUSED) else exit_code_of(kind)
            return code, one_line(message)[:_LONGEST], {"retryable": code == STORAGE}
    return None


def spark_said(error: Exception) -> str:
    """The first sentence and the deepest cause, without the stack traces and plans around them."""
    first, *causes = re.split(r"^Caused by: ", str(error), flags=re.M)
    said = [_sentence(first)]
    if causes and (cause := _sentence(causes[-1])) not in said[0]:
        said.append(cause)
    return "; ".join(said)[:_LONGEST]


def _sentence(text: str) -> str:
    kept: list[str] = []
    for line in text.splitlines():
        if line.startswith(
            ("JVM stacktrace", "\tat ", "\t...", "== ", "Driver stack", "Traceback")
        ):
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
