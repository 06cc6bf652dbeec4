"""The commands of `onto`, by name. What a command needs is imported when it is called.

The help text of the whole program and the completion of a command's name know commands by what is
written here; the module that has one is imported when it is resolved.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from storage_engine.cli.arguments import GLOBAL_OPTIONS, with_settings
from storage_engine.cli.examples import EXAMPLES

_START, _READ, _CHANGE, _LOOK_AFTER = "Start", "Read", "Change", "Look after"


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command or a group of them: where it is, and its help."""

    panel: str
    module: str
    attribute: str
    help: str

    def load(self, name: str) -> Any:
        module = importlib.import_module(f"storage_engine.cli.{self.module}")
        declared = getattr(module, self.attribute)
        around = typer.Typer(add_completion=False)
        if not isinstance(declared, typer.Typer):
            around.command(name, rich_help_panel=self.panel)(with_settings(declared))
            return explained(get_command(around), name)
        around.add_typer(declared, name=name, rich_help_panel=self.panel)
        group: Any = get_command(around)
        return explained(group.commands[name], name)

    def summary(self, name: str) -> TyperCommand:
        return TyperCommand(name, help=self.help, rich_help_panel=self.panel)


ENTRIES = {
    "init": CommandEntry(
        _START, "storage", "init", "Create an empty storage, or erase one and start again."
    ),
    "info": CommandEntry(
        _START,
        "storage",
        "info",
        "Show what a storage is, where its head stands, its types in figures, and what to do next.",
    ),
    "query": CommandEntry(
        _READ, "query", "app", "Ask for entities, relations and paths, or ask in SQL."
    ),
    "shell": CommandEntry(
        _READ, "shell", "shell", "Open a Python prompt with a session and the declared types."
    ),
    "explore": CommandEntry(
        _READ,
        "explore",
        "explore",
        "Serve a read-only page of the ontology: types, objects, history, events, health.",
    ),
    "commits": CommandEntry(_READ, "commits", "app", "List commits, newest first, or examine one."),
    "log": CommandEntry(
        _READ,
        "history",
        "log",
        "Show commits in the order in which they landed: who, which run, what and how many rows.",
    ),
    "diff": CommandEntry(
        _READ,
        "history",
        "diff",
        "Show what differs between two commits: new rows, and fields before and after.",
    ),
    "export": CommandEntry(
        _READ,
        "exchange",
        "export",
        "Write the rows of types as of one commit: a file for each type and export.json, or a "
        "pipe.",
    ),
    "schema": CommandEntry(
        _READ,
        "schema",
        "app",
        "Look at stored types and their schema versions, compare them with classes, drop them.",
    ),
    "migrate": CommandEntry(
        _CHANGE,
        "migrate",
        "migrate",
        "Bring the storage to the classes of --models; exit code 3 if upgraders are missing.",
    ),
    "import": CommandEntry(
        _CHANGE,
        "exchange",
        "import_",
        "Check files of rows, say what importing them would do, and do it in one commit.",
    ),
    "restore": CommandEntry(
        _CHANGE,
        "commits",
        "restore",
        "Make the state of an older commit the latest, by a new commit; history stays.",
    ),
    "tag": CommandEntry(
        _CHANGE,
        "commits",
        "tag_app",
        "Give commits names, to read and restore by; a tag keeps its files from being collected.",
    ),
    "branch": CommandEntry(
        _CHANGE,
        "branch",
        "app",
        "Work beside main: fork branches, compare them, merge them, or throw them away.",
    ),
    "copy": CommandEntry(
        _CHANGE,
        "transfer",
        "copy",
        "Copy a storage with its whole history into an empty one, or bring such a copy up to date.",
    ),
    "migrate-engine": CommandEntry(
        _CHANGE,
        "transfer",
        "migrate_engine",
        "Build a v2 storage from a v1 one, with its whole history; the v1 storage stays as it is.",
    ),
    "events": CommandEntry(
        _LOOK_AFTER, "events", "app", "Look after the event bus, and run workers on it."
    ),
    "verify": CommandEntry(
        _LOOK_AFTER,
        "maintenance",
        "verify",
        "Check the log, its checkpoints, tags and data files; exit code 3 if anything is wrong.",
    ),
    "index": CommandEntry(
        _LOOK_AFTER,
        "maintenance",
        "index_app",
        "Look after the type indices of a storage on S3 or in a directory.",
    ),
    "compact": CommandEntry(
        _LOOK_AFTER,
        "maintenance",
        "compact",
        "Merge the small files of types into large ones; reads stay the same, history is kept.",
    ),
    "gc": CommandEntry(
        _LOOK_AFTER,
        "maintenance",
        "gc",
        "Delete objects that nothing needs: what failed writers left, and what was replaced.",
    ),
    "du": CommandEntry(
        _LOOK_AFTER,
        "history",
        "du",
        "Show what takes how much room: objects and bytes, data files by type.",
    ),
    "doctor": CommandEntry(
        _LOOK_AFTER,
        "storage",
        "doctor",
        "Look whether this machine and this storage have what they need; exit code 3 if not.",
    ),
    "lock": CommandEntry(
        _LOOK_AFTER,
        "storage",
        "lock_app",
        "See who holds the write lock, and take it from a holder that will not give it back.",
    ),
}


def explained(command: Any, path: str) -> Any:
    """With examples, and without the options that `onto --help` shows."""
    for parameter in bare_flags(command).params:
        parameter.hidden = parameter.name in GLOBAL_OPTIONS
    lines = "\n".join(f"  {escape(line)}" for line in EXAMPLES.get(path, ()))
    command.epilog = f"Examples:\n{lines}\n\nGlobal options: onto --help"
    for name, inner in getattr(command, "commands", {}).items():
        explained(inner, f"{path} {name}")
    # A group alone shows what it has.
    if not getattr(command, "invoke_without_command", True):
        command.no_args_is_help = True
    return command


def bare_flags(command: Any) -> Any:
    """With flags that are shown as they are written. Typer would show `--json <bool>`."""
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return command


class Commands(Mapping[str, Any]):
    """Each is loaded when it is asked for, once."""

    def __init__(self, entries: Mapping[str, CommandEntry]) -> None:
        self._entries = entries
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._entries[name].load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Program(TyperGroup):
    """The program itself, as a group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = Commands(ENTRIES)
        self._listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in ENTRIES:
            return None
        return ENTRIES[cmd_name].summary(cmd_name) if self._listing else self.commands[cmd_name]

    def list_commands(self, _ctx: Any) -> list[str]:
        return list(ENTRIES)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._summaries():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._summaries():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _summaries(self) -> Iterator[None]:
        self._listing = True
        try:
            yield
        finally:
            self._listing = False
