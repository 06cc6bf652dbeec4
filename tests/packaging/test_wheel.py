"""The wheel, without a checkout, in a project that has a `jobs/` and a `tests/` of its own.

Nothing is downloaded: the environment is a new one with the wheel in it, and sees the packages that
the wheel needs through a `.pth` file, which does not carry the editable install along.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import storage_engine

ROOT = Path(__file__).parents[2]
PACKAGES = ("ontologia_dagster", "storage_engine")
COMPONENT = "ontologia_dagster.components.OntologyTypeComponent"

# What a user's project has of its own: nothing of ours may import it, or be hidden by it.
STRANGER = 'raise ImportError("this folder is the user\'s own")\n'
FILES = {
    "pyproject.toml": '[tool.dg]\ndirectory_type = "project"\n\n'
    '[tool.dg.project]\nroot_module = "shop"\n',
    "jobs/__init__.py": STRANGER,
    "jobs/ingest.py": STRANGER,
    "jobs/arguments.py": STRANGER,
    "tests/__init__.py": STRANGER,
    "program.py": STRANGER,
    "shop/__init__.py": "",
    "shop/defs/__init__.py": "",
    "shop/models.py": """
from storage_engine import Entity, Field


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
""",
    "data/customers.csv": "id,name\nc1,Ada\nc2,Bo\n",
    "materialise.py": """
import dagster as dg

from ontologia_dagster import (
    OntologyAsset,
    OntologyResource,
    SourceSpec,
    SparkResource,
    build_platform,
)
from storage_engine import Session, initialize_storage

initialize_storage("store")
declared = OntologyAsset(
    type="Customer",
    models="shop.models",
    source=SourceSpec(format="csv", paths=["data/customers.csv"]),
)
bound = {
    "ontology": OntologyResource(storage_uri="store"),
    "spark": SparkResource(master="local[1]", spark_config={"spark.ui.enabled": "false"}),
    "notifier": None,
}
defs = dg.Definitions.merge(build_platform([declared]), dg.Definitions(resources=bound))
result = defs.resolve_job_def("ontology_ingest_customer").execute_in_process()
assert result.success
with Session("store") as session:
    rows = session.sql("select id, name from Customer order by id").collect()
print(rows)
""",
}


@dataclass(frozen=True)
class Installation:
    """The environment with the wheel, and a user's project beside it."""

    wheel: Path
    python: Path
    site: Path
    project: Path

    def run(self, *command: str | Path, timeout: float = 300) -> str:
        environment = _environment()
        environment["PATH"] = f"{self.python.parent}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout


def _environment() -> dict[str, str]:
    """Ours, without what would lead to the checkout."""
    ours = ("ONTOLOGIA_", "DAGSTER_", "PYTHON", "PYSPARK_", "SPARK_", "VIRTUAL_ENV")
    return {name: text for name, text in os.environ.items() if not name.startswith(ours)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("wheel")
    wheel = _built(folder)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=120
    )
    python = folder / "env" / "bin" / "python"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"),
            *("--no-deps", "--no-index", str(wheel)),
        ],
        env=_environment(),
        check=True,
        timeout=300,
    )
    [site] = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    project = folder / "project"
    for name, text in FILES.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Installation(wheel, python, site, project)


def _built(folder: Path) -> Path:
    """From a copy of the whole checkout: building leaves files in its folder."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "images")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=left_out)
    program = "import setuptools.build_meta as build; build.build_wheel('../dist')"
    (folder / "dist").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [wheel] = (folder / "dist").glob("*.whl")
    return wheel


def test_it_has_all_of_the_two_packages_and_nothing_else(installed: Installation) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == set(PACKAGES)
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    # The example is the checkout's: who installs the package has types of their own.
    example = {name for name in wanted if name.startswith("ontologia_dagster/defs/")}
    assert names == wanted - example | {"ontologia_dagster/defs/__init__.py"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert "ontologia_dagster/demo/workspace.yaml" in names


def test_the_checkout_does_not_leak_in(installed: Installation) -> None:
    for name in PACKAGES:
        program = f"import {name}; print({name}.__file__)"
        path = installed.run(installed.python, "-c", program).strip()
        assert Path(path).is_relative_to(installed.site)
    for name in ("jobs", "tests"):
        asked = f"from importlib.util import find_spec; print(find_spec({name!r}))"
        assert installed.run(installed.python, "-I", "-c", asked).strip() == "None"


def test_the_command_line_tells_its_version(installed: Installation) -> None:
    said = installed.run(installed.python.with_name("onto"), "--version")
    assert storage_engine.__version__ in said


def test_the_example_of_the_readme_works(installed: Installation) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M)
    (installed.project / "example.py").write_text(example)
    said = installed.run(installed.python, "example.py")
    assert "Ada" in said
    assert "'source': 'catalogue'" in said


def test_dg_finds_the_component_in_any_project(installed: Installation) -> None:
    dg = "from dagster_dg_cli.cli import main; main()"
    said = installed.run(installed.python, "-c", dg, "list", "components", "--json")
    listed, _ = json.JSONDecoder().raw_decode(said, said.index("["))
    assert COMPONENT in [component["key"] for component in listed]


@pytest.mark.spark
def test_an_ingestion_asset_through_dagster(installed: Installation) -> None:
    said = installed.run(installed.python, "materialise.py")
    assert "[{'id': 'c1', 'name': 'Ada'}, {'id': 'c2', 'name': 'Bo'}]" in said


@pytest.mark.spark
def test_the_programs_for_spark_beside_a_users_jobs(installed: Installation) -> None:
    onto = installed.python.with_name("onto")
    installed.run(onto, "init", "--storage-uri", "by_program")
    said = installed.run(
        *(installed.python, "-m", "storage_engine.spark.jobs", "ingest", "--json"),
        *("--storage-uri", "by_program", "--models", "shop.models", "--type", "Customer"),
        *("--source", "data/customers.csv", "--format", "csv"),
    )
    result = json.loads(said.splitlines()[-1])
    assert (result["commit_id"], result["inserted"]) == (1, 2)
