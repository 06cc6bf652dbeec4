"""Connections to one SQLite file, the statements that run on them, and what its errors mean.

A connection is lent out for one operation and kept for the next one, so threads never share one.
SQLite itself arbitrates between writers, whether they are threads or processes. An in-memory
storage is the exception: it lives in its only connection, which is lent to one thread at a time.

Ctrl-C ends a query. Python runs signal handlers between two of its own instructions, and a
statement is one call, so SQLite calls back every now and then, which gives a waiting signal its
turn; what its handler raises ends the statement and reaches the caller as it is. A single sort is
not cut short.

SQLite keeps for each file which locks this process has, and a fork copies that, but not the locks:
a connection that a child opens while the parent's are there believes itself protected, and writes
to a log that the parent deletes under it. So a fork waits for operations that are under way, and
closes what is idle; where a connection is still in use then, the child refuses the file, and where
another thread uses it (SQLite's own locks may be taken), it refuses SQLite altogether.

A file with a write-ahead log wants two files beside it, even to be read. On a read-only file system
it is opened as one that never changes, unless a crash has left a log: that has them already.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from storage_engine.errors import (
    ForkedSessionError,
    IntegrityError,
    LockContentionError,
    OntologiaError,
    StorageBackendError,
)
from storage_engine.objectstore.local import advice, shortened
from storage_engine.process import Owner, renew_after_fork, settle_before_fork, unforked
from storage_engine.query.compiler import Statement
from storage_engine.query.dialects import install
from storage_engine.repository.sqlite import forward

BATCH_ROWS = 16_384
INSTRUCTIONS = 200_000  # of SQLite's machine between two looks: some hundredths of a second

_TOO_LARGE = ("too many SQL variables", "Expression tree is too large", "parser stack overflow")


def ask(connection: sqlite3.Connection, statement: Statement) -> sqlite3.Cursor:
    """Begin a statement; `batches` gets its rows."""
    with _asking(connection):
        return connection.execute(statement.sql, statement.parameters)


def batches(cursor: sqlite3.Cursor) -> Iterator[Sequence[Sequence[Any]]]:
    """The rows as columns, some thousand rows at a time. The statement ends with the iterator."""
    process = os.getpid()
    try:
        while True:
            if os.getpid() != process:
                raise ForkedSessionError("a query", in_use=True)
            with _asking(cursor.connection):
                rows = cursor.fetchmany(BATCH_ROWS)
            if not rows:
                return
            yield list(zip(*rows, strict=True))
    finally:
        with suppress(sqlite3.ProgrammingError):  # what failed has closed the connection already
            cursor.close()


def plan_of(connection: sqlite3.Connection, statement: Statement) -> list[str]:
    """SQLite's plan, a line for each part of it, indented by depth."""
    depths: Mapping[int, int] = {0: -1}
    lines = []
    with _asking(connection):
        rows = connection.execute(f"EXPLAIN QUERY PLAN {statement.sql}", statement.parameters)
        for part, parent, _, detail in rows:
            depth = depths[parent] + 1
            depths = {**depths, part: depth}
            lines.append("  " * depth + detail)
    return lines


@contextmanager
def _asking(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        with _interruptible(connection), forward.refusals():
            yield
    except sqlite3.OperationalError as error:
        if str(error) == "integer overflow":
            raise OverflowError(
                "a sum of integers does not fit into 64 bits; sum fewer rows, or take avg()"
            ) from error
        if "'finalize' method raised error" in str(error):
            raise OverflowError(
                "a sum of decimals has more than 38 digits; sum fewer rows, or take avg()"
            ) from error
        if str(error).startswith(_TOO_LARGE):
            raise ValueError(
                f"the filter has more conditions or values than SQLite takes ({error}); use "
                "in_([...]) instead of many |, and ask in several queries"
            ) from error
        raise


@contextmanager
def _interruptible(connection: sqlite3.Connection) -> Iterator[None]:
    """Signals are the main thread's; the others need not look."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[BaseException] = []
    look = _signals(raised)
    next(look)
    connection.set_progress_handler(look.__next__, INSTRUCTIONS)
    try:
        yield
    except sqlite3.OperationalError:
        if raised:
            raise raised[0] from None
        raise
    finally:
        connection.set_progress_handler(None, 0)


def _signals(raised: list[BaseException]) -> Iterator[int]:
    """0 to go on, 1 to stop. A generator, because sqlite3 drops what a callback raises: resumed
    inside `try`, it gets hold of it even at its first instruction."""
    try:
        while True:
            yield 0
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - raised again by `_interruptible`
        raised.append(error)
    yield 1


MEMORY = ":memory:"
MAX_IDLE = 8
WAL_KEPT_BYTES = 64 * 1024 * 1024
WAL_RETRY_S = 0.01
_HEADER_BYTES = 100

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_NOT_OURS = ("no such table", "no such column", "table ", "malformed JSON", "ON CONFLICT clause")
_ADVICE = {
    sqlite3.SQLITE_NOTADB: "the file is not a SQLite database; give another path, or restore it "
    "from a backup",
    sqlite3.SQLITE_FULL: "the disk is full; free some space and try again (nothing was written)",
    sqlite3.SQLITE_READONLY: "the file is write protected; check its permissions",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; check that its directory exists and that "
    "you may read and write there",
    sqlite3.SQLITE_PERM: "access was denied; check the permissions",
}


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection's lock was in the way."""
    return _primary_code(error) in _BUSY


def translate(
    error: sqlite3.Error, path: str, operation: str, waited_ms: int = 0
) -> OntologiaError:
    """The error a user should see for what SQLite reported."""
    code = _primary_code(error)
    if code in _BUSY:
        return LockContentionError(waited_ms=waited_ms)
    if code == sqlite3.SQLITE_CORRUPT:
        return IntegrityError(
            f"{operation} {path}: the database file is damaged ({error}); restore it from a backup",
            key=path,
        )
    if code == sqlite3.SQLITE_ERROR and str(error).startswith(_NOT_OURS):
        return IntegrityError(
            f"{operation} {path}: the tables are not as this version makes them ({error}); "
            "something else has changed the file: `onto verify --deep` looks for what is wrong, "
            "restore it from a backup",
            key=path,
        )
    detail = f"{_ADVICE[code]} ({error})" if code in _ADVICE else str(error)
    return StorageBackendError(
        f"{operation} {path}: {detail}",
        operation=operation,
        key=path,
        retryable=code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL),
    )


@contextmanager
def errors_of(path: str, operation: str, waited_ms: int = 0) -> Iterator[None]:
    """Turn SQLite's errors into ours, naming the file and the operation."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path, operation, waited_ms) from error


def connect(path: str, timeout_ms: int, *, create: bool) -> sqlite3.Connection:
    """Open a connection that manages its transactions itself; without `create`, never a new file.

    A reader opens for writing too where it may: after a crash it has to roll the log forward.
    """
    if path == MEMORY:
        target = "file::memory:"
    else:
        mode = "rwc" if create else "rw"
        if is_unchangeable(path):
            mode = "ro&immutable=1"
        target = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode={mode}"
    connection = sqlite3.connect(
        target,
        uri=True,
        timeout=timeout_ms / 1000,
        isolation_level=None,
        check_same_thread=False,
    )
    for pragma in (
        "synchronous=FULL",
        "temp_store=FILE",
        f"journal_size_limit={WAL_KEPT_BYTES}",
        "trusted_schema=OFF",
    ):
        connection.execute(f"PRAGMA {pragma}")
    install(connection)
    forward.install(connection)
    return connection


def is_unchangeable(path: str) -> bool:
    """Whether the file is on a read-only file system, all of it."""
    try:
        if not os.statvfs(path).f_flag & os.ST_RDONLY:
            return False
        return not os.path.exists(f"{path}-wal") or os.path.getsize(f"{path}-wal") == 0
    except OSError:
        return False


def begin_write(connection: sqlite3.Connection, timeout_ms: int) -> float:
    """Take the write lock (BEGIN IMMEDIATE, write-ahead log on); the milliseconds it took.

    Raises LockContentionError when it is not free within the timeout.
    """
    started = time.monotonic()
    deadline = started + timeout_ms / 1000
    try:
        _use_write_ahead_log(connection, deadline)
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if not is_busy(error):
            raise
        raise LockContentionError(
            waited_ms=round((time.monotonic() - started) * 1000), holder=_last_holder(connection)
        ) from error
    return (time.monotonic() - started) * 1000


def rollback(connection: sqlite3.Connection) -> None:
    """Undo the running transaction, if there still is one (SQLite ends some by itself)."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Let several reads see one state of the storage."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        rollback(connection)


class _FileIdentity(NamedTuple):
    process: int
    device: int
    inode: int
    unchangeable: bool

    @property
    def place(self) -> tuple[int, int]:
        return self.device, self.inode


class _Lent(NamedTuple):
    connection: sqlite3.Connection
    file: _FileIdentity | None  # which file it was opened on


class _Uses:
    """Which files this process uses at the moment, and which it may not: see above."""

    def __init__(self) -> None:
        self._current: dict[object, tuple[int, _FileIdentity | None]] = {}
        self._refused: set[tuple[int, int]] = set()
        self._refuses_all = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        for thread, file in self._current.values():
            if thread != threading.get_ident() or file is None:
                self._refuses_all = True
            else:
                self._refused.add(file.place)
        self._current.clear()

    def begin(self, use: object, file: _FileIdentity | None) -> None:
        self._current[use] = (threading.get_ident(), file)

    def end(self, use: object) -> None:
        self._current.pop(use, None)

    def check(self, path: str, file: _FileIdentity | None) -> None:
        if self._refuses_all or (file is not None and file.place in self._refused):
            raise ForkedSessionError(shortened(path), in_use=True)


_uses = _Uses()


class Connections:
    """Lends connections to one database."""

    def __init__(self, path: str | Path, timeout_ms: int) -> None:
        self.path = str(path)
        self.timeout_ms = timeout_ms
        self.in_memory = self.path == MEMORY
        self._guard = threading.RLock()  # a dropped stream comes back whenever garbage is collected
        self._idle: list[_Lent] = []
        self._inherited: list[_Lent] = []
        self._closed = False
        self._memory_lock = threading.RLock()
        self._memory = connect(MEMORY, timeout_ms, create=True) if self.in_memory else None
        self._owner = Owner("an in-memory storage")
        settle_before_fork(self)
        renew_after_fork(self)

    def before_fork(self) -> None:
        """Leave nothing to a child that SQLite would take for its own."""
        with self._guard:
            idle, self._idle = self._idle, []
        for lent in idle:
            self._discard(lent)

    def after_fork(self) -> None:
        """Whoever had a connection or a lock at the fork is not here to give it back."""
        self._guard = threading.RLock()
        self._memory_lock = threading.RLock()

    def exists(self) -> bool:
        """Whether there is a database to read; an empty file is none yet."""
        if self.in_memory:
            return True
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._failure("open", advice(error)) from error
        self._check_kind("open", status)
        # SQLite takes some files that are shorter than a header for empty, and writes over them.
        if stat.S_ISREG(status.st_mode) and 0 < status.st_size < _HEADER_BYTES:
            raise self._failure("open", _ADVICE[sqlite3.SQLITE_NOTADB])
        return status.st_size > 0

    @contextmanager
    def use(
        self, operation: str, *, create: bool = False, lasting: bool = False
    ) -> Iterator[sqlite3.Connection]:
        """A connection for one operation. What goes wrong with it becomes one of our errors.

        `lasting`: code of users runs in between, so that a fork does not wait for it.
        """
        waits = nullcontext() if lasting else unforked()
        with waits, errors_of(self.path, operation, self.timeout_ms):
            if self._memory is not None:
                self._owner.check()  # its only connection may be in use in the parent
                with self._memory_lock:
                    self._check_open(operation)
                    yield self._memory
                return
            lent, use = None, object()
            try:
                with unforked():
                    lent = self._take(operation, create)
                    _uses.begin(use, lent.file)
                yield lent.connection
                self._give_back(lent)
                lent = None
            finally:
                if lent is not None:
                    self._discard(lent)  # takes a transaction and temporary tables along
                _uses.end(use)

    def close(self) -> None:
        """Close what is idle now, and what is in use when it comes back. May be called twice."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for lent in idle:
            self._discard(lent)
        if self._memory is not None and not self._owner.elsewhere:
            with self._memory_lock:
                self._memory.close()

    def _take(self, operation: str, create: bool) -> _Lent:
        self._check_path(operation, create)
        with self._guard:
            self._check_open(operation)
            file = self._current_file()
            _uses.check(self.path, file)
            while self._idle:
                lent = self._idle.pop()
                if lent.file == file:
                    return lent
                self._discard(lent)
        connection = connect(self.path, self.timeout_ms, create=create)
        return _Lent(connection, self._current_file())

    def _give_back(self, lent: _Lent) -> None:
        with unforked(), self._guard:
            if not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(lent)
                return
        self._discard(lent)

    def _discard(self, lent: _Lent) -> None:
        """Close a connection, unless it came with a fork: that would disturb the log of the
        process that has it."""
        if lent.file and lent.file.process != os.getpid():
            self._inherited.append(lent)
            return
        with unforked():
            lent.connection.close()

    def _current_file(self) -> _FileIdentity | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return _FileIdentity(os.getpid(), status.st_dev, status.st_ino, is_unchangeable(self.path))

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise self._failure(operation, "the repository was closed; open it again")

    def _check_path(self, operation: str, create: bool) -> None:
        if os.path.isdir(self.path):
            raise self._failure(
                operation,
                "this is a directory, not a SQLite file; an ontology in a directory is file:///...",
            )
        with suppress(OSError):
            self._check_kind(operation, os.stat(self.path))
        directory = os.path.dirname(os.path.abspath(self.path))
        if create and not os.path.isdir(directory):
            raise self._failure(operation, f"the directory {directory} does not exist; create it")

    def _check_kind(self, operation: str, status: os.stat_result) -> None:
        """A device looks like an empty database, and keeps nothing; a pipe waits for ever."""
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise self._failure(operation, "this is no file, but a device, pipe or socket")

    def _failure(self, operation: str, detail: str) -> StorageBackendError:
        return StorageBackendError(
            f"{operation} {shortened(self.path)}: {detail}", operation=operation, key=self.path
        )


def _primary_code(error: sqlite3.Error) -> int:
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else -1


def _use_write_ahead_log(connection: sqlite3.Connection, deadline: float) -> None:
    """Two writers that meet a new file both switch it; SQLite then answers busy without waiting."""
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").fetchone()
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
            time.sleep(WAL_RETRY_S)


def _last_holder(connection: sqlite3.Connection) -> dict[str, str]:
    """Who committed last: the present holder's own entry is not visible before it commits."""
    try:
        row = connection.execute("SELECT owner_id, acquired_at FROM locks").fetchone()
    except sqlite3.Error:
        return {}
    return {"last": row[0], "at": row[1]} if row else {}
