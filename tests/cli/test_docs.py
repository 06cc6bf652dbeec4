"""docs/cli.md tells of every command, option and exit code; docs/operations.md of every setting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from storage_engine.cli import arguments, errors
from storage_engine.cli.main import app
from storage_engine.config import OntologiaConfig
from tests.cli.support import ROOT, onto

CLI = (ROOT / "docs" / "cli.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
GLOBAL = {
    "--storage-uri",
    "--db",
    "--config",
    "--models",
    "--json",
    "--verbose",
    "-v",
    "--version",
}


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{path} {name}")


COMMANDS = dict(_commands(get_command(app), "onto"))


def _section(path: str) -> str:
    """The text under a command's heading, up to the next heading."""
    found = re.search(rf"^#+ `{re.escape(path)}[^`\n]*`\n(.*?)(?=^#|\Z)", CLI, re.M | re.S)
    assert found, f"docs/cli.md has no heading for `{path}`"
    return found.group(0)


def _options(command: Any) -> set[str]:
    return {name for p in command.params for name in p.opts if name.startswith("-")}


@pytest.mark.parametrize("path", [p for p in COMMANDS if p != "onto"])
def test_every_command_is_documented_with_its_help(path: str) -> None:
    command, section = COMMANDS[path], _section(path)

    assert command.help in section
    for option in _options(command) - GLOBAL:
        assert f"`{option}" in section, f"{path} {option}"
        assert _help_of(command, option) in section, f"{path} {option}"


def _help_of(command: Any, option: str) -> str:
    return next(p.help for p in command.params if option in p.opts)


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_takes_the_global_options_and_shows_them(path: str) -> None:
    assert _options(COMMANDS[path]) >= GLOBAL
    shown = onto(*path.split()[1:], "--help")
    assert shown.code == 0
    assert all(option in shown.out for option in GLOBAL)


def test_the_global_options_and_variables_are_documented() -> None:
    for option in GLOBAL:
        assert f"`{option}" in CLI or f"`{option}`" in CLI
    for name in vars(arguments):
        if name.endswith("_VARIABLE"):
            assert f"`{getattr(arguments, name)}`" in CLI


def test_docs_name_no_command_that_is_not_there() -> None:
    known = {path.removeprefix("onto").strip() for path in COMMANDS}
    for heading in re.findall(r"^#+ `onto ([a-z -]+)", CLI, re.M):
        assert heading.strip() in known


def test_the_exit_codes_are_documented() -> None:
    rows = {
        int(code): set(re.findall(r"`(\w+)`", names))
        for code, names in re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|", CLI, re.M)
    }
    for error, code in errors.EXIT_CODES.items():
        assert error.__name__ in rows[code], f"{error.__name__} under exit code {code}"
    documented = set().union(*rows.values())
    named = {error.__name__ for error in errors.EXIT_CODES}
    assert {name for name in documented if name.endswith("Error")} - named <= {
        "CommitNotFoundError",
        "EventNotFoundError",
        "UsageError",
    }


def test_the_settings_are_documented_with_their_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", OPERATIONS, re.M))

    assert set(rows) == set(OntologiaConfig.model_fields)
    for name, field in OntologiaConfig.model_fields.items():
        assert rows[name].replace("_", "") == str(field.default).replace("_", ""), name


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
