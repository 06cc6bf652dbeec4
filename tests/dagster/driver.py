"""In place of spark-submit, without Spark: writes down what it was started with and what it sees,
and does what TEST_DRIVER says.

python -m tests.dagster.driver [options of spark-submit] jobs/__main__.py ingest [arguments]
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from storage_engine.errors import LockContentionError, ValidationError
from storage_engine.spark.ingest_spec import IngestSpec
from storage_engine.spark.jobs import ingest
from storage_engine.spark.jobs.program import opened, spark_config
from storage_engine.spark.results import WriteResult

HOLDER = "TEST_HOLDER"


def executable(folder: Path) -> str:
    """A program to be named as `spark_submit`."""
    path = folder / "spark-submit"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.dagster.driver "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def seen(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return found


def _ingest(_spark: Any, order: IngestSpec, *, dry_run: bool, **_: Any) -> WriteResult:
    with opened(order.storage_uri, None) as session:
        runtime_id = session.repository.config.runtime_id  # type: ignore[attr-defined]
    told = {"command": sys.argv, "spark": spark_config(), "runtime_id": runtime_id}
    Path(os.environ["TEST_FOLDER"], "seen.json").write_text(json.dumps(told))
    match os.environ["TEST_DRIVER"]:
        case "contended":
            holder = {"dagster/run_id": os.environ[HOLDER]}
            raise LockContentionError(waited_ms=7, owner_id="somebody", holder=holder)
        case "refused":
            raise ValidationError("no such value", type="Customer", field="name")
        case "gone":
            os._exit(9)
    return WriteResult("Customer", None, 0, inserted=3 if dry_run else 0)


def main() -> int:
    vars(ingest).update(start_spark=lambda *_: None, ingest=_ingest)
    at = next(n for n, each in enumerate(sys.argv) if each.endswith("jobs/__main__.py"))
    assert sys.argv[at + 1] == "ingest"
    return ingest.main(sys.argv[at + 2 :])


if __name__ == "__main__":
    sys.exit(main())
