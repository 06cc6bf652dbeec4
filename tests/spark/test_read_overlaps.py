"""Which version of an identity a read shows when commits overlap, in every way that they can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from storage_engine import Session, initialize_storage
from storage_engine.spark import reader, scans
from storage_engine.spark.reader import read_type
from tests.spark import read_world as world
from tests.spark.read_world import Follows, Sample, Stay, commit, expected, rows, sample

pytestmark = pytest.mark.spark


@pytest.fixture(params=["native", "arrow"])
def session(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Session]:
    """A directory: Spark opens its files itself, or gets them as Arrow batches as from S3."""
    if request.param == "arrow":
        monkeypatch.setattr(scans, "_url", lambda *_args, **_kwargs: None)
    uri = str(tmp_path / "onto")
    initialize_storage(uri)
    with Session(uri) as opened:
        yield opened


def overlapping(session: Session) -> None:
    """s0005 has a version in every commit; small commits have commit ids in their files, bulk
    commits have not. s0040 to s0049 are in one file that overlaps with nothing."""
    world.stage(session, range(20), 100)
    world.stage(session, [5, 6, 30], 200)
    commit(session, sample(5, 300), sample(7, 300))
    world.stage(session, range(40, 50), 400)
    world.stage(session, [5, 7, 19], 500)


def numbers(frame: DataFrame) -> dict[str, int]:
    found = [(row["id"], row["number"]) for row in rows(frame.select("id", "number"))]
    assert len(found) == len(dict(found)), "an identity is there twice"
    return dict(found)


def test_the_newest_of_many_versions(spark: SparkSession, session: Session) -> None:
    overlapping(session)
    latest = {f"s{n:04}": 100 for n in range(20)} | {f"s{n:04}": 400 for n in range(40, 50)}
    latest |= {"s0006": 200, "s0030": 200, "s0005": 500, "s0007": 500, "s0019": 500}
    assert numbers(read_type(spark, Sample, session)) == latest
    past = [read_type(spark, Sample, session, as_of=n, filter="id = 's0005'") for n in range(1, 6)]
    assert [numbers(frame)["s0005"] for frame in past] == [100, 200, 300, 300, 500]
    for as_of in (None, 4, 3, 2):
        found = read_type(spark, Sample, session, with_commit_id=True, as_of=as_of)
        assert rows(found) == expected(session, Sample, commit_id=True, as_of=as_of), as_of
    assert rows(read_type(spark, Sample, session, history=True)) == expected(
        session, Sample, commit_id=True, history=True
    )


def test_conditions_do_not_bring_back_old_versions(spark: SparkSession, session: Session) -> None:
    overlapping(session)

    def ids(condition: str, **options: Any) -> set[str]:
        return set(numbers(read_type(spark, Sample, session, filter=condition, **options)))

    assert ids("number = 300") == set()  # both were written again
    assert ids("number = 200") == {"s0006", "s0030"}
    assert ids("number = 300", as_of=4) == {"s0005", "s0007"}
    assert ids("number = 100 AND id IN ('s0004', 's0005')") == {"s0004"}
    assert ids("commit_id = 2", with_commit_id=True) == {"s0006", "s0030"}
    assert ids("commit_id < 5 AND id = 's0005'", with_commit_id=True) == set()
    # Neither the key nor the condition's column is asked for.
    only = read_type(spark, Sample, session, columns=["flag"], filter="number < 500")
    assert only.columns == ["flag"]
    assert only.count() == 31 - 3


def test_inside_the_range_of_a_snapshot(spark: SparkSession, session: Session) -> None:
    overlapping(session)
    world.compact(session)
    world.stage(session, [5, 45], 600)
    commit(session, sample(45, 700))
    for as_of in (1, 2, 3, 4, 5, 6, 7):
        found = read_type(spark, Sample, session, as_of=as_of, with_commit_id=True)
        assert rows(found) == expected(session, Sample, commit_id=True, as_of=as_of), as_of
    since = read_type(spark, Sample, session, since=4)
    assert rows(since) == expected(session, Sample, commit_id=True, history=True, since=4)


def test_composite_identities(spark: SparkSession, session: Session) -> None:
    """Two rows may share any part of an identity, and differ in another."""

    def follows(left: int, right: int, weight: int) -> Follows:
        return Follows(left_key=f"s{left:04}", right_key=f"s{right:04}", weight=weight)

    def stay(right: int, visit: str, nights: int) -> Stay:
        return Stay(left_key="s0001", right_key=f"s{right:04}", visit=visit, nights=nights)

    commit(session, *(sample(n) for n in range(5)))
    commit(session, *(follows(a, b, 1) for a in range(3) for b in range(3)))
    commit(session, follows(0, 1, 2), follows(1, 1, 2), stay(2, "a", 1), stay(2, "b", 1))
    commit(session, follows(1, 1, 3), follows(1, 4, 3), stay(2, "b", 2), stay(3, "a", 2))
    for type in (Follows, Stay):
        for as_of in (None, 3):
            found = read_type(spark, type, session, with_commit_id=True, as_of=as_of)
            assert rows(found) == expected(session, type, commit_id=True, as_of=as_of), type
    heavy = read_type(spark, Follows, session, filter="weight = 2", columns=["right_key"])
    assert rows(heavy) == [{"right_key": "s0001"}]  # of 0: that of 1 has got another weight


@pytest.mark.parametrize("named", [0, 2, 3])
def test_more_commits_than_one_expression_tells_apart(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: int
) -> None:
    monkeypatch.setattr(scans, "_NAMED", named)
    initialize_storage(tmp_path / "onto")
    with Session(tmp_path / "onto") as session:
        overlapping(session)
        found = read_type(spark, Sample, session, with_commit_id=True)
        assert rows(found) == expected(session, Sample, commit_id=True)
        assert numbers(read_type(spark, Sample, session, filter="number = 200")) == {
            "s0006": 200,
            "s0030": 200,
        }


def test_more_newer_versions_than_are_sent_to_everybody(
    spark: SparkSession, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "smallest_memory", lambda _: 0)
    overlapping(session)
    assert rows(read_type(spark, Sample, session)) == expected(session, Sample)


def test_overlapping_commits_are_one_scan_and_one_join(spark: SparkSession, tmp_path: Path) -> None:
    """However many commits: rows once, keys of newer files once, and conditions in the scan."""
    initialize_storage(tmp_path / "onto")
    with Session(tmp_path / "onto") as session:
        overlapping(session)
        frame = read_type(spark, Sample, session, columns=["number"], filter="number = 200")
        plan = str(frame._jdf.queryExecution().executedPlan().toString())
    assert (plan.count("FileScan"), plan.count("HashJoin"), plan.count("Union")) == (2, 1, 0), plan
    scan = plan[plan.index("FileScan") :].partition("\n")[0]
    assert "EqualTo(number,200)" in scan
    assert "ReadSchema: struct<commit_id:bigint,entity_key:string,number:bigint>" in scan
