"""The documentation as a site: it builds without a warning, fetches nothing, leaves nothing out.

Public names, errors, pages and permissions are compared with the code; `onto` lines with the
program.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from storage_engine import errors
from storage_engine.cli.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
REFERENCE = {page: page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md")}
PACKAGES = ("ontologia_dagster", "storage_engine", "storage_engine.query", "storage_engine.spark")
_FENCED = re.compile(r"^ *```.*?^ *```", re.S | re.M)
_DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.M)
_ERROR_ROW = re.compile(r"^\| `(\w+)`(?: \(([^)]*)\))?(, \*retryable\*)? \| (.+) \| (.+) \|$", re.M)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_has_every_page_and_public_name_and_fetches_nothing(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix(".html").as_posix()
        assert name.replace("README.html", "index.html") in pages
    fetched = re.compile(
        r"""<(?:script|img|iframe|source|video|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//"""
    )
    for name, text in pages.items():
        assert not fetched.search(text), f"{name} fetches from elsewhere"
        assert 'class="mermaid"' not in text, f"{name}: Mermaid would be fetched; draw an SVG"
    told = "".join(text for name, text in pages.items() if name.startswith("reference/"))
    for package in PACKAGES:
        for public in importlib.import_module(package).__all__:
            anchored = f'id="{package}.{public}"' in told
            assert anchored or f"<code>{public}</code>" in told or public == "__version__", public
    assert "<code>--engine-version v1|v2</code>" in pages["cli.html"]  # no backslash
    assert "(<code>ontologia_dagster/defs/README.md</code>)" in pages["dagster.html"]
    assert re.search(
        r"<li><code>idempotency</code>: \(app id, version\)", pages["reference/api.html"]
    )
    assert "Swap head" in (site / "images" / "commit.svg").read_text()
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any("LockContentionError" in entry["text"] for entry in index["docs"])


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference_once(package: str) -> None:
    directives = [name for text in REFERENCE.values() for name in _DIRECTIVE.findall(text)]
    assert len(directives) == len(set(directives))
    documented = {name.rpartition(".") for name in directives}
    top = package.partition(".")[0]
    names = {name for owner, _, name in documented if owner.partition(".")[0] == top}
    names |= {row[0] for row in _error_rows()} | {"__version__"}
    assert set(importlib.import_module(package).__all__) <= names
    for owner, _, name in documented:
        assert name in importlib.import_module(owner).__all__, f"{owner}.{name} is not public"


def _error_rows() -> list[tuple[str, ...]]:
    return _ERROR_ROW.findall(REFERENCE[DOCS / "reference" / "errors.md"])


def _attributes(error: type) -> set[str]:
    """What the constructors of an error assign, its base's included."""
    module = ast.parse(Path(errors.__file__).read_text(encoding="utf-8"))
    bases = {each.__name__ for each in error.__mro__}
    return {
        target.attr
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name in bases
        for assigned in ast.walk(node)
        if isinstance(assigned, ast.Assign)
        for target in assigned.targets
        if isinstance(target, ast.Attribute)
    }


def test_every_error_has_cause_and_cure_and_is_told_with_its_facts() -> None:
    rows = {row[0]: row for row in _error_rows()}
    assert len(rows) == len(_error_rows())
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OntologiaError)
    }
    assert set(rows) == set(classes)
    for name, error in classes.items():
        _, facts, retryable, cause, cure = rows[name]
        assert bool(retryable) == error.retryable, name
        # What a BadRowsError has of its base says nothing there.
        wanted = _attributes(error) - ({"identity", "field"} if name == "BadRowsError" else set())
        assert set(re.findall(r"`(\w+)`", facts)) == wanted, name
        assert cause.strip()
        assert cure.strip()


def _nav(entries: Any) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
            continue
        for value in entry.values():
            yield from [value] if isinstance(value, str) else _nav(value)


def test_the_navigation_names_every_page_in_the_users_order() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = list(_nav(settings["nav"]))
    assert len(named) == len(set(named))
    assert set(named) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    sections = [next(iter(section)) for section in settings["nav"]]
    assert sections == ["Start", "How to", "Operations", "Reference", "Design"]
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in set(named) - {"README.md"}:
        if not page.startswith("design/"):  # which has an index of its own
            assert f"]({page})" in index, f"docs/README.md does not name {page}"


def _anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    named = re.findall(r'<a id="([^"]+)">', text)
    return {*named, *(re.sub(r"[\s-]+", "-", heading) for heading in plain)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_images_lead_somewhere(page: Path) -> None:
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), f"{target}#{anchor}"


def test_the_policies_allow_what_the_doctor_asks_for() -> None:
    text = (DOCS / "howto" / "s3-permissions.md").read_text(encoding="utf-8")
    reader, writer = (
        {action for each in json.loads(block)["Statement"] for action in _listed(each["Action"])}
        for block in re.findall(r"^```json\n(.*?)^```", text, re.S | re.M)
    )
    doctor = (ROOT / "storage_engine" / "maintenance" / "doctor.py").read_text(encoding="utf-8")
    asked = set(re.findall(r"s3:\w+", doctor))
    operations = (DOCS / "operations.md").read_text(encoding="utf-8")
    assert reader == {"s3:ListBucket", "s3:GetObject"}
    assert writer == asked | {"s3:AbortMultipartUpload"}
    assert writer == set(re.findall(r"^\| `(s3:\w+)` \|", operations, re.M))


def _listed(action: str | list[str]) -> list[str]:
    return [action] if isinstance(action, str) else action


def _onto_lines(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for block in _FENCED.findall(text):
        yield from (line.strip() for line in block.splitlines() if re.match(r" *onto ", line))
    yield from re.findall(r"(?<!`)`(onto [^`\n]+)`", _FENCED.sub("", text))


def _options(command: Any) -> set[str]:
    """Of a command, and of a group those of its commands: `onto query ... --explain`."""
    options = {name for each in command.params for name in each.opts}
    return options.union(*map(_options, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_options_that_the_pages_name_are_there(page: Path) -> None:
    program: Any = get_command(app)
    everywhere = {"--help", *(name for each in program.params for name in each.opts)}
    for line in _onto_lines(page):
        command, options, before = program, everywhere, ""
        for word in shlex.split(line.replace("\\|", "|"), comments=True)[1:]:
            if word in (">", "|", ";", "&&"):
                break
            if word.startswith("-") and len(word) > 1:
                assert word.partition("=")[0] in options, f"{line}: {word}"
            elif word in getattr(command, "commands", {}):
                command = command.commands[word]
                options = everywhere | _options(command)
            elif command is program and word.islower() and word.isidentifier():
                assert before in ("--db", "--storage-uri", "--models"), f"{line}: {word}"
            before = word
