"""What an ingested type is to Dagster, as one declaration: in Python, or in YAML.

    OntologyAsset(
        type="Customer",
        models="shop.models",
        source=SourceSpec(format="csv", paths=["data/customers/*.csv"]),
        columns={"id": "customer_no", "name": "trim(name)"},
    )

`ingestion.asset.build_type` makes the asset, its checks, schedule and sensor of it. Declaring
opens nothing and imports no models; building imports them, for the ends of a relation and for what
the asset's page says.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

import dagster as dg
from croniter import croniter
from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from storage_engine.config import duration
from storage_engine.model.descriptions import checked_owners, checked_tags
from storage_engine.runtime.arguments import declared_types as types_of_module
from storage_engine.spark.ingest_spec import (
    Format,
    IngestFields,
    IngestSpec,
    Source,
    SourceFields,
    checked_expectations,
)

if TYPE_CHECKING:
    from storage_engine.model.spec import TypeSpec

INGEST_POOL = "ontologia_ingest"
MAINTENANCE_POOL = "ontologia_maintenance"
EVENTS_POOL = "ontologia_events"

# All steps of a run in one process, with one JVM; launchpads have nothing to ask about it.
one_process_executor = dg.in_process_executor.configured(
    {"retries": {"enabled": {}}}, name="one_process"
)

_AUTOMATION = {
    "eager": dg.AutomationCondition.eager,
    "on_missing": dg.AutomationCondition.on_missing,
}
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_ON_CRON = re.compile(r"on_cron\((?P<cron>[^)]+)\)")


def on_new_data() -> dg.AutomationCondition[Any]:
    """When an upstream asset's data version has changed, and no such run is under way.

    A run upstream that changed nothing reports the version it had, and so triggers nothing.
    """
    changed = dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed())
    first = dg.AutomationCondition.missing() & ~dg.AutomationCondition.any_deps_missing()
    return (
        (changed | first.newly_true()).since_last_handled()
        & ~dg.AutomationCondition.any_deps_missing()
        & ~dg.AutomationCondition.any_deps_in_progress()
        & ~dg.AutomationCondition.in_progress()
    ).with_label("on_new_data")


def automation(text: str | dg.AutomationCondition[Any] | None) -> Any:
    """A condition by its name: on_new_data, eager, on_missing, on_cron(0 6 * * *)."""
    if text is None or isinstance(text, dg.AutomationCondition):
        return text
    if text == "on_new_data":
        return on_new_data()
    if text in _AUTOMATION:
        return _AUTOMATION[text]()
    cron = _ON_CRON.fullmatch(text.strip())
    if cron is None:
        raise ValueError(
            f"automation {text!r} is none of on_new_data, eager, on_missing, on_cron(0 6 * * *)"
        )
    return dg.AutomationCondition.on_cron(cron["cron"].strip())


_DECLARED = ConfigDict(
    extra="forbid", frozen=True, arbitrary_types_allowed=True, populate_by_name=True
)
# Members that decide how rows are written, not which.
_BESIDE_ROWS = {"meta", "quarantine", "target_part_bytes"}
# Members that have always been part of the code version.
_HASHED = {
    "type",
    "models",
    "columns",
    "where",
    "transform",
    "distinct",
    "order_by",
    "on_bad_rows",
    "drift",
    "expectations",
}


class _Declared(dg.Model, dg.Resolvable):
    model_config = _DECLARED


class SourceSpec(SourceFields, dg.Model, dg.Resolvable):
    """Where the rows come from. `{partition_key}` in a path stands for the partition's key."""

    format: Format = Field(default="csv", description="csv, json (lines), parquet or jdbc")
    # The name that YAML has here comes first: `dg check yaml` knows that one alone.
    row_schema: str | None = Field(
        default=None,
        validation_alias=AliasChoices("row_schema", "schema"),
        serialization_alias="schema",
        description=SourceFields.model_fields["row_schema"].description,
    )
    fingerprint: str | None = Field(
        default=None,
        description="module:function that names the source's present state, for sources without "
        "files; called with this source",
    )


class PartitionSpec(_Declared):
    """How the type is cut. `field` is a declared field: what it says decides where a row is."""

    kind: Literal["daily", "weekly", "monthly", "hourly", "static"] = "daily"
    field: str
    start: str | None = Field(default=None, description="2013-01-01; for time partitions")
    end: str | None = Field(default=None, description="Up to, without; open if left out")
    timezone: str = "UTC"
    keys: Sequence[str] = Field(default=(), description="For static partitions")
    expression: str | None = Field(
        default=None, description="SQL over the source for the field; as in `columns` if left out"
    )

    @model_validator(mode="after")
    def _complete(self) -> PartitionSpec:
        if self.kind == "static" and not self.keys:
            raise ValueError("static partitions need `keys`")
        if self.kind != "static" and not self.start:
            raise ValueError(f"{self.kind} partitions need `start`")
        for name, text in (("start", self.start), ("end", self.end)):
            if text is not None and not _DAY.match(text):
                raise ValueError(f"partitions.{name} is a day such as 2013-01-31, not {text!r}")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            near = difflib.get_close_matches(self.timezone, available_timezones(), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"partitions.timezone: {self.timezone!r} is unknown{hint}") from None
        return self


class FreshnessSpec(_Declared):
    """How old the last materialisation may be: `26h`, `7d`."""

    fail_after: str
    warn_after: str | None = None

    @field_validator("fail_after", "warn_after")
    @classmethod
    def _duration(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None:
            try:
                duration(text)
            except ValueError as error:
                raise ValueError(f"freshness.{info.field_name}: {error}") from None
        return text

    def policy(self) -> dg.FreshnessPolicy:
        warn = duration(self.warn_after) if self.warn_after else None
        return dg.FreshnessPolicy.time_window(
            fail_window=duration(self.fail_after), warn_window=warn
        )


class RetrySpec(_Declared):
    """Of failures that trying again can help; others are never retried."""

    max_retries: int = 3
    delay_s: float = 5.0

    def policy(self) -> dg.RetryPolicy:
        return dg.RetryPolicy(
            max_retries=self.max_retries,
            delay=self.delay_s,
            backoff=dg.Backoff.EXPONENTIAL,
            jitter=dg.Jitter.PLUS_MINUS,
        )


class CompactionSpec(_Declared):
    """When the maintenance job compacts the type (as CompactionPolicy)."""

    min_entries: int = 8
    ratio: float = 1.5


class OntologyAsset(IngestFields, dg.Model, dg.Resolvable):
    """One entity or relation type, how it is ingested (the members of `IngestFields`), and what
    Dagster shows of it. Storage and unit of work are not declared: the resource and the run say
    them."""

    model_config = _DECLARED

    source: SourceSpec

    partitions: PartitionSpec | None = None
    backfill: Literal["single_run", "multi_run"] = Field(
        default="multi_run", description="A range of partitions in one run, or a run for each"
    )
    schedule: str | None = Field(default=None, description="Cron; of the latest partition if any")
    watch_source: bool = Field(
        default=False, description="A sensor that asks for a run when the source's files change"
    )
    freshness: FreshnessSpec | None = None
    automation: Annotated[
        dg.AutomationCondition[Any] | str | None,
        dg.Resolver(lambda _context, text: automation(text), model_field_type=str | None),
    ] = None
    compaction: CompactionSpec | None = None
    # Called `schema` in YAML and in calls; as an attribute Pydantic has that name for itself.
    schema_changes: Literal["strict", "additive"] = Field(
        default="strict",
        validation_alias=AliasChoices("schema", "schema_changes"),
        serialization_alias="schema",
        description="additive: a run applies changes of the class that need no upgrader by itself; "
        "strict: any difference from the storage stops it, and the migration job is for that",
    )
    retry: RetrySpec = RetrySpec()
    pool: str | None = INGEST_POOL

    storage: str = Field(default="ontology", description="Key of the OntologyResource")
    key_prefix: Sequence[str] = ()
    name: str | None = Field(default=None, description="Of the asset; the type's in snake case")
    deps: Sequence[str] = Field(default=(), description="Upstream assets, as a/b")
    group: str | None = "ontologia"
    owners: Sequence[str] = Field(
        default=(), description="Email addresses and team:name; the class's if left out"
    )
    tags: dict[str, str] = Field(default_factory=dict, description="Beside those of the class")
    description: str | None = Field(default=None, description="The class's docstring if left out")
    blocking_checks: bool = Field(
        default=False, description="Downstream stops while the index check fails"
    )
    version: str = Field(default="1", description="Raise it when `transform` does something else")

    @field_validator("expectations", mode="before")
    @classmethod
    def _expected(cls, raw: Any) -> Any:
        """Checked, and kept as they were declared: the code version has them."""
        normal = checked_expectations(raw)
        return tuple(raw) if isinstance(raw, list | tuple) else normal

    @field_validator("owners", mode="before")
    @classmethod
    def _owned(cls, raw: Any) -> Any:
        return checked_owners(raw)

    @field_validator("tags", mode="before")
    @classmethod
    def _tagged(cls, raw: Any) -> Any:
        return checked_tags(raw)

    @field_validator("schedule")
    @classmethod
    def _cron(cls, text: str | None) -> str | None:
        if text is not None and not croniter.is_valid(text):
            raise ValueError(f"schedule is cron, such as '0 6 * * *', not {text!r}")
        return text

    @field_validator("automation", mode="before")
    @classmethod
    def _condition(cls, given: Any) -> Any:
        """By its name in Python, too."""
        return automation(given) if isinstance(given, str) else given

    @property
    def asset_key(self) -> dg.AssetKey:
        return dg.AssetKey([*self.key_prefix, self.asset_name])

    @property
    def asset_name(self) -> str:
        return self.name or snake_case(self.type)

    @property
    def type_asset(self) -> TypeAsset:
        """As the jobs and sensors of its storage see it."""
        return _type_asset(self.asset_key, definition_metadata(self))

    @property
    def code_version(self) -> str:
        """Of all that decides which rows are written. A member that came later counts once it is
        used, so that what it adds makes no asset stale."""
        shared = set(IngestFields.model_fields) - _BESIDE_ROWS
        unused = {name for name in shared - _HASHED if self._is_default(name)}
        parts = self.model_dump(mode="json", include={"version", *shared} - unused - {"drift"})
        drift = self.drift.model_dump(mode="json", exclude_unset=True)
        source = self.source.model_dump(mode="json", exclude={"fingerprint"})
        text = json.dumps({**parts, "drift": drift, "source": source}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _is_default(self, name: str) -> bool:
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) == default)

    def ingest_spec(self, storage_uri: str, paths: Sequence[str]) -> IngestSpec:
        """What is asked of Spark, but for a unit of work."""
        own = self.source.model_dump(include=set(SourceFields.model_fields))
        members = {name: getattr(self, name) for name in IngestFields.model_fields}
        return IngestSpec(
            storage_uri=storage_uri, source=Source(**{**own, "paths": paths}), **members
        )


def ingestion_job_name(declared: OntologyAsset) -> str:
    return f"{declared.storage}_ingest_{'__'.join(declared.asset_key.path)}"


def with_ends(spec: TypeSpec, models: str) -> list[TypeSpec]:
    """A type, and of a relation the types at its ends: a rename of one is a change of both."""
    ends = {("entity", name) for name in (spec.left, spec.right) if name is not None}
    declared = types_of_module(models, option="models") if ends else {}
    return [spec, *(other for ref, other in declared.items() if ref in ends)]


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


# -- found again ----------------------------------------------------------------------------------

# In the metadata of an asset's definition: jobs and sensors of a storage find its types and checks
# this way, wherever they were declared.
TYPE_METADATA = "ontologia/type"
MODELS_METADATA = "ontologia/models"
STORAGE_METADATA = "ontologia/storage"
PARTITION_BY_METADATA = "ontologia/partition_by"
COMPACTION_METADATA = "ontologia/compaction"
WRITTEN_BY_METADATA = "ontologia/written_by"
EVENT_METADATA = "ontologia/event"
EMITS_METADATA = "ontologia/emits"
INGEST_JOB_METADATA = "ontologia/ingest_job"


@dataclass(frozen=True)
class TypeAsset:
    """An asset that is a type of a storage."""

    key: dg.AssetKey
    type_name: str
    partition_by: PartitionSpec | None = None
    compaction: CompactionSpec | None = None
    models: str | None = None
    ingest_job: str | None = None
    storage: str = ""
    is_ingested: bool = True  # and not written by handlers


def definition_metadata(declared: OntologyAsset) -> dict[str, Any]:
    """What an asset's definition says, to be found again."""
    metadata: dict[str, Any] = {
        TYPE_METADATA: declared.type,
        MODELS_METADATA: declared.models,
        STORAGE_METADATA: declared.storage,
        INGEST_JOB_METADATA: ingestion_job_name(declared),
    }
    if declared.partitions is not None:
        metadata[PARTITION_BY_METADATA] = declared.partitions.model_dump(mode="json")
    if declared.compaction is not None:
        metadata[COMPACTION_METADATA] = declared.compaction.model_dump(mode="json")
    return metadata


def declared_assets(definitions: dg.Definitions, storage: str) -> list[TypeAsset]:
    """The assets that are types of a storage, of definitions that are no location yet."""
    assets = []
    for spec in asset_specs(definitions):
        metadata = {name: _plain(value) for name, value in spec.metadata.items()}
        if metadata.get(STORAGE_METADATA) == storage and TYPE_METADATA in metadata:
            assets.append(_type_asset(spec.key, metadata))
    return assets


def asset_specs(definitions: dg.Definitions) -> list[dg.AssetSpec]:
    specs: list[dg.AssetSpec] = []
    for asset in definitions.assets or ():
        if isinstance(asset, dg.AssetsDefinition):
            specs += asset.specs
        elif isinstance(asset, dg.AssetSpec):
            specs.append(asset)
    return specs


def checks_of(repository: dg.RepositoryDefinition, storage: str) -> list[dg.AssetCheckKey]:
    """The checks of a storage's assets. Those of assets that belong to no storage are the first
    storage's, so that each has one who looks at it."""
    graph = repository.asset_graph
    owner = {
        key: _plain_metadata(graph, key).get(STORAGE_METADATA) for key in graph.get_all_asset_keys()
    }
    first = min(filter(None, owner.values()), default=None)
    return sorted(
        key
        for key in graph.asset_check_keys
        if (owner.get(key.asset_key) or first) in (storage, None)
    )


def find_type_assets(repository: dg.RepositoryDefinition, storage: str) -> list[TypeAsset]:
    assets = []
    graph = repository.asset_graph
    for key in sorted(graph.materializable_asset_keys):
        metadata = _plain_metadata(graph, key)
        if metadata.get(STORAGE_METADATA) == storage and TYPE_METADATA in metadata:
            assets.append(_type_asset(key, metadata))
    return assets


def _type_asset(key: dg.AssetKey, metadata: Mapping[str, Any]) -> TypeAsset:
    return TypeAsset(
        key,
        metadata[TYPE_METADATA],
        _parse(PartitionSpec, metadata, PARTITION_BY_METADATA),
        _parse(CompactionSpec, metadata, COMPACTION_METADATA),
        metadata.get(MODELS_METADATA),
        metadata.get(INGEST_JOB_METADATA),
        metadata[STORAGE_METADATA],
        WRITTEN_BY_METADATA not in metadata,
    )


def _plain_metadata(graph: Any, key: dg.AssetKey) -> dict[str, Any]:
    return {name: _plain(value) for name, value in graph.get(key).metadata.items()}


def _parse(model: Any, metadata: Mapping[str, Any], name: str) -> Any:
    return model(**metadata[name]) if name in metadata else None


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value
