"""Running the statements of queries: Ctrl-C ends them, and their errors say what to do.

Python runs signal handlers between two of its own instructions, and a statement is one call. So
SQLite calls back every now and then, which gives a waiting signal its turn; what its handler raises
(KeyboardInterrupt, as a rule) ends the statement and reaches the caller as it is. A single sort is
not cut short.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from storage_engine.query.statements import Statement

BATCH_ROWS = 16_384
INSTRUCTIONS = 200_000  # of SQLite's machine between two looks: some hundredths of a second

_TOO_LARGE = ("too many SQL variables", "Expression tree is too large", "parser stack overflow")


def ask(connection: sqlite3.Connection, statement: Statement) -> sqlite3.Cursor:
    """Begin a statement; `batches` gets its rows."""
    with _asking(connection):
        return connection.execute(statement.sql, statement.parameters)


def batches(cursor: sqlite3.Cursor) -> Iterator[Sequence[Sequence[Any]]]:
    """The rows as columns, some thousand rows at a time. The statement ends with the iterator."""
    try:
        while True:
            with _asking(cursor.connection):
                rows = cursor.fetchmany(BATCH_ROWS)
            if not rows:
                return
            yield list(zip(*rows, strict=True))
    finally:
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
        with _interruptible(connection):
            yield
    except sqlite3.OperationalError as error:
        if str(error) == "integer overflow":
            raise OverflowError(
                "a sum of integers does not fit into 64 bits; sum fewer rows, or take avg()"
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
