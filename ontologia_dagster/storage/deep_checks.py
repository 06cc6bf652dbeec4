"""Deep verification: everything is read back (chain, hashes, row counts, both ends of relations).

Each type has its check on its own asset, the chain has one on the storage's log, an asset that
nobody materialises; all come from one reading of the storage. Dagster runs the checks of an asset
whenever it is materialised, which is not when a storage is to be read from end to end: in such a
run a check repeats what the last verification has found, and says so. Only a storage that is small
and was never verified is, so that the first run leaves no check without an answer. Jobs of ours
leave it out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.dagster_compat import last_evaluation, materialises
from ontologia_dagster.declaration import (
    MAINTENANCE_POOL,
    STORAGE_METADATA,
    TypeAsset,
    snake_case,
)
from ontologia_dagster.downstream.metadata import HIDDEN, request_metadata, requests_of, table
from ontologia_dagster.storage.checks import (
    DEEP_VERIFY,
    FINDING,
    failed_check,
    repair_metadata,
)
from ontologia_dagster.storage.finding_words import ends_sentence, findings_sentence
from ontologia_dagster.storage.maintenance import repair_job_name
from storage_engine.errors import ConfigurationError, OntologiaError
from storage_engine.runtime.arguments import declared_types
from storage_engine.wording import noun_of, plural_of

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.maintenance.integrity import Finding, IntegrityReport
    from storage_engine.model.spec import TypeSpec

LOG_AREA = "deep_verify_log"
_SMALL_BYTES, _SMALL_ROWS = 16 * 1024 * 1024, 200_000


def log_asset(storage: str) -> dg.AssetSpec:
    """The storage's log, as something to hang checks on: runs write it, nobody materialises it."""
    return dg.AssetSpec(
        dg.AssetKey([storage, "log"]),
        description="The commit log with its data files, as deep verification sees it.",
        group_name="ontologia",
        kinds={"parquet"},
        metadata={STORAGE_METADATA: storage},
    )


def deep_check_key(storage: str, type_name: str, asset: TypeAsset | None) -> dg.AssetCheckKey:
    """On the type's own asset; a type that has none is told of with the log."""
    if asset is not None:
        return dg.AssetCheckKey(asset.key, DEEP_VERIFY)
    name = f"{DEEP_VERIFY}_{snake_case(type_name)}"
    return dg.AssetCheckKey(dg.AssetKey([storage, "log"]), name)


def deep_checks(storage: str, types: Mapping[str, TypeAsset | None]) -> dg.AssetChecksDefinition:
    """One check for the log itself, one for each type; all from one reading of the storage."""
    log = dg.AssetCheckKey(dg.AssetKey([storage, "log"]), LOG_AREA)
    keys = {name: deep_check_key(storage, name, asset) for name, asset in types.items()}
    described = {log: "Chain, checkpoints, tags, undeclared types."} | {
        key: f"Files, hashes, row counts and ends of {name}, all read back."
        for name, key in keys.items()
    }

    @dg.multi_asset_check(
        name=f"{storage}_deep_verification",
        specs=[
            dg.AssetCheckSpec(key.name, asset=key.asset_key, description=description)
            for key, description in described.items()
        ],
        required_resource_keys={storage},
        pool=MAINTENANCE_POOL,
        can_subset=True,  # otherwise the UI's Execute buttons are off
    )
    def deep_verify(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        ontology: OntologyResource = getattr(context.resources, storage)
        wanted = set(context.selected_asset_check_keys)
        if materialises(context):
            last = {key: last_evaluation(context.instance, key) for key in sorted(wanted)}
            yield from _repeated(storage, last)
            wanted = {key for key, evaluation in last.items() if evaluation is None}
            if not wanted:
                return
        try:
            if materialises(context) and not _is_small(ontology):
                return
            report, requests = deep_report(ontology)
            verdicts = Verdicts(ontology, storage, types, report)
            results = {log: verdicts.of_log(log, requests)} | {
                key: verdicts.of_type(key, name) for name, key in keys.items()
            }
        except OntologiaError as error:
            results = {
                key: failed_check(error, asset_key=key.asset_key, check_name=key.name)
                for key in described
            }
        yield from (result for key, result in results.items() if key in wanted)

    return deep_verify


def _is_small(ontology: "OntologyResource") -> bool:
    """Whether all of it is read back in seconds: then the first run that materialises does, and
    nobody wonders what becomes of the checks."""
    from storage_engine.maintenance.metrics import collect

    with ontology.repository() as repository:
        types = collect(repository).types
    return (
        sum(figures.bytes for figures in types) <= _SMALL_BYTES
        and sum(figures.rows for figures in types) <= _SMALL_ROWS
    )


def _repeated(
    storage: str, evaluations: Mapping[dg.AssetCheckKey, dg.AssetCheckEvaluation | None]
) -> Iterator[dg.AssetCheckResult]:
    """What was found last: nothing has been verified since. Nothing where nothing ever was."""
    for key, evaluation in evaluations.items():
        if evaluation is None:
            continue
        head = evaluation.metadata.get("head_commit")
        what = evaluation.description or "nothing was found"
        note = f"As of commit {head.value if head is not None else 'unknown'}: "
        yield dg.AssetCheckResult(
            asset_key=key.asset_key,
            check_name=key.name,
            passed=evaluation.passed,
            severity=evaluation.severity,
            description=what if what.startswith("As of commit") else f"{note}{what}",
            metadata={
                **evaluation.metadata,
                "repeated": f"not verified again: a run that materialises does not read everything "
                f"back. The job {storage}_{DEEP_VERIFY} does",
            },
        )


def deep_report(ontology: "OntologyResource") -> "tuple[IntegrityReport, dict[str, int]]":
    """What is wrong with the storage, and the requests that it took to know."""
    from storage_engine.maintenance.integrity import verify_storage

    with ontology.repository() as repository:
        return verify_storage(repository, deep=True), requests_of(repository)


@dataclass(frozen=True)
class Verdicts:
    """What a report says of the log and of each type. By what was counted: of many findings the
    report keeps only the first."""

    ontology: "OntologyResource"
    storage: str
    types: Mapping[str, TypeAsset | None]
    report: "IntegrityReport"

    def of_log(self, key: dg.AssetCheckKey, requests: Mapping[str, int]) -> dg.AssetCheckResult:
        """Of all that is no declared type's; what the verification took is told here."""
        rest = [f for f in self.report.findings if f.type_name not in self.types]
        others = self.report.total - sum(self.report.by_type[name] for name in self.types)
        checked = {f"checked_{what}": n for what, n in sorted(self.report.checked.items())}
        sentence = findings_sentence(rest, others) if others else None
        return self._result(
            key,
            rest,
            others,
            sentence,
            self._advice("the log", rest),
            {**checked, **request_metadata(requests)},
        )

    def of_type(self, key: dg.AssetCheckKey, name: str) -> dg.AssetCheckResult:
        shown = [finding for finding in self.report.findings if finding.type_name == name]
        count = self.report.by_type[name]
        if not count:
            return self._result(key, shown, 0, None, "", {})
        spec = self._declared(name)
        hidden = frozenset() if spec is None else _hidden(spec)
        more: dict[str, Any] = {}
        for finding in shown:
            if finding.ends is not None:
                ends = finding.ends
                examples = [
                    (HIDDEN if f"{ends.side}_key" in hidden else missing, number)
                    for missing, number in ends.examples
                ]
                column = f"missing {noun_of(ends.type_name)}"
                more[f"missing_{ends.side}_ends"] = table([column, name], examples)
                more[f"missing_{ends.side}_end_count"] = ends.missing
                more[f"rows_without_{ends.side}_end"] = ends.concerned
        sentence = findings_sentence(shown, count, hidden=hidden)
        words = [
            ends_sentence(name, f.ends, hidden=f"{f.ends.side}_key" in hidden)
            if f.ends is not None
            else f.message
            for f in shown
        ]
        advice = self._advice(name, shown)
        return self._result(key, shown, count, sentence, advice, more, words)

    def _result(
        self,
        key: dg.AssetCheckKey,
        shown: "Sequence[Finding]",
        count: int,
        sentence: str | None,
        advice: str,
        more: Mapping[str, Any],
        words: Sequence[str] | None = None,
    ) -> dg.AssetCheckResult:
        texts = words if words is not None else [finding.message for finding in shown]
        repair = (
            repair_metadata(self.ontology, repair_job_name(self.storage))
            if any(finding.area == "index" for finding in shown)
            else {}
        )
        return dg.AssetCheckResult(
            asset_key=key.asset_key,
            check_name=key.name,
            passed=not count,
            description=f"{sentence}. {advice}" if sentence else None,
            metadata={
                "findings": count,
                "finding_list": table(
                    ["type", "area", *FINDING[1:]],
                    [
                        (f.type_name, f.area, f.reason, f.commit_id, text, f.key)
                        for f, text in zip(shown, texts, strict=True)
                    ],
                ),
                "head_commit": str(self.report.head_commit_id),
                **more,
                **repair,
            },
        )

    def _advice(self, name: str, findings: "Sequence[Finding]") -> str:
        """What to run."""
        again = f"then run {self.storage}_{DEEP_VERIFY} again"
        ends = sorted({f.ends.type_name for f in findings if f.ends is not None})
        if ends:
            jobs = [self._job(end) for end in ends]
            return f"Bring in what is missing ({', '.join(jobs)}) or correct {name}, {again}"
        areas = {finding.area for finding in findings}
        if areas == {"index"}:
            return f"Run {repair_job_name(self.storage)}, {again}"
        if "file" in areas:
            return f"Put the files back from a backup, {again}"
        return f"`onto verify --deep --storage-uri {self.ontology.storage_uri}` lists all of it"

    def _job(self, type_name: str) -> str:
        asset = self.types.get(type_name)
        if asset is None or asset.ingest_job is None:
            return f"write {plural_of(noun_of(type_name))}"
        return f"job {asset.ingest_job}"

    def _declared(self, name: str) -> "TypeSpec | None":
        asset = self.types.get(name)
        if asset is None or asset.models is None:
            return None
        try:
            types = declared_types(asset.models)
        except ConfigurationError:
            return None
        return next((spec for (_, named), spec in types.items() if named == name), None)


def _hidden(spec: "TypeSpec") -> frozenset[str]:
    return frozenset(spec.identity) if spec.sensitive else spec.sensitive_columns
