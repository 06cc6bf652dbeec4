"""The ontology as a whole, as a source asset: observing it shows where its history stands."""

import warnings
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.failures import reported_failures

if TYPE_CHECKING:
    from ontologia_dagster.resources import OntologyResource


def head_asset(storage: str) -> Any:
    """Observable: its data version is the id of the latest commit."""

    def observed(context: dg.OpExecutionContext) -> dg.ObserveResult:
        ontology: OntologyResource = getattr(context.resources, storage)
        with reported_failures(context.instance), ontology.repository() as repository:
            head = repository.head_commit_id()
            info = repository.storage_info()
        types = sorted(info["types"])
        return dg.ObserveResult(
            data_version=dg.DataVersion(str(head)),
            metadata={
                "dagster/uri": ontology.storage_uri,
                "backend": info["backend"],
                "engine_version": info["engine_version"],
                "commits": head,  # ids start at 1 and have no gaps
                "type_count": len(types),
                "types": dg.MetadataValue.md("\n".join(f"- {name}" for name in types)),
            },
        )

    with warnings.catch_warnings():
        # Dagster still calls it beta; nothing else is observed and not materialised.
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.observable_source_asset(
            name=f"{storage}_head",
            group_name="ontologia",
            description="The head of the commit log. Its data version is the id of the latest "
            "commit.",
            required_resource_keys={storage},
        )
        return decorate(observed)
