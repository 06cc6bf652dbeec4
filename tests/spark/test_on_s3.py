"""What writes, reads and compaction do on a directory they do on S3 (SeaweedFS) as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from storage_engine import CompactionPolicy, Session, initialize_storage
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import spec_of
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.spark import read_type, write_type
from storage_engine.spark.compaction import compact_with_spark
from tests.maintenance.reads import entries_of, seen
from tests.servers import S3Server
from tests.spark import read_world as world
from tests.spark.read_world import Follows, Place, Sample, Stay, expected, rows

pytestmark = [pytest.mark.spark, pytest.mark.s3]


@pytest.fixture
def session(seaweedfs_s3: S3Server) -> Iterator[Session]:
    place = Place(f"s3://{seaweedfs_s3.make_bucket()}/onto", seaweedfs_s3.config())
    initialize_storage(place.uri, config=place.config)
    with place.open() as made:
        yield made


def test_any_number_of_partitions(spark: SparkSession, session: Session) -> None:
    """None, one, two, and many of a row each: what is read back is what a session reads."""
    nothing = spark.createDataFrame([], "id string, number bigint")
    assert rows(read_type(spark, Sample, session)) == []
    for commit_id, partitions in enumerate((200, 1, 2), start=1):
        df = spark.range(0, 200, 1, partitions).selectExpr(
            "format_string('s%04d', id) AS id", f"id + {partitions} AS number"
        )
        written = write_type(df, Sample, session)
        assert (written.commit_id, written.files) == (commit_id, 1)
        assert (written.inserted, written.updated) == ((200, 0) if commit_id == 1 else (0, 200))
        stored = expected(session, Sample)
        assert [row["number"] for row in stored] == [n + partitions for n in range(200)]
        assert rows(read_type(spark, Sample, session)) == stored
    assert write_type(nothing, Sample, session).commit_id is None
    assert session.repository.head_commit_id() == 3


def test_compaction_by_spark(spark: SparkSession, session: Session) -> None:
    """Entities and relations, small commits and staged parts: every read, and the history, stay."""
    world.first_commits(session)
    repository = session.repository
    assert isinstance(repository, ObjectRepository)
    types = [spec_of(type) for type in (Sample, Follows, Stay)]

    def stored() -> dict[str, tuple[int, int]]:
        """Entries of the log and rows in their files, by type."""
        found = {spec.name: entries_of(repository, spec) for spec in types}
        return {
            name: (len(entries), sum(f.row_count for e in entries for f in e.files))
            for name, entries in found.items()
        }

    before, reads = stored(), {spec.name: seen(repository, spec) for spec in types}
    assert min(entries for entries, _ in before.values()) > 1
    report = compact_with_spark(
        spark, session, policy=CompactionPolicy(min_entries=2), above_bytes=0
    )
    assert [run.outcome for run in report.runs] == ["published"] * 3  # each was proven
    session.flush()
    assert stored() == {name: (1, count) for name, (_, count) in before.items()}
    assert {spec.name: seen(repository, spec) for spec in types} == reads
    for type in (Sample, Follows, Stay):
        assert rows(read_type(spark, type, session, history=True)) == expected(
            session, type, commit_id=True, history=True
        )
    found = verify_storage(repository, deep=True)
    assert found.ok, found.findings
