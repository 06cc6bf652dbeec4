"""What the documentation imports is exported by the packages that it names."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "docs").rglob("*.py"))
OURS = ("ontologia_dagster", "storage_engine")
# A user imports from these and from nothing below them.
PUBLIC = {"ontologia_dagster", "storage_engine", "storage_engine.query", "storage_engine.spark"}
_CODE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.S | re.M)


def _programs() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, block in enumerate(_CODE.findall(page.read_text(encoding="utf-8")), 1):
            yield f"{page.relative_to(ROOT)}:{number}", block
    for example in EXAMPLES:
        yield str(example.relative_to(ROOT)), example.read_text(encoding="utf-8")


def _imports(program: str) -> Iterator[tuple[str, str]]:
    """Of our packages: module and name."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in OURS:
                yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                (alias.name, "") for alias in node.names if alias.name.split(".")[0] in OURS
            )


@pytest.mark.parametrize(
    ("place", "program"), [pytest.param(*one, id=one[0]) for one in _programs()]
)
def test_every_name_that_the_docs_import_is_exported(place: str, program: str) -> None:
    for module, name in _imports(program):
        assert module in PUBLIC, f"{place} imports {module}, which is not for users"
        if name:
            exported = importlib.import_module(module).__all__
            assert name in exported, f"{place} imports {name}, which {module} does not export"


def test_the_docs_import_from_both_packages() -> None:
    """The test above sees what it should."""
    seen = {module for _, program in _programs() for module, _ in _imports(program)}
    assert set(OURS) <= seen


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_every_exported_name_is_there(module: str) -> None:
    package = importlib.import_module(module)
    assert len(package.__all__) == len(set(package.__all__))
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError):
        _ = package.no_such_name


def test_importing_the_dagster_package_is_light() -> None:
    program = (
        "import sys, ontologia_dagster\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    )
    assert not {"dagster", "pyspark", "pydantic", "storage_engine"} & set(done.stdout.split())
