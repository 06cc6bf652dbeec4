"""docs/cli.md tells of every command, option and exit code; docs/operations.md of every setting."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from storage_engine.cli import arguments, errors, tree
from storage_engine.cli.examples import EXAMPLES
from storage_engine.cli.main import app
from storage_engine.config import OntologiaConfig
from tests.cli.support import ROOT, onto, onto_process

CLI = (ROOT / "docs" / "cli.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
GLOBAL = {
    "--storage-uri",
    "--db",
    "--config",
    "--models",
    "--branch",
    "--json",
    "--verbose",
    "--debug",
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
def test_every_command_takes_the_global_options_and_one_shows_them(path: str) -> None:
    assert _options(COMMANDS[path]) >= GLOBAL
    for option in COMMANDS[path].params:
        assert option.hidden == (path != "onto" and GLOBAL.issuperset(option.opts)), option.name


@pytest.mark.parametrize("name", tree.ENTRIES)
def test_the_program_says_of_a_command_what_its_own_help_does(name: str) -> None:
    assert COMMANDS[f"onto {name}"].help == tree.ENTRIES[name].help


@pytest.mark.parametrize("path", [p for p in COMMANDS if p != "onto"])
def test_every_command_has_examples_that_its_own_options_understand(path: str) -> None:
    examples = EXAMPLES[path.removeprefix("onto ")]
    program: Any = get_command(app)
    assert examples
    for line in examples:
        shell = re.split(r" [>|] ", line)[0]
        words = shlex.split(shell)
        assert shell.startswith((path, "onto"))
        context = program.make_context("onto", words[1:])
        command, args = program, words[1:]
        while hasattr(command, "commands") and args and args[0] in command.commands:
            _, command, args = command.resolve_command(context, args)
        command.make_context(path, args)  # raises what the line would be refused for


def test_help_ends_with_examples_and_says_where_the_other_options_are() -> None:
    shown = onto("schema", "drop", "--help")
    assert shown.code == 0
    assert "onto schema drop Customer --cascade" in shown.out
    assert "Global options: onto --help" in shown.out


@pytest.mark.parametrize(
    "path", ["onto", "onto tag create", "onto schema diff", "onto branch diff"]
)
def test_help_shows_flags_without_values_and_brackets_once(path: str) -> None:
    shown = onto(*path.split()[1:], "--help")
    assert "--help" in shown.out
    assert "<bool>" not in shown.out
    assert "[[" not in shown.out


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("onto qu", ["query"]),
        ("onto schema re", ["repair"]),
        ("onto --js", ["--json"]),
        ("onto compact --ap", ["--apply"]),
        ("onto import --on-conflict u", ["upsert"]),
        ("onto query entities Client --format j", ["json"]),
        ("onto branch merge x --on-conflict f", ["fail", "fields"]),
    ],
)
def test_a_shell_completes_commands_options_and_values(line: str, offered: list[str]) -> None:
    done = onto_process(
        cwd=ROOT,
        _ONTO_COMPLETE="complete_bash",
        COMP_WORDS=line,
        COMP_CWORD=str(len(line.split()) - 1),
    )
    assert (done.code, done.out.split(), done.err) == (0, offered, "")


def test_a_group_alone_shows_its_commands() -> None:
    for path, command in COMMANDS.items():
        if getattr(command, "commands", None) and path not in ("onto commits",):
            shown = onto(*path.split()[1:])
            assert shown.code == 2
            assert "Usage" in shown.out + shown.err
            assert all(name in shown.out + shown.err for name in command.commands), path


def test_help_of_the_program_imports_no_command() -> None:
    program = (
        "import sys; from storage_engine.cli.main import run; run(['--help']); "
        "print(*sys.modules, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.splitlines())
    assert "storage_engine.cli.tree" in loaded
    assert not loaded & {f"storage_engine.cli.{entry.module}" for entry in tree.ENTRIES.values()}
    assert not loaded & {"pyarrow", "duckdb", "pydantic", "boto3", "storage_engine.config"}


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
