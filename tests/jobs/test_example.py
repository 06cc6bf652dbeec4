"""The example order of the documentation does what its comments say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.jobs.support import new_storage, rows, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "orders"


def test_the_example_order(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uri = new_storage(tmp_path)
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(str(FOLDER))
    arguments = ["--order=customers.yaml", f"--storage-uri={uri}"]
    arguments.append(f"--source={FOLDER / 'customers.csv'}")
    code, result = run(capsys, *arguments)
    assert (code, result["inserted"], result["duplicates"]) == (0, 3, 1), result
    assert rows(uri, "select id, name, country, seats from Customer order by id") == [
        ("eu-7", 'Ann "A" Lovelace', "GB", 3),
        ("eu-8", "Émilie", None, 1),
        ("us-7", "Grace Hopper", "US", 250),
    ]
    code, again = run(capsys, *arguments)
    assert (code, again["already_applied"], again["commit_id"]) == (0, True, 1)
