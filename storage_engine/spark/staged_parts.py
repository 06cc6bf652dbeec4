"""What executors do: Arrow batches in, Parquet parts in the store, descriptions of them out.

Runs in Spark's Python workers (`mapInArrow`). Names are unique per partition and task attempt, so
a task that runs twice, or two copies of it at once, leave orphans and never a mixture; only what
a successful task returns is taken into the write. Scalar columns never become Python objects.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.model.arrow import row_schema
from storage_engine.model.columns import times_of_text
from storage_engine.model.conform import Conformer, RowFault, SiftedBatch, conform
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.repository.object.write.staged_write import PartFolder
from storage_engine.spark.quarantine import Quarantine, QuarantineFile, SetAside, set_aside
from storage_engine.spark.tallies import LIMIT, Tally, add_rows, bucket_array

INSERT = "__insert"  # bool: the identity is new (all are when the column is missing)
REASONS = "__reasons"  # list of str: what expectations have found wrong with the row
FAULTS = "__faults"  # JSON: what was wrong with a row that was conformed before
ORIGINAL = "__original"  # JSON: what is kept of that row
GIVEN = "__given"  # list of str: the identity of such a row, as far as it can be told
ORIGIN = "__origin"  # struct: the row in its source: file, line, record; fault: cannot be read
HELPERS = (INSERT, REASONS, FAULTS, ORIGINAL, GIVEN, ORIGIN)

REPORT = pa.schema([pa.field("report", pa.string(), nullable=False)])
REPORT_DDL = "report string"
_EXAMPLES = 3
IDENTITIES = 5  # for each reason
_LONGEST = 120  # characters of one
LOOSE_BYTES = 64 * 1024  # what a task may return instead of staging a part
_LOOSE_TASKS = 512  # the first ones: the driver's memory is bounded, whatever the partitions


@dataclass(frozen=True)
class StageTarget(PartFolder):
    """Where the parts of a write go, how large they get, and where bad rows go."""

    part_bytes: int
    quarantine: Quarantine | None  # None: bad rows are counted, and the write will fail


@dataclass
class TaskReport:
    """What one task did. `parts` are the descriptions that `PartFolder.stage` gives."""

    rows: int = 0
    bad: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    identities: dict[str, list[str]] = field(default_factory=dict)  # by reason
    tally: Tally = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    loose: str = ""  # rows too few for a part, as Arrow's stream in base64; the driver stages them
    loose_inserted: int = 0
    quarantined: list[str] = field(default_factory=list)

    def loose_rows(self) -> pa.Table | None:
        if not self.loose:
            return None
        with pa.ipc.open_stream(base64.b64decode(self.loose)) as stream:
            return stream.read_all()

    def to_batch(self) -> pa.RecordBatch:
        text = json.dumps(vars(self))
        return pa.RecordBatch.from_arrays([pa.array([text])], schema=REPORT)

    @classmethod
    def parse(cls, text: str) -> TaskReport:
        raw = json.loads(text)
        return cls(**{**raw, "reasons": Counter(raw["reasons"])})


@dataclass(frozen=True)
class StageTask:
    """The function of one task. `conformed`: rows come in the row schema already. `rehearsal`:
    rows are looked at and counted, none is staged or set aside. `loose_bytes`: up to this much is
    returned instead of staged, so that many small tasks do not make many small files. `count_by`: a
    field by whose values rows are counted."""

    target: StageTarget
    conformed: bool = False
    rehearsal: bool = False
    loose_bytes: int = 0
    count_by: str | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with tempfile.TemporaryDirectory(prefix="ontologia-stage-") as folder:
            run = _Run(self.target, Path(folder), self)
            try:
                for batch in batches:
                    run.take(batch)
                report = run.finish()
            finally:
                run.close()
        if report.rows:
            yield report.to_batch()


class _Run:
    """One task at work."""

    def __init__(self, target: StageTarget, folder: Path, task: StageTask) -> None:
        self._target = target
        self._spec = target.spec
        self._folder = folder
        self._conformed = task.conformed
        self._rehearsal = task.rehearsal
        self._count_by = task.count_by
        partition, self._label = task_label()
        self._loose_bytes = task.loose_bytes if partition < _LOOSE_TASKS else 0
        self._store: ObjectStore | None = None
        self._conformer: Conformer | None = None
        self._quarantine: QuarantineFile | None = None
        self._report = TaskReport()
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._held_new = 0

    def take(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        self._report.rows += batch.num_rows
        own = batch.select([n for n in batch.schema.names if n not in HELPERS])
        sifted = self._sift(own, batch)
        rows, fresh = sifted.rows, _column(batch, INSERT)
        if sifted.fits is not None:
            self._set_aside(own, batch, sifted)
            fresh = fresh.filter(sifted.fits) if fresh is not None else None
            if self._target.quarantine is None and not self._rehearsal:
                return  # nothing will be published: count on, but stage no more
        if self._count_by is not None and len(self._report.tally) <= LIMIT:
            storage = self._spec.field(self._count_by).storage
            add_rows(self._report.tally, bucket_array(rows.column(self._count_by), storage), fresh)
        if self._rehearsal:
            new = rows.num_rows if fresh is None else int(pc.sum(fresh).as_py() or 0)
            self._report.parts.append({"inserted": new, "updated": rows.num_rows - new})
            return
        if rows.num_rows and (self._target.quarantine is not None or not self._report.bad):
            self._held.append(rows)
            self._held_bytes += rows.nbytes
            self._held_new += rows.num_rows if fresh is None else int(pc.sum(fresh).as_py() or 0)
            if self._held_bytes >= self._target.part_bytes:
                self._flush()

    def finish(self) -> TaskReport:
        if self._held and not self._report.parts and self._held_bytes <= self._loose_bytes:
            self._return_rows()
        elif self._held:
            self._flush()
        if self._quarantine is not None:
            self._report.quarantined.append(self._quarantine.close())
        return self._report

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    # -- rows that do not fit -----------------------------------------------------------------

    def _sift(self, own: pa.RecordBatch, batch: pa.RecordBatch) -> SiftedBatch:
        if self._conformed:
            carried = _carried(batch)
            if not carried:
                return SiftedBatch(taken_back(own, row_schema(self._spec)), None, {})
            fits = _all_but(carried, batch.num_rows)
            rows = taken_back(own.filter(fits), row_schema(self._spec))
            return SiftedBatch(rows, fits, carried)
        if self._conformer is None:
            self._conformer = conform(self._spec, own.schema)
        return sift_with_reasons(self._conformer, own, batch)

    def _set_aside(self, own: pa.RecordBatch, batch: pa.RecordBatch, sifted: SiftedBatch) -> None:
        report = self._report
        report.bad += len(sifted.faults)
        for faults in sifted.faults.values():
            report.reasons.update({fault.what for fault in faults})
        numbers = sorted(sifted.faults)
        originals = _column(batch, ORIGINAL)
        places = pa.array(numbers, pa.int64())
        if originals is not None:
            rows = [SetAside.parse(text) for text in originals.take(places).to_pylist()]
        else:
            rows = set_aside(own, _column(batch, ORIGIN), numbers)
        reasons_by_row = [[_say(fault) for fault in sifted.faults[number]] for number in numbers]
        if self._spec.sensitive or self._spec.sensitive_columns:
            # Of rows not to be shown: what is wrong, not with what.
            kinds = [fault.what for number in numbers for fault in sifted.faults[number]]
            report.examples = (report.examples + kinds)[:_EXAMPLES]
        else:
            self._show(own, rows, numbers, sifted)
        if self._target.quarantine is not None:
            if self._quarantine is None:
                self._quarantine = QuarantineFile(
                    self._target.quarantine, self._target.config, self._label, self._folder
                )
            self._quarantine.write(rows, reasons_by_row)

    def _show(
        self,
        own: pa.RecordBatch,
        rows: Sequence[SetAside],
        numbers: Sequence[int],
        sifted: SiftedBatch,
    ) -> None:
        """Some of the rows as they came, and for each reason some identities."""
        report = self._report
        for row, number in zip(rows, numbers, strict=True):
            faults = sifted.faults[number]
            if len(report.examples) < _EXAMPLES:
                reasons = "; ".join(_say(fault) for fault in faults)
                report.examples.append(f"{reasons}: {row.shown()}")
            for fault in faults:
                some = report.identities.setdefault(fault.what, [])
                if len(some) < IDENTITIES:
                    some.append(_identity(self._spec, own, number) or row.shown()[:_LONGEST])

    # -- parts --------------------------------------------------------------------------------

    def _return_rows(self) -> None:
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, self._held[0].schema, options=options) as stream:
            for batch in self._held:
                stream.write_batch(batch)
        self._report.loose = base64.b64encode(sink.getvalue()).decode()
        self._report.loose_inserted = self._held_new

    def _flush(self) -> None:
        target = self._target
        rows = pa.Table.from_batches(self._held)
        inserted = self._held_new
        self._held, self._held_bytes, self._held_new = [], 0, 0
        number = len(self._report.parts)
        path = self._folder / f"{number}.parquet"
        label = self._label if number == 0 else f"{self._label}-{number:03d}"
        if self._store is None:
            self._store = open_store(target.uri, target.config)
        self._report.parts.append(target.stage(self._store, label, rows, path, inserted=inserted))
        path.unlink()


def exchanged(schema: pa.Schema) -> pa.Schema:
    """The Arrow columns in which rows go to Spark: a cast leads there, `taken_back` back."""
    return pa.schema(
        [
            field.with_type(pa.string()) if pa.types.is_time(field.type) else field
            for field in schema
        ],
        metadata=schema.metadata,
    )


def taken_back(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows that Spark hands over (`exchanged`), with these columns again."""
    columns = []
    for column_field in schema:
        column = rows.column(column_field.name)
        is_text = pa.types.is_time(column_field.type) and not pa.types.is_time(column.type)
        columns.append(times_of_text(column) if is_text else column.cast(column_field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def sift_with_reasons(
    conformer: Conformer, own: pa.RecordBatch, batch: pa.RecordBatch
) -> SiftedBatch:
    """Sort out rows that do not fit the type, and those that broke an expectation."""
    sifted = conformer.sift(own)
    broken = _broken(batch)
    if not broken:
        return sifted
    both = {row: [*sifted.faults.get(row, ()), *row_faults] for row, row_faults in broken.items()}
    faults: dict[int, Sequence[RowFault]] = {**sifted.faults, **both, **_unread(batch)}
    fits = _all_but(faults, batch.num_rows)
    kept = fits if sifted.fits is None else fits.filter(sifted.fits)
    return SiftedBatch(sifted.rows.filter(kept), fits, faults)


def _broken(batch: pa.RecordBatch) -> dict[int, list[RowFault]]:
    reasons = _column(batch, REASONS)
    if reasons is None:
        return {}
    some = pc.indices_nonzero(pc.fill_null(pc.greater(pc.list_value_length(reasons), 0), False))
    texts = reasons.take(some).to_pylist()
    return {
        row: [RowFault(text) for text in row_texts]
        for row, row_texts in zip(some.to_pylist(), texts, strict=True)
    }


def _unread(batch: pa.RecordBatch) -> dict[int, list[RowFault]]:
    """Lines that could not be read. What is said of the values that they lack means nothing."""
    origin = _column(batch, ORIGIN)
    if origin is None:
        return {}
    faults = pc.struct_field(origin, "fault")
    rows = pc.indices_nonzero(pc.is_valid(faults))
    return {
        row: [RowFault(fault)]
        for row, fault in zip(rows.to_pylist(), faults.take(rows).to_pylist(), strict=True)
    }


def _carried(batch: pa.RecordBatch) -> dict[int, list[RowFault]]:
    faults = _column(batch, FAULTS)
    if faults is None:
        return {}
    some = pc.indices_nonzero(pc.is_valid(faults))
    return {
        row: [RowFault(*pair) for pair in json.loads(text)]
        for row, text in zip(some.to_pylist(), faults.take(some).to_pylist(), strict=True)
    }


def _all_but(faults: Mapping[int, Sequence[RowFault]], rows: int) -> pa.Array:
    return pa.array([row not in faults for row in range(rows)], pa.bool_())


def _identity(spec: TypeSpec, rows: pa.RecordBatch, number: int) -> str | None:
    """Of a row, by the names of the type or of its stored columns; None where a key is missing."""
    if spec.kind == "entity":
        places = [(str(spec.primary_key), "entity_key")]
    else:
        places = [("left_key", "left_key"), ("right_key", "right_key")]
        if spec.instance_key is not None:
            places.append((spec.instance_key, "instance_key"))
    keys = []
    for names in places:
        column = next((c for name in names if (c := _column(rows, name)) is not None), None)
        value = column[number].as_py() if column is not None else None
        if value is None:
            return None
        keys.append(str(value))
    return " / ".join(keys)[:_LONGEST]


def _say(fault: RowFault) -> str:
    return f"{fault.what}: {fault.detail}" if fault.detail else fault.what


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    position = batch.schema.get_field_index(name)
    return batch.column(position) if position >= 0 else None


def task_label() -> tuple[int, str]:
    """The partition of the running task, and a name that no other attempt at it has."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "only Spark tasks have a label"
    number = context.partitionId()
    return number, f"{number:05d}-{context.taskAttemptId()}"
