"""What `onto` prints: tables for people or one JSON document for programs, both on stdout.

Warnings, errors and the progress of long work go to stderr, progress only where someone watches.
Text that comes out of a storage is shown with its control characters escaped, so that it cannot
steer the terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import IO, Any, Literal, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

Advance = Callable[[int, int | None], None]  # done, of all (None: not known)


@contextmanager
def progress(what: str) -> Iterator[Advance]:
    """A bar that goes away when the work is done; nothing at all where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader of our output went away
_UNLIMITED_WIDTH = 4096
_ALIGNED = 100  # characters; what is longer stands out of its column where nothing is folded
_UNBROKEN = 36  # a time, a UUID
_NARROW = 8  # what a column of folded text needs at least
_GAP = 2  # between columns
_NARROWEST = 80  # columns of a table would be nothing; the terminal wraps lines instead
_BROKEN_OFF = b"\xff\xff\xff\xff" + (1 << 20).to_bytes(4, "little")


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise typer.Exit(BROKEN_PIPE)


@dataclass(slots=True)
class Output:
    """Where the results of a command go."""

    json: bool = False
    _streaming: bool = field(default=False, init=False)
    _arrow: IO[bytes] | None = field(default=None, init=False)

    def document(self, payload: Mapping[str, Any]) -> None:
        """The whole result, for programs.

        While a document is being streamed these are its last members: what goes wrong in the
        middle becomes its `error`, and it is still JSON.
        """
        text = json.dumps(payload, indent=2, default=str)
        if self._streaming:
            self._streaming = False
            text = f"\n  ],\n{text.removeprefix('{').lstrip(chr(10))}"
        self.text(f"{text}\n")

    def stream(self, payload: Mapping[str, Any], batches: Iterable[Sequence[Any]]) -> None:
        """One document whose `rows` are written as they come, one on a line.

        It ends with `row_count`. One that was interrupted is not complete, and so not JSON.
        """
        begun = json.dumps({**payload, "rows": []}, indent=2, default=str)
        self.text(begun.removesuffix("]\n}"))
        self._streaming = True
        count = 0
        for batch in batches:
            lines = [json.dumps(row, allow_nan=False, default=str) for row in batch]
            if lines:
                self.text(("," if count else "") + "\n    " + ",\n    ".join(lines))
            count += len(lines)
        self.document({"row_count": count})

    def text(self, text: str) -> None:
        """Written as it is."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise typer.Exit(BROKEN_PIPE) from None

    @contextmanager
    def unfinished(self, sink: IO[bytes]) -> Iterator[None]:
        """While an Arrow stream is written to `sink`: if it fails, readers shall notice."""
        self._arrow = sink
        try:
            yield
        except BrokenPipeError:
            raise
        except BaseException:
            self.abandon()
            raise
        finally:
            self._arrow = None

    def abandon(self) -> None:
        """What has been written is not the whole result. A stream that just ends would pass for
        one, so it ends in the header of a message that does not come."""
        if self._arrow is not None:
            self._arrow.write(_BROKEN_OFF)
            self._arrow.flush()

    def facts(self, rows: Iterable[tuple[str, Any]]) -> None:
        """Names and values in two columns; rows without a value are left out."""
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")  # never cut: it may be what somebody looks for
        for name, value in rows:
            if value is not None:
                table.add_row(Text(printable(name), style="dim"), cell(value))
        _console().print(table)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Numbers are set to the right; a terminal that is too narrow folds long text."""
        lines = [list(row) for row in rows]
        numeric = [_are_numbers(line[number] for line in lines) for number in range(len(columns))]
        cells = [[cell(value) for value in line] for line in lines]
        if not sys.stdout.isatty():
            self._whole_lines(columns, numeric, cells)
            return
        console = _console()
        texts = [
            [name, *(line[number].plain for line in cells)] for number, name in enumerate(columns)
        ]
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold")
        for name, right, width in zip(columns, numeric, _widths(texts, console.width), strict=True):
            justify: Literal["left", "right"] = "right" if right else "left"
            table.add_column(Text(name), justify=justify, overflow="fold", width=width)
        for line in cells:
            table.add_row(*line)
        console.print(table)

    def _whole_lines(
        self, columns: Sequence[str], numeric: Sequence[bool], cells: Sequence[Sequence[Text]]
    ) -> None:
        """For programs such as grep: a row is a line, however long, and has no blanks at its
        end."""
        texts = [[*columns], *([each.plain for each in line] for line in cells)]
        widths = [
            max((n for n in map(cell_len, column) if n <= _ALIGNED), default=0)
            for column in zip(*texts, strict=True)
        ]
        for line in texts:
            padded = (
                f"{' ' * (width - cell_len(text))}{text}"
                if right
                else f"{text}{' ' * (width - cell_len(text))}"
                for text, width, right in zip(line, widths, numeric, strict=True)
            )
            self.text(f"{(' ' * _GAP).join(padded).rstrip(' ')}\n")

    def styled(self, text: Text) -> None:
        """With colours where somebody sees them; the caller has made it printable."""
        _console().print(text, soft_wrap=True)

    def line(self, text: str = "") -> None:
        _console().print(Text(printable(text)), soft_wrap=True)

    def warning(self, text: str) -> None:
        sys.stderr.write(f"warning: {printable(one_line(text))}\n")

    def note(self, text: str) -> None:
        """A remark on a result that is right."""
        sys.stderr.write(f"note: {printable(one_line(text))}\n")

    def version(self, version: str) -> None:
        if self.json:
            self.document({"version": version})
        else:
            self.line(f"onto {version}")


def _are_numbers(values: Iterable[Any]) -> bool:
    stored = [value for value in values if value is not None]
    return bool(stored) and all(isinstance(value, int | float | Decimal) for value in stored)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int | None]:
    """Of columns on a terminal. No word is broken, such as a time or an id, but in columns of long
    text, which share what the others leave. None lets rich divide the room, where there is too
    little of it for that."""
    longest = [max(map(cell_len, texts)) for texts in columns]
    widths = [
        min(
            max(cell_len(word) for text in texts for word in (text.split() or [""])),
            _UNBROKEN if length <= _UNBROKEN else _NARROW,
        )
        for texts, length in zip(columns, longest, strict=True)
    ]
    left = room - sum(widths) - _GAP * len(columns)
    if left < 0:
        return [None] * len(columns)
    by_length = sorted(range(len(columns)), key=longest.__getitem__)
    for place, number in enumerate(by_length):
        wanted = longest[number] - widths[number]
        more = min(wanted, left if longest[number] <= _UNBROKEN else left // (len(columns) - place))
        widths[number] += more
        left -= more
    return [*widths]


def cell(value: Any) -> Text:
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, Decimal):
        return Text(format(value, "f"))  # with all its digits, and no exponent
    return Text(printable(moment(value) if isinstance(value, datetime) else str(value)))


def moment(value: datetime) -> str:
    """For people: ISO 8601 in UTC, exact, so that it means the same when it is given back."""
    return value.astimezone(UTC).isoformat()


def shown_time(text: str | None) -> str | None:
    """A stored time, for people."""
    return moment(datetime.fromisoformat(text)) if text else None


def printable(text: str) -> str:
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def one_line(text: str) -> str:
    return " ".join(text.split())


def _console() -> Console:
    # Not a terminal: never cut or fold lines, a program such as grep reads them.
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    console = _Console(file=sys.stdout, width=width, highlight=False, emoji=False)
    console.width = max(console.width, _NARROWEST)
    return console
