"""Merges by Spark: the same as those without it, whatever was changed, and beside other writers."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from storage_engine import Session, initialize_storage
from storage_engine.errors import MergeConflictError
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository.object.merge import MergeReport
from storage_engine.spark import merge as spark_merge
from storage_engine.spark import merge_with_spark, read_type, update_with_spark, write_type
from storage_engine.spark.jobs import merge as job
from tests.spark.read_world import Sample, Stay, commit, expected, rows, sample

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SEEDS = range(20) if os.environ.get("ONTOLOGIA_LONG") else (1,)


def changes(random_: random.Random) -> list[Any]:
    """Few identities, so that both sides often change the same, also to the same."""
    samples = [
        sample(n, random_.randrange(4)) if random_.random() < 0.7 else Sample(id=f"s{n:04}")
        for n in random_.sample(range(30), 8)
    ]
    stays = [
        Stay(left_key="s0001", right_key="s0002", visit=f"v{n}", nights=random_.randrange(3))
        for n in random_.sample(range(6), 2)
    ]
    return [*samples, *stays]


def decided(base: Any, ours: Any, theirs: Any) -> Any:
    """Something of both, and something of neither."""
    if base is None:
        return ours or theirs
    return {**theirs, "number": 9} if "number" in theirs else {**theirs, "nights": 9}


def by_fields(session: Session, source: str | None, policy: Any) -> MergeReport:
    if source is None:
        return session.update_branch(on_conflict=policy)
    return session.merge(source, on_conflict=policy)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_comes_to_the_same_as_without_spark(
    spark: SparkSession, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    compare = spark_merge.SparkMerger.compare

    def counted(self: Any, asked: Any, folder: Any) -> Any:
        compared.append(asked.spec.name)
        return compare(self, asked, folder)

    monkeypatch.setattr(spark_merge.SparkMerger, "compare", counted)
    random_ = random.Random(seed)
    here, there = tmp_path / "here", tmp_path / "there"
    initialize_storage(str(here))
    with Session(str(here)) as main:
        commit(main, *(sample(n) for n in (1, 2, *range(3, 30, 2))), *changes(random_))
        main.create_branch("run/1")
    steps: list[tuple[str, Any]] = [
        ("merge", "fail"),
        ("merge", decided),
        ("update", "fields"),
        ("merge", "theirs"),
        ("merge", "ours"),
    ]
    for way, policy in steps:
        for branch, times in ((None, random_.randrange(1, 3)), ("run/1", random_.randrange(1, 3))):
            with Session(str(here), branch=branch) as session:
                for _ in range(times):
                    commit(session, *changes(random_))
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(here, there)  # the same, to the byte
        source = "run/1" if way == "merge" else None
        reports: list[Any] = []
        for place in (here, there):
            with Session(str(place), branch=None if source else "run/1") as session:
                try:
                    if place is here:
                        report = by_fields(session, source, policy)
                    elif source is None:
                        report = update_with_spark(spark, session, on_conflict=policy, above_rows=1)
                    else:
                        report = merge_with_spark(
                            spark, session, source, on_conflict=policy, above_rows=1
                        )
                except MergeConflictError as error:
                    reports.append(sorted(error.conflicts, key=repr))
                    assert not staged_parts(place, session)
                else:
                    reports.append(report.as_dict())
        assert reports[0] == reports[1], (way, policy)
        for branch in (None, "run/1"):
            with (
                Session(str(here), branch=branch) as one,
                Session(str(there), branch=branch) as other,
            ):
                for type in (Sample, Stay):
                    for window in ({}, {"history": True}):
                        assert expected(one, type, commit_id=True, **window) == expected(
                            other, type, commit_id=True, **window
                        ), (way, branch)
        with Session(str(there)) as main:
            found = verify_storage(main.repository, deep=True)
            assert found.ok, found.findings
    assert {*compared} == {"Sample", "Stay"}


def staged_parts(place: Path, session: Session) -> set[str]:
    """Parts that no commit of main or the branch names, and heartbeats."""
    objects = session.repository.objects
    assert objects is not None
    there = {str(path.relative_to(place)) for path in (place / "staged").rglob("*.parquet")}
    named: set[str] = set()
    for branch in (None, "run/1"):
        with Session(str(place), branch=branch) as opened:
            repository = opened.repository.objects
            assert repository is not None
            head = repository.chain.read_head().head
            for _, manifest in repository.chain.stretch(head.link, above=0):
                named |= {file.path for file in manifest.files}
    return there - named


@pytest.fixture
def large(spark: SparkSession, tmp_path: Path) -> Path:
    """Ten rows, half of which a branch has changed in two commits, with others that are new."""
    place = tmp_path / "onto"
    initialize_storage(str(place))
    with Session(str(place)) as main:
        commit(main, *(Sample(id=f"s{n:04}", number=n) for n in range(10)))
        main.create_branch("run/1")
        for value in (100, 200):
            df = spark.range(5, 15).selectExpr(
                "format_string('s%04d', id) AS id", f"id + {value} AS number"
            )
            write_type(df, Sample, main, branch="run/1")
    return place


def numbers(session: Session) -> dict[int, int]:
    return {int(row["id"][1:]): row["number"] for row in expected(session, Sample)}


def test_it_is_not_compared_again_while_others_wait_for_the_lock(
    spark: SparkSession, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody commits each time between the comparison and the lock: of another type, which is no
    reason to compare again; then of the type itself, which is one, without the lock."""
    asked: list[bool] = []
    locked: list[int] = []
    with Session(str(large)) as main, Session(str(large)) as other:
        repository = main.repository.objects
        assert repository is not None
        compare = spark_merge.SparkMerger.compare
        publish = repository.publish_merge
        pending = [
            Stay(left_key="a", right_key="b", visit="v"),
            Sample(id="s0000", number=50),
        ]

        def counted(self: Any, *given: Any) -> Any:
            asked.append(bool(locked))
            return compare(self, *given)

        def published(*given: Any) -> Any:
            if pending:
                commit(other, pending.pop(0))
            locked.append(1)
            try:
                return publish(*given)
            finally:
                locked.clear()

        monkeypatch.setattr(spark_merge.SparkMerger, "compare", counted)
        monkeypatch.setattr(repository, "publish_merge", published)
        report = merge_with_spark(spark, main, "run/1", above_rows=1)
        assert asked == [False, False]
        assert (report.types[0].inserted, report.types[0].updated) == (5, 5)
        assert numbers(main) == {
            **{n: n for n in range(5)},
            **{n: n + 200 for n in range(5, 15)},
            0: 50,
        }
        merged = read_type(spark, Sample, main, with_commit_id=True)
        assert rows(merged) == expected(main, Sample, commit_id=True)
        assert not staged_parts(large, main)


def test_the_program(spark: SparkSession, large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--storage-uri", str(large), "--spark-above=1", "--json"]
    with Session(str(large)) as main:
        commit(main, Sample(id="s0005", number=1))

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        code = job.main([*common, *options])
        return code, json.loads(capsys.readouterr().out)

    code, shown = run("--source=run/1")
    assert (code, shown["applied"], len(shown["conflicts"])) == (6, False, 1)
    code, refused = run("--source=run/1", "--apply")
    assert (code, refused["error"]["type"]) == (6, "MergeConflictError")
    with Session(str(large)) as main:
        assert not staged_parts(large, main)
    code, done = run("--source=run/1", "--apply", "--on-conflict=theirs")
    assert (code, done["commit_id"], done["by_spark"]) == (0, 3, ["Sample"])
    (merged,) = done["types"]
    assert (merged["inserted"], merged["updated"], merged["resolved"]) == (5, 5, 1)
    code, updated = run("--update=run/1", "--apply")
    assert (code, updated["commit_id"]) == (0, None)
    assert run("--apply")[0] == 2
    with Session(str(large)) as main:
        assert numbers(main)[5] == 205
