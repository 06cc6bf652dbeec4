"""The single error boundary: whatever happens becomes one line (or JSON object) and an exit code.

People get `error: what went wrong and what to do (storage ...)` on stderr. With `--json` the
same is one object on stdout, so that a program which parses stdout always finds JSON there.
Tracebacks are shown with `-v` only.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import typer

from storage_engine import errors
from storage_engine.cli.options import LOGGER, Invocation
from storage_engine.cli.output import BROKEN_PIPE, Output, one_line, printable

OK, GENERAL, USAGE, MISMATCH, FAILED, STORAGE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

EXIT_CODES: dict[type[errors.OntologiaError], int] = {
    errors.OntologiaError: GENERAL,
    errors.ConfigurationError: USAGE,
    errors.IntegrityError: MISMATCH,
    errors.SchemaOutdatedError: MISMATCH,
    errors.SchemaMetadataError: MISMATCH,
    errors.AlreadyInitializedError: FAILED,
    errors.ClosedError: FAILED,
    errors.UnknownTagError: FAILED,
    errors.TagExistsError: FAILED,
    errors.MigrationTokenError: FAILED,
    errors.MissingUpgraderError: FAILED,
    errors.MigrationError: FAILED,
    errors.TypeDroppedError: FAILED,
    errors.TypeDeclarationError: FAILED,
    errors.ValidationError: FAILED,
    errors.BatchSizeExceededError: FAILED,
    errors.MetadataUnavailableError: FAILED,
    errors.HandlerError: FAILED,
    errors.EventLoopLimitError: FAILED,
    errors.UninitializedStorageError: STORAGE,
    errors.UnsupportedEngineError: STORAGE,
    errors.StorageBackendError: STORAGE,
    errors.LockContentionError: STORAGE,
    errors.LeaseExpiredError: STORAGE,
    errors.HeadMismatchError: STORAGE,
    errors.CommitStateUnknownError: STORAGE,
    errors.ExpectedVersionMismatchError: STORAGE,
    errors.ConcurrentWriteError: STORAGE,
}


class CommandError(errors.OntologiaError):
    """Base of what commands themselves refuse; the storage is in order."""


EXIT_CODES[CommandError] = FAILED


class Command(Protocol):
    """What `typer.main.get_command` returns, as far as it is used here."""

    def main(
        self, args: Sequence[str], prog_name: str, *, standalone_mode: bool, obj: object
    ) -> Any: ...


def run(command: Command, args: Sequence[str]) -> int:
    """Run a command line to its exit code. Nothing but that comes out of here."""
    invocation = Invocation(Output())
    with _logging_to_stderr():
        try:
            code = _run(command, args, invocation)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:
            code = BROKEN_PIPE
    return _flushed(code)


def exit_code_of(kind: type[errors.OntologiaError]) -> int:
    return next(EXIT_CODES[cls] for cls in kind.__mro__ if cls in EXIT_CODES)


def _run(command: Command, args: Sequence[str], invocation: Invocation) -> int:
    try:
        returned = command.main(args, "onto", standalone_mode=False, obj=invocation)
    except errors.OntologiaError as error:
        code = exit_code_of(type(error))
        details = {"retryable": error.retryable, "facts": error.facts()}
        return _report(error, _with_storage(error, invocation), code, invocation, details)
    except typer.TyperException as error:  # the line itself is wrong
        if not error.format_message():
            return USAGE  # no arguments at all: the help text has been shown
        invocation.output.json |= _asks_for_json(args)  # parsing may not have come that far
        return _report(error, _usage_message(error), USAGE, invocation, {"type": "UsageError"})
    except SystemExit as exit_request:  # from typer's own output, when its reader goes away
        return exit_request.code if isinstance(exit_request.code, int) else GENERAL
    except Exception as error:  # noqa: BLE001 - a defect of ours must not look like one of theirs
        message = (
            f"unexpected {type(error).__name__}: {error}; this is a defect in ontologia, "
            "please report it with the traceback that -v shows"
        )
        return _report(error, message, GENERAL, invocation)
    return returned if isinstance(returned, int) else OK


def _asks_for_json(args: Sequence[str]) -> bool:
    return bool({"--json", "--format=json"} & {*args}) or ("--format", "json") in pairwise(args)


def _report(
    error: Exception,
    message: str,
    code: int,
    invocation: Invocation,
    details: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    if invocation.settings.verbose and not isinstance(error, typer.TyperException):
        traceback.print_exception(error, file=sys.stderr)
    message = one_line(message)
    if invocation.output.json:
        described = {
            "type": type(error).__name__,
            "message": message,
            "exit_code": code,
            "retryable": False,
            **details,
        }
        try:
            invocation.output.document({"error": described})
        except typer.Exit as broken:
            return broken.exit_code
    else:
        sys.stderr.write(f"error: {printable(message)}\n")
    return code


def _with_storage(error: errors.OntologiaError, invocation: Invocation) -> str:
    """Say where, unless the error does so itself or the storage could not be told."""
    message = str(error)
    if isinstance(error, errors.ConfigurationError):
        return message
    uri = invocation.target().uri
    names = {uri, uri.partition("://")[2] or str(Path(uri).absolute())}
    return message if any(name in message for name in names) else f"{message} (storage {uri})"


def _usage_message(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "onto"
    message = error.format_message().rstrip(".")
    return f"{message}{' See' if message.endswith('?') else '; see'} `{path} --help`"


class _LineFormatter(logging.Formatter):
    """Log records look like our own warnings, and stay on one line."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {printable(one_line(record.getMessage()))}"


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    logger = logging.getLogger(LOGGER)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter())
    level = logger.level
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _flushed(code: int) -> int:
    """What is still buffered goes out now, where a vanished reader can be dealt with."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE
    if code == BROKEN_PIPE:
        # The interpreter flushes once more at its end; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
