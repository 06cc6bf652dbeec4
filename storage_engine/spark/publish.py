"""The driver's part of a write, whoever staged the rows: where parts go, what stops it, publish.

Shared by `write_type` and the data source, so that both keep the same rules and say the same of
rows that cannot be written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from storage_engine.config import MIB
from storage_engine.errors import (
    BadRowsError,
    ConfigurationError,
    HeadMismatchError,
    LockContentionError,
    ValidationError,
)
from storage_engine.model.declarations import Event
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.object.write.staged_conflicts import disjoint
from storage_engine.repository.object.write.staged_write import StagedWrite
from storage_engine.repository.protocol import CommitResult
from storage_engine.runtime import arguments
from storage_engine.runtime.arguments import StoredClass
from storage_engine.runtime.core import internals
from storage_engine.runtime.session import Session
from storage_engine.spark.missing_policy import MissingPolicy
from storage_engine.spark.quarantine import Quarantine
from storage_engine.spark.reconcile import Counts, Reconciled
from storage_engine.spark.results import WriteProgress, WriteResult
from storage_engine.spark.staged_parts import IDENTITIES, StageTarget, TaskReport
from storage_engine.wording import counted

_PUBLISH_TRIES = 5  # each waits for the lock as long as the config says
# Up to here the driver looks through the keys itself; beyond it Spark does, which costs a shuffle.
DRIVER_ROWS = 20_000_000
DRIVER_BYTES = 64 * MIB  # of parts that are not local


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """What a write may be asked for; see `write_type`."""

    idempotency: tuple[str, int | str] | None = None
    meta: Mapping[str, str] | None = None
    expect: Mapping[StoredClass | str, int] | None = None
    event: Event | Iterable[Event] | None = None
    holder: Mapping[str, str] | None = None
    order_by: str | None = None
    on_bad_rows: Literal["fail", "quarantine"] = "fail"
    quarantine: str | None = None
    expectations: Sequence[Any] = ()
    missing: MissingPolicy = field(default_factory=MissingPolicy)
    count_by: str | None = None
    target_part_bytes: int | None = None
    progress: Callable[[WriteProgress], None] | None = None
    dry_run: bool = False

    @property
    def sets_aside(self) -> bool:
        """Whether bad rows go to a side table."""
        return self.on_bad_rows == "quarantine" and not self.dry_run


def check_options(spec: TypeSpec, options: WriteOptions) -> None:
    """Refuse what cannot be meant."""
    if options.on_bad_rows not in ("fail", "quarantine"):
        raise ConfigurationError(
            f"on_bad_rows {options.on_bad_rows!r} is unknown: give 'fail' or 'quarantine'"
        )
    if options.quarantine is not None and options.on_bad_rows != "quarantine":
        raise ConfigurationError("quarantine is given, but on_bad_rows is not 'quarantine'")
    names = [f.name for f in spec.fields]
    if options.count_by is not None and options.count_by not in names:
        raise ConfigurationError(
            f"count_by {options.count_by!r} is no field of {spec.name} (it has {', '.join(names)})"
        )
    if options.order_by is not None:
        if options.order_by not in names:
            raise ConfigurationError(
                f"order_by {options.order_by!r} is no field of {spec.name} "
                f"(it has {', '.join(names)})"
            )
        if spec.field(options.order_by).storage in ("json", "bytes"):
            raise ConfigurationError(
                f"order_by {options.order_by!r} has no order: name a field of text, numbers, "
                "dates or times"
            )


def target_of(attempt: StagedWrite, options: WriteOptions) -> StageTarget:
    """Where the parts of a write go."""
    return StageTarget(
        uri=attempt.uri,
        config=attempt.config,
        attempt=attempt.attempt,
        spec=attempt.spec.without_class(),
        schema_version_id=attempt.schema_version_id,
        part_bytes=options.target_part_bytes or attempt.config.target_part_bytes,
        quarantine=_quarantine(attempt, options) if options.sets_aside else None,
    )


def _quarantine(attempt: StagedWrite, options: WriteOptions) -> Quarantine:
    uri, prefix = options.quarantine, ""
    if uri is None:
        uri, prefix = attempt.uri, attempt.quarantine_prefix
    mark = options.idempotency
    facts = {**(options.meta or {})}
    if mark is not None:
        facts |= {"app_id": mark[0], "version": str(mark[1])}
    return Quarantine(
        uri=uri,
        prefix=prefix,
        type_name=attempt.spec.name,
        attempt=attempt.attempt,
        base_commit_id=attempt.base.commit_id,
        started_at=attempt.timestamp(),
        job=tuple(sorted(facts.items())),
    )


def take_parts(attempt: StagedWrite, reports: Sequence[TaskReport], part_bytes: int) -> bool:
    """Take what tasks have staged into the write, and stage what they have returned.

    Whether no identity can be in any one part twice, as far as order tells.
    """
    parts = [part for report in reports for part in report.parts]
    attempt.add_described(parts)
    held: list[pa.Table] = []
    inserted = size = 0
    for report in [*reports, None]:
        rows = report.loose_rows() if report is not None else None
        if held and (report is None or size >= part_bytes):
            attempt.stage(pa.concat_tables(held), inserted=inserted)
            held, inserted, size = [], 0, 0
        if report is not None and rows is not None:
            held.append(rows)
            inserted += report.loose_inserted
            size += rows.nbytes
    whole = not any(report.loose for report in reports)
    return whole and all(part["ascending"] for part in parts)


def check_unique(
    attempt: StagedWrite,
    *,
    ascending: bool,
    by_spark: Callable[[], list[object]] | None = None,
) -> None:
    """No identity may be in the parts twice; `ascending`: none is, within one of them.

    `by_spark` finds some that are, where there is too much for the driver to look through.
    """
    files = attempt.files
    if not files or (ascending and disjoint(files)):
        return
    rows, size = (sum(n) for n in zip(*((f.row_count, f.bytes) for f in files), strict=True))
    much = rows > DRIVER_ROWS or (not attempt.local and size > DRIVER_BYTES)
    identities = by_spark() if by_spark is not None and much else attempt.repeated()
    if identities:
        shown = ", ".join(repr(identity) for identity in identities)
        raise ValidationError(
            f"{attempt.spec.name}: identities appear more than once in the input, for example "
            f"{shown}; nothing was published. Make them unique, or name the column that says "
            "which row is the latest (order_by)",
            type=attempt.spec.name,
            identity=identities,
        )


def publish(session: Session, attempt: StagedWrite, options: WriteOptions) -> CommitResult | None:
    """As one commit; None when nothing differs and there is no event."""
    given = options.event  # an iterable can be read once, and a publish tried again
    events = None if given is None else arguments.listed_events("write(event=...)", given)
    tries = 0
    while True:
        tries += 1
        try:
            return internals(session).commit_staged(
                attempt.as_input(),
                events,
                meta=options.meta,
                expect=options.expect,
                idempotency=options.idempotency,
                holder=options.holder,
            )
        except (LockContentionError, HeadMismatchError):
            # The work is staged and stays good; others only had the lock for too long.
            if tries >= _PUBLISH_TRIES:
                raise


def check_rows(target: StageTarget, reports: Sequence[TaskReport]) -> None:
    """Bad rows stop a write that has no side table for them."""
    bad = sum(report.bad for report in reports)
    if bad and target.quarantine is None:
        raise bad_rows(target.spec, bad, reports)


def check_read_again(
    spec: TypeSpec,
    reconciled: Reconciled,
    reports: Sequence[TaskReport],
    *,
    unique: bool = False,
) -> None:
    """The source was read twice, and must have given as many rows of what differs. `unique`: no
    identity is among the staged rows twice, so that there are none too many for that reason."""
    counts = reconciled.counts
    if not counts.rows:
        return  # it was read once, or was empty
    staged = sum(report.rows for report in reports)
    least, most = reconciled.identities + counts.bad, counts.written
    if staged < least or (unique and staged > most):
        raise ValidationError(
            f"{spec.name}: the source changed while it was read, or is not the same each time: of "
            f"what differs from what is stored it gave {counted(staged, 'row')} instead of "
            f"{most if staged > most else least} when it was read again; nothing was published. "
            "Let it rest and run it again. If it is not the same by itself (a limit without an "
            "order, a function that draws or counts), write it to a file first and read that",
            type=spec.name,
        )


def said_twice(counts: Counts, reports: Sequence[TaskReport], options: WriteOptions) -> int:
    """Equal rows of one identity, of which an order column leaves one."""
    if options.order_by is None:
        return 0
    return max(0, counts.written - sum(report.rows for report in reports))


def previewed(
    spec: TypeSpec,
    type_commit_id: int,
    reconciled: Reconciled,
    reports: Sequence[TaskReport],
    options: WriteOptions,
    too_many: str | None,
) -> WriteResult:
    """What a rehearsal has counted. Bad rows are told as quarantined; `problem` says if they,
    identities that appear twice, or too many that are missing would stop the write."""
    reasons: Counter[str] = Counter()
    for report in reports:
        reasons.update(report.reasons)
    parts = [part for report in reports for part in report.parts]
    counts = reconciled.counts
    bad = sum(report.bad for report in reports)
    inserted, updated = (sum(part[name] for part in parts) for name in ("inserted", "updated"))
    repeated = inserted + updated - reconciled.identities
    problem = None
    if bad and options.on_bad_rows == "fail":
        problem = str(bad_rows(spec, bad, reports))
    elif repeated:
        ordered = f" and {options.order_by}" if options.order_by is not None else ""
        problem = (
            f"{spec.name}: {counted(repeated, 'row')} with an identity{ordered} that another one "
            "has; make them unique, or name the column that says which row is the latest (order_by)"
        )
    absent = reconciled.absent
    return WriteResult(
        type_name=spec.name,
        commit_id=None,
        type_commit_id=type_commit_id,
        rows=counts.rows,
        inserted=inserted,
        updated=updated,
        unchanged=counts.unchanged,
        marked=0 if absent.untold else absent.count,
        quarantined=bad,
        duplicates=counts.duplicates + said_twice(counts, reports, options),
        stale=counts.stale,
        reasons=dict(reasons),
        examples=identities_by_reason(reports),
        problem=problem or too_many,
    )


def identities_by_reason(reports: Sequence[TaskReport]) -> dict[str, list[str]]:
    """Some for each reason, of all tasks."""
    merged: dict[str, list[str]] = {}
    for report in reports:
        for reason, some in report.identities.items():
            merged[reason] = (merged.get(reason, []) + some)[:IDENTITIES]
    return merged


def bad_rows(spec: TypeSpec, bad: int, reports: Sequence[TaskReport]) -> BadRowsError:
    """Lists each reason with its count, and three rows."""
    reasons: Counter[str] = Counter()
    examples: list[str] = []
    for report in reports:
        reasons.update(report.reasons)
        examples += report.examples
    listed = "; ".join(
        f"{what} in {counted(count, 'row')}" for what, count in reasons.most_common()
    )
    shown = " | ".join(examples[:3])
    return BadRowsError(
        f"{spec.name}: {counted(bad, 'row')} cannot be written: {listed}. Nothing was published. "
        f"Examples: {shown}. Put the source right, or give on_bad_rows='quarantine'",
        type=spec.name,
        rows=bad,
        reasons=dict(reasons.most_common()),
        examples=identities_by_reason(reports),
    )
