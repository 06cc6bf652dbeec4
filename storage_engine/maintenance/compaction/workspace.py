"""What one merge has to itself: a scratch folder, a DuckDB and a few threads, in bounded memory.

It must not take the memory of queries, and with a thread for each core of a large machine it would
not fit into the limit.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar, cast

from storage_engine.config import size_in_bytes
from storage_engine.errors import ConfigurationError, StorageBackendError
from storage_engine.wording import first_line

if TYPE_CHECKING:
    import duckdb

THREADS = 2

T = TypeVar("T")


class Workspace:
    """A folder for files, cursors that spill into it, and threads that work ahead."""

    def __init__(
        self,
        folder: Path,
        memory_bytes: int,
        cursor: Callable[[], duckdb.DuckDBPyConnection],
        *,
        inline: bool,
    ) -> None:
        self.folder = folder
        self.memory_bytes = memory_bytes
        self.cursor = cursor
        self._inline = inline
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="onto-merge")

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin in another thread; what is returned waits for the end. Not a future: Ctrl-C inside
        its condition's own `with` would leave that locked."""
        outcome: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

        def run() -> None:
            try:
                outcome.put((work(), None))
            except BaseException as error:  # noqa: BLE001 - handed to who waits
                outcome.put((None, error))

        if self._inline:
            run()
        else:
            self._pool.submit(run)

        def wait() -> T:
            result, error = outcome.get()
            if error is not None:
                raise error
            return cast(T, result)

        return wait

    def ahead(self, works: Iterable[Callable[[], T]]) -> Iterator[T]:
        """The results in order, while the threads are at the next ones."""
        running: deque[Callable[[], T]] = deque()
        for work in works:
            running.append(self.start(work))
            if len(running) > THREADS:
                yield running.popleft()()
        while running:
            yield running.popleft()()

    def settle(self) -> None:
        """Wait for the threads; what has not begun never will."""
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def open_workspace(
    memory_limit: str, small: Callable[[], duckdb.DuckDBPyConnection] | None = None
) -> Iterator[Workspace]:
    """Gone with all its files at the end. What cannot be done for want of memory or disk is raised
    as an error that says so.

    A merge that is `small` is done before threads and a DuckDB would have started: it is done in
    one thread, with these cursors."""
    import duckdb  # here: importing storage_engine stays light

    with ExitStack() as held:
        try:
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="ontologia-compact-"))
            workspace = Workspace(
                Path(folder),
                size_in_bytes(memory_limit),
                small or held.enter_context(_own_duckdb(memory_limit, folder)).cursor,
                inline=small is not None,
            )
            held.callback(workspace.settle)
            yield workspace
        except (duckdb.OutOfMemoryException, MemoryError) as error:
            raise ConfigurationError(
                f"the merge does not fit into s3_duckdb_memory_limit ({memory_limit}), raise it; "
                f"nothing was published: {first_line(error)}"
            ) from error
        except (duckdb.IOException, OSError) as error:
            raise StorageBackendError(
                f"the merge failed in {tempfile.gettempdir()}, where temporary files are; nothing "
                f"was published: {first_line(error)}",
                operation="compact",
                retryable=True,
            ) from error


@contextmanager
def _own_duckdb(memory_limit: str, folder: str) -> Iterator[duckdb.DuckDBPyConnection]:
    import duckdb

    connection = duckdb.connect(
        ":memory:",
        config={
            "memory_limit": memory_limit,
            "temp_directory": f"{folder}/spill",
            "threads": THREADS,
            "preserve_insertion_order": "false",
            "autoinstall_known_extensions": "false",
        },
    )
    with connection:
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
        connection.execute("SET enable_progress_bar = false")
        yield connection
