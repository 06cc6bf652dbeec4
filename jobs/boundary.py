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
import sys
import traceback
from collections.abc import Callable
from typing import Any

from storage_engine import errors
from storage_engine.cli.boundary import GENERAL, INTERRUPTED, MISMATCH, OK, USAGE, exit_code_of
from storage_engine.cli.output import one_line, printable

_REFUSED = (errors.ValidationError, errors.SchemaOutdatedError, errors.TypeDeclarationError)
__all__ = ["OK", "describe", "run"]

_LONGEST = 1000  # Spark's messages go on with the whole plan


def run(work: Callable[[], int], *, as_json: bool, verbose: bool) -> int:
    """The exit code of the work. Nothing but that comes out of here."""
    try:
        return work()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - this is the boundary
        if verbose:
            traceback.print_exception(error, file=sys.stderr)
        code, message, facts = describe(error)
        _tell(error, code, message, facts, as_json)
        return code


def describe(error: Exception) -> tuple[int, str, dict[str, Any]]:
    """Exit code, one line, and facts for programs."""
    if isinstance(error, errors.OntologiaError):
        code = MISMATCH if isinstance(error, _REFUSED) else exit_code_of(error)
        return code, one_line(str(error)), {"retryable": error.retryable, "facts": error.facts()}
    from pyspark.errors import PySparkException

    if isinstance(error, PySparkException):
        return _of_spark(error), _first(str(error)), {"condition": error.getCondition()}
    said = f"unexpected {type(error).__name__}: {_first(str(error))}; this is a defect in "
    return GENERAL, f"{said}ontologia, please report it with the traceback that -v shows", {}


def _of_spark(error: Any) -> int:
    """By the class of the SQL state: 42 is a mistake in names or syntax, 22 a value in the data."""
    state = error.getSqlState() or ""
    return {"42": USAGE, "22": MISMATCH}.get(state[:2], GENERAL)


def _first(message: str) -> str:
    """Without the stack traces and plans that Spark appends."""
    kept: list[str] = []
    for line in message.splitlines():
        if line.startswith(("JVM stacktrace", "\tat ", "== SQL", "Driver stacktrace", "Traceback")):
            break
        kept.append(line)
    return one_line(" ".join(kept))[:_LONGEST]


def _tell(error: Exception, code: int, message: str, facts: dict[str, Any], as_json: bool) -> None:
    if not as_json:
        sys.stderr.write(f"error: {printable(message)}\n")
        return
    described = {"type": type(error).__name__, "message": message, "exit_code": code, **facts}
    sys.stdout.write(json.dumps({"error": described}, default=str) + "\n")
    sys.stdout.flush()
