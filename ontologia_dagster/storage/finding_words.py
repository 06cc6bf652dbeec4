"""What checks have found, in the words of the data: how many of what, which, and what to run.

    7,602 flights go to 4 airports that are not there: BQN, PSE, SJU, STT

A sentence is short however much was found; tables beside it have the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from storage_engine.wording import counted, listed, noun_of

if TYPE_CHECKING:
    from storage_engine.index.verify import IndexFinding
    from storage_engine.maintenance.integrity import Finding
    from storage_engine.maintenance.integrity.report import MissingEnds

_KINDS = 3  # kinds of findings in a sentence


# -- deep verification ----------------------------------------------------------------------------


def ends_sentence(relation: str, ends: MissingEnds, *, hidden: bool = False) -> str:
    """Of relations whose ends are not there. A relation with a key of its own is a thing, which
    has a plural; one without is often named by a verb. `hidden`: the keys are sensitive."""
    noun = noun_of(relation) if ends.keyed else f"{relation} relation"
    verb = {"left": ("comes from", "come from"), "right": ("goes to", "go to")}[ends.side]
    goes = verb[0] if ends.concerned == 1 else verb[1]
    are = "is" if ends.missing == 1 else "are"
    entities = counted(ends.missing, noun_of(ends.type_name))
    sentence = f"{counted(ends.concerned, noun)} {goes} {entities} that {are} not there"
    examples = listed([key for key, _ in ends.examples], ends.missing)
    return sentence if hidden or not examples else f"{sentence}: {examples}"


def findings_sentence(
    findings: Sequence[Finding], count: int, *, hidden: Collection[str] = ()
) -> str:
    """Of what deep verification has found of one type; `hidden` are columns not to be shown."""
    sentences = [
        ends_sentence(
            str(finding.type_name), finding.ends, hidden=f"{finding.ends.side}_key" in hidden
        )
        for finding in findings
        if finding.ends is not None
    ]
    others = [finding for finding in findings if finding.ends is None]
    by_reason = Counter((finding.area, finding.reason) for finding in others)
    for kind, number in by_reason.most_common(_KINDS):
        first = next(f for f in others if (f.area, f.reason) == kind)
        more = f", and {number - 1:,} more of the kind" if number > 1 else ""
        sentences.append(f"{_subject(first)}{first.message}{more}")
    left = count - len(findings) + sum(by_reason.values())
    left -= sum(number for _, number in by_reason.most_common(_KINDS))
    if left > 0:
        sentences.append(f"{counted(left, 'further finding')}")
    return "; ".join(sentences)


def _subject(finding: Finding) -> str:
    if finding.reason == "missing_file":
        return f"{finding.key} is missing: "
    if finding.area == "file":
        return f"{finding.key} "
    return f"commit {finding.commit_id}: " if finding.commit_id is not None else ""


# -- indices --------------------------------------------------------------------------------------

_Phrase = Callable[[int, str], str]
_INDEX: Mapping[str, _Phrase] = {
    "missing_entry": lambda n, _: f"has no entry for {counted(n, 'commit')}",
    "absent_file": lambda n, _: f"names {counted(n, 'file')} that are not there",
    "unproven_snapshot": lambda n, _: f"names {counted(n, 'snapshot')} that the log does not have",
    "orphan_file": lambda n, _: f"names {counted(n, 'file')} that no commit wrote",
    "path_mismatch": lambda n, _: f"names {counted(n, 'file')} that the log has elsewhere",
    "superseded": lambda n, _: f"has {counted(n, 'commit')} that a snapshot has replaced",
    "overlap": lambda n, _: f"covers commits twice, in {counted(n, 'entry')}",
    "wrong_facts": lambda n, _: f"says other facts of {counted(n, 'file')} than the log",
    "unreadable": lambda _, __: "cannot be parsed",
}


def index_sentence(type_name: str, findings: Sequence[IndexFinding]) -> str:
    """`The index of Flight has no entry for the latest commit, and is at commit 3, needs 4.`"""
    first = {finding.reason: finding.message for finding in reversed(findings)}
    numbers = Counter(finding.reason for finding in findings)
    phrases = [
        _INDEX[reason](numbers[reason], first[reason]) if reason in _INDEX else first[reason]
        for reason in sorted(numbers)
    ]
    *begin, last = phrases
    return f"The index of {type_name} {', '.join(begin)}{', and ' if begin else ''}{last}."
