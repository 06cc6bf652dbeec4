"""The command lines of the jobs: a spec, from a file, from arguments, or from both.

The options are those of `IngestSpec`, whose fields say everything about them. Promise:
`parse_ingest(spec_arguments(spec)).spec == spec`. What is given as an argument replaces what the
file says; `--column`, `--option`, `--meta` and `--drift` replace single members.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from storage_engine.errors import ConfigurationError
from storage_engine.spark.ingest_spec import (
    DRIFTS,
    POLICIES,
    DriftPolicy,
    IngestSpec,
    parse_spec,
    spec_options,
)
from storage_engine.spark.spec_members import InvalidSpec, SpecOption, bytes_of, read_yaml

_GROUPS = ("order", "source", "mapping", "writing")


@dataclass(frozen=True)
class RunOptions:
    """How a job runs; no part of the spec."""

    master: str | None = None
    remote: str | None = None
    conf: dict[str, str] = field(default_factory=dict)
    json: bool = False
    dry_run: bool = False
    replay_quarantine: str | None = None
    verbose: bool = False


@dataclass(frozen=True)
class IngestCall:
    spec: IngestSpec
    run: RunOptions


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, through the same boundary as all other mistakes."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,  # a new option must not change what an old line means
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return given

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")

    def _hint(self, unknown: Sequence[str]) -> str:
        """The nearest option of each that is not known."""
        options = [text for action in self._actions for text in action.option_strings]
        near = [
            match
            for text in unknown
            if text.startswith("-")
            for match in difflib.get_close_matches(text.partition("=")[0], options, n=1)
        ]
        return f"; did you mean {', '.join(near)}?" if near else ""


def program_name(job: str) -> str:
    """As it was started: a checkout's program, or the library's `__main__`."""
    return sys.argv[0] if sys.argv[0].startswith("python -m ") else f"jobs/{job}.py"


def ingest_parser() -> Parser:
    parser = Parser(
        program_name("ingest"),
        "Read a source with Spark, map it to a type, and publish what is new or changed.",
        "Exit codes: 0 done, 2 the order is wrong, 3 the data or its schema was refused, 5 the\n"
        "storage failed, 1 anything else. Nothing is published unless the code is 0.",
    )
    add_spec_options(parser)
    add_run_options(parser, dry_run=True)
    return parser


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """Those of IngestSpec; everything is optional here, since a file may say it."""
    groups = {name: parser.add_argument_group(name) for name in _GROUPS}
    groups["order"].add_argument(
        "--order", metavar="FILE", help="a YAML file with the order; arguments come on top"
    )
    for each in spec_options():
        add_to = groups[each.flag.group].add_argument
        shown: dict[str, Any] = {"help": each.help.replace("%", "%%"), "dest": _dest(each)}
        match each.form:
            case "switch":
                add_to(each.option, action=argparse.BooleanOptionalAction, **shown)
            case "choice":
                add_to(each.option, choices=each.choices, **shown)
            case "texts" | "pairs" | "json" | "policies":
                add_to(each.option, action="append", metavar=each.flag.metavar, **shown)
            case "size":
                add_to(each.option, type=size, metavar=each.flag.metavar, **shown)
            case "text" | "version" | "mapping":
                add_to(each.option, metavar=each.flag.metavar, **shown)


def add_run_options(parser: argparse.ArgumentParser, *, dry_run: bool = False) -> None:
    add = parser.add_argument_group("running").add_argument
    if dry_run:
        add(
            "--dry-run",
            action="store_true",
            help="count what would be inserted, updated and left unchanged; publish nothing. Exit "
            "code 3 when the write would be refused, and why",
        )
        add(
            "--replay-quarantine",
            metavar="URI",
            help="take the rows that an earlier run has set aside, and that were put right, "
            "instead of the source: the folder that it named, or a .parquet or .jsonl file",
        )
    add(
        "--master",
        metavar="URL",
        help="Spark master, such as local[4]; default: what spark-submit says, else local[*]",
    )
    add("--remote", metavar="URL", help="a Spark Connect server instead: sc://host:15002")
    add("--conf", action="append", metavar="NAME=VALUE", help="a setting of the Spark session")
    add("--json", action="store_true", help="print the result, or the error, as one JSON line")
    add("-v", "--verbose", action="store_true", help="show tracebacks of errors")


def parse_ingest(argv: Sequence[str] | None) -> IngestCall:
    given = ingest_parser().parse_args(argv)
    return IngestCall(spec_of(given), run_options(given))


def run_options(given: argparse.Namespace) -> RunOptions:
    if given.master is not None and given.remote is not None:
        raise ConfigurationError("--master and --remote exclude each other: a server has its own")
    return RunOptions(
        master=given.master,
        remote=given.remote,
        conf=_pairs("--conf", given.conf),
        json=given.json,
        dry_run=getattr(given, "dry_run", False),
        replay_quarantine=getattr(given, "replay_quarantine", None),
        verbose=given.verbose,
    )


def spec_of(given: argparse.Namespace) -> IngestSpec:
    file = read_yaml(given.order) if given.order is not None else None
    raw: dict[str, Any] = file.members if file is not None else {}
    replaced: list[tuple[str, ...]] = []
    for each in spec_options():
        value = getattr(given, _dest(each))
        if value is None:
            continue
        for path, member in _given_members(each, value, raw):
            _put(raw, path, member)
            replaced.append(path)
    return parse_spec(raw, file, replaced)


def _given_members(
    each: SpecOption, value: Any, raw: dict[str, Any]
) -> list[tuple[tuple[str, ...], Any]]:
    """What an option states, by the path of the member that it states it of."""
    match each.form:
        case "pairs":
            return [((*each.path, name), text) for name, text in _pairs(each.option, value).items()]
        case "json":
            return [(each.path, [_json(each.option, text) for text in value])]
        case "policies":
            return [(each.path, _drift(_get(raw, each.path), value))]
        case "mapping":
            return [(each.path, _mapping(each.option, value))]
        case "version":
            return [(each.path, _version(value))]
        case _:
            return [(each.path, value)]


def spec_arguments(spec: IngestSpec) -> list[str]:
    """The arguments that `parse_ingest` reads as this spec. Values are joined to their option
    by `=`, so that none is taken for an option itself."""
    described = spec.as_dict()
    return [
        text
        for each in spec_options()
        if (value := _get(described, each.path)) is not None
        for text in _stated(each, value)
    ]


def _stated(each: SpecOption, value: Any) -> list[str]:
    match each.form:
        case "switch":
            return [each.option if value else f"--no-{each.flag.name}"]
        case "pairs" | "policies":
            return [f"{each.option}={name}={text}" for name, text in value.items()]
        case "texts":
            return [f"{each.option}={text}" for text in value]
        case "json":
            return [f"{each.option}={json.dumps(item)}" for item in value]
        case "mapping":
            return [f"{each.option}={json.dumps(value)}"]
        case "version":
            return [f"{each.option}={_version_text(value)}"]
        case _:
            return [f"{each.option}={value}"]


def option_table(parser: argparse.ArgumentParser, *titles: str) -> str:
    """The options of groups, or of all, as a Markdown table for the documentation."""
    rows = ["| option | meaning |", "| --- | --- |"]
    groups = [group for group in parser._action_groups if not titles or group.title in titles]
    for action in (action for group in groups for action in group._group_actions):
        if "--help" in action.option_strings or action.help == argparse.SUPPRESS:
            continue
        long = [text for text in action.option_strings if text.startswith("--")]
        value = f" {action.metavar}" if action.metavar else ""
        names = ", ".join(f"`{name}{value}`" for name in long)
        meaning = str(action.help).replace("%%", "%").replace("|", "\\|")
        rows.append(f"| {names.replace('|', chr(92) + '|')} | {meaning} |")
    return "\n".join(rows)


def _dest(each: SpecOption) -> str:
    return each.flag.name.replace("-", "_")


def _put(raw: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *inner, last = path
    for name in inner:
        members = raw.setdefault(name, {})
        if members is None:
            members = raw[name] = {}
        if not isinstance(members, dict):
            raise ConfigurationError(f"{name} is a mapping, not {members!r}")
        raw = members
    raw[last] = value


def _get(described: Any, path: Sequence[str]) -> Any:
    for name in path:
        described = (described or {}).get(name)
    return described


def _pairs(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"{option} takes NAME=VALUE, not {text!r}")
        pairs[name] = value
    return pairs


def _drift(before: Any, texts: Sequence[str]) -> dict[str, str]:
    try:
        policy = DriftPolicy.parse(before).as_dict() if before is not None else {}
    except InvalidSpec as error:
        raise ConfigurationError(str(error)) from None
    for text in texts:
        case, equals, word = text.rpartition("=")
        if word not in POLICIES or (equals and case not in DRIFTS):
            raise ConfigurationError(
                f"--drift takes {', '.join(POLICIES)}, or {'=, '.join(DRIFTS)}= and one of them, "
                f"not {text!r}"
            )
        policy |= {case: word} if equals else dict.fromkeys(DRIFTS, word)
    return policy


def _version(text: str) -> int | str:
    """Digits are a number; a text that looks like one is written as JSON."""
    if text.startswith('"'):
        version = _json("--app-version", text)
        if isinstance(version, str):
            return version
    return int(text) if text.removeprefix("-").isdecimal() and text.isascii() else text


def _version_text(version: int | str) -> str:
    text = str(version)
    return text if type(_version_of(text)) is type(version) else json.dumps(text)


def _version_of(text: str) -> int | str | None:
    return None if text.startswith('"') else _version(text)


def _mapping(option: str, text: str) -> Any:
    """A word, or a mapping as JSON or as one writes it in a YAML file."""
    import yaml

    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigurationError(
            f"{option} takes a word, or a mapping such as '{{a: 1, b: text}}', not {text!r}"
        ) from None


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{option}: {text!r} is not JSON: {error.msg}") from None


def size(text: str) -> int:
    number = bytes_of(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256MB")
    return number
