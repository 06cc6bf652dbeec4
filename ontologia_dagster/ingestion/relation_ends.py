"""A relation's asset depends on the assets of both its ends.

The class says which types these are, and what else is declared for the storage says which assets
stand for them. An end that nothing is declared for is left out: a dependency on an asset that
nobody has would only dangle.

The ends decide about order, not about when: a relation is ingested from its own source, so that
rows that came or changed at an end ask for no run of it. It waits for runs of its ends that are
under way, and for an end that was never ingested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.declaration import TypeAsset, automation
from ontologia_dagster.ingestion.asset_page import declared_spec

if TYPE_CHECKING:
    from ontologia_dagster.declaration import OntologyAsset


def ends_of(declared: OntologyAsset, siblings: Iterable[TypeAsset]) -> list[TypeAsset]:
    """The assets of the types at a relation's ends; none of an entity."""
    names = _end_names(declared)
    by_type: dict[str, TypeAsset] = {}
    for sibling in siblings:
        if sibling.storage == declared.storage and sibling.key != declared.asset_key:
            by_type.setdefault(sibling.type_name, sibling)
    return [by_type[name] for name in names if name in by_type]


def _end_names(declared: OntologyAsset) -> list[str]:
    spec = declared_spec(declared)
    if spec is None:
        return []  # whoever checks the declaration says what is wrong with it
    return list(dict.fromkeys(name for name in (spec.left, spec.right) if name is not None))


def end_deps(declared: OntologyAsset, ends: Sequence[TypeAsset]) -> list[dg.AssetDep]:
    """Rows of one partition may be about an entity of any other."""
    cut = declared.partitions is not None
    return [
        dg.AssetDep(
            end.key,
            partition_mapping=dg.AllPartitionMapping() if cut and end.partition_by else None,
        )
        for end in ends
        if end.key.to_user_string() not in declared.deps
    ]


def automation_beside(
    declared: OntologyAsset, ends: Sequence[TypeAsset]
) -> dg.AutomationCondition[Any] | None:
    """The declared condition, as it would be without the ends, once these are there and at rest.
    Those that the declaration names itself as upstream count as it says."""
    condition: Any = automation(declared.automation)
    keys = [end.key for end in ends if end.key.to_user_string() not in declared.deps]
    if condition is None or not keys:
        return condition  # type: ignore[no-any-return]
    of_ends = dg.AssetSelection.assets(*keys)
    label = condition.get_label()
    if _looks_upstream(condition):
        condition = condition.ignore(of_ends)
    condition &= ~dg.AutomationCondition.any_deps_in_progress().allow(of_ends)
    # A partition of an end that has no rows stays missing for ever, and so may what only handlers
    # write: neither is waited for.
    whole = [end.key for end in ends if end.is_ingested and not end.partition_by]
    if whole:
        missing = dg.AutomationCondition.any_deps_match(dg.AutomationCondition.missing())
        condition &= ~missing.allow(dg.AssetSelection.assets(*whole))
    return condition.with_label(label) if label else condition  # type: ignore[no-any-return]


def _looks_upstream(condition: Any) -> bool:
    """Conditions that are about nothing upstream have no such method."""
    return callable(getattr(condition, "ignore", None))
