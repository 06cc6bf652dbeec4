"""What `onto` prints: tables for people or one JSON document for programs, both on stdout.

Warnings and errors for people go to stderr. Text that comes out of a storage is shown with its
control characters escaped, so that it cannot steer the terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader of our output went away
_UNLIMITED_WIDTH = 4096


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise typer.Exit(BROKEN_PIPE)


@dataclass(slots=True)
class Output:
    """Where the results of a command go."""

    json: bool = False

    def document(self, payload: Mapping[str, Any]) -> None:
        """The whole result, for programs."""
        try:
            sys.stdout.write(json.dumps(payload, indent=2, default=str) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise typer.Exit(BROKEN_PIPE) from None

    def facts(self, rows: Iterable[tuple[str, Any]]) -> None:
        """Names and values in two columns; rows without a value are left out."""
        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            if value is not None:
                table.add_row(Text(name, style="dim"), cell(value))
        _console().print(table)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Numbers are set to the right; a terminal that is too narrow folds long text."""
        found = [list(row) for row in rows]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for number, column in enumerate(columns):
            numeric = bool(found) and all(isinstance(row[number], int) for row in found)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in found:
            table.add_row(*(cell(value) for value in row))
        _console().print(table)

    def line(self, text: str = "") -> None:
        _console().print(Text(printable(text)), soft_wrap=True)

    def warning(self, text: str) -> None:
        sys.stderr.write(f"warning: {printable(one_line(text))}\n")

    def version(self, version: str) -> None:
        if self.json:
            self.document({"version": version})
        else:
            self.line(f"onto {version}")


def cell(value: Any) -> Text:
    if value is None:
        return Text("-", style="dim")
    return Text(printable(moment(value) if isinstance(value, datetime) else str(value)))


def moment(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def printable(text: str) -> str:
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def one_line(text: str) -> str:
    return " ".join(text.split())


def size(count: int) -> str:
    """Bytes as people read them."""
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"


def _console() -> Console:
    # Not a terminal: never cut or fold lines, a program such as grep reads them.
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    return _Console(file=sys.stdout, width=width, highlight=False, emoji=False)
