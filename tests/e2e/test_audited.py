"""Audited runs under the real daemon: it queues, launches and backfills, and its sensors look after
branches that stand, while somebody reads main all the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storage_engine import Session, initialize_storage
from tests.dagster import audited
from tests.dagster.audited import ENDLESS, FLAWED, LAST, NAMES, NUMBER, ROWS
from tests.dagster.world import version
from tests.e2e.audited_branch_location import BRANCH
from tests.e2e.audited_location import FOLDER, KILLED
from tests.e2e.platform import end, until

SETTINGS = """
telemetry: {enabled: false}
run_retries: {enabled: true, max_retries: 0}
concurrency: {runs: {max_concurrent_runs: 3}}
"""
RUNS = 100 if os.environ.get("ONTOLOGIA_LONG") else 3


@contextmanager
def daemon(home: Path, folder: Path, location: str) -> Iterator[dg.DagsterInstance]:
    """With an instance of its own, as a deployment has it."""
    home.mkdir()
    (home / "dagster.yaml").write_text(SETTINGS)
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        # A busy machine needs longer than a minute to launch a run, which would count as failed.
        "DAGSTER_GRPC_TIMEOUT_SECONDS": "300",
        FOLDER: str(folder),
    }
    with open(home / "daemon.log", "wb") as log:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("dagster-daemon")),
                *("run", "-m", location),
            ],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with dg.DagsterInstance.from_config(str(home)) as instance:
            yield instance
    finally:
        end(process)


class Platform:
    """Storage, instance and daemon, and somebody who reads main all the time."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.folder = folder
        self.instance = instance
        self.mixed: list[Any] = []
        self._stop = threading.Event()

    def numbers(self, branch: str | None = None) -> dict[str, set[int]]:
        """Which runs each type has rows of, as of one commit."""
        with Session(str(self.folder / "store"), branch=branch) as session:
            head = session.repository.head_commit_id()
            if not head:
                return {}
            each = (f"SELECT '{name}' AS name, number FROM \"{name}\"" for name in NAMES)
            rows = session.at(head).sql(" UNION ".join(each)).collect()
            return {name: {r["number"] for r in rows if r["name"] == name} for name in NAMES}

    def seen(self, branch: str | None = None) -> set[int]:
        """The runs that all types have rows of: of each the same."""
        numbers = list(self.numbers(branch).values())
        assert all(of_type == numbers[0] for of_type in numbers)
        return numbers[0] if numbers else set()

    @property
    def head(self) -> bytes:
        return (self.folder / "store" / "meta" / "head.json").read_bytes()

    def branches(self) -> list[str]:
        with Session(str(self.folder / "store")) as session:
            return [branch.name for branch in session.list_branches() if branch.parent]

    def commits(self) -> list[dict[str, Any]]:
        with Session(str(self.folder / "store")) as session:
            return session.list_commits()

    def ask(self, number: int, *, of: str = "ask", **tags: str) -> None:
        """For a run, whose rows are its own."""
        told = {NUMBER: str(number), ROWS: f"row{number}", **tags}
        draft = self.folder / f"{number}.draft"
        draft.write_text(json.dumps(told))
        draft.rename(self.folder / f"{of}-{number:03}.json")

    def ended(self, number: int, instance: dg.DagsterInstance | None = None) -> dg.DagsterRun:
        """The last run of that number."""

        def run() -> dg.DagsterRun | None:
            runs = (instance or self.instance).get_runs(dg.RunsFilter(tags={NUMBER: str(number)}))
            return runs[0] if runs and all(each.is_finished for each in runs) else None

        found = until(run, f"run {number} has ended")
        assert found is not None
        return found

    def poll(self) -> None:
        """Reads main at each head that it finds: the same head has the same rows."""
        read = b""
        while not self._stop.wait(0.05):
            if (head := self.head) == read:
                continue
            read = head
            numbers = self.numbers()
            if len({frozenset(of_type) for of_type in numbers.values()}) > 1:
                self.mixed.append(numbers)

    @contextmanager
    def read(self) -> Iterator[None]:
        reader = threading.Thread(target=self.poll)
        reader.start()
        try:
            yield
        finally:
            self._stop.set()
            reader.join()


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("audited")
    initialize_storage(str(folder / "store"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        with daemon(folder / "home", folder, "tests.e2e.audited_location") as instance:
            made = Platform(folder, instance)
            with made.read():
                yield made


@pytest.mark.timeout(3600 if RUNS > 3 else 900)
def test_a_reader_never_sees_types_of_different_runs(platform: Platform) -> None:
    """While runs come and go, three at a time, of which some fail: all ten types of each in one
    commit, and nothing of those that failed."""
    numbers = range(1, RUNS + 1)
    flawed = {number for number in numbers if number % 3 == 2}
    for number in numbers:
        platform.ask(number, **({FLAWED: LAST} if number in flawed else {}))

    ended = {number: platform.ended(number) for number in numbers}

    well = dg.DagsterRunStatus.SUCCESS
    assert {n for n, run in ended.items() if run.status == well} == {*numbers} - flawed
    assert platform.seen() == {*numbers} - flawed
    commits = platform.commits()
    assert [each["rows"] for each in commits] == [dict.fromkeys(NAMES, 1)] * len(platform.seen())
    standing = sorted(f"run/{ended[number].run_id}" for number in flawed)
    assert platform.branches() == standing
    assert not platform.mixed


@pytest.mark.timeout(900)
def test_the_last_check_of_ten_types_fails(platform: Platform) -> None:
    before = platform.head
    platform.ask(201, **{FLAWED: LAST})

    failed = platform.ended(201)

    assert failed.status == dg.DagsterRunStatus.FAILURE
    assert platform.head == before
    name = f"run/{failed.run_id}"
    assert name in platform.branches()
    assert 201 in platform.seen(name)
    until(lambda: _noted(platform.instance, failed.run_id, name), "its log says where it is")
    assert not platform.mixed


@pytest.mark.timeout(900)
def test_a_run_that_is_terminated(platform: Platform) -> None:
    """While its last check looks: nothing of it is published, and its log says where it is."""
    instance, before = platform.instance, platform.head
    platform.ask(202, **{ENDLESS: "true"})

    def looking() -> Any:
        for run in instance.get_runs(dg.RunsFilter(tags={NUMBER: "202"})):
            entries = instance.all_logs(run.run_id, dg.DagsterEventType.STEP_START)
            if any(entry.step_key == f"{LAST.lower()}_consistent" for entry in entries):
                return run
        return None

    run = until(looking, "its last check looks")
    assert instance.run_launcher.terminate(run.run_id)

    ended = platform.ended(202)
    assert ended.status == dg.DagsterRunStatus.CANCELED
    assert platform.head == before
    name = f"run/{run.run_id}"
    until(lambda: _noted(instance, run.run_id, name), "its log says where it is")


@pytest.mark.timeout(900)
def test_killed_after_the_swap_of_head_and_retried(platform: Platform) -> None:
    """The process of a run is killed by SIGKILL when its merge is there and nothing of it is told;
    the daemon retries the run, which answers with the same commit and tells of it once."""
    before = len(platform.commits())
    platform.ask(203, **{KILLED: "true", "dagster/max_retries": "1"})

    def retried() -> Any:
        runs = platform.instance.get_runs(dg.RunsFilter(tags={NUMBER: "203"}))
        return len(runs) == 2 and all(run.is_finished for run in runs) and runs

    again, killed = until(retried, "the run was retried")

    assert (killed.status, again.status) == (
        dg.DagsterRunStatus.FAILURE,
        dg.DagsterRunStatus.SUCCESS,
    )
    commits = platform.commits()
    assert len(commits) == before + 1
    assert 203 in platform.seen()
    assert f"run/{killed.run_id}" not in platform.branches()
    for name in NAMES:
        told = platform.instance.fetch_materializations(dg.AssetKey(name.lower()), limit=20)
        made = [each.asset_materialization for each in told.records]
        versions = [version(each) for each in made if each is not None]
        assert versions.count(str(commits[0]["id"])) == 1
    assert not platform.mixed


@pytest.mark.timeout(900)
def test_a_backfill_in_one_run_is_one_commit(platform: Platform) -> None:
    """The run has no publication; the sensor has it published."""
    _backfill(platform.instance)

    def monthly() -> list[dict[str, Any]]:
        return [each for each in platform.commits() if "Monthly" in each["types"]]

    [commit] = until(monthly, "the backfill is published")
    assert (commit["kind"], commit["rows"]) == ("merge", {"Monthly": 12})
    assert platform.instance.get_materialized_partitions(dg.AssetKey("monthly")) == set(
        audited.MONTHS.get_partition_keys()
    )


@pytest.mark.timeout(900)
def test_a_location_on_its_own_branch_and_its_merge(platform: Platform) -> None:
    """What it publishes is on its branch, until a person has that published: in one commit."""
    before, known = platform.head, len(platform.commits())
    home = platform.folder / "branch_home"
    with daemon(home, platform.folder, "tests.e2e.audited_branch_location") as instance:
        for number in (204, 205):
            platform.ask(number, of="pr")
            ended = platform.ended(number, instance)
            assert ended.status == dg.DagsterRunStatus.SUCCESS, _told(instance, ended)
    assert platform.head == before
    assert platform.seen(BRANCH) >= {204, 205}

    (platform.folder / "merge-1.txt").write_text(BRANCH)

    until(lambda: BRANCH not in platform.branches(), "the branch is published")
    assert platform.seen() >= {204, 205}
    commits = platform.commits()
    assert len(commits) == known + 1
    assert commits[0]["rows"] == dict.fromkeys(NAMES, 2)
    assert not platform.mixed


def _told(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """The end of a run's log, and why its steps have failed."""
    entries = instance.all_logs(run.run_id)
    events = [entry.dagster_event for entry in entries if entry.dagster_event is not None]
    failed = [e.step_failure_data.error_display_string for e in events if e.is_step_failure]
    return "\n".join([*(event.message or "" for event in events[-12:]), *failed])


def _noted(instance: dg.DagsterInstance, run_id: str, branch: str) -> bool:
    events = [entry.dagster_event for entry in instance.all_logs(run_id)]
    return any(f"branch {branch} stands" in (e.message or "") for e in events if e is not None)


def _backfill(instance: dg.DagsterInstance) -> None:
    """All months of a type, in one run, as the UI asks for it; until the daemon is done with it."""
    from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill

    from tests.e2e.audited_location import defs

    graph = defs().get_repository_def().asset_graph
    instance.add_backfill(
        PartitionBackfill.from_asset_partitions(
            backfill_id="twelve",
            asset_graph=graph,
            partition_names=audited.MONTHS.get_partition_keys(),
            asset_selection=[dg.AssetKey("monthly")],
            backfill_timestamp=time.time(),
            tags={},
            dynamic_partitions_store=instance,
            all_partitions=False,
            title=None,
            description=None,
            run_config=None,
        )
    )

    def completed() -> bool:
        backfill = instance.get_backfill("twelve")
        assert backfill is not None
        assert backfill.status not in (BulkActionStatus.FAILED, BulkActionStatus.COMPLETED_FAILED)
        return backfill.status == BulkActionStatus.COMPLETED_SUCCESS

    until(completed, "the backfill is complete")
