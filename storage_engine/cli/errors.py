"""The single error boundary: whatever happens becomes one line (or JSON object) and an exit code.

People get `error: what went wrong and what to do (storage ...)` on stderr. With `--json` the
same is one object on stdout, so that a program which parses stdout always finds JSON there.
Tracebacks are shown with `--debug` only.

Ctrl-C ends a query at once, even one that is deep inside a database engine. Python tells a program
of a signal between two of its own instructions. Inside DuckDB and SQLite there may be none for
minutes, and DuckDB reports an interrupt as an error of its own. So the signal also wakes a thread,
which ends the process when nobody else has after a moment. That is safe for commands that only
read; their temporary files are in a folder that goes with them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn, Protocol

import typer

from storage_engine import errors
from storage_engine.cli.arguments import LOGGER, Invocation
from storage_engine.cli.output import BROKEN_PIPE, Output, one_line, printable

GRACE_S = 1.0  # to end in order, before the process is ended
_EXIT_CODE = 130


@contextlib.contextmanager
def prompt_interrupts(abandon: Callable[[], None]) -> Iterator[None]:
    """Around work that only reads. `abandon` is called before the process is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are for the main thread
        return
    interrupted = threading.Event()
    finished = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> NoReturn:
        interrupted.set()
        raise KeyboardInterrupt

    def watch() -> None:
        while number := woken.recv(1):  # empty: the other end was closed
            if number[0] == signal.SIGINT and not finished.wait(GRACE_S):
                try:
                    abandon()
                    shutil.rmtree(scratch, ignore_errors=True)
                finally:
                    os._exit(_EXIT_CODE)

    tempdir = tempfile.tempdir
    scratch = tempfile.mkdtemp(prefix="onto-")
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    fd_before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        tempfile.tempdir = scratch
        yield
    except Exception:
        if interrupted.is_set():  # the engine's way of saying so
            raise KeyboardInterrupt from None
        raise
    finally:
        finished.set()
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(fd_before)
        wake.close()
        watcher.join()
        woken.close()
        tempfile.tempdir = tempdir
        shutil.rmtree(scratch, ignore_errors=True)


OK, GENERAL, USAGE, MISMATCH, FAILED, STORAGE, CONFLICT, DEPENDENTS = range(8)
INTERRUPTED = 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

EXIT_CODES: dict[type[errors.OntologiaError], int] = {
    errors.OntologiaError: GENERAL,
    errors.ConfigurationError: USAGE,
    errors.IntegrityError: MISMATCH,
    errors.SchemaOutdatedError: MISMATCH,
    errors.SchemaMetadataError: MISMATCH,
    errors.SqlNotAllowedError: USAGE,
    errors.AlreadyInitializedError: FAILED,
    errors.ClosedError: FAILED,
    errors.ForkedSessionError: FAILED,
    errors.LockBreakError: FAILED,
    errors.UnknownTagError: FAILED,
    errors.TagExistsError: FAILED,
    errors.UnknownBranchError: FAILED,
    errors.BranchExistsError: FAILED,
    errors.ProtectedBranchError: FAILED,
    errors.MergeConflictError: CONFLICT,
    errors.MigrationTokenError: FAILED,
    errors.CopyRefusedError: FAILED,
    errors.ImportConflictError: CONFLICT,
    errors.MissingUpgraderError: MISMATCH,
    errors.MigrationError: FAILED,
    errors.TypeDroppedError: MISMATCH,
    errors.DropDependencyError: DEPENDENTS,
    errors.TypeDeclarationError: FAILED,
    errors.ValidationError: FAILED,
    errors.BadRowsError: FAILED,
    errors.MissingRowsError: FAILED,
    errors.OvertakenExtractError: STORAGE,
    errors.BatchSizeExceededError: FAILED,
    errors.CommitMetadataTooLargeError: FAILED,
    errors.MetadataUnavailableError: FAILED,
    errors.HandlerError: FAILED,
    errors.EventLoopLimitError: FAILED,
    errors.UninitializedStorageError: STORAGE,
    errors.UnsupportedEngineError: STORAGE,
    errors.UnsupportedTypeError: STORAGE,
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
    except SystemExit as exit_request:  # of code in a shell, or of typer when its reader goes away
        return _exit_code(exit_request.code)
    except Exception as error:  # noqa: BLE001 - a defect of ours must not look like one of theirs
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return _report(error, _no_room(error), GENERAL, invocation)
        message = (
            f"unexpected {type(error).__name__}: {error}; this is a defect in ontologia, "
            "please report it with the traceback that --debug shows"
        )
        return _report(error, message, GENERAL, invocation)
    return returned if isinstance(returned, int) else OK


def _exit_code(given: Any) -> int:
    """As Python's own: nothing is 0, and a text is told."""
    if given is None or isinstance(given, int):
        return given or OK
    sys.stderr.write(f"{given}\n")
    return GENERAL


def _no_room(error: OSError) -> str:
    where = error.filename or "the output or the folder of temporary files"
    return f"{where} cannot be written to: {error.strerror}; make room there and run it again"


def _asks_for_json(args: Sequence[str]) -> bool:
    return bool({"--json", "--format=json"} & {*args}) or ("--format", "json") in pairwise(args)


def _report(
    error: Exception,
    message: str,
    code: int,
    invocation: Invocation,
    details: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    if invocation.settings.debug and not isinstance(error, typer.TyperException):
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
            return code
        except typer.Exit as broken:
            return broken.exit_code
        except OSError:  # nobody can read it there
            pass
    sys.stderr.write(f"error: {printable(message)}\n")
    return code


def _with_storage(error: errors.OntologiaError, invocation: Invocation) -> str:
    """Say where, unless the error does so itself or the storage could not be told."""
    message = str(error)
    if isinstance(error, errors.ConfigurationError) or invocation.names_storages:
        return message
    try:
        uri = invocation.target().uri
    except errors.OntologiaError:  # there is no saying where: that is what the error is about
        return message
    names = {uri, uri.partition("://")[2] or str(Path(uri).absolute())}
    return message if any(name in message for name in names) else f"{message} (storage {uri})"


def _usage_message(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "onto"
    message = error.format_message().rstrip(".").replace(": Value error, ", ": ", 1)
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
    unwritten = code == BROKEN_PIPE
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code, unwritten = BROKEN_PIPE, True
    except OSError as error:
        if code == OK:
            sys.stderr.write(f"error: {_no_room(error)}\n")
        code, unwritten = code or GENERAL, True
    if unwritten:
        # The interpreter flushes once more at its end; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
