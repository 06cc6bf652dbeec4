"""The ontology as a whole, as a source asset: observing it shows where its history stands."""

import dagster as dg

from ontologia_dagster.failures import reported_failures
from ontologia_dagster.resources import OntologyResource


@dg.observable_source_asset(
    group_name="ontologia",
    description="The head of the commit log. Its data version is the id of the latest commit.",
)
def ontology_head(ontology: OntologyResource) -> dg.ObserveResult:
    with reported_failures(), ontology.repository() as repository:
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
