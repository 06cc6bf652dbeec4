"""What becomes of audited runs that did not go as planned: branches that somebody threw away or
merged by hand, runs that were stopped, half re-executed or published by others."""

# No `from __future__ import annotations`: Dagster reads annotations of assets as objects.

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from ontologia_dagster import build_platform, location_resources
from ontologia_dagster.resources.branches import BRANCH_TAG
from ontologia_dagster.resources.environments import Environments
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage import publication, standing, unpublished
from ontologia_dagster.storage.publication_defs import discard_config, publish_config
from storage_engine import Session
from storage_engine.errors import ConfigurationError, UnknownBranchError
from tests.dagster import audited
from tests.dagster.audited import FLAWED, JOB, NAMES, NUMBER, ROWS
from tests.dagster.audited_runs import (
    Recorder,
    branches,
    failure_of,
    head,
    messages,
    numbers,
    patched_check,
    run,
)
from tests.dagster.world import evaluated, materialisations

TWO = NAMES[:2]
PUBLICATION = "ontology_publication"


def throw_away(folder: Path) -> None:
    """As `onto branch delete --apply` does it, or garbage collection after its time."""
    with Session(str(folder / "store")) as session:
        for branch in session.list_branches():
            if branch.parent:
                session.delete_branch(branch.name)


def tick(folder: Path, instance: dg.DagsterInstance, **options: Any) -> Any:
    definitions = audited.definitions(folder, **{"names": TWO, **options})
    bound: dict[str, Any] = dict(definitions.resources or {})
    return evaluated(definitions, "ontology_standing_branches", bound, instance)


def job_about(
    name: str, folder: Path, instance: dg.DagsterInstance, branch: str, **config: str
) -> Any:
    made = publish_config if name.endswith("publish_branch") else discard_config
    return (
        audited.definitions(folder, names=TWO)
        .resolve_job_def(name)
        .execute_in_process(
            instance=instance, run_config=made("ontology", branch, **config), raise_on_error=False
        )
    )


def selected(
    folder: Path,
    instance: dg.DagsterInstance,
    *keys: str,
    more: Sequence[dg.AssetsDefinition] = (),
    tags: dict[str, str] | None = None,
) -> Any:
    """A run of these assets."""
    definitions = audited.definitions(folder, names=TWO, more=more)
    return definitions.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance,
        asset_selection=[dg.AssetKey(key) for key in keys],
        tags={NUMBER: "5", **(tags or {})},
        raise_on_error=False,
    )


# -- thrown away ----------------------------------------------------------------------------------


def test_a_branch_that_is_thrown_away_while_its_run_works(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    """The next step that writes does not begin another one: half of the run would be published."""
    assert run(folder, instance, 1, names=TWO).success
    before = head(folder)

    @dg.asset(deps=[TWO[0].lower()])
    def vandal() -> None:
        throw_away(folder)

    of_storage = {"ontologia/storage": "ontology"}

    @dg.asset(deps=[vandal], required_resource_keys={"ontology"}, metadata=of_storage)
    def late(context: dg.AssetExecutionContext) -> None:
        ontology: OntologyResource = context.resources.ontology
        with ontology.session(entity_types=[audited.Monthly], writes=True) as session:  # type: ignore[list-item]
            session.ensure(audited.Monthly(id="x", number=5))

    keys = (TWO[0].lower(), "vandal", "late", PUBLICATION)
    result = selected(folder, instance, *keys, more=[vandal, late])

    assert not result.success
    assert result.get_failed_step_keys() == {"late"}
    assert "is gone with what was written to it" in failure_of(result).description
    assert head(folder) == before
    assert branches(folder) == []


def test_one_that_had_no_rows_is_missed_too(
    folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events were sent there, and no asset has told of rows."""
    runs_on = unpublished.runs_on

    def meanwhile(*given: Any) -> Any:
        throw_away(folder)
        return runs_on(*given)

    monkeypatch.setattr(publication, "runs_on", meanwhile)
    result = selected(folder, instance, "notices", PUBLICATION)
    assert not result.success
    assert "was never published" in failure_of(result).description


def test_going_on_with_a_branch_that_is_gone(folder: Path) -> None:
    """From failure: half of it is gone. All of it again: it begins anew."""
    (folder / "home").mkdir()
    job = audited.reconstructable(folder)
    with dg.DagsterInstance.local_temp(str(folder / "home")) as instance:
        with dg.execute_job(job, instance, tags={NUMBER: "2", FLAWED: NAMES[-1]}) as failed:
            root = failed.run_id
        throw_away(folder)
        options = dg.ReexecutionOptions.from_failure(root, instance)
        tags = {NUMBER: "2"}
        with dg.execute_job(job, instance, reexecution_options=options, tags=tags) as half:
            assert not half.success
            assert "was never published" in failure_of(half).description
        assert numbers(folder) == set()
        options = dg.ReexecutionOptions(parent_run_id=root)
        with dg.execute_job(job, instance, reexecution_options=options, tags=tags) as whole:
            assert whole.success
        assert numbers(folder) == {2}
        assert branches(folder) == []


def test_what_writes_never_falls_back_to_main(
    folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch is thrown away after the step has found it, and before it opens it."""
    begin = OntologyResource.begin_branch

    def begun(self: OntologyResource) -> Any:
        branch = begin(self)
        throw_away(folder)
        return branch

    monkeypatch.setattr(OntologyResource, "begin_branch", begun)
    result = selected(folder, instance, TWO[0].lower())
    assert not result.success
    assert UnknownBranchError.__name__ in str(failure_of(result).metadata)
    assert numbers(folder) == set()


# -- not all of it --------------------------------------------------------------------------------


def test_the_publication_alone_does_not_pass_over_checks(folder: Path) -> None:
    """Re-executed by itself after a blocking check has failed; a person may decide to."""
    (folder / "home").mkdir()
    job = audited.reconstructable(folder)
    with dg.DagsterInstance.local_temp(str(folder / "home")) as instance:
        with dg.execute_job(job, instance, tags={NUMBER: "2", FLAWED: NAMES[-1]}) as failed:
            root = failed.run_id
        options = dg.ReexecutionOptions(parent_run_id=root, step_selection=[PUBLICATION])
        with dg.execute_job(job, instance, reexecution_options=options) as alone:
            assert not alone.success
            said = failure_of(alone).description
        assert f"{NAMES[-1].lower()}_consistent" in said
        assert "ontology_publish_branch" in said
        assert numbers(folder) == set()
        options = dg.ReexecutionOptions(
            parent_run_id=root, step_selection=["thing9_consistent", "total", PUBLICATION]
        )
        tags = {NUMBER: "2"}
        with dg.execute_job(job, instance, reexecution_options=options, tags=tags) as mended:
            assert mended.success
        assert numbers(folder) == {2}


def test_a_run_that_was_half_done_again_is_left_to_people(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    """It had no publication. The last run went well, and did not do what had failed before."""

    @dg.asset(deps=[TWO[0].lower()])
    def breaks() -> None:
        raise RuntimeError

    failed = selected(folder, instance, TWO[0].lower(), "breaks", more=[breaks])
    name = f"run/{failed.run_id}"
    assert not failed.success
    half = selected(folder, instance, TWO[0].lower(), tags={BRANCH_TAG: name})
    assert half.success
    assert branches(folder) == [name]
    assert tick(folder, instance).run_requests == []
    [line] = [text for text in messages(instance, half.run_id) if "stands" in text]
    assert "breaks failed or was never done" in line


def test_checks_that_do_not_block(folder: Path, instance: dg.DagsterInstance) -> None:
    """One that warns, one that fails and blocks nothing: it is published."""

    @dg.asset_check(asset=TWO[0].lower())
    def soft() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False)

    @dg.asset_check(asset=TWO[0].lower(), blocking=True)
    def warns() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN)

    whole = dg.Definitions.merge(
        audited.definitions(folder, names=TWO), dg.Definitions(asset_checks=[soft, warns])
    )
    result = whole.resolve_job_def(JOB).execute_in_process(
        instance=instance, tags={NUMBER: "3"}, raise_on_error=False
    )
    assert result.success
    assert numbers(folder, names=TWO) == {3}
    assert branches(folder) == []


# -- others at the same branch --------------------------------------------------------------------


def test_nobody_publishes_what_a_run_works_on(folder: Path, instance: dg.DagsterInstance) -> None:
    said: list[str] = []

    def meanwhile(context: Any) -> None:
        for name in ("ontology_publish_branch", "ontology_discard_branch"):
            refused = job_about(name, folder, instance, f"run/{context.run.run_id}")
            said.append(failure_of(refused).description)

    with patched_check(TWO[0], meanwhile):
        result = run(folder, instance, 2, names=TWO)

    assert result.success
    assert len(said) == 2
    assert all(f"run {result.run_id} works on branch" in text for text in said)
    with Session(str(folder / "store")) as session:
        [commit] = session.list_commits()
        assert commit["rows"] == dict.fromkeys(TWO, 2)


def test_a_branch_that_was_merged_by_hand(folder: Path, instance: dg.DagsterInstance) -> None:
    """By `onto branch merge --apply`, or by a publication that was stopped then: the sensor has it
    told and cleared away, and nobody hears that nothing was published."""
    failed = run(folder, instance, 2, names=TWO, tags={FLAWED: TWO[1]})
    name = f"run/{failed.run_id}"
    with Session(str(folder / "store")) as session:
        session.merge(name)

    [request] = tick(folder, instance).run_requests

    assert not any("stands" in text for text in messages(instance, failed.run_id))
    job = audited.definitions(folder, names=TWO).resolve_job_def("ontology_publish_branch")
    done = job.execute_in_process(instance=instance, run_config=request.run_config)
    assert {m.asset_key.path[-1] for m in materialisations(done)} >= {n.lower() for n in TWO}
    assert branches(folder) == []
    with Session(str(folder / "store")) as session:
        assert len(session.list_commits()) == 1


def test_merged_and_deleted_by_hand_while_its_run_works(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    """The publication answers with the commit that did it."""

    def meanwhile(context: Any) -> None:
        with Session(str(folder / "store")) as session:
            session.merge(f"run/{context.run.run_id}")
            session.delete_branch(f"run/{context.run.run_id}")

    with patched_check(TWO[0], meanwhile):
        result = run(folder, instance, 2, names=TWO)
    assert result.success
    assert "published as commit 1 of main, by an attempt before this one" in str(
        messages(instance, result.run_id)
    )


def test_a_publication_by_the_sensor_that_fails(folder: Path, instance: dg.DagsterInstance) -> None:
    """It conflicts: it is not tried again and again, and people are told with what it found."""
    result = selected(folder, instance, TWO[0].lower())
    assert result.success
    first: Any = getattr(audited, TWO[0])
    with Session(str(folder / "store"), entity_types=[first]) as session:
        session.ensure(first(id="a", number=99))
    recorder = Recorder(webhook_url="-")
    [request] = tick(folder, instance).run_requests

    job = audited.definitions(folder, names=TWO).resolve_job_def("ontology_publish_branch")
    failed = job.execute_in_process(
        instance=instance, run_config=request.run_config, tags=request.tags, raise_on_error=False
    )
    assert not failed.success

    assert tick(folder, instance).run_requests == []
    [line] = [text for text in messages(instance, result.run_id) if "stands" in text]
    assert "conflict" in line
    assert "from failure" not in line  # it did not fail
    definitions = audited.definitions(folder, names=TWO, notifier=recorder)
    Recorder.sent.clear()
    evaluated(definitions, "ontology_conditions", dict(definitions.resources or {}), instance)
    [alert] = [a for a in Recorder.sent if a["key"].startswith("branch/")]
    assert "conflict" in alert["facts"]["findings"]
    name = f"run/{result.run_id}"
    assert job_about(
        "ontology_publish_branch", folder, instance, name, on_conflict="theirs"
    ).success
    assert branches(folder) == []


def test_a_recheck_does_not_count_as_the_run(folder: Path, instance: dg.DagsterInstance) -> None:
    """Its checks passed again, and then others were in the way: that is for people to see to."""
    first: Any = getattr(audited, TWO[0])
    assert run(folder, instance, 1, names=TWO).success

    def meanwhile(context: Any) -> None:
        """Another row before the recheck, and the same row while it looks."""
        row = "z" if context.run.tags.get(BRANCH_TAG) is None else "a"
        with Session(str(folder / "store"), entity_types=[first]) as session:
            session.ensure(first(id=row, number=99))

    with patched_check(TWO[0], meanwhile):
        result = run(folder, instance, 2, names=TWO, recheck=True)

    assert not result.success
    assert branches(folder) == [f"run/{result.run_id}"]
    assert tick(folder, instance).run_requests == []
    assert any("stands" in text for text in messages(instance, result.run_id))


def test_two_runs_on_one_branch(folder: Path, instance: dg.DagsterInstance) -> None:
    """One that is done does not publish what the other has only begun: that one publishes both."""
    failed = run(folder, instance, 1, names=TWO, tags={FLAWED: TWO[1]})
    tags = {BRANCH_TAG: f"run/{failed.run_id}"}
    other: list[Any] = []

    def meanwhile(context: Any) -> None:
        if context.run.tags[NUMBER] == "2":
            other.append(run(folder, instance, 3, names=TWO, tags={**tags, ROWS: "c"}))
            assert numbers(folder, names=TWO) == set()

    with patched_check(TWO[0], meanwhile):
        result = run(folder, instance, 2, names=TWO, tags=tags)

    assert not other[0].success
    said = failure_of(other[0]).description
    assert f"run {result.run_id} still works on branch run/{failed.run_id}" in said
    assert result.success
    assert numbers(folder, names=TWO) == {2, 3}
    assert branches(folder) == []


def test_a_run_that_is_about_to_be_retried(folder: Path, instance: dg.DagsterInstance) -> None:
    """Nobody is told of its branch, unless the daemon does not retry it after all. If it fails
    again that is told once more."""
    definitions = audited.definitions(folder, names=TWO, notifier=Recorder(webhook_url="-"))
    bound: dict[str, Any] = dict(definitions.resources or {})
    Recorder.sent.clear()

    def told(cursor: str | None = None) -> tuple[int, str | None]:
        done = evaluated(definitions, "ontology_conditions", bound, instance, cursor)
        return len([a for a in Recorder.sent if a["key"].startswith("branch/")]), done.cursor

    retried = {FLAWED: TWO[1], "dagster/will_retry": "true"}
    failed = run(folder, instance, 1, names=TWO, tags=retried)
    assert told()[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standing, "PATIENCE", timedelta(0))
        count, cursor = told()
    assert count == 1

    name = f"run/{failed.run_id}"
    for number in range(2, 5):
        run(folder, instance, number, names=TWO, tags={FLAWED: TWO[1], BRANCH_TAG: name})
        count, cursor = told(cursor)
        assert count == number
    assert told(cursor)[0] == count


def test_what_the_sensor_has_published_is_checked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`recheck` is for all that is published without somebody looking at it."""
    options = {"folder": str(folder), "names": TWO[:1], "recheck": True}
    monkeypatch.setenv(audited.LOCATION, json.dumps(options))
    first: Any = getattr(audited, TWO[0])
    seen: list[str] = []

    def look(context: Any) -> None:
        with context.resources.ontology.session() as session:
            found = session.sql(f'SELECT id FROM "{TWO[0]}" ORDER BY id').collect()
        seen.append(",".join(row["id"] for row in found))

    (folder / "home").mkdir()
    with (
        patched_check(TWO[0], look),
        dg.DagsterInstance.local_temp(str(folder / "home")) as instance,
    ):
        with dg.execute_job(
            audited.located("__ASSET_JOB", TWO[0].lower()), instance, tags={NUMBER: "5"}
        ) as done:
            assert done.success
        with Session(str(folder / "store"), entity_types=[first]) as session:
            session.ensure(first(id="z", number=5))
        [request] = tick(folder, instance, names=TWO[:1], recheck=True).run_requests
        publish = audited.located("ontology_publish_branch")
        with dg.execute_job(
            publish, instance, run_config=request.run_config, tags=request.tags
        ) as done:
            assert done.success
    assert seen == ["a,b", "a,b,z"]
    assert branches(folder) == []


def test_branches_that_nobody_decides_about(folder: Path, instance: dg.DagsterInstance) -> None:
    """`ontology_gc` deletes them after their time, and says so."""
    lasting = run(folder, instance, 1, names=TWO, tags={FLAWED: TWO[1]})
    failed = run(folder, instance, 1, names=TWO, tags={FLAWED: TWO[1]}, branch_retention="1s")
    with Session(str(folder / "store")) as session:
        ends = [b.expires_at for b in session.list_branches() if b.name.endswith(failed.run_id)]
    left = datetime.fromisoformat(str(ends[0])) - datetime.now(UTC)
    time.sleep(max(0.0, left.total_seconds()))
    config = {"ops": {"ontology_collect_garbage": {"config": {"dry_run": False}}}}
    job = audited.definitions(folder, names=TWO).resolve_job_def("ontology_gc")
    done = job.execute_in_process(instance=instance, run_config=config)
    assert branches(folder) == [f"run/{lasting.run_id}"]
    [observed] = [e for e in done.all_events if e.event_type_value == "ASSET_OBSERVATION"]
    metadata = observed.event_specific_data.asset_observation.metadata  # type: ignore[union-attr]
    assert metadata["branches_deleted"].value == f"run/{failed.run_id}"


# -- which assets are published -------------------------------------------------------------------


def test_the_publication_waits_for_what_the_io_manager_keeps(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    """Also where an asset says of which type it is, and not of which storage."""
    metadata = {"ontologia/type": "Monthly", "ontologia/models": audited.MODELS}

    @dg.asset(io_manager_key="ontology_io", metadata=metadata, deps=[TWO[0].lower()])
    def zulu(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"id": ["x"], "number": [5]})

    result = selected(folder, instance, TWO[0].lower(), "zulu", PUBLICATION, more=[zulu])
    assert result.success
    with Session(str(folder / "store")) as session:
        [commit] = session.list_commits()
        assert commit["rows"] == {"Monthly": 1, TWO[0]: 2}
    assert branches(folder) == []


def test_what_writes_after_the_publication_is_told(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    """It would stand on a branch that nobody publishes."""

    @dg.asset(deps=[PUBLICATION], required_resource_keys={"ontology"})
    def after(context: dg.AssetExecutionContext) -> None:
        with context.resources.ontology.session(
            entity_types=[audited.Monthly], writes=True
        ) as session:
            session.ensure(audited.Monthly(id="x", number=5))

    result = selected(folder, instance, TWO[0].lower(), PUBLICATION, "after", more=[after])
    assert result.get_failed_step_keys() == {"after"}
    assert "ontologia/storage" in failure_of(result).description
    assert branches(folder) == []


def test_the_head_is_that_of_main(folder: Path, instance: dg.DagsterInstance) -> None:
    failed = run(folder, instance, 1, names=TWO, tags={FLAWED: TWO[1]})
    tags = {BRANCH_TAG: f"run/{failed.run_id}"}
    assert selected(folder, instance, "ontology_head", tags=tags).success
    [observed] = instance.fetch_observations(dg.AssetKey("ontology_head"), limit=5).records
    assert observed.asset_observation is not None
    assert observed.asset_observation.tags["dagster/data_version"] == "0"


# -- where it can work ----------------------------------------------------------------------------


def test_main_takes_nothing_but_publications(folder: Path, instance: dg.DagsterInstance) -> None:
    with Session(str(folder / "store")) as session:
        session.protect_branch("main")
    assert run(folder, instance, 3, names=TWO).success
    assert numbers(folder, names=TWO) == {3}
    definitions = audited.definitions(folder, names=TWO)
    for name in ("compact", "gc", "index_repair", "metrics", "deep_verify"):
        job = definitions.resolve_job_def(f"ontology_{name}")
        assert job.execute_in_process(instance=instance).success


@pytest.mark.parametrize("name", ["ontology_publish_branch", "ontology_discard_branch"])
def test_main_is_no_branch_of_a_run(name: str, folder: Path, instance: dg.DagsterInstance) -> None:
    refused = job_about(name, folder, instance, "main")
    assert failure_of(refused).description == (
        "'main' is what this location publishes to: name a branch of it"
    )


def test_a_platform_that_was_not_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resource says audited, and nothing in the location would publish."""
    options = {"folder": str(folder), "names": TWO[:1], "told": False}
    monkeypatch.setenv(audited.LOCATION, json.dumps(options))
    (folder / "home").mkdir()
    job = audited.located("__ASSET_JOB", TWO[0].lower())
    with (
        dg.DagsterInstance.local_temp(str(folder / "home")) as instance,
        dg.execute_job(job, instance, tags={NUMBER: "5"}) as result,
    ):
        assert not result.success
        assert "build_platform(..., publish='audited')" in failure_of(result).description
    assert branches(folder) == []


def test_settings_that_mean_nothing(tmp_path: Path) -> None:
    uri = str(tmp_path)
    with pytest.raises(ConfigurationError, match=r"recheck has no effect with publish='direct'"):
        OntologyResource(storage_uri=uri, recheck=True)
    with pytest.raises(ValueError, match="'0d' is no time to look at a branch in"):
        OntologyResource(storage_uri=uri, publish="audited", branch_retention="0d")
    with pytest.raises(ConfigurationError, match="publish is 'audit': say 'direct' or 'audited'"):
        build_platform(publish="audit")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Fix Prices", "lower-case letters"),
        ("1234", "reads as a commit id"),
        ("a//b", "lower-case"),
    ],
)
def test_a_location_says_at_once_that_no_branch_is_called_that(
    name: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=f"ONTOLOGIA_BRANCH: .*{why}"):
        Environments.load({"ONTOLOGIA_BRANCH": name})
    with pytest.raises(ConfigurationError, match=why):
        OntologyResource(storage_uri=str(tmp_path), branch=name)


def test_a_location_says_at_once_that_sqlite_has_no_branches(tmp_path: Path) -> None:
    file = tmp_path / "environments.toml"
    uri = f"sqlite:///{tmp_path}/onto.db"
    environ = {"ONTOLOGIA_ENVIRONMENTS": str(file)}
    file.write_text(f'[development]\nstorage_uri = "{uri}"\npublish = "audited"\n')
    with pytest.raises(ConfigurationError, match=r"audited.*has no branches: it is SQLite"):
        Environments.load(environ)
    with pytest.raises(ConfigurationError, match="has no branches: it is SQLite"):
        OntologyResource(storage_uri=uri, publish="audited")
    file.write_text(f'[development]\nstorage_uri = "{uri}"\n')
    assert location_resources(Environments.load(environ))
    with pytest.raises(ConfigurationError, match="'pr/1' is to be worked on"):
        Environments.load({**environ, "ONTOLOGIA_BRANCH": "pr/1"})
