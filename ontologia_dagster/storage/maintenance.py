"""Jobs that keep a storage in shape: compaction, index repair, garbage collection, deep verify.

Each has a dry run in its config, shows its plan and the figures before and after as tables, and
leaves an observation on the storage's log, so that figures plot over time. A pool keeps them from
crowding each other out; that they may run beside any writer is the store's promise, not the
pool's. Index repair and compaction change no row; garbage collection deletes only what nothing
needs, and asks for `dry_run: false` in the launchpad.

Figures for a scraper are Prometheus text, written where one looks for it, such as the textfile
collector of node_exporter: `ONTOLOGIA_METRICS_DIR` (or the job's config) names the folder.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.dagster_compat import location_of, log_evaluation
from ontologia_dagster.declaration import (
    MAINTENANCE_POOL,
    OntologyAsset,
    find_type_assets,
    one_process_executor,
)
from ontologia_dagster.downstream.metadata import before_and_after, request_metadata, table
from ontologia_dagster.resources.ontology import SchemaAdvice, report_failures
from ontologia_dagster.resources.spark import PIPES, submit
from ontologia_dagster.storage import checks, dead_letters
from ontologia_dagster.storage.events import age_s, due_events, observations_due
from storage_engine.config import duration

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from ontologia_dagster.resources.spark import SparkResource
    from ontologia_dagster.storage.lineage import EventLineage
    from storage_engine.events.protocol import Peek
    from storage_engine.maintenance.compaction import (
        CompactionPolicy,
        CompactionReport,
        RunPlan,
    )
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.protocol import Repository
    from storage_engine.runtime.handlers import Handler

_RETRY = dg.RetryPolicy(
    max_retries=2, delay=10, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS
)
_GIB = 1024**3
_ON_MAIN_ALONE = {"compact", "gc"}
DIRECTORY_VARIABLE = "ONTOLOGIA_METRICS_DIR"


class CompactionConfig(dg.Config):
    dry_run: bool = Field(default=False, description="Show the plan, change nothing")
    types: list[str] = Field(default_factory=list, description="Only these; all if left out")
    min_entries: int | None = Field(
        default=None, description="Fewer entries are left alone; as declared if left out"
    )
    spark_above_bytes: int = Field(
        default=_GIB, description="Types with more to merge than this are given to Spark"
    )


class RepairConfig(dg.Config):
    dry_run: bool = Field(default=False, description="Show what would be written, write nothing")


class GcConfig(dg.Config):
    dry_run: bool = Field(default=True, description="Show what would be deleted, delete nothing")
    older_than: str = Field(default="7d", description="Grace: 12h, 7d")
    purge_compacted: bool = Field(
        default=False, description="Also files that a snapshot has replaced"
    )


def compaction_job(storage: str, declared: Sequence[OntologyAsset]) -> dg.JobDefinition:
    own = {asset.type: asset.compaction for asset in declared if asset.compaction is not None}

    @maintenance_op(storage, "compact_types", needs={"spark"})
    def compact_types(context: dg.OpExecutionContext, config: CompactionConfig) -> None:
        with upkeep(context, storage, "compact", config.dry_run) as work:
            policies = {**_declared_policies(context, storage), **own}
            work.metadata |= _compact(context, work, config, policies)

    return one_op_job(f"{storage}_compact", compact_types, "Merge small files of types.")


def _compact(
    context: dg.OpExecutionContext,
    work: "Upkeep",
    config: CompactionConfig,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    from storage_engine.maintenance.compaction import compact, plan_compaction
    from storage_engine.spark.compaction import spark_builds

    spark: SparkResource = context.resources.spark
    repository = work.repository

    def large(run: "RunPlan") -> bool:
        return repository.engine_version == "v2" and run.bytes >= config.spark_above_bytes

    planned: list[Any] = []
    done: list[Any] = []
    skipped: dict[str, str] = {}
    for policy, types in _policies(repository, config, own):
        plan = plan_compaction(repository, policy, types)
        planned += [item for item in plan.types if item.work]
        if config.dry_run or plan.empty:
            continue
        if spark.mode == PIPES and any(large(run) for run in plan.runs):
            report = _submit_compaction(
                context, work.ontology, spark, policy, types, config.spark_above_bytes
            )
        else:
            # Spark is started for the first run that is large enough, if any is.
            builds = spark_builds(spark.session, repository, config.spark_above_bytes)
            report = compact(repository, plan, build=builds)
        done += list(report.runs)
        skipped |= report.skipped
    return {
        "plan": table(
            ["type", "entries", "entries_after", "rows", "bytes", "why", "runs", "by_spark"],
            [
                (
                    item.type_name,
                    item.entries,
                    item.entries_after,
                    sum(run.rows for run in item.runs),
                    sum(run.bytes for run in item.runs),
                    item.reason,
                    len(item.runs),
                    sum(large(run) for run in item.runs),
                )
                for item in planned
            ],
        ),
        "done": table(
            ["type", "commits", "outcome", "files_in", "files_out", "rows", "bytes_out"],
            [
                (
                    run.type_name,
                    f"{run.min_commit_id}-{run.max_commit_id}",
                    run.outcome,
                    run.files_in,
                    run.files_out,
                    run.rows,
                    run.bytes_out,
                )
                for run in done
            ],
        ),
        "skipped": dict(skipped),
        "rows_rewritten": sum(run.rows for run in done if run.outcome == "published"),
    }


def _declared_policies(context: dg.OpExecutionContext, storage: str) -> dict[str, Any]:
    """Of types that were declared elsewhere in the location, such as in YAML."""
    location = location_of(context)
    assets = find_type_assets(location, storage) if location is not None else []
    return {asset.type_name: asset.compaction for asset in assets if asset.compaction is not None}


def _submit_compaction(
    context: dg.OpExecutionContext,
    ontology: "OntologyResource",
    spark: "SparkResource",
    policy: "CompactionPolicy",
    types: Sequence[str],
    above_bytes: int,
) -> "CompactionReport":
    """The whole of it on the cluster: what is small there is merged by its driver."""
    from storage_engine.maintenance.compaction import CompactionReport, RunReport

    arguments = ["--storage-uri", ontology.storage_uri, "--apply"]
    arguments += ["--spark-above", str(above_bytes)]
    arguments += ["--min-entries", str(policy.min_entries), "--ratio", str(policy.ratio)]
    for name in types:
        arguments += ["--type", name]
    # Nothing is reported when somebody else was faster.
    report = submit(context, ontology, spark, "compact", arguments).get("report", {})
    runs = tuple(RunReport(**run) for run in report.get("runs", ()))
    return CompactionReport(ontology.storage_uri, runs, report.get("skipped", {}))


def _policies(
    repository: "Repository", config: CompactionConfig, own: Mapping[str, Any]
) -> "list[tuple[CompactionPolicy, list[str]]]":
    """Each policy with the types that it is for."""
    from storage_engine.maintenance.compaction import CompactionPolicy

    names = config.types or [spec.name for spec in repository.known_types()]
    grouped: dict[CompactionPolicy, list[str]] = {}
    for name in names:
        declared = own.get(name)
        entries = config.min_entries or (declared.min_entries if declared else None)
        policy = CompactionPolicy(
            **({"min_entries": entries} if entries else {}),
            **({"ratio": declared.ratio} if declared else {}),
        )
        grouped.setdefault(policy, []).append(name)
    return list(grouped.items())


def repair_job(storage: str) -> dg.JobDefinition:
    @maintenance_op(storage, "repair_indices")
    def repair_types(context: dg.OpExecutionContext, config: RepairConfig) -> None:
        from storage_engine.maintenance.indices import repair_indices

        with upkeep(context, storage, "index repair", config.dry_run) as work:
            objects = _objects(work.repository)
            repair = repair_indices(objects, apply=not config.dry_run) if objects else None
            types = repair.types if repair else ()
            work.metadata |= {
                "plan": table(
                    ["type", "reasons", "indexed_to", "becomes", "entries", "become"],
                    [(t.type_name, ", ".join(t.reasons), *t.watermark, *t.entries) for t in types],
                ),
                "indices_checked": repair.checked if repair else 0,
                "indices_repaired": len(types) if not config.dry_run else 0,
            }

    return one_op_job(
        repair_job_name(storage), repair_types, "Rewrite indices that differ from the log."
    )


def repair_job_name(storage: str) -> str:
    return f"{storage}_index_repair"


def gc_job(storage: str) -> dg.JobDefinition:
    @maintenance_op(storage, "collect_garbage")
    def collect_garbage(context: dg.OpExecutionContext, config: GcConfig) -> None:
        with upkeep(context, storage, "gc", config.dry_run) as work:
            work.metadata |= _collect(work.repository, config)

    return one_op_job(f"{storage}_gc", collect_garbage, "Delete objects that nothing needs.")


def _collect(repository: "Repository", config: GcConfig) -> dict[str, Any]:
    from storage_engine.maintenance.gc import plan_gc, sweep

    objects = _objects(repository)
    if objects is None:
        return {"note": "a SQLite storage leaves no objects behind"}
    plan = plan_gc(
        objects, grace=duration(config.older_than), purge_compacted=config.purge_compacted
    )
    report = None if config.dry_run else sweep(objects, plan)
    return {
        "plan": table(
            ["reason", "objects", "bytes"],
            [(reason, count, size) for reason, (count, size) in plan.by_reason().items()],
        ),
        "objects_planned": len(plan.doomed),
        "objects_deleted": report.objects if report else 0,
        "bytes_deleted": report.bytes if report else 0,
        "objects_spared": report.spared if report else 0,
        # Of runs that nobody published within their time, for example.
        **_branches("branches_expired", plan.expired),
        **_branches("branches_deleted", report.branches if report else ()),
        "kept": table(["why", "objects"], sorted(plan.kept.items())),
    }


def _branches(name: str, branches: Sequence[str]) -> dict[str, Any]:
    return {name: ", ".join(branches)} if branches else {}


def deep_verify_job(
    storage: str, deep: dg.AssetChecksDefinition
) -> dg.JobDefinition | Any:  # an unresolved asset job has no public name
    return dg.define_asset_job(
        f"{storage}_{checks.DEEP_VERIFY}",
        selection=dg.AssetSelection.checks(*deep.check_keys),
        description="Read everything: chain, hashes, row counts, both ends of relations.",
    )


# -- figures --------------------------------------------------------------------------------------


class MetricsConfig(dg.Config):
    directory: str | None = Field(
        default=None, description="Where to write <storage>.prom; only shown if left out"
    )


def metrics_job(lineage: "EventLineage") -> dg.JobDefinition:
    storage = lineage.storage

    @dg.op(name=f"{storage}_collect_metrics", required_resource_keys={storage})
    def collect_metrics(context: dg.OpExecutionContext, config: MetricsConfig) -> None:
        ontology: OntologyResource = getattr(context.resources, storage)
        with report_failures(context.instance):
            text, seen, letters = look_at_all(ontology, lineage.handlers)
        for observed in observations_due(context.instance, lineage, seen, letters):
            context.log_event(observed)
        made = dead_letters.evaluations(lineage, ontology, letters)
        for evaluation in dead_letters.untold(context.instance, made):
            log_evaluation(context, evaluation)
        folder = config.directory or os.environ.get(DIRECTORY_VARIABLE)
        metadata: dict[str, Any] = {"metrics": dg.MetadataValue.md(f"```\n{text}```")}
        if folder:
            metadata["path"] = str(_write(Path(folder) / f"{storage}.prom", text))
        context.add_output_metadata(metadata)

    @dg.job(
        name=f"{storage}_metrics",
        description="Figures of the storage and its bus, as Prometheus text.",
        executor_def=one_process_executor,
    )
    def metrics() -> None:
        collect_metrics()

    return metrics


def look_at_all(
    ontology: "OntologyResource", handlers: "Sequence[Handler[Any]]" = ()
) -> "tuple[str, Peek, dead_letters.Letters]":
    """The storage's figures as Prometheus text, and of its bus: what is due, how old, how many are
    dead."""
    from storage_engine.events.protocol import Peek, open_event_store
    from storage_engine.maintenance.metrics import collect

    with ontology.repository(branch=ontology.home) as repository:
        text = collect(repository).prometheus()
        bus = open_event_store(repository, ontology.config())
        letters = dead_letters.read_letters(bus, ontology.namespace, handlers, dead_letters.GLANCED)
        figures = {"dead_letters": (letters.total, "Events that handlers gave up on.")}
        seen = Peek()
        if handlers:
            subscribed = [handler.subscription() for handler in handlers]
            seen = bus.peek(ontology.namespace, subscribed)
            figures |= {
                "events_pending": (seen.pending, "Events left to handle, as far as counted."),
                "events_more": (int(seen.more), "Whether there are more than were counted."),
                "events_due": (
                    due_events(seen),
                    "Events that could be handled now; of many, all that are left if some could.",
                ),
                "events_waiting": (
                    seen.waiting,
                    "Events with a worker, or between attempts, of those looked at.",
                ),
                "events_oldest_seconds": (int(age_s(seen.oldest)), "Age of the oldest of these."),
            }
    label = f'{{storage="{ontology.storage_uri}",namespace="{ontology.namespace}"}}'
    for name, (value, help_text) in figures.items():
        text += f"# HELP ontologia_{name} {help_text}\n# TYPE ontologia_{name} gauge\n"
        text += f"ontologia_{name}{label} {value}\n"
    return text, seen, letters


def _write(path: Path, text: str) -> Path:
    """Whole or not at all: a scraper may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return path


def figures(repository: "Repository") -> dict[str, int]:
    """The shape of a storage, in numbers."""
    from storage_engine.maintenance.metrics import collect

    metrics = collect(repository)
    return {
        "head_commit": metrics.head_commit_id,
        "types": len(metrics.types),
        "entries": sum(stored.entries for stored in metrics.types),
        "files": sum(stored.files for stored in metrics.types),
        "rows": sum(stored.rows for stored in metrics.types),
        "bytes": sum(stored.bytes for stored in metrics.types),
        "latest_files": sum(stored.latest_files for stored in metrics.types),
        "index_lag": sum(stored.index_lag for stored in metrics.types),
    }


@dataclass
class Upkeep:
    """One job's work on a storage: what it works on, and what it has to show."""

    ontology: "OntologyResource"
    repository: "Repository"
    metadata: dict[str, Any] = field(default_factory=dict)


@contextmanager
def upkeep(
    context: dg.OpExecutionContext, storage: str, operation: str, dry_run: bool
) -> Iterator[Upkeep]:
    """Open the storage, and afterwards tell what was done, with the figures before and after: of
    the step, and as an observation of the storage's log."""
    from storage_engine.maintenance.metrics import collect

    ontology: OntologyResource = getattr(context.resources, storage)
    advice = SchemaAdvice.of(ontology, storage)
    _refuse_on_branch(ontology, operation)
    with (
        report_failures(context.instance, advice),
        ontology.repository(branch=ontology.home) as repository,
    ):
        before = figures(repository)
        work = Upkeep(ontology, repository)
        yield work
        after = figures(repository)
        shown: dict[str, Any] = {
            "operation": operation,
            "dry_run": dry_run,
            "dagster/uri": ontology.storage_uri,
            **work.metadata,
            "before_after": before_and_after(before, after),
            **after,
            **request_metadata(dict(collect(repository).requests)),
        }
        context.add_output_metadata(shown)
        key = dg.AssetKey([storage, "log"])
        context.log_event(dg.AssetObservation(asset_key=key, metadata=shown))


def _refuse_on_branch(ontology: "OntologyResource", operation: str) -> None:
    if ontology.branch is not None and operation in _ON_MAIN_ALONE:
        raise dg.Failure(
            description=f"{operation} is done for the whole storage, on main, and this location "
            f"works on branch {ontology.branch}: merge the branch, or throw it away, and leave "
            "maintenance to the location on main",
            allow_retries=False,
        )


def _objects(repository: "Repository") -> "ObjectRepository | None":
    return repository.objects


def maintenance_op(
    storage: str, name: str, *, needs: Collection[str] = ()
) -> Callable[[Callable[..., None]], dg.OpDefinition]:
    return dg.op(
        name=f"{storage}_{name}",
        pool=MAINTENANCE_POOL,
        retry_policy=_RETRY,
        required_resource_keys={storage, *needs},
    )


def one_op_job(name: str, op: dg.OpDefinition, description: str) -> dg.JobDefinition:
    @dg.graph(name=name, description=description)
    def work() -> None:
        op()

    return work.to_job(name=name, description=description, executor_def=one_process_executor)
