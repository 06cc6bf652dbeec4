"""Every command with arguments that fit the storage of `conftest`, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.cli.support import Done

MODELS = "tests.cli.support"
HANDLERS = "tests.cli.test_events"

LINES: dict[str, tuple[str, ...]] = {
    "init": ("--force", "--token", "t"),
    "info": (),
    "query entities": ("Customer",),
    "query relations": ("Employment",),
    "query traverse": ("Customer", "--via", "Employment"),
    "query sql": ("SELECT * FROM Customer",),
    "shell": ("-c", "pass"),
    "explore": ("--port", "0"),
    "commits": (),
    "commits examine": ("1",),
    "log": (),
    "diff": ("0", "2"),
    "export": ("--output", "out"),
    "schema list": (),
    "schema show": ("Product",),
    "schema diff": ("--models", MODELS),
    "schema export": (),
    "schema history": ("Product",),
    "schema drop": ("Employment",),
    "schema repair": ("--apply",),
    "migrate": ("--models", MODELS),
    "import": ("--input", "in.jsonl", "--apply"),
    "restore": ("1", "--apply"),
    "tag list": (),
    "tag create": ("before", "1"),
    "tag delete": ("before",),
    "copy": ("--apply",),  # told where it is by arguments of its own
    "migrate-engine": ("--to", "there"),
    "events list-namespaces": (),
    "events sessions": (),
    "events show": (),
    "events dead-letters": (),
    "events inspect": ("e1",),
    "events replay": ("e1", "--apply"),
    "events redrive": ("--apply",),
    "events cleanup": ("--apply",),
    "events peek": ("--handlers", HANDLERS),
    "events run": ("--handlers", HANDLERS, "--drain"),
    "verify": (),
    "index verify": (),
    "index repair": ("--apply",),
    "compact": ("--apply",),
    "gc": ("--apply",),
    "du": (),
    "doctor": (),
    "lock show": (),
    "lock break": ("--token", "t"),
    "branch list": (),
    "branch create": ("run/1",),
    "branch diff": ("run/1",),
    "branch update": ("run/1", "--apply"),
    "branch merge": ("run/1", "--apply"),
    "branch protect": ("run/1",),
    "branch delete": ("run/1", "--apply"),
}


READ_ROWS = {
    "query entities",
    "query relations",
    "query traverse",
    "query sql",
    "diff",
    "export",
    "import",
    "copy",
    "verify",
}  # who reads what is damaged cannot end well
PRINT_THEIR_OWN = {"shell", "log", "explore"}  # and what the page would print is left out here
REPORTS = {"doctor", "verify", "index verify"}  # that fail by what they say
LOOK_BEFORE = {"doctor", "init"}  # there need not be a storage


def leaves(command: Any, path: str = "") -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if not inner or (path and getattr(command, "invoke_without_command", False)):
        yield path
    for name in inner:
        yield from leaves(inner[name], f"{path} {name}".strip())


def line_of(command: str, uri: str, *options: str, as_json: bool) -> list[str]:
    """All arguments of `onto`."""
    where = (uri, "copied") if command == "copy" else ("--storage-uri", uri)
    return [*command.split(), *LINES[command], *where, *options, *(["--json"] if as_json else [])]


def check_answer(command: str, done: Done, *, as_json: bool) -> None:
    """Whatever the storage is like: one JSON document, or one line that says what is wrong."""
    told = (command, done)
    assert "Traceback" not in done.err, told
    assert "defect" not in done.err + done.out, told
    assert done.code in (0, *range(2, 7)), told
    if as_json and (done.code or command not in PRINT_THEIR_OWN):
        assert isinstance(done.json, dict), told
    elif done.code and command not in REPORTS:
        errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert (len(errors), done.out) == (1, ""), told
