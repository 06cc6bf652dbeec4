"""Imports: files that are read and checked as a whole, compared with the storage, and written by
one commit.

    read       every row is checked against its type; all that is wrong is told, up to a bound, and
               nothing is written if anything is
    compare    against the storage as of one commit: new, the same, or stored otherwise, which is a
               conflict
    commit     all types at once, staged before the lock like any bulk write

Whatever changes between comparing and committing shows: the commit refuses to write over it, and
both are done again. The unit of work has a name, from the content unless told, so that an import
whose answer was lost can be repeated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.errors import (
    ConcurrentWriteError,
    ConfigurationError,
    ImportConflictError,
    StorageBackendError,
    ValidationError,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.duck import Duck
from storage_engine.repository.protocol import (
    AppliedUnit,
    CommitRequest,
    CommitResult,
    Idempotency,
    Identity,
    ReadWindow,
    Repository,
    Snapshot,
    TypeInput,
    TypeRef,
    repetition_note,
)
from storage_engine.runtime.exchange.inputs import (
    ON_CONFLICT,
    EnoughProblems,
    ImportInput,
    ImportTypes,
    InputProblem,
    OnConflict,
    Problems,
    open_input,
)
from storage_engine.runtime.exchange.readers import read_rows
from storage_engine.runtime.exchange.spool import (
    AT_HAND,
    KEYS_AT_ONCE,
    ComparedType,
    Spool,
    SpooledRows,
    compare_rows,
    keys_without,
)
from storage_engine.wording import counted

APP_ID = "onto-import"
_ATTEMPTS = 5
_DUCKDB_MEMORY = "128MB"
_ENDS_SHOWN = 3

ImportProgress = Callable[[str, int], None]  # what is done, rows so far
Commit = Callable[[CommitRequest], CommitResult | None]


@dataclass(frozen=True, slots=True)
class ImportedType:
    """What an import means for one type. `conflict`: rows that are stored otherwise."""

    kind: str
    type_name: str
    rows: int
    insert: int
    update: int
    unchanged: int
    conflict: int
    examples: Sequence[Identity] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "type_name": self.type_name,
            "rows": self.rows,
            "insert": self.insert,
            "update": self.update,
            "unchanged": self.unchanged,
            "conflict": self.conflict,
            "conflict_examples": [i[0] if len(i) == 1 else list(i) for i in self.examples],
        }


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import would do, or did.

    problems:         what is wrong with the input; `problems_complete` when that is all of it
    base_commit_id:   the commit that rows were compared with
    already_applied:  this unit of work was done before, by `commit_id`
    """

    source: str
    on_conflict: OnConflict
    types: Sequence[ImportedType] = ()
    problems: Sequence[InputProblem] = ()
    problems_complete: bool = True
    base_commit_id: int = 0
    applied: bool = False
    commit_id: int | None = None
    already_applied: bool = False
    idempotency: Idempotency | None = None
    notes: Sequence[str] = ()

    @property
    def conflicts(self) -> int:
        """How many rows keep it from being applied. Of what was applied before: how many others
        have changed since."""
        refused = self.on_conflict == "abort" or (
            self.already_applied and self.on_conflict == "upsert"
        )
        return sum(each.conflict for each in self.types) if refused and not self.applied else 0

    @property
    def writes(self) -> int:
        return sum(each.insert + each.update for each in self.types)

    def require(self) -> None:
        """ValidationError or ImportConflictError where it cannot be applied."""
        if self.problems:
            first = "; ".join(map(str, self.problems[:3]))
            count = len(self.problems)
            at_least = "" if self.problems_complete else "at least "
            more = f"; and {count - 3} more" if count > 3 else ""
            raise ValidationError(
                f"{self.source}: {at_least}{counted(count, 'problem')}, nothing was "
                f"written: {first}{more}"
            )
        if self.conflicts:
            raise ImportConflictError(
                source=self.source,
                conflicts={each.type_name: each.conflict for each in self.types if each.conflict},
                applied_by=self.commit_id if self.already_applied else None,
            )

    def as_dict(self) -> dict[str, Any]:
        unit = self.idempotency
        return {
            "source": self.source,
            "applied": self.applied,
            "commit_id": self.commit_id,
            "already_applied": self.already_applied,
            "on_conflict": self.on_conflict,
            "base_commit_id": self.base_commit_id,
            "conflicts": self.conflicts,
            "types": [each.as_dict() for each in self.types],
            "problems": [problem.as_dict() for problem in self.problems],
            "problems_complete": self.problems_complete,
            "idempotency": {"app_id": unit.app_id, "version": unit.version} if unit else None,
            "notes": list(self.notes),
        }


def import_types(
    repository: Repository,
    source: str | Path | IO[bytes],
    *,
    declared: Mapping[TypeRef, TypeSpec] | None = None,
    apply: bool = False,
    on_conflict: str = "abort",
    file_format: str | None = None,
    type_name: str | None = None,
    idempotency: Idempotency | None = None,
    meta: Mapping[str, str] | None = None,
    progress: ImportProgress | None = None,
    holder: Mapping[str, Any] | None = None,
    commit: Commit | None = None,
) -> ImportReport:
    """See `Session.import_files`; problems and conflicts are in the report. `commit` publishes, in
    the place of the repository."""
    policy = next((each for each in ON_CONFLICT if each == on_conflict), None)
    if policy is None:
        raise ConfigurationError(
            f"on_conflict {on_conflict!r} is unknown: use {', '.join(ON_CONFLICT)}"
        )
    tell = progress or (lambda _what, _rows: None)
    label = str(source) if isinstance(source, str | Path) else "-"
    report = ImportReport(label, policy, idempotency=idempotency)
    if idempotency is not None and (unit := repository.applied(idempotency)) is not None:
        return _applied_before(report, unit)
    with _local_errors(), tempfile.TemporaryDirectory(prefix="ontologia-import-") as folder:
        scratch = Path(folder)
        problems = Problems()
        spool = Spool(scratch)
        types = ImportTypes(repository, declared or {})
        complete = True
        try:
            given = open_input(
                source,
                file_format=file_format,
                type_name=type_name,
                scratch=scratch,
                problems=problems,
            )
            digest = _read(given, types, problems, spool, tell)
            report = replace(report, notes=tuple(dict.fromkeys([*given.notes, *problems.notes])))
        except EnoughProblems:
            complete = False
        finally:
            spool.close()
        if problems.listed:
            return replace(report, problems=tuple(problems.listed), problems_complete=complete)
        if idempotency is None:
            version = f"{digest}-{policy}"
            report = replace(report, idempotency=Idempotency(APP_ID, version))
        with closing(Duck(uri=label, memory_limit=_DUCKDB_MEMORY)) as duck:
            run = _ImportRun(repository, types, spool, report, tell, duck)
            run.commit = commit or repository.commit
            run.settle()
            if apply:
                terms = (dict(meta or {}), dict(holder or {}))
                return run.apply(*terms, named=idempotency is not None)
            return run.preview()


@contextmanager
def _local_errors() -> Iterator[None]:
    """What the disk refuses, as one of our errors; those of storages are."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StorageBackendError(
            f"{where}cannot be read or put aside: {error.strerror or error}", operation="import"
        ) from error


def _applied_before(report: ImportReport, unit: AppliedUnit) -> ImportReport:
    return replace(report, applied=True, already_applied=True, commit_id=unit.commit_id)


def _read(
    given: ImportInput,
    types: ImportTypes,
    problems: Problems,
    spool: Spool,
    tell: ImportProgress,
) -> str:
    """Read everything; the digest of what was read."""
    if given.summary is not None:
        types.tell(given.summary)
    sink = _ToldSpool(spool, tell)
    for file in given.files:
        count = read_rows(file, types, problems, sink)
        if file.rows is not None and count != file.rows and not problems.listed:
            problems.add(
                InputProblem(file.label, f"has {count} rows, and the export had {file.rows}")
            )
    digest = given.digest()
    for file in given.changed():
        problems.add(
            InputProblem(
                file.label, "changed while it was read: run it again when nobody writes to it"
            )
        )
    return digest


@dataclass(slots=True)
class _ToldSpool:
    """A spool whose progress is told."""

    spool: Spool
    tell: ImportProgress
    rows: int = 0

    def add(self, spec: TypeSpec, rows: pa.RecordBatch) -> None:
        self.spool.add(spec, rows)
        self.rows += rows.num_rows
        self.tell("reading", self.rows)


class _ImportRun:
    """What is done with rows that are in order."""

    def __init__(
        self,
        repository: Repository,
        types: ImportTypes,
        spool: Spool,
        report: ImportReport,
        tell: ImportProgress,
        duck: Duck,
    ) -> None:
        """`duck`: for rows in local files, which that of a SQLite storage must not see."""
        self._duck = duck
        self._repository = repository
        self._types = types
        self._spool = spool
        self._report = report
        self._tell = tell
        self._rows: dict[TypeRef, SpooledRows] = {}
        self.commit: Commit = repository.commit

    def settle(self) -> None:
        """One row for each identity."""
        self._rows = self._spool.settled(self._duck)
        self._duck.close()  # the commit needs the memory; opened again if it has to be
        notes = [
            repetition_note(self._rows[ref].spec, count)
            for ref, count in self._spool.repeated.items()
            if count
        ]
        self._report = replace(self._report, notes=(*self._report.notes, *notes))

    def preview(self) -> ImportReport:
        base = self._repository.head_commit_id()
        report = self._described(base, self._compared(base))
        unit = self._repository.applied(self._unit)
        if unit is not None:
            report = replace(report, already_applied=True, commit_id=unit.commit_id)
        return replace(report, notes=(*report.notes, *self._end_notes(base)))

    def apply(self, meta: dict[str, str], holder: dict[str, Any], *, named: bool) -> ImportReport:
        for attempt in range(1, _ATTEMPTS + 1):
            base = self._repository.head_commit_id()
            compared = self._compared(base)
            report = self._described(base, compared)
            notes = (*report.notes, *self._end_notes(base))
            if not named and (unit := self._repository.applied(self._unit)) is not None:
                # Done before. If it would change something now, others have changed it since: to
                # do it again must be said.
                report = replace(report, already_applied=True, commit_id=unit.commit_id)
                return replace(report, applied=not report.conflicts)
            if report.conflicts:
                return replace(report, notes=notes)
            try:
                return self._committed(replace(report, notes=notes), compared, meta, holder, named)
            except ConcurrentWriteError:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    @property
    def _unit(self) -> Idempotency:
        assert self._report.idempotency is not None
        return self._report.idempotency

    def _compared(self, base: int) -> list[ComparedType]:
        self._types.look()  # after the base is known, so that no type of it is missed
        compared: list[ComparedType] = []
        before = 0
        for ref, spooled in self._rows.items():

            def tell(rows: int, before: int = before) -> None:
                self._tell("comparing", before + rows)

            is_stored = self._types.is_stored(ref)
            compared.append(
                compare_rows(
                    self._repository, spooled, self._spool, tell, as_of=base, is_stored=is_stored
                )
            )
            before += spooled.rows
        return compared

    def _described(self, base: int, compared: Sequence[ComparedType]) -> ImportReport:
        types = [
            ImportedType(
                each.spec.kind,
                each.spec.name,
                each.rows,
                each.inserted.rows,
                each.changed.rows if self._report.on_conflict == "upsert" else 0,
                each.unchanged,
                each.changed.rows,
                each.examples,
            )
            for each in compared
        ]
        return replace(self._report, types=types, base_commit_id=base)

    def _committed(
        self,
        report: ImportReport,
        compared: Sequence[ComparedType],
        meta: dict[str, str],
        holder: dict[str, Any],
        named: bool,
    ) -> ImportReport:
        inputs = [made for each in compared if (made := self._input(each)) is not None]
        if not inputs and not named:
            return replace(report, applied=True)
        snapshot = None
        if report.on_conflict != "upsert":  # nobody may have written them meanwhile
            snapshot = Snapshot(report.base_commit_id)
        self._tell("writing", report.writes)
        result = self.commit(
            CommitRequest(
                inputs=inputs,
                metadata=meta,
                idempotency=self._unit,
                snapshot=snapshot,
                holder=holder,
            )
        )
        if result is None:
            return replace(report, applied=True)
        return replace(
            report,
            applied=True,
            commit_id=result.commit_id,
            already_applied=result.already_applied,
            notes=tuple(dict.fromkeys([*report.notes, *result.notes])),
        )

    def _input(self, compared: ComparedType) -> TypeInput | None:
        parts = [compared.inserted]
        if self._report.on_conflict == "upsert":
            parts.append(compared.changed)
        rows = sum(part.rows for part in parts)
        if not rows:
            return None
        if rows <= AT_HAND:
            table = pa.concat_tables([part.table() for part in parts])
            return TypeInput(compared.spec, table=table)
        return TypeInput(compared.spec, stream=_stream(parts))

    # --- ends of relations ----------------------------------------------------------------------

    def _end_notes(self, base: int) -> list[str]:
        """Which ends of relations are neither in the input nor stored."""
        notes: list[str] = []
        for spooled in self._rows.values():
            spec = spooled.spec
            ends = [("left_key", spec.left or ""), ("right_key", spec.right or "")]
            for side, name in ends if spec.kind == "relation" else ():
                missing, examples = self._missing(spooled, side, name, base)
                if missing:
                    shown = ", ".join(map(repr, examples))
                    more = ", ..." if missing > len(examples) else ""
                    notes.append(
                        f"{spec.name}: {counted(missing, side)} without a "
                        f"{name} ({shown}{more}), neither stored nor in the input"
                    )
        return notes

    def _missing(
        self, spooled: SpooledRows, side: str, name: str, base: int
    ) -> tuple[int, list[str]]:
        """Keys without an entity: how many, and some. Only those not in the input are asked for."""
        ref: TypeRef = ("entity", name)
        spec = self._types.get("entity", name) if self._types.is_stored(ref) else None
        missing = 0
        examples: list[str] = []
        entities = self._rows.get(ref)
        for asked in keys_without(spooled, side, entities, self._duck):
            keys = asked
            if spec is not None:
                stored = self._repository.read(spec, ReadWindow(as_of=base), keys=keys)
                there = pc.is_in(keys.column(0), value_set=stored.column("entity_key"))
                keys = keys.filter(pc.invert(there))
            missing += keys.num_rows
            examples += keys.column(0).slice(0, _ENDS_SHOWN - len(examples)).to_pylist()
        return missing, examples


def _stream(parts: Sequence[SpooledRows]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        yield from part.batches(KEYS_AT_ONCE)
