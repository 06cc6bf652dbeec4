"""What an ingested type is to Dagster, as one declaration: in Python, or in YAML.

    OntologyAsset(
        type="Customer",
        models="shop.models",
        source=SourceSpec(format="csv", paths=["data/customers/*.csv"]),
        columns={"id": "customer_no", "name": "trim(name)"},
    )

`factory.build_type` makes the asset, its checks, schedule and sensor of it. Declaring opens
nothing and imports no models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import dagster as dg
from pydantic import ConfigDict, Field, model_validator

from storage_engine.config import duration

INGEST_POOL = "ontologia_ingest"
MAINTENANCE_POOL = "ontologia_maintenance"
EVENTS_POOL = "ontologia_events"

_AUTOMATION = {
    "eager": dg.AutomationCondition.eager,
    "on_missing": dg.AutomationCondition.on_missing,
}
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


class _Declared(dg.Model, dg.Resolvable):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class SourceSpec(_Declared):
    """Where the rows come from. `{partition_key}` in a path stands for the partition's key."""

    format: Literal["csv", "json", "parquet", "jdbc"] = "csv"
    paths: Sequence[str] = ()
    options: dict[str, str] = Field(default_factory=dict)
    row_schema: str | None = Field(
        default=None, description="Columns as DDL text; read if left out"
    )
    null_value: str | None = None
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
        return self


class FreshnessSpec(_Declared):
    """How old the last materialisation may be: `26h`, `7d`."""

    fail_after: str
    warn_after: str | None = None

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


class OntologyAsset(_Declared):
    """One entity or relation type, how it is ingested, and what Dagster shows of it."""

    type: str = Field(description="The stored name of the type")
    models: str = Field(description="The Python module that declares the class")
    source: SourceSpec
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Field -> SQL expression over the source; relations: left_key, right_key too",
    )
    where: str | None = Field(default=None, description="SQL condition on the source")
    transform: str | None = Field(
        default=None, description="module:function, DataFrame -> DataFrame"
    )
    distinct: bool = False
    order_by: str | None = Field(
        default=None, description="Of rows with one identity the greatest of this field wins"
    )
    on_bad_rows: Literal["fail", "quarantine"] = "fail"
    drift: dict[str, str] = Field(
        default_factory=dict,
        description="added, missing, retyped -> fail, ignore or quarantine; needs row_schema",
    )
    expectations: Sequence[dict[str, Any]] = Field(
        default=(), description="Checked before anything is published: not_null, unique, range, ..."
    )
    target_part_bytes: int | None = None

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
        dg.AutomationCondition[Any] | None,
        dg.Resolver(lambda _context, text: automation(text), model_field_type=str | None),
    ] = None
    compaction: CompactionSpec | None = None
    retry: RetrySpec = RetrySpec()
    pool: str | None = INGEST_POOL

    storage: str = Field(default="ontology", description="Key of the OntologyResource")
    key_prefix: Sequence[str] = ()
    name: str | None = Field(default=None, description="Of the asset; the type's in snake case")
    deps: Sequence[str] = Field(default=(), description="Upstream assets, as a/b")
    group: str | None = "ontologia"
    owners: Sequence[str] = ()
    tags: dict[str, str] = Field(default_factory=dict)
    description: str | None = None
    blocking_checks: bool = Field(
        default=False, description="Downstream stops while the index check fails"
    )
    version: str = Field(default="1", description="Raise it when `transform` does something else")

    @property
    def asset_key(self) -> dg.AssetKey:
        return dg.AssetKey([*self.key_prefix, self.asset_name])

    @property
    def asset_name(self) -> str:
        return self.name or snake_case(self.type)

    @property
    def code_version(self) -> str:
        """Of all that decides which rows are written."""
        parts = self.model_dump(
            mode="json",
            include={
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
                "version",
            },
        )
        source = self.source.model_dump(mode="json", exclude={"fingerprint"})
        text = json.dumps({**parts, "source": source}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
