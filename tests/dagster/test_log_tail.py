"""Commits that no run has reported become materialisations; those that one has do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.declaration import PartitionSpec, on_new_data
from ontologia_dagster.ingestion import partitions, provenance
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage import log_tail
from ontologia_dagster.storage.storage_defs import build_platform
from storage_engine import initialize_storage
from storage_engine.repository.object.engine import ObjectRepository
from tests.dagster.shop import Customer, Order
from tests.dagster.world import customers, evaluated, orders, resources, storage


@pytest.fixture
def ontology(tmp_path: Path) -> OntologyResource:
    return storage(tmp_path)


class Tail:
    """The sensor with its cursor; what it reports goes into the instance, as the daemon does."""

    def __init__(
        self,
        folder: Path,
        ontology: OntologyResource,
        instance: dg.DagsterInstance | None = None,
    ) -> None:
        self.definitions = build_platform([customers(folder), orders(folder)])
        self.bound = resources(ontology)
        self.instance = instance or dg.DagsterInstance.ephemeral()
        self.cursor: str | None = None
        self.summary = ""

    def told(self) -> list[tuple[str, str | None, str]]:
        """Of as many ticks as it takes; each of them goes on."""
        told: list[tuple[str, str | None, str]] = []
        while True:
            before = self.cursor
            told += self.tick()
            if "behind" not in self.summary and "caught up" not in self.summary:
                return told
            assert self.cursor != before

    def tick(self) -> list[tuple[str, str | None, str]]:
        name = "ontology_log_tail"
        data = evaluated(self.definitions, name, self.bound, self.instance, self.cursor)
        self.cursor, self.summary = data.cursor, data.skip_message
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
        return [
            (e.asset_key.to_user_string(), e.partition, e.tags["dagster/data_version"])
            for e in data.asset_events
        ]


def ensure(ontology: OntologyResource, *objects: Any, **meta: str) -> None:
    with ontology.session() as session:
        session.ensure(objects)
        session.commit(meta={name.replace("__", "/"): text for name, text in meta.items()})


def order(number: int, day: str) -> Order:
    return Order(id=str(number), day=date.fromisoformat(day), total=number)


def test_commits_from_elsewhere_are_reported_once(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    ensure(ontology, Customer(id="c1", name="Ada"))
    ensure(ontology, order(1, "2013-01-05"), order(2, "2013-03-05"), order(3, "2014-01-01"))

    assert tail.tick() == [
        ("customer", None, "1"),
        ("order", "2013-01-01", "2"),
        ("order", "2013-03-01", "2"),
    ]
    assert tail.tick() == []
    ensure(ontology, Customer(id="c1", name="Bo"))
    assert tail.tick() == [("customer", None, "3")]


def test_what_a_run_has_reported_is_known(tmp_path: Path, ontology: OntologyResource) -> None:
    tail = Tail(tmp_path, ontology)
    ensure(ontology, Customer(id="c1", name="Ada"))
    reported = dg.AssetMaterialization("customer", tags={"dagster/data_version": "1"})
    tail.instance.report_runless_asset_event(reported)

    assert tail.tick() == []


@pytest.mark.parametrize("dead", [False, True])
def test_the_commit_of_a_going_run_is_left_to_it_and_that_of_a_killed_one_is_not(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    tail = Tail(tmp_path, ontology)
    job = dg.JobDefinition(graph_def=dg.GraphDefinition("ingest"))
    run = tail.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    ensure(
        ontology,
        order(1, "2013-02-05"),
        dagster__run_id=run.run_id,
        dagster__asset_key="order",
        dagster__partitions='[["2013-02-01", "2013-03-01"]]',
    )
    ensure(ontology, Customer(id="c1", name="Ada"), dagster__run_id="of-another-instance")
    assert provenance.RUN_ID == "dagster/run_id"

    assert tail.tick() == [("customer", None, "2")]
    assert tail.tick() == []
    again = Tail(tmp_path, ontology, tail.instance)  # another sensor's first look holds it too
    assert again.tick() == []
    if dead:
        # Nobody noticed: the commit is not left to the run for ever.
        monkeypatch.setattr(log_tail, "_LEFT_TO_RUN", timedelta(0))
    else:
        tail.instance.report_run_failed(run)  # as run monitoring does when the process is gone
    # Of March it found nothing, and changed nothing.
    assert tail.tick() == [("order", "2013-02-01", "1"), ("order", "2013-03-01", "0")]
    assert tail.tick() == []
    assert again.tick() == []


def test_the_commit_of_a_run_that_is_retried_is_left_to_the_retry(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    job = dg.JobDefinition(graph_def=dg.GraphDefinition("ingest"))
    run = tail.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    ensure(ontology, Customer(id="c1", name="Ada"), dagster__run_id=run.run_id)
    tail.instance.report_run_failed(run)
    tail.instance.add_run_tags(run.run_id, {"dagster/will_retry": "true"})
    assert tail.tick() == []  # the daemon has not come to it yet

    retry = tail.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    tail.instance.add_run_tags(run.run_id, {"dagster/auto_retry_run_id": retry.run_id})
    assert tail.tick() == []
    tail.instance.report_run_failed(retry)
    assert tail.tick() == [("customer", None, "1")]
    assert tail.tick() == []


def test_a_run_with_many_commits_is_held_as_one_and_told_in_parts_when_it_dies(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a drain makes them. One that is seen on the bus is waited for however long it takes."""
    monkeypatch.setattr(log_tail, "_PER_TICK", 3)
    tail = Tail(tmp_path, ontology)
    job = dg.JobDefinition(graph_def=dg.GraphDefinition("drain"))
    run = tail.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    ensure(ontology, Customer(id="c0", name="Ada"))
    for number in range(1, 8):
        ensure(ontology, Customer(id="c1", name=str(number)), dagster__run_id=run.run_id)
    ensure(ontology, order(1, "2013-01-05"))
    assert tail.told() == [("order", "2013-01-01", "9")]  # c0 is behind the type's last change
    assert tail.cursor is not None
    [[first, last, _]] = json.loads(tail.cursor)["held"].values()
    assert (first, last) == (8, 8)  # of which there is one at first
    for number in range(8, 15):
        ensure(ontology, Customer(id="c1", name=str(number)), dagster__run_id=run.run_id)
    assert tail.told() == []
    assert len(tail.cursor) < 400

    monkeypatch.setattr(log_tail, "_LEFT_TO_RUN", timedelta(0))
    with ontology.bus() as bus:
        bus.register_session("default", "worker", {"run_id": run.run_id})
        read: list[Any] = []
        with monkeypatch.context() as patch:
            between = ObjectRepository.commits_between

            def counted(self: Any, since: int, upto: int) -> Any:
                read.append((since, upto))
                return between(self, since, upto)

            patch.setattr(ObjectRepository, "commits_between", counted)
            assert tail.told() == []
        assert len(read) <= 1  # whether the cursor is of this history, and none of the run's
        tail.instance.report_run_failed(run)
        bus.end_session("default", "worker")
    assert tail.tick() == [("customer", None, str(n)) for n in (8, 10, 11)]
    assert tail.tick() == [("customer", None, str(n)) for n in (12, 13, 14)]
    assert tail.tick() == [("customer", None, str(n)) for n in (15, 16)]
    assert tail.tick() == []


def test_what_a_run_left_as_it_was_is_told_at_the_version_that_it_has(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    ensure(ontology, order(1, "2013-01-05"), order(2, "2013-02-05"))
    assert len(tail.tick()) == 2
    ensure(
        ontology,
        order(3, "2013-02-06"),
        dagster__asset_key="order",
        dagster__partitions='[["2013-01-01", "2013-02-01"]]',
    )
    assert tail.tick() == [("order", "2013-02-01", "2")]
    assert tail.tick() == []


def test_the_first_look_tells_the_last_change_of_every_type(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago it was: nothing downstream of a type that rarely changes may wait."""
    monkeypatch.setattr(log_tail, "_RECENT", 2)
    monkeypatch.setattr(log_tail, "_PER_QUERY", 3)
    ensure(ontology, Customer(id="c1", name="Ada"))
    ensure(ontology, order(1, "2013-01-05"), order(2, "2013-03-05"))
    for number in range(3, 7):
        ensure(ontology, order(number, "2013-04-05"))
    tail = Tail(tmp_path, ontology)

    assert sorted(tail.tick()) == [
        ("customer", None, "1"),
        ("order", "2013-01-01", "2"),
        ("order", "2013-03-01", "2"),
        ("order", "2013-04-01", "6"),
    ]
    assert tail.tick() == []
    ensure(ontology, order(7, "2013-01-06"))
    assert tail.tick() == [("order", "2013-01-01", "7")]
    tail.cursor = None  # somebody reset it
    assert tail.tick() == []


def test_a_storage_that_was_begun_anew_is_told_as_it_is(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    for name in ("Ada", "Bo"):
        ensure(ontology, Customer(id="c1", name=name))
    assert tail.tick() == [("customer", None, "2")]

    shutil.rmtree(ontology.storage_uri)
    initialize_storage(ontology.storage_uri)
    ensure(ontology, Customer(id="c1", name="Cy"))
    assert tail.tick() == [("customer", None, "1")]
    assert tail.tick() == []


def test_a_long_log_is_told_in_many_ticks_and_nothing_twice(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commit by commit, or, for who is far behind, by the last change of each partition."""
    monkeypatch.setattr(log_tail, "_PER_TICK", 3)
    monkeypatch.setattr(log_tail, "_PAGE", 4)
    tail, leaping = Tail(tmp_path, ontology), Tail(tmp_path, ontology)
    ensure(ontology, Customer(id="c1", name="Ada"))
    assert tail.told() == leaping.told() == [("customer", None, "1")]
    expected = []
    for number in range(2, 22):
        month = number % 3 + 1
        ensure(ontology, order(number, f"2013-0{month}-05"))
        expected.append(("order", f"2013-0{month}-01", str(number)))

    assert tail.tick() == expected[:3]
    assert tail.summary == "3 changes told up to commit 4, 17 commits behind"
    assert tail.told() == expected[3:]
    monkeypatch.setattr(log_tail, "_FAR", 10)
    assert leaping.told() == expected[-3:]
    ensure(ontology, order(50, "2013-01-06"))
    assert tail.told() == leaping.told() == [("order", "2013-01-01", "22")]


def test_a_tick_that_has_no_time_left_keeps_what_it_did(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at a partitioned type takes five seconds for each commit of it."""
    tail = Tail(tmp_path, ontology)
    ensure(ontology, order(1, "2013-01-01"))
    assert len(tail.told()) == 1
    for number in range(2, 14):
        ensure(ontology, order(number, "2013-02-05"), Customer(id=str(number), name="Ada"))
    clock = [0.0]
    written = log_tail._Tail._partitions_written

    def slow(self: Any, asset: Any, since: int, upto: int, alone: bool) -> Any:
        for commit_id, key in written(self, asset, since, upto, alone):
            clock[0] += 5.0
            if clock[0] - self._began > log_tail._LOOK_S and not alone:
                raise log_tail._OutOfTimeError
            yield commit_id, key

    monkeypatch.setattr(log_tail._Tail, "_partitions_written", slow)
    monkeypatch.setattr("ontologia_dagster.storage.log_tail.time.monotonic", lambda: clock[0])
    told, longest = [], 0.0
    for _ in range(20):
        began = clock[0]
        told += tail.tick()
        longest = max(longest, clock[0] - began)

    assert longest <= 20
    assert told == [
        (name, part, str(number))
        for number in range(2, 14)
        for name, part in (("customer", None), ("order", "2013-02-01"))
    ]


def test_a_page_of_small_commits_that_took_too_long_is_read_again(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each type has one commit in it: a smaller page can be read, so none is given up."""
    tail = Tail(tmp_path, ontology)
    ensure(ontology, Customer(id="c1", name="Ada"))
    assert len(tail.told()) == 1
    ensure(ontology, order(1, "2013-01-05"), order(2, "2013-02-05"))
    ensure(ontology, Customer(id="c2", name="Bo"))
    clock, delays = [0.0], [log_tail._LOOK_S + 1]
    keep = log_tail._Tail._keep

    def late(self: Any, records: Any) -> None:
        clock[0] += delays.pop() if delays else 0.0
        keep(self, records)

    monkeypatch.setattr(log_tail._Tail, "_keep", late)
    monkeypatch.setattr("ontologia_dagster.storage.log_tail.time.monotonic", lambda: clock[0])
    assert tail.tick() == []
    orders = [("order", "2013-01-01", "2"), ("order", "2013-02-01", "2")]
    assert tail.told() == [*orders, ("customer", None, "3")]


UNREADABLE = [
    *("", "7", "null", "[]", "{}", "not json", '{"commit": 1'),
    *('{"commit": "x", "held": []}', '{"commit": true, "held": []}', '{"commit": 1, "held": 3}'),
    *('{"commit": -1, "held": []}', '{"commit": 1, "held": ["a"]}'),
    '{"commit": 1, "held": [], "assets": 7}',
]


def test_a_cursor_that_nobody_can_read_is_begun_anew(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    ensure(ontology, Customer(id="c1", name="Ada"))
    tail = Tail(tmp_path, ontology)
    for cursor in UNREADABLE:
        tail.instance, tail.cursor = dg.DagsterInstance.ephemeral(), cursor
        assert tail.tick() == [("customer", None, "1")], cursor
    assert tail.tick() == []


def test_the_cursor_of_an_earlier_release_is_gone_on_from(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    for name in ("Ada", "Bo"):
        ensure(ontology, Customer(id="c1", name=name))
    ensure(ontology, order(1, "2013-01-05"))
    tail.cursor = '{"commit": 2, "held": [1]}'
    assert tail.tick() == [("customer", None, "1"), ("order", "2013-01-01", "3")]


@pytest.mark.parametrize("how", ["begun anew", "head put back"])
@pytest.mark.parametrize("commits", [1, 2, 3])
def test_another_history_is_told_whatever_its_length(
    tmp_path: Path, ontology: OntologyResource, how: str, commits: int
) -> None:
    """Also when it has as many commits as the one before, or more."""
    tail = Tail(tmp_path, ontology)
    store = Path(ontology.storage_uri)
    ensure(ontology, Customer(id="c0", name="Ada"))
    ensure(ontology, order(1, "2013-01-05"))
    first = (store / "meta" / "head.json").read_bytes()
    ensure(ontology, order(1, "2013-02-05"))
    assert tail.told() == [
        ("customer", None, "1"),
        ("order", "2013-01-01", "2"),
        ("order", "2013-02-01", "3"),
    ]
    if how == "begun anew":
        shutil.rmtree(store)
        initialize_storage(ontology.storage_uri)
        ensure(ontology, Customer(id="c1", name="Bo"))
        ensure(ontology, order(7, "2013-03-05"))
    else:
        (store / "meta" / "head.json").write_bytes(first)
    for number in range(commits - 1):
        ensure(ontology, order(number + 5, "2013-04-05"))

    told = {(name, part): version for name, part, version in tail.told()}
    place = "2013-03-01" if how == "begun anew" else "2013-01-01"
    expected = {("customer", None): "1", ("order", place): "2"}
    if commits > 1:
        expected["order", "2013-04-01"] = str(commits + 1)
    assert told == expected
    assert tail.told() == []
    ensure(ontology, order(9, "2013-01-07"))
    assert tail.told() == [("order", "2013-01-01", str(commits + 2))]


def test_an_asset_that_is_declared_later_is_caught_up_with(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    whole = tail.definitions
    tail.definitions = build_platform([customers(tmp_path)])
    ensure(ontology, order(1, "2013-01-05"), Customer(id="c1", name="Ada"))
    ensure(ontology, order(2, "2013-02-05"))
    assert tail.told() == [("customer", None, "1")]
    tail.definitions = whole
    assert tail.told() == [("order", "2013-01-01", "1"), ("order", "2013-02-01", "2")]
    tail.definitions = build_platform([orders(tmp_path)])  # and taken away again
    ensure(ontology, order(3, "2013-02-06"), Customer(id="c1", name="Bo"))
    assert tail.told() == [("order", "2013-02-01", "3")]
    tail.definitions = whole
    assert tail.told() == [("customer", None, "3")]


def test_rows_of_a_partition_that_is_not_complete_are_told_when_it_is(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    tail = Tail(tmp_path, ontology)
    cut = PartitionSpec(kind="monthly", field="day", start="2013-01-01")
    declared = orders(tmp_path).model_copy(update={"partitions": cut})
    tail.definitions = build_platform([declared])

    def told(when: str) -> list[Any]:
        with dg.partition_loading_context(effective_dt=datetime.fromisoformat(f"{when}T00:00Z")):
            return [(part, version) for _, part, version in tail.told()]

    ensure(ontology, order(1, "2013-01-05"), order(2, "2013-02-05"))
    assert told("2013-02-20") == [("2013-01-01", "1")]
    ensure(ontology, order(3, "2013-02-06"), order(4, "2013-03-01"), order(5, "2012-01-01"))
    assert told("2013-02-21") == told("2013-02-22") == []
    assert told("2013-03-01") == [("2013-02-01", "2")]
    assert told("2013-03-31") == []
    ensure(ontology, order(6, "2013-01-01"))
    assert told("2013-04-01") == [("2013-03-01", "2"), ("2013-01-01", "3")]
    assert told("2013-05-01") == []


def test_two_ticks_at_once_tell_the_same(tmp_path: Path, ontology: OntologyResource) -> None:
    """Of two daemons, the cursor of one or the other stays; what was told twice is no change."""
    tail = Tail(tmp_path, ontology)
    other = Tail(tmp_path, ontology, tail.instance)
    ensure(ontology, order(1, "2013-01-05"))
    assert tail.told() != []
    other.cursor = tail.cursor
    ensure(ontology, order(2, "2013-01-06"))
    assert tail.tick() == [("order", "2013-01-01", "2")]
    assert other.tick() == []
    ensure(ontology, order(3, "2013-01-06"))
    other.tick()
    assert tail.tick() == []


def test_what_a_tick_asks_of_the_store(
    tmp_path: Path, ontology: OntologyResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest for each commit, and no file: the log knows what the files hold."""
    asked: list[dict[str, int]] = []
    opened = OntologyResource.repository

    @contextmanager
    def counting(self: OntologyResource) -> Iterator[Any]:
        with opened(self) as repository:
            yield repository
            asked.append(repository.requests())

    tail = Tail(tmp_path, ontology)
    ensure(ontology, order(1, "2013-01-05"), Customer(id="c0", name="Ada"))
    assert len(tail.told()) == 2
    for number in range(2, 42):
        ensure(ontology, order(number, "2013-02-05"), Customer(id=str(number), name="Ada"))
    monkeypatch.setattr(OntologyResource, "repository", counting)
    monkeypatch.setattr(log_tail, "_PER_TICK", 100)
    assert len(tail.told()) == 80
    assert tail.tick() == []
    busy, idle = (sum(n for kind, n in of.items() if kind in ("GET", "LIST")) for of in asked)
    assert busy <= 40 + 12
    assert idle <= 5


def test_a_manifest_keeps_every_partition_key() -> None:
    days = PartitionSpec(kind="daily", field="day", start="2010-01-01", timezone="Europe/Berlin")
    keys = partitions.partitions_def(days).get_partition_keys()[:2_500]
    gaps = [*keys[:2], *keys[5:8], keys[2_000]]
    named = PartitionSpec(kind="static", field="region", keys=["a,b", "c", '["d"]'])

    for spec, some in ((days, keys), (days, gaps), (named, ["a,b", '["d"]']), (named, ["c"])):
        text = partitions.format_keys(spec, some)
        assert partitions.parse_keys(spec, text) == some
        assert len(text) < 150
    for old in ("2010-01-01,2010-01-02", "7", '["1999-01-01"]', '[["c"]]', "[1]"):
        assert partitions.parse_keys(days, old) is None


def test_a_change_asks_for_downstream_runs_and_a_run_without_one_does_not(
    tmp_path: Path, ontology: OntologyResource
) -> None:
    """Through `data_version_changed`: what counts is the version, not that something ran."""
    tail = Tail(tmp_path, ontology)

    @dg.asset(deps=["customer"], automation_condition=on_new_data())
    def report() -> None: ...

    definitions = dg.Definitions.merge(
        tail.definitions,
        dg.Definitions(assets=[report], resources=tail.bound),
    )
    instance, cursor = tail.instance, None

    def asked() -> int:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(definitions, instance, cursor=cursor)
        cursor = result.cursor
        return result.get_num_requested(dg.AssetKey("report"))

    def materialised(key: str, version: str) -> None:
        event = dg.AssetMaterialization(key, tags={"dagster/data_version": version})
        instance.report_runless_asset_event(event)

    assert asked() == 0  # nothing is there yet
    ensure(ontology, Customer(id="c1", name="Ada"))
    tail.tick()
    assert asked() == 1
    materialised("report", "a")
    assert asked() == 0
    materialised("customer", "1")  # a run that changed nothing reports the version there was
    assert asked() == 0
    ensure(ontology, Customer(id="c1", name="Bo"))
    tail.tick()
    assert asked() == 1
    materialised("report", "b")
    assert asked() == 0
