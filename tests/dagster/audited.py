"""Ten types that every run writes, published audited: for tests, and for processes that they start.

python -m tests.dagster.audited HOME FOLDER merged|told|deleted

runs the job once and is killed: after the swap of head that merges, after what it brought was told,
or after the branch is gone.
"""


# No `from __future__ import annotations`: Dagster reads annotations of assets as objects.

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import new_class
from typing import Any

import dagster as dg
import pyarrow as pa
from dagster._core.definitions.reconstruct import ReconstructableJob, ReconstructableRepository

from ontologia_dagster import OntologyIOManager, build_platform, emits, one_process_executor
from ontologia_dagster.downstream.queries import query_asset
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.storage.alerts import Notifier
from storage_engine import Entity, Event, Field

MODELS = "tests.dagster.audited"
NUMBER = "test/number"  # a run's tag: what it writes into all rows of all types
ROWS = "test/rows"
FLAWED = "test/flawed"  # a run's tag: the check of this type fails
LOCATION = "TEST_AUDITED_LOCATION"  # its folder and options, as JSON
ENDLESS = "test/endless"  # a run's tag: that of the last type never ends
JOB = "write_all"
NAMES = [f"Thing{number}" for number in range(10)]
LAST = NAMES[-1]


def _type(name: str) -> type[Entity]:
    def body(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = __name__
        namespace["__annotations__"] = {"id": Field[str], "number": Field[int]}
        namespace["id"] = Field(primary_key=True)

    made: Any = new_class(name, (Entity,), {}, body)
    return made


for _name in NAMES:
    globals()[_name] = _type(_name)


class Noticed(Event):
    number: Field[int]


@dg.asset(metadata=emits(Noticed), deps=[NAMES[0].lower()], required_resource_keys={"ontology"})
def notices(context: dg.AssetExecutionContext) -> None:
    """Sends an event, with a commit."""
    ontology: OntologyResource = context.resources.ontology
    number = int(context.run.tags.get(NUMBER, "0"))
    with ontology.session(writes=True) as session:
        session.commit(event=Noticed(id=f"noticed/{number}", number=number))


Monthly = _type("Monthly")
MONTHS = dg.MonthlyPartitionsDefinition("2013-01-01", end_date="2014-01-01")


@dg.asset(
    io_manager_key="ontology_io",
    partitions_def=MONTHS,
    backfill_policy=dg.BackfillPolicy.single_run(),
    metadata={
        "ontologia/type": "Monthly",
        "ontologia/models": MODELS,
        "ontologia/storage": "ontology",
    },
)
def monthly(context: dg.AssetExecutionContext) -> pa.Table:
    keys = list(context.partition_keys)
    return pa.table({"id": keys, "number": list(range(len(keys)))})


def thing(name: str) -> dg.AssetsDefinition:
    @dg.asset(
        name=name.lower(),
        io_manager_key="ontology_io",
        metadata={
            "ontologia/type": name,
            "ontologia/models": MODELS,
            "ontologia/storage": "ontology",
        },
    )
    def made(context: dg.AssetExecutionContext) -> pa.Table:
        ids = context.run.tags.get(ROWS, "a,b").split(",")
        return pa.table({"id": ids, "number": [int(context.run.tags.get(NUMBER, "0"))] * len(ids)})

    return made


def consistent(name: str, look: Callable[[Any], None] | None = None) -> dg.AssetChecksDefinition:
    """All types say the same number, there where the run works."""

    @dg.asset_check(
        asset=name.lower(),
        name="consistent",
        blocking=True,
        required_resource_keys={"ontology"},
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        if look is not None:
            look(context)
        while ENDLESS in context.run.tags and name == LAST:
            time.sleep(0.1)
        ontology: OntologyResource = context.resources.ontology
        with ontology.session() as session:
            rows = session.sql(f'SELECT DISTINCT number FROM "{name}"').to_arrow()
        numbers = rows.column("number").to_pylist()
        run = context.run
        flawed = run.tags.get(FLAWED) == name
        return dg.AssetCheckResult(
            passed=not flawed,
            description=f"{name} is flawed" if flawed else None,
            metadata={"numbers": str(sorted(numbers))},
        )

    return check


def definitions(
    folder: Path,
    *,
    names: list[str] = NAMES,
    notifier: Notifier | None = None,
    running: bool = False,
    more: Sequence[dg.AssetsDefinition] = (),
    told: bool = True,
    **options: Any,
) -> dg.Definitions:
    """`told`: whether the platform is, and not the resource alone, how runs are published."""
    ontology = OntologyResource(
        storage_uri=str(folder / "store"), **{"publish": "audited", **options}
    )
    total = query_asset(
        "total", f'SELECT sum(number) AS total FROM "{names[0]}"', deps=[names[0].lower()]
    )
    own = dg.Definitions(
        assets=[*(thing(name) for name in names), total, monthly, notices, *more],
        asset_checks=[consistent(name) for name in names],
    )
    keys = [*(name.lower() for name in names), "total"]
    if ontology.publish == "audited" and told:
        keys.append("ontology_publication")
    job = dg.define_asset_job(JOB, selection=dg.AssetSelection.assets(*keys))
    return dg.Definitions.merge(
        build_platform(
            beside=own,
            publish=ontology.publish if told else "direct",
            branch=options.get("branch"),
            running=running,
        ),
        own,
        dg.Definitions(
            jobs=[job],
            executor=one_process_executor,
            resources={
                "ontology": ontology,
                "ontology_io": OntologyIOManager(ontology=ontology),
                "spark": SparkResource(),
                "notifier": notifier or Notifier(),
            },
        ),
    )


@dg.definitions
def location() -> dg.Definitions:
    options = json.loads(os.environ[LOCATION])
    return definitions(Path(options.pop("folder")), **options)


def located(name: str, *keys: str) -> Any:
    """A job of the location, or its assets of these keys, as a run's process loads them."""
    repository = ReconstructableRepository.for_module(MODELS, "location")
    assets = {dg.AssetKey(key) for key in keys} or None
    return ReconstructableJob(repository, name, asset_selection=assets)


def job(folder: str) -> dg.JobDefinition:
    return definitions(Path(folder)).resolve_job_def(JOB)


def reconstructable(folder: Path) -> Any:
    arguments: Any = (str(folder),)
    return dg.build_reconstructable_job(MODELS, "job", reconstructable_args=arguments)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    from dagster._core.execution.api import execute_run

    from ontologia_dagster.storage import publication

    home, folder, when = sys.argv[1:]
    if when == "deleted":
        delete = publication._delete

        def dies_after(*given: Any) -> None:
            delete(*given)
            die()

        vars(publication)["_delete"] = dies_after
    else:
        vars(publication)[{"merged": "_tell", "told": "_delete"}[when]] = die
    with dg.DagsterInstance.from_config(home) as instance:
        made = reconstructable(Path(folder))
        run = instance.create_run_for_job(made.get_definition(), tags={NUMBER: "7"})
        execute_run(made, run, instance)


if __name__ == "__main__":
    main()
