"""Audited runs: nothing of a run is seen before all of it is, and then in one commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.resources.branches import BRANCH_TAG, location_branch
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage.publication_defs import discard_config, publish_config
from storage_engine import Session
from storage_engine.errors import ConfigurationError
from tests.dagster import audited
from tests.dagster.audited import FLAWED, LAST, NAMES, NUMBER, ROWS
from tests.dagster.audited_runs import (
    Recorder,
    branches,
    failure_of,
    head,
    messages,
    numbers,
    patched_check,
    published,
    run,
)
from tests.dagster.world import evaluated, facts, materialisations, rows, version


def test_a_run_of_ten_types_is_one_commit(folder: Path, instance: dg.DagsterInstance) -> None:
    result = run(folder, instance, 1)

    assert result.success
    said = facts(published(result).metadata)
    assert said["commit"] == "1"
    assert said["rows_published"] == 20
    assert said["branch"] == f"run/{result.run_id}"
    assert said["seconds_to_publication"] >= 0
    assert {row["type"]: row["rows"] for row in rows(said["types"])} == dict.fromkeys(NAMES, 2)
    assert branches(folder) == []
    with Session(str(folder / "store")) as session:
        [commit] = session.list_commits()
        assert commit["kind"] == "merge"
        assert commit["rows"] == dict.fromkeys(NAMES, 2)
    # What was made in the run is told with the publication, as the version that all see.
    last = {made.asset_key.path[-1]: made for made in materialisations(result)}
    assert {version(last[name.lower()]) for name in NAMES} == {"1"}
    assert facts(last["thing3"].metadata)["commit"] == "1"
    assert version(published(result)) == "1"
    assert len([m for m in materialisations(result) if m.asset_key.path == ["total"]]) == 1
    again = run(folder, instance, 1)
    assert facts(published(again).metadata)["commit"] is None
    assert version(published(again)) == "1"
    assert branches(folder) == []


def test_the_last_check_fails(folder: Path, instance: dg.DagsterInstance) -> None:
    assert run(folder, instance, 1).success
    before = head(folder)

    result = run(folder, instance, 2, tags={FLAWED: LAST})

    assert not result.success
    assert head(folder) == before
    assert numbers(folder) == {1}
    [name] = branches(folder)
    assert name == f"run/{result.run_id}"
    assert numbers(folder, name) == {2}
    assert "ontology_publication" not in {
        event.asset_key.to_user_string() for event in result.get_asset_materialization_events()
    }
    # Nobody outside has heard of a new version.
    told = {version(made) for made in materialisations(result)}
    assert told == {"1"}
    assert not any("total" in str(m.asset_key) for m in materialisations(result))

    definitions = audited.definitions(folder)
    bound: dict[str, Any] = dict(definitions.resources or {})
    tick = evaluated(definitions, "ontology_standing_branches", bound, instance)
    assert not tick.run_requests
    log = messages(instance, result.run_id)
    [line] = [text for text in log if f"branch {name} stands" in text]
    assert f"onto branch diff {name} --storage-uri" in line
    assert f"{LAST} is flawed" in line
    assert "ontology_publish_branch" in line
    evaluated(definitions, "ontology_standing_branches", bound, instance, tick.cursor)
    log = messages(instance, result.run_id)
    assert len([text for text in log if f"branch {name} stands" in text]) == 1


def test_the_alert_of_a_standing_branch(folder: Path, instance: dg.DagsterInstance) -> None:
    recorder = Recorder(webhook_url="-")
    definitions = audited.definitions(folder, names=NAMES[:2], notifier=recorder)
    result = run(folder, instance, 1, names=NAMES[:2], tags={FLAWED: NAMES[1]})
    bound: dict[str, Any] = dict(definitions.resources or {})
    Recorder.sent.clear()

    tick = evaluated(definitions, "ontology_conditions", bound, instance)

    [alert] = [a for a in Recorder.sent if a["key"].startswith("branch/")]
    assert alert["facts"]["branch"] == f"run/{result.run_id}"
    assert "onto branch diff" in alert["facts"]["diff"]
    assert "is flawed" in alert["facts"]["findings"]
    evaluated(definitions, "ontology_conditions", bound, instance, tick.cursor)
    assert len([a for a in Recorder.sent if a["key"].startswith("branch/")]) == 1


# -- stopped, and tried again ---------------------------------------------------------------------


@pytest.mark.parametrize("when", ["merged", "told", "deleted"])
def test_killed_while_it_publishes(when: str, folder: Path) -> None:
    """After the swap of head, after it was told, or after the branch is gone: a re-execution from
    failure answers with the commit that did it, and tells each asset once."""
    home = folder / "home"
    home.mkdir()
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        killed = subprocess.run(
            [sys.executable, "-m", "tests.dagster.audited", str(home), str(folder), when],
            capture_output=True,
            text=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        [parent] = instance.get_runs()
        assert numbers(folder) == {7}
        assert bool(branches(folder)) == (when != "deleted")
        instance.report_run_failed(parent)
        assert (folder / "store" / "meta" / "head.json").exists()
        before = head(folder)

        options = dg.ReexecutionOptions.from_failure(parent.run_id, instance)
        job = audited.reconstructable(folder)
        with dg.execute_job(job, instance, reexecution_options=options) as result:
            assert result.success
            [made] = [
                m
                for m in (
                    e.step_materialization_data.materialization
                    for e in result.all_events
                    if e.is_step_materialization
                )
                if m.asset_key.path == ["ontology_publication"]
            ]
        said = facts(made.metadata)
        assert said["commit"] == "1"
        assert said["rows_published"] == 20
        assert head(folder) == before
        assert branches(folder) == []
        for name in NAMES:
            told = instance.fetch_materializations(dg.AssetKey(name.lower()), limit=10).records
            versions = [version(r.asset_materialization) for r in told if r.asset_materialization]
            assert versions.count("1") == 1, (name, versions)


def test_a_branch_that_somebody_threw_away(folder: Path, instance: dg.DagsterInstance) -> None:
    result = run(folder, instance, 1, names=NAMES[:2], tags={FLAWED: NAMES[1]})
    name = f"run/{result.run_id}"
    definitions = audited.definitions(folder, names=NAMES[:2])
    config = discard_config("ontology", name)
    discard = definitions.resolve_job_def("ontology_discard_branch")
    assert discard.execute_in_process(instance=instance, run_config=config).success
    assert branches(folder) == []
    again = discard.execute_in_process(instance=instance, run_config=config, raise_on_error=False)
    assert "no branch" in str(again.get_failed_step_keys() and failure_of(again).description)

    config = publish_config("ontology", name)
    publish = definitions.resolve_job_def("ontology_publish_branch")
    failed = publish.execute_in_process(instance=instance, run_config=config, raise_on_error=False)
    assert "no branch" in str(failure_of(failed).description)


def test_a_person_publishes_a_branch_that_stands(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    names = NAMES[:3]
    result = run(folder, instance, 4, names=names, tags={FLAWED: names[2]})
    config = {"branch": f"run/{result.run_id}"}

    publish = audited.definitions(folder, names=names).resolve_job_def("ontology_publish_branch")
    done = publish.execute_in_process(
        instance=instance, run_config=publish_config("ontology", **config)
    )

    assert done.success
    assert numbers(folder, names=names) == {4}
    assert branches(folder) == []
    told = {m.asset_key.path[-1]: version(m) for m in materialisations(done)}
    assert told == {**dict.fromkeys((n.lower() for n in names), "1"), "total": told["total"]}


def test_both_sides_changed_a_row(folder: Path, instance: dg.DagsterInstance) -> None:
    names = NAMES[:2]
    assert run(folder, instance, 1, names=names).success
    first: Any = getattr(audited, names[0])

    def meanwhile(_context: Any) -> None:
        with Session(str(folder / "store"), entity_types=[first]) as session:
            session.ensure(first(id="a", number=99))

    with patched_check(names[0], meanwhile):
        result = run(folder, instance, 2, names=names)

    assert not result.success
    failed = failure_of(result)
    assert "divergent_update" in str(rows(facts(failed.metadata)["conflicts"]))
    assert f"run/{result.run_id}" in failed.description
    assert facts(failed.metadata)["diff_command"].startswith("onto branch diff run/")
    assert branches(folder) == [f"run/{result.run_id}"]
    assert numbers(folder, names=names) == {1, 99}
    config = {"branch": f"run/{result.run_id}", "on_conflict": "theirs"}
    publish = audited.definitions(folder, names=names).resolve_job_def("ontology_publish_branch")
    done = publish.execute_in_process(
        instance=instance, run_config=publish_config("ontology", **config)
    )
    assert done.success
    assert numbers(folder, names=names) == {2}


# -- beside others --------------------------------------------------------------------------------


def test_what_others_published_meanwhile_is_checked_too(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    """`recheck`: their rows come into the branch, and the blocking checks run once more there."""
    names = NAMES[:2]
    first: Any = getattr(audited, names[0])
    seen: list[str] = []

    def meanwhile(context: Any) -> None:
        with context.resources.ontology.session() as session:
            found = session.sql(f'SELECT id FROM "{names[0]}" ORDER BY id').collect()
            seen.append(",".join(row["id"] for row in found))
        if len(seen) == 1:
            with Session(str(folder / "store"), entity_types=[first]) as session:
                session.ensure(first(id="z", number=5))

    with patched_check(names[0], meanwhile):
        result = run(folder, instance, 5, names=names, recheck=True)

    assert result.success
    assert seen == ["a,b", "a,b,z"]
    assert facts(published(result).metadata)["commit"] == "2"
    assert numbers(folder, names=names) == {5}


def test_together_with_others_it_does_not_hold(folder: Path, instance: dg.DagsterInstance) -> None:
    names = NAMES[:2]
    first: Any = getattr(audited, names[0])
    looked: list[int] = []

    def meanwhile(context: Any) -> None:
        looked.append(1)
        if len(looked) > 1:
            raise RuntimeError("two rows of the same")
        with Session(str(folder / "store"), entity_types=[first]) as session:
            session.ensure(first(id="z", number=5))

    with patched_check(names[0], meanwhile):
        result = run(folder, instance, 5, names=names, recheck=True)

    assert not result.success
    assert "does not together with what others have published" in failure_of(result).description
    assert branches(folder) == [f"run/{result.run_id}"]
    with Session(str(folder / "store")) as session:
        assert session.repository.head_commit_id() == 1


def test_runs_at_once_and_steps_that_race(folder: Path) -> None:
    """Two runs of which each has all its steps begin at once: one branch a run, two commits."""
    from ontologia_dagster.resources.branches import fork_once

    uri = str(folder / "store")
    barrier = threading.Barrier(4)

    def begin(_: int) -> str:
        with Session(uri) as session:
            barrier.wait()
            made = fork_once(
                session.repository, "run/race", owner="x", expires_in=timedelta(days=1)
            )
            return made.incarnation

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(begin, range(4)))) == 1
        with Session(uri) as session:
            [branch] = [b for b in session.list_branches() if b.parent]
            assert branch.owner == "x"
            assert branch.expires_at is not None
            session.delete_branch("run/race")

        def one(number: int) -> bool:
            with dg.DagsterInstance.ephemeral() as instance:
                tags = {ROWS: f"r{number}"}
                return bool(run(folder, instance, number, names=NAMES[:4], tags=tags).success)

        assert list(pool.map(one, [1, 2])) == [True, True]
    with Session(uri) as session:
        assert [c["rows"] for c in session.list_commits()] == [dict.fromkeys(NAMES[:4], 1)] * 2
    assert numbers(folder) == {1, 2}


def test_a_reader_never_sees_types_of_different_runs(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    """It polls main while audited runs come and go, some of which fail."""
    count, names = (100, NAMES) if os.environ.get("ONTOLOGIA_LONG") else (4, NAMES[:5])
    stop = threading.Event()
    mixed: list[set[int]] = []
    looks: set[int] = set()

    def poll() -> None:
        while not stop.is_set():
            seen = numbers(folder, names=names)
            looks.update(seen)
            if len(seen) > 1:
                mixed.append(seen)

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        for number in range(1, count + 1):
            bad = {FLAWED: names[-1]} if number % 3 == 2 else {}
            done = run(folder, instance, number, names=names, tags=bad)
            assert done.success == (not bad)
        stop.set()
        polling.result()
    assert not mixed
    assert not {number for number in looks if number % 3 == 2}
    assert numbers(folder, names=names) == {count}


def test_events_go_out_with_the_publication(folder: Path, instance: dg.DagsterInstance) -> None:
    """None while the run goes on, none of a run that fails, each once of one that is published."""
    names = NAMES[:1]
    seen: list[int] = []

    def sent() -> list[str]:
        uri = str(folder / "store")
        with OntologyResource(storage_uri=uri).bus() as bus:
            return [event.envelope["id"] for event in bus.list_events("default", 10)]

    with patched_check(names[0], lambda _context: seen.append(len(sent()))):
        definitions = audited.definitions(folder, names=names)
        job = definitions.resolve_implicit_global_asset_job_def()
        keys = [*(dg.AssetKey(name.lower()) for name in names), dg.AssetKey("notices")]
        for number, tags in ((1, {FLAWED: names[0]}), (2, {})):
            result = job.execute_in_process(
                instance=instance,
                asset_selection=[*keys, dg.AssetKey("ontology_publication")],
                tags={NUMBER: str(number), **tags},
                raise_on_error=False,
            )
            assert result.success == (not tags)

    assert seen == [0, 0]
    assert sent() == ["noticed/2"]
    said = facts(published(result).metadata)
    assert (said["events_published"], said["rows_published"]) == (1, 2)


# -- outside the run ------------------------------------------------------------------------------


def test_conditions_follow_the_publication(folder: Path, instance: dg.DagsterInstance) -> None:
    """What was part of the run is not asked for again; what was not is asked for once, and after a
    failed run nothing is."""
    from ontologia_dagster import on_new_data

    names = NAMES[:1]

    @dg.asset(deps=[names[0].lower()], automation_condition=on_new_data())
    def outside() -> None: ...

    whole = dg.Definitions.merge(
        audited.definitions(folder, names=names), dg.Definitions(assets=[outside])
    )
    dg.materialize([outside], instance=instance)
    assert run(folder, instance, 1, names=names).success
    cursor = None

    def asked() -> set[str]:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(whole, instance, cursor=cursor)
        cursor = result.cursor
        return {
            key.to_user_string()
            for key in (dg.AssetKey("outside"), dg.AssetKey("total"))
            if result.get_num_requested(key)
        }

    asked()
    assert asked() == set()
    assert not run(folder, instance, 2, names=names, tags={FLAWED: names[0]}).success
    assert asked() == set()
    assert run(folder, instance, 3, names=names).success
    assert asked() == {"outside"}
    assert run(folder, instance, 3, names=names).success
    assert asked() == set()


def test_the_log_tail_tells_a_publication_once(folder: Path, instance: dg.DagsterInstance) -> None:
    """Not at all where the run told it; and where it was killed before, as one change a type."""
    definitions = audited.definitions(folder, names=NAMES[:2])
    bound: dict[str, Any] = dict(definitions.resources or {})
    first = evaluated(definitions, "ontology_log_tail", bound, instance)
    assert run(folder, instance, 1, names=NAMES[:2]).success
    tick = evaluated(definitions, "ontology_log_tail", bound, instance, first.cursor)
    assert tick.asset_events == []
    with dg.DagsterInstance.ephemeral() as other:
        assert run(folder, other, 2, names=NAMES[:2]).success
    tick = evaluated(definitions, "ontology_log_tail", bound, instance, tick.cursor)
    assert {(e.asset_key.path[-1], version(e)) for e in tick.asset_events} == {
        ("thing0", "2"),
        ("thing1", "2"),
    }


def test_a_run_without_the_publication(folder: Path, instance: dg.DagsterInstance) -> None:
    """As an automation condition asks for one type alone: the sensor has it published."""
    definitions = audited.definitions(folder, names=NAMES[:2])
    job = definitions.resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(
        instance=instance, asset_selection=[dg.AssetKey("thing0")], tags={NUMBER: "3"}
    )
    assert done.success
    assert numbers(folder) == set()
    bound: dict[str, Any] = dict(definitions.resources or {})

    tick = evaluated(definitions, "ontology_standing_branches", bound, instance)

    [request] = tick.run_requests
    publish = definitions.resolve_job_def("ontology_publish_branch")
    assert publish.execute_in_process(instance=instance, run_config=request.run_config).success
    assert numbers(folder) == {3}
    tick = evaluated(definitions, "ontology_standing_branches", bound, instance)
    assert tick.run_requests == []


# -- a location's own branch ----------------------------------------------------------------------


def test_a_location_on_its_own_branch_and_its_merge(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    names = NAMES[:2]
    assert run(folder, instance, 1, names=names).success
    before = head(folder)

    for publish in ("audited", "direct"):
        number = 2 if publish == "audited" else 3
        definitions = audited.definitions(folder, names=names, branch="pr/12", publish=publish)
        if publish == "direct":
            keys = [name.lower() for name in names]
            job = definitions.resolve_implicit_global_asset_job_def()
            done = job.execute_in_process(
                instance=instance,
                asset_selection=[dg.AssetKey(key) for key in keys],
                tags={NUMBER: str(number)},
            )
        else:
            done = run(folder, instance, number, names=names, branch="pr/12")
        assert done.success
        assert head(folder) == before
        assert numbers(folder, "pr/12", names) == {number}
    assert branches(folder) == ["pr/12"]
    repository = definitions.get_repository_def()
    repository.load_all_definitions()  # as a code server does it: names are compared there
    assert not repository.schedule_defs
    assert "ontology_events" not in {sensor.name for sensor in repository.sensor_defs}
    for name, op in (("ontology_gc", "ontology_collect_garbage"), ("ontology_compact", "")):
        config = {"ops": {op: {"config": {"dry_run": False}}}} if op else {}
        refused = definitions.resolve_job_def(name).execute_in_process(
            instance=instance, run_config=config, raise_on_error=False
        )
        assert "works on branch pr/12" in failure_of(refused).description

    merged = publish_config("ontology", "pr/12")
    publish_job = audited.definitions(folder, names=names).resolve_job_def(
        "ontology_publish_branch"
    )
    assert publish_job.execute_in_process(instance=instance, run_config=merged).success
    assert numbers(folder, names=names) == {3}
    assert branches(folder) == []


def test_which_branch_a_location_has() -> None:
    deployed = {"DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT": "1"}
    assert location_branch({}) is None
    assert location_branch({"ONTOLOGIA_BRANCH": "fix/prices"}) == "fix/prices"
    assert location_branch({**deployed, "DAGSTER_CLOUD_PULL_REQUEST_ID": "42"}) == "pr/42"
    name = {"DAGSTER_CLOUD_DEPLOYMENT_NAME": "Feature_X/9"}
    assert location_branch({**deployed, **name}) == "deployment/feature_x-9"
    assert location_branch({**deployed, "ONTOLOGIA_BRANCH": "main"}) is None
    with pytest.raises(ConfigurationError, match="ONTOLOGIA_BRANCH"):
        location_branch(deployed)


def test_a_tag_names_the_branch(folder: Path, instance: dg.DagsterInstance) -> None:
    """Another run goes on with a branch that stands; main, and one that is not there, are
    refused."""
    names = NAMES[:2]
    failed = run(folder, instance, 1, names=names, tags={FLAWED: names[1]})
    name = f"run/{failed.run_id}"

    result = run(folder, instance, 2, names=names, tags={BRANCH_TAG: name})

    assert result.success
    assert numbers(folder, names=names) == {2}
    assert branches(folder) == []
    for wrong, words in (("main", "where runs are published to"), ("run/none", "no branch")):
        result = run(folder, instance, 3, names=names, tags={BRANCH_TAG: wrong})
        assert not result.success
        assert words in " ".join(messages(instance, result.run_id)) or words in str(
            [e.event_specific_data.error for e in result.all_events if e.is_step_failure]
        )
    assert numbers(folder, names=names) == {2}
