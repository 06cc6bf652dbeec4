"""RFC 0004, matrix 6: `onto compact` previews unless told to apply."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Place
from tests.cli.support import Customer, Product, commit, create, files, onto, onto_process, opened


@pytest.fixture(params=["v1", "v2"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    uri = f"file://{tmp_path}/shop"
    create(uri, str(request.param))
    for n in range(4):
        commit(uri, Customer(id="c1", name=f"Ann {n}"), Customer(id=f"n{n}", name="x"))
    commit(uri, Product(sku="p1"))
    return uri


def test_rfc0004_06_compact_without_apply_changes_nothing(storage: str, tmp_path: Path) -> None:
    before = files(tmp_path / "shop")
    done = onto("compact", "--storage-uri", storage)
    assert done.code == 0
    assert "Would rewrite 8 rows" in done.out
    assert "4 of 4 entries can become 1 snapshot" in done.out
    assert "add --apply" in done.out
    assert files(tmp_path / "shop") == before


def test_rfc0004_06_compact_apply_then_nothing_is_left_to_do(storage: str) -> None:
    with opened(storage) as repository:
        before = repository.list_commit_changes(3)
    done = onto("compact", "--storage-uri", storage, "--apply")
    assert (done.code, done.err) == (0, "")
    assert "8 rows rewritten" in done.out
    assert "1-4" in done.out
    again = onto("compact", "--storage-uri", storage, "--apply")
    assert "Nothing to compact." in again.out
    with opened(storage) as repository:
        assert repository.list_commit_changes(3) == before
        assert repository.head_commit_id() == 5


def test_json_tells_plan_and_report(storage: str) -> None:
    plan = onto("compact", "--storage-uri", storage, "--json").json
    assert plan["applied"] is False
    assert plan["total"] | {"bytes": 0, "expected_bytes": 0, "expected_files": 0} == {
        "runs": 1,
        "files": 4,
        "rows": 8,
        "bytes": 0,
        "expected_files": 0,
        "expected_bytes": 0,
    }
    done = onto("compact", "--storage-uri", storage, "--type", "Customer", "--apply", "--json").json
    assert done["applied"] is True
    [run] = done["report"]["runs"]
    assert (run["outcome"], run["files_in"], run["rows"]) == ("published", 4, 8)
    assert onto("compact", "--storage-uri", storage, "--json").json["total"]["runs"] == 0


def test_one_type_and_an_unknown_one(storage: str) -> None:
    done = onto("compact", "--storage-uri", storage, "--type", "Product")
    assert "Nothing to compact." in done.out
    assert "Customer" not in done.out
    wrong = onto("compact", "--storage-uri", storage, "--type", "Custommer")
    assert wrong.code == 2
    assert "did you mean Customer?" in wrong.error()


def test_empty_storages_and_sqlite(place: Place) -> None:
    create(place.uri, place.engine)
    done = onto("compact", "--storage-uri", place.uri, "--apply")
    assert done.code == 0
    assert "nothing to compact" in done.out


def test_a_process_prints_no_bar_where_nobody_watches(storage: str, tmp_path: Path) -> None:
    done = onto_process("compact", "--storage-uri", storage, "--apply", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "8 rows rewritten" in done.out
