"""The global options: accepted before and after a command's name, shown in the program's help.

`with_settings` gives a command these options on top of its own. What stands nearer to the end of
the line wins; an option beats the environment.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from storage_engine import __version__
from storage_engine.commitlog.layout import MAIN
from storage_engine.errors import ConfigurationError

if TYPE_CHECKING:
    from storage_engine.cli.output import Output
    from storage_engine.config import OntologiaConfig
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository import Repository
    from storage_engine.repository.open import Location


def parse_duration(text: str) -> timedelta:
    from storage_engine.config import duration

    try:
        return duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def written_options(*options: tuple[str, str | None]) -> str:
    """As they are typed, each with a blank before it; without those that have no value."""
    return "".join(f" {name} {shlex.quote(value)}" for name, value in options if value)


CONFIG_VARIABLE = "ONTOLOGIA_CONFIG"
LOG_LEVEL_VARIABLE = "ONTOLOGIA_LOG_LEVEL"
LOGGER = "storage_engine"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_PANEL = "Global options"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says, whichever side of the command's name it stands on."""

    storage_uri: str | None = None
    db: str | None = None
    config: str | None = None
    models: str | None = None
    branch: str | None = None
    json: bool = False
    verbose: bool = False
    debug: bool = False
    version: bool = False

    def then(self, later: Settings) -> Settings:
        """These settings with what a later part of the line adds or replaces."""
        given = {f.name: getattr(later, f.name) for f in fields(later)}
        stated = {name: value for name, value in given.items() if value not in (None, False)}
        return replace(self, **stated)


@dataclass(slots=True)
class Invocation:
    """One run of `onto`: its settings, and what commands make of them."""

    output: Output
    settings: Settings = Settings()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    names_storages: bool = False  # the command's own arguments do, not the settings
    _models: dict[tuple[str, str], TypeSpec] | None = None

    def apply(self, given: Settings) -> None:
        self.settings = self.settings.then(given)
        self.output.json = self.settings.json
        logging.getLogger(LOGGER).setLevel(self._log_level())

    def target(self) -> Location:
        """The storage that is meant. An option that names one makes the environment irrelevant."""
        from storage_engine.repository.open import bind, default_storage

        self.models()  # what is wrong with them is told by commands that need none, too
        db, uri = self.settings.db, self.settings.storage_uri
        for name, value in (("--db", db), ("--storage-uri", uri)):
            if value is not None and not value.strip():
                raise ConfigurationError(f"{name} is empty: name a storage or leave it out")
        return default_storage(self.environ) if db is None and uri is None else bind(db, uri)

    def repeated(self) -> str:
        """The global options with which a command that is shown means what this run means."""
        settings = self.settings
        storage = (
            ("--db", settings.db) if settings.db else ("--storage-uri", str(self.target().uri))
        )
        return written_options(
            storage,
            ("--config", settings.config),
            ("--models", settings.models),
            ("--branch", settings.branch),
        )

    def config(self) -> OntologiaConfig:
        from storage_engine.config import OntologiaConfig

        path = self.settings.config or self.environ.get(CONFIG_VARIABLE)
        return OntologiaConfig.from_file(path) if path else OntologiaConfig()

    def models(self) -> dict[tuple[str, str], TypeSpec]:
        """The types that `--models` declares, by kind and name; empty without it."""
        if self.settings.models is None:
            return {}
        from storage_engine.runtime.arguments import declared_types

        if self._models is None:
            self._models = declared_types(self.settings.models)
        return self._models

    @contextmanager
    def repository(self, *, on_main: bool = False) -> Iterator[Repository]:
        """The storage, opened with the engine that wrote it, on `--branch` unless a command goes
        from main to the branches by itself; closed whatever happens."""
        from storage_engine.repository import open_repository
        from storage_engine.repository.open import MEMORY

        target = self.target()
        branch = None if on_main else self.settings.branch
        opened = open_repository(target, self.config(), branch=branch)
        path = target.sqlite_path
        if path not in (None, MEMORY) and not Path(path).expanduser().exists():
            self.output.warning(f"{path} does not exist yet; the first commit creates it")
        try:
            yield opened
        finally:
            opened.close()

    def refuse_branch(self, command: str, why: str = "is about the whole storage") -> None:
        """Of commands that are about the storage as a whole, or are told of a branch otherwise."""
        if self.settings.branch not in (None, MAIN):
            raise ConfigurationError(f"`onto {command}` {why}: leave --branch out")

    def _log_level(self) -> int:
        name = self.environ.get(LOG_LEVEL_VARIABLE, "").strip().upper() or "WARNING"
        if name not in LOG_LEVELS:
            raise ConfigurationError(
                f"{LOG_LEVEL_VARIABLE} is {name!r}: choose one of {', '.join(LOG_LEVELS)}"
            )
        if self.settings.debug:
            return logging.DEBUG
        level = logging.getLevelNamesMapping()[name]
        return min(level, logging.INFO) if self.settings.verbose else level


def _shared(
    storage_uri: Annotated[
        str | None,
        typer.Option(
            "--storage-uri",
            metavar="URI",
            help="Storage: s3://bucket/prefix, file:///path, a directory or sqlite:///path.db "
            "(env ONTOLOGIA_STORAGE_URI). Without any: onto.db, or .ontologia/store if that is "
            "what is here.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    db: Annotated[
        str | None,
        typer.Option(
            "--db",
            metavar="PATH",
            help="SQLite file; the same as --storage-uri sqlite:///PATH (env ONTOLOGIA_DB).",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help=f"TOML file with options of OntologiaConfig (env {CONFIG_VARIABLE}).",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            metavar="MODULE",
            help="Python module that declares types; without it, types are as the storage has "
            "them.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    branch: Annotated[
        str | None,
        typer.Option(
            "--branch",
            metavar="NAME",
            help="What to work on instead of main; `onto branch list` shows what there is.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON document on stdout, errors included.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help=f"Log what happens on stderr (env {LOG_LEVEL_VARIABLE} sets the level).",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show the traceback of an error, and log everything.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", rich_help_panel=_PANEL),
    ] = False,
) -> None:
    """A signature to take parameters from; never called."""


@functools.cache
def _global_options() -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_shared, eval_str=True).parameters


GLOBAL_OPTIONS = tuple(Settings.__dataclass_fields__)


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command: its first parameter, `invocation`, is filled from the global options."""
    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    shared = _global_options()
    context = inspect.Parameter(
        "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    wants_context = any(p.name == "ctx" for p in own)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        given = Settings(**{name: values.pop(name) for name in shared})
        ctx: typer.Context = values.pop("ctx")
        invocation = ctx.find_object(Invocation)
        assert invocation is not None
        invocation.apply(given)
        if invocation.settings.version:
            invocation.output.version(__version__)
            raise typer.Exit
        if wants_context:
            values["ctx"] = ctx
        function(invocation, **values)

    parameters = [context, *(p for p in own if p.name != "ctx"), *shared.values()]
    signature = inspect.Signature(
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
