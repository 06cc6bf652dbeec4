"""Asks for runs when the files of a source have changed since the type was last materialised.

Where paths have `{partition_key}` in them, a partition is asked for when its own files change,
however old it is; files that are not there yet are waited for. Files without it may have rows of
any partition: when they change, all partitions are asked for, in one run.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.declaration import OntologyAsset
from ontologia_dagster.downstream.metadata import FINGERPRINT
from ontologia_dagster.ingestion import partitions, provenance
from ontologia_dagster.ingestion.source_files import PARTITION_KEY, SourceFiles
from ontologia_dagster.resources.ontology import report_failures

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource

_INTERVAL_S = 60
_PER_TICK = 50  # runs
_TICK_S = 10.0  # of looking things up; Dagster ends a tick after 60
_WHOLE = ""  # the key of a type that is not cut
RANGE_START = "dagster/asset_partition_range_start"
RANGE_END = "dagster/asset_partition_range_end"


def source_sensor(declared: OntologyAsset, job: Any) -> dg.SensorDefinition:
    """The cursor is the state that was last asked for, by partition: a run that failed on it is
    not asked for again until the source changes, or somebody retries it."""

    @dg.sensor(
        name=f"{declared.storage}_{'__'.join(declared.asset_key.path)}_source",
        job=job,
        minimum_interval_seconds=_INTERVAL_S,
        required_resource_keys={declared.storage},
        description=f"Looks at the files that {declared.type} comes from.",
    )
    def source_changed(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        ontology: OntologyResource = getattr(context.resources, declared.storage)
        began = time.monotonic()
        with report_failures():
            now = read_states(declared, ontology)
        if now is None:
            return dg.SkipReason("nobody can tell the state of this source: give it a fingerprint")
        if not now:
            return dg.SkipReason(f"there is no file yet at {', '.join(declared.source.paths)}")
        asked = _parse_cursor(context.cursor)
        changed = [key for key, state in now.items() if asked.get(key) != state]
        wanted, unseen = _not_ingested(context.instance, declared, now, changed, began)
        requests, left = _requests(declared, wanted)
        left |= unseen
        after = asked | {key: now[key] for key in changed if key not in left}
        cursor = json.dumps(after, separators=(",", ":"))
        if left:
            context.log.info("%d partitions are left to the next tick", len(left))
        if not requests:
            reason = "it was ingested as it is" if changed else "the source is as it was"
            if left:
                reason = f"{len(left)} partitions are left to be looked at"
            return dg.SensorResult(skip_reason=reason, cursor=cursor)
        return dg.SensorResult(run_requests=requests, cursor=cursor)

    return source_changed


def read_states(declared: OntologyAsset, ontology: "OntologyResource") -> dict[str, str] | None:
    """The fingerprint of each partition whose files are all there; None when nobody can tell."""
    source, spec, files = declared.source, declared.partitions, SourceFiles(ontology)
    keys = partitions.partitions_def(spec).get_partition_keys() if spec is not None else [_WHOLE]
    if source.format == "jdbc" or source.fingerprint is not None:
        fingerprint = provenance.source_fingerprint(source, source.paths, files)
        return None if fingerprint is None else dict.fromkeys(keys, fingerprint)
    by_path: list[Any] = []
    for path in source.paths:
        if PARTITION_KEY not in path:
            by_path.append(files.at(path))
        elif spec is not None and spec.kind == "static":
            places = [path.replace(PARTITION_KEY, key) for key in keys]
            looks = dict(zip(keys, files.at_each(places), strict=True))
            by_path.append(None if None in looks.values() else looks)
        else:
            by_path.append(files.by_key(path, keys))
    if None in by_path:
        return None
    told = {
        key: provenance.state_of(f[key] if isinstance(f, dict) else f for f in by_path)
        for key in keys
    }
    return {key: state for key, state in told.items() if state is not None}


def _requests(
    declared: OntologyAsset, wanted: Sequence[str]
) -> tuple[list[dg.RunRequest], set[str]]:
    """Runs for these partitions, and those that are left to the next tick."""
    if not wanted:
        return [], set()
    if declared.partitions is None:
        return [dg.RunRequest()], set()
    spans = spans_of_runs(declared, wanted)
    asked = [partition_request(span) for span in spans[:_PER_TICK]]
    return asked, {key for span in spans[_PER_TICK:] for key in span}


def spans_of_runs(declared: OntologyAsset, wanted: Sequence[str]) -> list[list[str]]:
    """Partitions as runs take them: each by itself, or those that follow each other together."""
    assert declared.partitions is not None
    shared = not any(PARTITION_KEY in path for path in declared.source.paths)
    if shared or declared.backfill == "single_run":
        order = partitions.partitions_def(declared.partitions).get_partition_keys()
        return _spans(wanted, order)
    return [[key] for key in wanted]


def partition_request(span: Sequence[str], run_key: str | None = None) -> dg.RunRequest:
    """Of partitions that follow each other, by their first and last."""
    if len(span) == 1:
        return dg.RunRequest(run_key=run_key, partition_key=span[0])
    return dg.RunRequest(run_key=run_key, tags={RANGE_START: span[0], RANGE_END: span[-1]})


def _spans(wanted: Iterable[str], order: Sequence[str]) -> list[list[str]]:
    """Those that follow each other, together."""
    at = {key: number for number, key in enumerate(order)}
    keys = sorted(wanted, key=at.__getitem__)
    spans = [[keys[0]]]
    for before, key in pairwise(keys):
        if at[key] == at[before] + 1:
            spans[-1].append(key)
        else:
            spans.append([key])
    return spans


def _parse_cursor(cursor: str | None) -> dict[str, str]:
    """What was asked for; nothing where nobody can read it, so that what the event log does not
    know is asked for once more."""
    try:
        states = json.loads(cursor) if cursor else {}
    except ValueError:
        return {}
    if not isinstance(states, dict):
        return {}
    return {key: state for key, state in states.items() if isinstance(state, str)}


def _not_ingested(
    instance: dg.DagsterInstance,
    declared: OntologyAsset,
    now: Mapping[str, str],
    changed: Sequence[str],
    began: float,
) -> tuple[list[str], set[str]]:
    """Those whose latest materialisation was made from another state, and those that this tick
    has no time or no runs for. What comes from the same files is asked for together in any case."""
    shared = not any(PARTITION_KEY in path for path in declared.source.paths)
    runs = _PER_TICK if declared.backfill == "multi_run" and not shared else len(changed)
    wanted: list[str] = []
    for number, key in enumerate(changed):
        if len(wanted) >= runs or (number and time.monotonic() - began > _TICK_S):
            if shared:
                return [*wanted, *changed[number:]], set()
            return wanted, set(changed[number:])
        if _latest_state(instance, declared, key) != now[key]:
            wanted.append(key)
    return wanted, set()


def _latest_state(instance: dg.DagsterInstance, declared: OntologyAsset, key: str) -> str | None:
    """What the latest materialisation of a partition was made from."""
    wanted = dg.AssetRecordsFilter(
        asset_key=declared.asset_key, asset_partitions=[key] if key != _WHOLE else None
    )
    for record in instance.fetch_materializations(wanted, limit=1).records:
        made = record.asset_materialization
        fingerprint = made.metadata.get(FINGERPRINT) if made is not None else None
        return str(fingerprint.value) if fingerprint is not None else None
    return None
