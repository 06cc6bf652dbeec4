"""The state of a source: which files count, when it changes, and what the sensor asks for."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource

from ontologia_dagster.declaration import OntologyAsset, PartitionSpec, SourceSpec
from ontologia_dagster.ingestion import source_files
from ontologia_dagster.ingestion.asset import build_type, ingestion_asset
from ontologia_dagster.ingestion.provenance import source_fingerprint, source_fingerprints
from ontologia_dagster.ingestion.source_files import SourceFiles, alternatives
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage.storage_defs import build_platform
from storage_engine import OntologiaConfig
from tests.dagster.world import MODELS, customers, evaluated, resources
from tests.servers import S3Server

LANDING = (
    "in/a.csv",
    "in/b.csv",
    "in/b1.csv",
    "in/{x}.csv",
    "in/_b.csv",
    "in/old/a.csv",
    "in/old/_SUCCESS",
    "in/old/.a.csv.crc",
    "in/day=1/_x=1/a.csv",
    "in-other/a.csv",
)
# By Spark's own reading of paths; a folder stands for what is in it.
NAMED = {
    "in/a.csv": ["in/a.csv"],
    "in/?.csv": ["in/a.csv", "in/b.csv"],
    "in/[ab].csv": ["in/a.csv", "in/b.csv"],
    "in/[^a].csv": ["in/b.csv"],
    "in/b*.csv": ["in/b.csv", "in/b1.csv"],
    "in/{a,b1}.csv": ["in/a.csv", "in/b1.csv"],
    "{in,in-other}/a.csv": ["in-other/a.csv", "in/a.csv"],
    "in/{a,{b,b1}}.csv": ["in/a.csv", "in/b.csv", "in/b1.csv"],
    "in/{old/a,b}.csv": ["in/b.csv", "in/old/a.csv"],
    "in/\\{x\\}.csv": ["in/{x}.csv"],
    "in/old": ["in/old/a.csv"],
    "in/old/": ["in/old/a.csv"],
    "in/day=*": ["in/day=1/_x=1/a.csv"],
    "in/nothing": [],
}


class Place:
    """A folder, or a bucket, with files in it."""

    def __init__(self, root: str, ontology: OntologyResource, put: Callable[[str, str], None]):
        self.root, self.ontology, self.put = root, ontology, put
        self.files = SourceFiles(ontology)

    def fingerprint(self, *paths: str) -> str | None:
        source = SourceSpec(paths=[f"{self.root}/{path}" for path in paths])
        return source_fingerprint(source, source.paths, self.files)


def local(folder: Path) -> Place:
    def put(name: str, text: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return Place(str(folder), OntologyResource(storage_uri=str(folder)), put)


def on_s3(server: S3Server) -> Place:
    bucket, client = server.make_bucket(), server.client()
    ontology = OntologyResource(
        storage_uri=f"s3://{bucket}/store", s3=S3Resource(endpoint_url=server.endpoint)
    )

    def put(name: str, text: str) -> None:
        client.put_object(Bucket=bucket, Key=f"landing/{name}", Body=text.encode())

    return Place(f"s3a://{bucket}/landing", ontology, put)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return local(tmp_path)
    return on_s3(request.getfixturevalue("moto_s3"))


def test_paths_name_what_spark_reads_and_a_change_is_another_state(place: Place) -> None:
    for name in LANDING:
        place.put(name, name)

    for path, names in NAMED.items():
        found = place.files.at(f"{place.root}/{path}")
        assert found is not None
        ends = [file.name.split("landing/")[-1].removeprefix(f"{place.root}/") for file in found]
        assert ends == names, path

    before = {path: place.fingerprint(path) for path in NAMED}
    place.put("in/a.csv", "in/a.csv, corrected")
    changed = {path for path in NAMED if place.fingerprint(path) != before[path]}
    assert changed == {path for path, names in NAMED.items() if "in/a.csv" in names}
    assert before["in/nothing"] is None  # what we do not see may still be there for Spark
    assert place.fingerprint("in/a.csv", "in/nothing") is None


def test_other_file_systems_and_databases_cannot_be_told(tmp_path: Path) -> None:
    files = SourceFiles(OntologyResource(storage_uri=str(tmp_path)))
    for path in ("gs://b/a.csv", "hdfs://host:9000/a.csv", "abfss://c@host/a.csv", "hdfs:/a.csv"):
        assert source_fingerprint(SourceSpec(paths=[path]), [path], files) is None
    database = SourceSpec(format="jdbc", paths=["jdbc:postgresql://host/db"])
    assert source_fingerprint(database, database.paths, files) is None
    (tmp_path / "a b%20.csv").touch()
    for place in (f"{tmp_path}", f"file://{tmp_path}", f"file:{tmp_path}"):
        path = f"{place}/a b%20.csv"
        assert source_fingerprint(SourceSpec(paths=[path]), [path], files)
    assert alternatives("{a,b}{1,2}") == ["a1", "a2", "b1", "b2"]
    assert alternatives("{a{b") == ["{a{b"]


class Watched:
    """The sensor of a type, with its cursor, in an instance of its own."""

    def __init__(self, declared: OntologyAsset, ontology: OntologyResource) -> None:
        [self.sensor] = list(build_type(declared).sensors or [])
        self.definitions = build_type(declared)
        self.ontology = ontology
        self.instance = dg.DagsterInstance.ephemeral()
        self.cursor: str | None = None
        self.said: str | None = None

    def tick(self) -> list[Any]:
        """Keys, or both ends of ranges, that runs were asked for."""
        bound = resources(self.ontology)
        name = self.sensor.name
        data = evaluated(self.definitions, name, bound, self.instance, self.cursor)
        self.cursor, self.said = data.cursor or self.cursor, data.skip_message
        return [request.partition_key or _range(request.tags) for request in data.run_requests]

    def materialised(self, partition: str | None, fingerprint: str | None) -> None:
        self.instance.report_runless_asset_event(
            dg.AssetMaterialization(
                self.sensor.name.removeprefix("ontology_").removesuffix("_source"),
                partition=partition,
                metadata={"ontologia/source_fingerprint": fingerprint},
            )
        )


def _range(tags: Any) -> Any:
    start = tags.get("dagster/asset_partition_range_start")
    return (start, tags["dagster/asset_partition_range_end"]) if start else None


def months(place: Place, path: str, **more: Any) -> OntologyAsset:
    return OntologyAsset(
        type="Order",
        models=MODELS,
        source=SourceSpec(paths=[f"{place.root}/{path}"]),
        partitions=PartitionSpec(kind="monthly", field="day", start="2013-01-01", end="2013-07-01"),
        watch_source=True,
        **more,
    )


def test_a_type_that_is_not_cut_is_asked_for_once_for_each_state(tmp_path: Path) -> None:
    watched = Watched(customers(tmp_path, None, watch_source=True), local(tmp_path).ontology)
    file = tmp_path / "customers.csv"

    assert watched.tick() == []
    assert watched.said == f"there is no file yet at {file}"
    file.write_text("id\n1\n")
    assert watched.tick() == [None]
    assert watched.tick() == []  # also when that run has failed
    assert watched.said == "the source is as it was"
    os.utime(file, ns=(1, 1))
    watched.materialised(None, local(tmp_path).fingerprint("customers.csv"))
    assert watched.tick() == []
    assert watched.said == "it was ingested as it is"
    file.unlink()
    assert watched.tick() == []
    file.write_text("id\n2\n")
    assert watched.tick() == [None]


def test_partitions_are_asked_for_when_their_own_files_change(place: Place) -> None:
    watched = Watched(months(place, "orders-{partition_key}/*.csv"), place.ontology)
    assert watched.tick() == []  # nothing has arrived
    for month in ("2013-02-01", "2013-03-01", "2013-05-01"):
        place.put(f"orders-{month}/1.csv", month)
    place.put("orders-2014-01-01/1.csv", "of no partition")
    watched.materialised("2013-03-01", place.fingerprint("orders-2013-03-01/*.csv"))

    assert watched.tick() == ["2013-02-01", "2013-05-01"]
    assert watched.tick() == []
    place.put("orders-2013-02-01/2.csv", "late")
    place.put("orders-2013-06-01/1.csv", "new")
    assert watched.tick() == ["2013-02-01", "2013-06-01"]

    ranged = Watched(
        months(place, "orders-{partition_key}/*.csv", backfill="single_run"), place.ontology
    )
    assert ranged.tick() == [("2013-02-01", "2013-03-01"), ("2013-05-01", "2013-06-01")]


def test_files_of_all_partitions_ask_for_all_of_them_in_one_run(tmp_path: Path) -> None:
    place = local(tmp_path)
    watched = Watched(months(place, "*.csv"), place.ontology)
    assert watched.tick() == []
    place.put("1.csv", "orders")
    assert watched.tick() == [("2013-01-01", "2013-06-01")]
    assert watched.tick() == []
    place.put("2.csv", "late ones")
    assert watched.tick() == [("2013-01-01", "2013-06-01")]


def test_static_partitions_and_sources_that_nobody_can_tell(tmp_path: Path) -> None:
    place = local(tmp_path)
    cut = PartitionSpec(kind="static", field="id", keys=["1", "11"])
    declared = months(place, "{partition_key}*.csv").model_copy(update={"partitions": cut})
    watched = Watched(declared, place.ontology)
    place.put("11.csv", "begins with both keys")
    assert watched.tick() == ["1", "11"]
    place.put("1.csv", "of the first")
    assert watched.tick() == ["1"]

    unseen = months(place, "x").model_copy(update={"source": SourceSpec(paths=["gs://b/x"])})
    blind = Watched(unseen, place.ontology)
    assert blind.tick() == []
    assert blind.said is not None
    assert "give it a fingerprint" in blind.said


def test_partitions_of_a_run_are_looked_at_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = local(tmp_path)
    keys = [f"2013-0{month}-01" for month in range(1, 5)]
    for key in keys[:3]:
        place.put(f"{key}.csv", key)
    all_at_once = threading.Barrier(len(keys), timeout=60)
    look = SourceFiles._at

    def waiting(self: SourceFiles, path: str) -> Any:
        all_at_once.wait()
        return look(self, path)

    monkeypatch.setattr(SourceFiles, "_at", waiting)
    prints = source_fingerprints(months(place, "{partition_key}.csv"), keys, place.ontology)
    monkeypatch.undo()
    assert prints == {key: place.fingerprint(f"{key}.csv") for key in keys}
    assert prints["2013-04-01"] is None


@pytest.fixture
def silent_server() -> Iterator[int]:
    """Takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("sensor", ["ontology_customer_source", "log_tail", "events", "conditions"])
def test_a_server_that_does_not_answer_fails_the_tick_with_what_to_do(
    sensor: str, silent_server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the time that a tick has: of a source after the longest wait for an answer, of a
    storage after three requests."""
    assert source_files._ANSWER_S <= 30
    assert 3 * OntologiaConfig().s3_request_timeout_s <= 30
    monkeypatch.setattr(source_files, "_ANSWER_S", 0.3)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    endpoint = f"http://127.0.0.1:{silent_server}"
    ontology = OntologyResource(
        storage_uri="s3://bucket/store",
        s3=S3Resource(endpoint_url=endpoint, region_name="us-east-1"),
        engine_options={"s3_request_timeout_s": 0.05},
    )
    source = SourceSpec(paths=["s3a://bucket/in/*.csv"])
    declared = OntologyAsset(type="Customer", models=MODELS, source=source, watch_source=True)
    definitions = build_platform([declared], handlers=[MODELS])
    name = sensor if sensor.endswith("_source") else f"ontology_{sensor}"
    with pytest.raises(dg.Failure) as caught:
        evaluated(definitions, name, resources(ontology), dg.DagsterInstance.ephemeral())
    assert endpoint in str(caught.value.description)
    assert caught.value.allow_retries


def test_a_bucket_that_is_not_there_fails_the_tick(moto_s3: S3Server) -> None:
    ontology = on_s3(moto_s3).ontology
    source = SourceSpec(paths=["s3a://no-such-bucket/in/*.csv"])
    declared = OntologyAsset(type="Customer", models=MODELS, source=source, watch_source=True)
    with pytest.raises(dg.Failure) as caught:
        Watched(declared, ontology).tick()
    assert "s3://no-such-bucket/in/ cannot be listed: " in str(caught.value.description)
    assert not caught.value.allow_retries


@pytest.mark.parametrize(
    ("kind", "field", "said"),
    [
        ("hourly", "day", "Order.day is a date, which does not tell the hour: use daily"),
        ("daily", "total", "Order.total is int: daily partitions need a field that is date"),
        ("daily", "month", "Order has no field 'month' to partition by; it has id, day, total"),
    ],
)
def test_partitions_that_no_field_tells_are_refused(
    tmp_path: Path, kind: Any, field: str, said: str
) -> None:
    """They would select nothing, or fail in Spark, try after try."""
    cut = PartitionSpec(kind=kind, field=field, start="2013-01-01", end="2013-01-02")
    declared = months(local(tmp_path), "*.csv").model_copy(update={"partitions": cut})

    with pytest.raises(dg.Failure) as caught:
        dg.materialize(
            [ingestion_asset(declared)],
            resources=resources(local(tmp_path).ontology),
            partition_key="2013-01-01-00:00" if kind == "hourly" else "2013-01-01",
        )

    assert said in (caught.value.description or "")
    assert caught.value.allow_retries is False
