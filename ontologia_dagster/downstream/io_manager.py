"""For small assets that return a table: what they return becomes rows of a type.

    @dg.asset(io_manager_key="ontology_io",
              metadata={"ontologia/type": "Customer", "ontologia/models": "shop.models"})
    def customers() -> pa.Table: ...

The storage is that of the key `ontology`, unless `ontologia/storage` names another one: in audited
runs its publication waits for these assets. Arrow tables, pandas and Polars frames are taken, and
given back as what an input is annotated with. Only what differs from the stored rows is written,
once for each run: a step that is tried again after its commit finds it. The data version is the
commit that last changed the type. For data that does not fit in memory use an ingestion asset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa

from ontologia_dagster.dagster_compat import instance_of, location_of, set_data_version
from ontologia_dagster.declaration import MODELS_METADATA, STORAGE_METADATA, TYPE_METADATA
from ontologia_dagster.downstream.metadata import (
    column_schema,
    commit_metadata,
    sample_metadata,
    schema_metadata,
)
from ontologia_dagster.ingestion import provenance
from ontologia_dagster.resources.ontology import (
    OntologyResource,
    SchemaAdvice,
    report_failures,
)
from ontologia_dagster.storage import unpublished
from ontologia_dagster.storage.lineage import DEFAULT_STORAGE
from storage_engine.errors import ConfigurationError
from storage_engine.runtime.arguments import declared_types

if TYPE_CHECKING:
    from storage_engine import Branch
    from storage_engine.model.spec import TypeSpec


class OntologyIOManager(dg.ConfigurableIOManager):
    """Keeps what assets return as rows of the type that their metadata names."""

    ontology: OntologyResource

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        if obj is None:
            return
        spec = _type_of(context.definition_metadata, context.asset_key)
        key = context.asset_key.to_user_string()
        meta = {
            provenance.RUN_ID: context.run_id,
            provenance.STEP: context.step_key,
            provenance.ASSET_KEY: key,
        }
        app = "/".join([self.ontology.location, key, *_partition(context)])
        models = _plain(context.definition_metadata)[MODELS_METADATA]
        advice = SchemaAdvice.of(self.ontology, None, models)
        holder = {"run_id": context.run_id}
        storage = _plain(context.definition_metadata).get(STORAGE_METADATA, DEFAULT_STORAGE)
        with report_failures():
            unpublished.require_publication(location_of(context), self.ontology, str(storage))
        with (
            report_failures(None, advice),
            self.ontology.session(holder=holder, writes=True) as work,
        ):
            assert spec.python_class is not None
            work.ingest(spec.python_class, obj)
            commit_id = work.commit(meta=meta, idempotency=(app, context.run_id))
            last, head = work.last_commit, work.repository.type_head(spec)
            schema = schema_metadata(work.repository, spec, instance_of(context), context.asset_key)
            sample = sample_metadata(work.repository, spec, head)
            branch = unpublished.branch_of(self.ontology, work.repository)
        changes = [
            change for change in (last.changes if last else ()) if change.type_name == spec.name
        ]
        name = branch.name if branch is not None else None
        metadata = {
            **commit_metadata(self.ontology, commit_id, spec.name, name),
            **sample,
            "rows_inserted": sum(change.inserted for change in changes),
            "rows_changed": sum(change.updated for change in changes),
            "dagster/table_name": spec.name,
            "dagster/uri": self.ontology.storage_uri,
            "dagster/column_schema": column_schema(spec),
            **schema,
        }
        context.add_output_metadata(metadata)
        set_data_version(
            context, head if branch is None else self._unpublished(context, branch, spec, metadata)
        )

    def _unpublished(
        self, context: dg.OutputContext, branch: Branch, spec: TypeSpec, metadata: dict[str, Any]
    ) -> int:
        """Dagster tells of what an asset returns at once, whatever others see. So it is told as
        the version that they see, and the publication tells the one that they will."""
        keys = context.asset_partition_keys if context.has_asset_partitions else [None]
        for key in keys:
            context.log_event(
                unpublished.observation(
                    branch, context.asset_key, metadata, partition=key, type_name=spec.name
                )
            )
        with self.ontology.repository(branch=self.ontology.home) as home:
            return home.type_head(spec)

    def load_input(self, context: dg.InputContext) -> Any:
        upstream = context.upstream_output
        assert upstream is not None
        spec = _type_of(upstream.definition_metadata, upstream.asset_key)
        with report_failures(), self.ontology.session() as session:
            table = session.sql(f'SELECT * EXCLUDE (commit_id) FROM "{spec.name}"').to_arrow()
        return _as_asked(table, context.dagster_type.typing_type)


def _partition(context: dg.OutputContext) -> list[str]:
    return (
        [provenance.name_partitions(context.asset_partition_keys)]
        if context.has_asset_partitions
        else []
    )


def _type_of(metadata: Any, key: dg.AssetKey) -> TypeSpec:
    plain = _plain(metadata)
    name, models = plain.get(TYPE_METADATA), plain.get(MODELS_METADATA)
    if not name or not models:
        raise ConfigurationError(
            f"{key.to_user_string()}: its metadata must name {TYPE_METADATA} and "
            f"{MODELS_METADATA} to be kept in the ontology"
        )
    for spec in declared_types(str(models), option=MODELS_METADATA).values():
        if spec.name == name:
            return spec
    raise ConfigurationError(f"{models} declares no type {name!r}")


def _plain(metadata: Any) -> dict[str, Any]:
    return {name: getattr(value, "value", value) for name, value in (metadata or {}).items()}


def _as_asked(table: pa.Table, wanted: Any) -> Any:
    module = str(getattr(wanted, "__module__", ""))
    if module.startswith("pandas"):
        return table.to_pandas()
    if module.startswith("polars"):
        import polars as pl

        return pl.from_arrow(table)
    return table
