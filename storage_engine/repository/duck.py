"""The DuckDB of an opened storage, and statements that run on it: a cursor per use, rows as they
come, Ctrl-C, memory. That for SQL of users is another one (`duck_confined`)."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa

from storage_engine.config import KIB, size_in_bytes
from storage_engine.errors import IntegrityError, StorageBackendError
from storage_engine.objectstore.local import advice, is_retryable
from storage_engine.process import Owner, leave_to_parent, renew_after_fork, unforked
from storage_engine.repository.duck_s3 import create_secret, load_httpfs, packaged_httpfs
from storage_engine.wording import first_line

if TYPE_CHECKING:
    import duckdb

    from storage_engine.query.spec import QuerySpec

log = logging.getLogger(__name__)

REMOTE_THREADS = 16  # range requests wait for the network, not for a core
_THREAD_BYTES = 100 * 1000**2  # enough for one to sort wide rows
_MANY_COLUMNS = 128
_COLUMN_BYTES = 512 * KIB  # of a batch of it in each step of a statement, for two threads

_PATH_KEYS = ("entity_key", "left_key", "right_key")

_BATCH_ROWS = 64 * 1024
_LOOK_S = 0.1  # after which a signal is seen at the latest
_LOOKS = 4  # each hears the reason nineteen times of twenty
_KINDS = {
    "Out of Memory": "OutOfMemoryException",
    "Conversion": "ConversionException",
    "Out of Range": "OutOfRangeException",
    "Invalid Input": "InvalidInputException",
    "INTERRUPT": "InterruptException",
    "HTTP": "HTTPException",
    "IO": "IOException",
    "INTERNAL": "InternalException",
    "FATAL": "FatalException",
    "Not implemented": "NotImplementedException",
}

T = TypeVar("T")


class DoesNotFit(StorageBackendError):
    """A statement needs more memory than the limit, as many threads as it had."""


class Duck:
    """Opened on first use. Spills to a directory of its own, removed on close."""

    def __init__(
        self,
        *,
        uri: str,
        memory_limit: str,
        secret: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`secret` is asked for S3 credentials whenever S3 is to be read: those of roles expire."""
        self._uri = uri
        self._memory_limit = memory_limit
        self._secret = secret
        self._current_secret: Mapping[str, Any] | None = None
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._spills: list[Path] = []
        self._room_for = 0  # columns
        self._held_back: list[int] = []  # how many threads each of those who want few allows
        self._threads_otherwise = 0  # when nobody does
        self._mutex = threading.Lock()
        self._opener: threading.Thread | None = None
        self._expected = False  # by who asked for it to be opened ahead
        self._owner = Owner(uri)
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a fork, giving up a connection would wait for ever for threads that are not there."""
        if self._connection is not None:
            leave_to_parent(self._connection)

    def open_ahead(self) -> None:
        """Begin to open it in another thread, for who will need it but has to ask the store first.
        Whoever needs it before it is open waits, as always.

        A fork waits for that thread, and so does the end of the process. What fails here fails
        again, and is told, when it is needed."""
        self._owner.check()
        if not self._mutex.acquire(blocking=False):
            return  # somebody opens or uses it just now
        try:
            if self._opener is None and self._connection is None:
                self._expected = True
                self._opener = threading.Thread(target=self._open_expected, name="onto-duckdb")
                self._opener.start()
        finally:
            self._mutex.release()

    def _open_expected(self) -> None:
        with suppress(Exception), unforked(), self._mutex:
            if self._expected:
                self._connected()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        self._owner.check()
        with self._mutex:
            return self._connected().cursor()

    def reach_s3(self) -> None:
        """Make `s3://` readable, with the credentials that are good now."""
        self._owner.check()
        secret = self._secret() if self._secret is not None else {}
        with self._mutex:
            connection = self._connected()
            if self._current_secret is None:
                load_httpfs(connection)
                connection.execute("SET GLOBAL enable_http_metadata_cache = true")
                self._threads_otherwise = max(REMOTE_THREADS, os.cpu_count() or 1)
                self._set_threads(connection)
            if secret != self._current_secret:
                create_secret(connection, secret)
                self._current_secret = secret

    def _connected(self) -> duckdb.DuckDBPyConnection:
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def run(
        self,
        cursor: duckdb.DuckDBPyConnection,
        work: Callable[[], T],
        *,
        columns: int = 0,
        frugal: Callable[[], T] | None = None,
    ) -> T:
        """Do something with a cursor, so that Ctrl-C ends it; where memory does not suffice,
        again with fewer threads, for each of them needs a share, and with more memory for as many
        `columns` as that is the cause: batches of all of them are held, and do not spill. `frugal`
        does the same in a way that takes longer and needs less at once: the last resort."""
        import duckdb

        self._owner.check()
        ways = (self._use_fewer_threads, lambda: self._make_room(columns))
        try:
            for way in ways:
                try:
                    return unmasked(cursor, work)
                except duckdb.OutOfMemoryException:
                    if not way() and way is ways[-1]:
                        raise
            return unmasked(cursor, work)
        except duckdb.OutOfMemoryException:
            if frugal is None:
                raise
            return unmasked(cursor, frugal)

    def _use_fewer_threads(self) -> bool:
        with self._mutex:
            if self._connection is None:
                return False
            fewer = self._fewer_threads(self._connection)
            if fewer is None:
                return False
            self._threads_otherwise = fewer
            self._set_threads(self._connection)
            return True

    def _fewer_threads(self, connection: duckdb.DuckDBPyConnection) -> int | None:
        """As many as each has room for; None when there are no more than that."""
        (now,) = connection.execute("SELECT current_setting('threads')").fetchall()[0]
        fewer = max(1, size_in_bytes(self._memory_limit) // _THREAD_BYTES)
        return fewer if fewer < now else None

    def _make_room(self, columns: int) -> bool:
        """Raise the limit for types of many columns; it stays, as more of them will be read."""
        with self._mutex:
            if self._connection is None or not self._note_columns(columns):
                return False
            self._set_memory_limit(self._connection)
            return True

    def _note_columns(self, columns: int) -> bool:
        """Whether these are so many, and more than before, that they ask for more memory."""
        if columns <= max(_MANY_COLUMNS, self._room_for):
            return False
        self._room_for = columns
        return True

    def _set_memory_limit(self, connection: duckdb.DuckDBPyConnection) -> None:
        limit = size_in_bytes(self._memory_limit) + self._room_for * _COLUMN_BYTES
        connection.execute(f"SET GLOBAL memory_limit = '{limit // KIB} KiB'")

    def within_memory(self, held_bytes: int, work: Callable[[], T], *, columns: int = 0) -> T:
        """Do what joins or groups about so many bytes, in the limit however many these are.

        A join spills, but each of its threads needs a share of memory before: what is larger than
        memory gets few of them at once, and whatever does not fit is done again with fewer.
        """
        limit = size_in_bytes(self._memory_limit)
        few = max(1, limit // _THREAD_BYTES)
        steps = [few, 1] if few > 1 else [1]
        if held_bytes <= limit // 2:
            steps = [0, *steps]
        for threads in steps[:-1]:
            try:
                with self._at_most(threads):
                    return work()
            except DoesNotFit:
                continue
        with self._at_most(steps[-1]):
            try:
                return work()
            except DoesNotFit:
                if not self._make_room(columns):
                    raise
            return work()

    @contextmanager
    def _at_most(self, threads: int) -> Iterator[None]:
        """Hold all work on this connection back to so many threads; 0: not at all."""
        if not threads:
            yield
            return
        with self._mutex:
            connection = self._connected()
            if not self._threads_otherwise:
                (now,) = connection.execute("SELECT current_setting('threads')").fetchall()[0]
                self._threads_otherwise = int(now)
            self._held_back.append(threads)
            self._set_threads(connection)
        try:
            yield
        finally:
            with self._mutex:
                self._held_back.remove(threads)
                if self._connection is not None:
                    self._set_threads(self._connection)

    def _set_threads(self, connection: duckdb.DuckDBPyConnection) -> None:
        threads = min([self._threads_otherwise, *self._held_back])
        connection.execute(f"SET GLOBAL threads = {threads}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What DuckDB reports about files and memory, as one of our errors."""
        import duckdb

        try:
            yield
        except duckdb.OutOfMemoryException as error:
            raise DoesNotFit(
                f"query {self._uri}: does not fit into {self._memory_limit}; raise "
                f"s3_duckdb_memory_limit ({first_line(error)})",
                operation="query",
            ) from error
        except duckdb.HTTPException as error:
            raise StorageBackendError(
                f"query {self._uri}: {first_line(error)}", operation="query", retryable=True
            ) from error
        except duckdb.IOException as error:
            if "No files found" in str(error) or "No such file" in str(error):
                raise IntegrityError(
                    f"a file is named by the log but missing from {self._uri}: {first_line(error)}"
                ) from error
            raise StorageBackendError(
                f"query {self._uri}: {first_line(error)}", operation="query"
            ) from error
        except duckdb.InvalidInputException as error:
            if "parquet" not in str(error).lower():
                raise
            raise IntegrityError(f"damaged file in {self._uri}: {first_line(error)}") from error

    def close(self) -> None:
        if self._owner.elsewhere:
            return  # connection and spill directory are the parent's
        with self._mutex:
            self._expected = False
            opener, self._opener = self._opener, None
        if opener is not None:
            opener.join()
        with self._mutex:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
                self._current_secret = None
                self._room_for = 0
            while self._spills:
                _spills_left.remove(self._spills.pop())

    def _open(self) -> duckdb.DuckDBPyConnection:
        import duckdb  # here: importing storage_engine stays light

        _own_connection.made = True
        spill = self._new_spill()
        connection = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": self._memory_limit,
                "temp_directory": str(spill),
                "preserve_insertion_order": "false",
                "autoinstall_known_extensions": "false",
                "python_enable_replacements": "false",  # SQL names tables, not Python variables
                **self._extension_settings(),
            },
        )
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
        connection.execute("SET enable_progress_bar = false")  # a library prints nothing
        # Data files never change: what is known of one stays true.
        connection.execute("SET GLOBAL parquet_metadata_cache = true")
        connection.execute("SET GLOBAL validate_external_file_cache = 'NO_VALIDATION'")
        return connection

    def _extension_settings(self) -> dict[str, str]:
        """To check the signature of what reads S3 takes 0.1 s of the first query. Where that was
        installed as a package, it came in the way that DuckDB itself and this code did, and is
        loaded without; nothing else is loaded then, and no statements but ours are run."""
        if packaged_httpfs() is None:
            return {}
        return {"allow_unsigned_extensions": "true", "autoload_known_extensions": "false"}

    def _new_spill(self) -> Path:
        """A folder for what does not fit into memory, of one instance alone."""
        try:
            self._spills.append(_spills_left.make())
        except OSError as error:
            raise StorageBackendError(
                f"no temporary folder can be made for queries: {advice(error)}; TMPDIR says where "
                "it goes",
                operation="query",
                retryable=is_retryable(error),
            ) from error
        return self._spills[-1]


class Stream:
    """The rows of a statement as they come. Begun at once: what sorting and grouping need has been
    done when this is made. The cursor is closed with the last row, or with the iterator."""

    def __init__(
        self,
        duck: Duck,
        cursor: duckdb.DuckDBPyConnection,
        statement: str,
        parameters: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        columns: int = 0,
        frugal: str = "",
    ) -> None:
        """`columns`: how many the statement reads, where these may be many. `frugal`: the same
        statement so that it needs less memory at once, should it not fit."""
        self._cursor = cursor
        self._statement = statement
        self._frugal = frugal
        self._parameters = parameters or None
        try:
            self._reader, self._first = duck.run(
                cursor,
                self._begin,
                columns=columns,
                frugal=self._begin_frugal if frugal else None,
            )
        except BaseException:
            cursor.close()
            raise

    @property
    def schema(self) -> pa.Schema:
        return self._reader.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        with self._cursor:
            batch = self._first
            while batch is not None:
                if batch.num_rows:
                    yield batch
                batch = self._next_batch()

    def _begin(self) -> tuple[pa.RecordBatchReader, pa.RecordBatch | None]:
        answer = self._cursor.execute(self._statement, self._parameters)
        with _kinds():  # not every type of DuckDB has one of Arrow
            reader = answer.to_arrow_reader(_BATCH_ROWS)
        return reader, _next(reader)

    def _begin_frugal(self) -> tuple[pa.RecordBatchReader, pa.RecordBatch | None]:
        self._statement = self._frugal
        return self._begin()

    def _next_batch(self) -> pa.RecordBatch | None:
        import duckdb

        try:
            return interruptible(self._cursor, lambda: _next(self._reader))
        except duckdb.InterruptException:
            unmasked(self._cursor, self._read_to_end)  # for what it raises
            raise

    def _read_to_end(self) -> None:
        reader, batch = self._begin()
        while batch is not None:
            batch = _next(reader)


def _next(reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
    with _kinds():
        return next(reader, None)


@contextmanager
def _kinds() -> Iterator[None]:
    """Arrow passes on what DuckDB said, but not as what kind of error: that is put right here."""
    import duckdb

    try:
        yield
    except pa.ArrowInvalid as error:
        if "ArrowSchema" not in str(error):
            raise _of_kind(error) from error
        message = "Not implemented Error: the answer is nested too deeply for Arrow"
        raise duckdb.NotImplementedException(message) from error
    except (OSError, pa.ArrowException) as error:
        raise _of_kind(error) from error


def _of_kind(error: Exception) -> Exception:
    import duckdb

    message = str(error)
    kind = next((kind for name, kind in _KINDS.items() if f"{name} Error:" in message), "Error")
    made: Exception = getattr(duckdb, kind)(message)
    return made


class _OwnConnection:
    """The one that DuckDB keeps for itself, and gives up when the process ends."""

    def __init__(self) -> None:
        self.made = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        if self.made:
            import duckdb

            leave_to_parent(duckdb.default_connection())


_own_connection = _OwnConnection()


class _SpillsLeft:
    """Folders of instances that nobody has closed: they go when the process ends."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        renew_after_fork(self)
        atexit.register(self._remove_all)

    def after_fork(self) -> None:
        self._folders.clear()  # the parent's

    def make(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="ontologia-duckdb-"))
        self._folders.add(folder)
        return folder

    def remove(self, folder: Path) -> None:
        self._folders.discard(folder)
        shutil.rmtree(folder, ignore_errors=True)

    def _remove_all(self) -> None:
        for folder in list(self._folders):
            self.remove(folder)


_spills_left = _SpillsLeft()


def path_rows(duck: Duck, spec: QuerySpec, tables: Sequence[pa.Table]) -> pa.Table:
    """Row numbers of the tables along each complete path of a traversal, in order: the first has
    the sources, each further one the relations of a step."""
    names = ["source", *(f"step_{n}" for n in range(len(spec.via)))]
    with duck.cursor() as cursor:
        for name, table in zip(names, tables, strict=True):
            keys = [c for c in table.column_names if c in _PATH_KEYS]
            numbers = pa.array(range(table.num_rows), pa.int64())
            cursor.register(name, table.select(keys).append_column("row", numbers))
        joins, reached = "source", "source.entity_key"
        for number, name in enumerate(names[1:]):
            start, end = spec.ends(number)
            joins += f" JOIN {name} ON {name}.{start}_key = {reached}"
            reached = f"{name}.{end}_key"
        listed = ", ".join(f"{name}.row AS {name}" for name in names)
        order = ", ".join(f"{name}.row" for name in names)
        return cursor.execute(f"SELECT {listed} FROM {joins} ORDER BY {order}").to_arrow_table()


def unmasked(cursor: duckdb.DuckDBPyConnection, work: Callable[[], T]) -> T:
    """Do what can be done again. A thread of DuckDB that fails breaks off the others, and one of
    them may come first with "Interrupted": then it is done once more, to hear what was wrong."""
    import duckdb

    for _ in range(_LOOKS):
        try:
            return interruptible(cursor, work)
        except duckdb.InterruptException:
            log.debug("DuckDB broke off a statement without saying why: it is asked again")
    return interruptible(cursor, work)


def interruptible(cursor: duckdb.DuckDBPyConnection, work: Callable[[], T]) -> T:
    """Signals reach the main thread, and only while it runs Python: DuckDB works in another one.

    An exception on the way (KeyboardInterrupt above all) ends the query before it goes on.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    # Not a future: Ctrl-C inside its condition's own `with` would leave that locked.
    outcome: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()
    given_up = threading.Event()

    def do() -> None:
        try:
            if not given_up.is_set():
                outcome.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            outcome.put((None, error))

    worker = threading.Thread(target=do, name="onto-query", daemon=True)
    try:
        worker.start()  # a signal may come as early as here
        result, error = _awaited(outcome)
    except BaseException:
        given_up.set()
        while worker.is_alive():
            cursor.interrupt()
            worker.join(0.1)
        raise
    if error is not None:
        raise error
    return cast(T, result)


def _awaited(outcome: SimpleQueue[T]) -> T:
    """What comes, looked for again and again: where another package has handlers of its own that
    let system calls go on (Polars has), a signal does not end a wait that has no end."""
    while True:
        try:
            return outcome.get(timeout=_LOOK_S)
        except Empty:
            continue
