"""What we ask of others: ranges in pyproject.toml, versions in the lock file alone."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import duckdb
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from storage_engine.errors import ConfigurationError
from storage_engine.repository import duck_s3

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_PIN = re.compile(r"^(?P<name>[\w.-]+)(?:\[[^\]]*\])?==(?P<version>[^\s;\\]+)", re.M)


def _requirements() -> Iterator[Requirement]:
    project = PROJECT["project"]
    listed = [
        *PROJECT["build-system"]["requires"],
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    yield from (Requirement(text) for text in listed)


def _locked() -> dict[str, Version]:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    return {canonicalize_name(m["name"]): Version(m["version"]) for m in _PIN.finditer(text)}


@pytest.mark.parametrize("requirement", _requirements(), ids=str)
def test_requirements_are_ranges_that_hold_what_is_locked(requirement: Requirement) -> None:
    operators = sorted(one.operator for one in requirement.specifier)
    assert operators == ["<", ">="], "a range: a lowest version, and one that is too new"
    locked = _locked()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(locked)


def test_somebody_elses_boto3_fits() -> None:
    [boto3] = [one for one in _requirements() if one.name == "boto3"]
    assert boto3.specifier.contains("1.43.0")


def test_the_dagster_extra_has_all_of_sparks() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras["spark"]) <= set(extras["dagster"])


def test_an_extension_of_another_duckdb_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locked together they fit; where somebody changed one of them, the error says what to do."""
    assert _locked()["duckdb"] == _locked()["duckdb-extension-httpfs"]
    package = tmp_path / "duckdb_extension_httpfs"
    package.mkdir()
    (package / "__init__.py").touch()
    _extension_for(package / "httpfs.duckdb_extension", "v1.0.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Looked for anew, and not remembered for the tests that follow.
    monkeypatch.setattr(duck_s3, "packaged_httpfs", duck_s3.packaged_httpfs.__wrapped__)

    connection = duckdb.connect()
    with pytest.raises(ConfigurationError) as caught:
        duck_s3.load_httpfs(connection)
    assert f"duckdb-extension-httpfs=={duckdb.__version__}" in str(caught.value)
    assert "v1.0.0" in str(caught.value)


def _extension_for(path: Path, version: str) -> None:
    """The installed one, which says at its end that it is of another release."""
    package = find_spec("duckdb_extension_httpfs")
    assert package is not None
    assert package.submodule_search_locations is not None
    [folder] = package.submodule_search_locations
    shutil.copyfile(next(Path(folder).rglob("httpfs.duckdb_extension")), path)
    own = f"v{duckdb.__version__}".encode()
    with path.open("r+b") as file:
        file.seek(-4096, 2)
        start, tail = file.tell(), file.read()
        file.seek(start + tail.rindex(own))
        file.write(version.encode().ljust(len(own), b"\0"))
