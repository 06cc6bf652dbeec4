"""Figures of a storage for a scraper: Prometheus text, written by a job where one looks for it.

The job is for the textfile collector of node_exporter and the like: `ONTOLOGIA_METRICS_DIR` (or
the job's config) names the folder. Runs plot the same figures in their metadata.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.resources.failures import report_failures
from ontologia_dagster.storage.events import age_s, load_handlers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ontologia_dagster.resources.ontology import OntologyResource

DIRECTORY_VARIABLE = "ONTOLOGIA_METRICS_DIR"


class MetricsConfig(dg.Config):
    directory: str | None = Field(
        default=None, description="Where to write <storage>.prom; only shown if left out"
    )


def metrics_job(storage: str, handlers: "Sequence[str]" = ()) -> dg.JobDefinition:
    @dg.op(name=f"{storage}_collect_metrics", required_resource_keys={storage})
    def collect_metrics(context: dg.OpExecutionContext, config: MetricsConfig) -> None:
        ontology: OntologyResource = getattr(context.resources, storage)
        with report_failures(context.instance):
            text = prometheus(ontology, handlers)
        folder = config.directory or os.environ.get(DIRECTORY_VARIABLE)
        metadata: dict[str, Any] = {"metrics": dg.MetadataValue.md(f"```\n{text}```")}
        if folder:
            metadata["path"] = str(_write(Path(folder) / f"{storage}.prom", text))
        context.add_output_metadata(metadata)

    @dg.job(
        name=f"{storage}_metrics",
        description="Figures of the storage and its bus, as Prometheus text.",
        executor_def=dg.in_process_executor,
    )
    def metrics() -> None:
        collect_metrics()

    return metrics


def prometheus(ontology: "OntologyResource", handlers: "Sequence[str]" = ()) -> str:
    """The storage's figures, and of its bus: what is due, how old, how many are dead."""
    from storage_engine.events.protocol import open_event_store
    from storage_engine.maintenance.metrics import collect

    with ontology.repository() as repository:
        text = collect(repository).prometheus()
        bus = open_event_store(repository, ontology.config())
        letters = len(bus.list_dead_letters(ontology.namespace, 10_000))
        figures = {"dead_letters": (letters, "Events that handlers gave up on.")}
        if handlers:
            subscriptions = [handler.subscription() for handler in load_handlers(handlers)]
            seen = bus.backlog(ontology.namespace, subscriptions, 10_000)
            figures |= {
                "events_due": (seen.due, "Events that could be handled now."),
                "events_waiting": (seen.waiting, "Events with a worker, or between attempts."),
                "events_oldest_seconds": (int(age_s(seen.oldest)), "Age of the oldest of these."),
            }
    label = f'{{storage="{ontology.storage_uri}",namespace="{ontology.namespace}"}}'
    for name, (value, help_text) in figures.items():
        text += f"# HELP ontologia_{name} {help_text}\n# TYPE ontologia_{name} gauge\n"
        text += f"ontologia_{name}{label} {value}\n"
    return text


def _write(path: Path, text: str) -> Path:
    """Whole or not at all: a scraper may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return path
