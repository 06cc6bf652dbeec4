"""`import storage_engine` costs nothing that the user did not ask for."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"pyspark", "dagster", "duckdb", "boto3", "botocore", "pandas", "polars"}


def modules_loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    )
    return set(done.stdout.split())


def packages_loaded_by(statement: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_loaded_by(statement)}


def test_importing_the_library_loads_no_heavy_package() -> None:
    loaded = packages_loaded_by("import storage_engine")

    assert "storage_engine" in loaded
    assert loaded & HEAVY == set()


def test_the_public_names_load_no_heavy_package() -> None:
    loaded = packages_loaded_by(
        "from storage_engine import Entity, Field, OntologiaConfig, Relation, Session"
    )

    assert loaded & HEAVY == set()


def test_the_check_sees_a_heavy_package() -> None:
    assert "duckdb" in packages_loaded_by("import duckdb")


def test_a_session_loads_what_merges_when_there_is_something_to_merge() -> None:
    loaded = modules_loaded_by("import storage_engine.maintenance.compaction.background")

    merging = {
        f"storage_engine.maintenance.compaction.{name}" for name in ("build", "merge", "run")
    }
    assert loaded & merging == set()
