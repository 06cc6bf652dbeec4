"""The command lines of the jobs: an order, from a file, from arguments, or from both.

Promise: `parse_ingest(order_arguments(order)).order == order`. What is given as an argument
replaces what the file says; `--column`, `--option`, `--meta` and `--drift` replace single members.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from storage_engine.errors import ConfigurationError
from storage_engine.spark.ingest_spec import (
    DRIFTS,
    FORMATS,
    POLICIES,
    DriftPolicy,
    IngestOrder,
    parse_order,
    read_yaml,
)

# Option -> where an order keeps it. Options with a value of their own come first, then those that
# add one member each to a mapping.
_PLAIN = {
    "storage_uri": ("storage_uri",),
    "type": ("type",),
    "models": ("models",),
    "format": ("source", "format"),
    "schema": ("source", "schema"),
    "null_value": ("source", "null_value"),
    "where": ("where",),
    "transform": ("transform",),
    "distinct": ("distinct",),
    "order_by": ("order_by",),
    "on_bad_rows": ("on_bad_rows",),
    "quarantine": ("quarantine",),
    "target_part_bytes": ("target_part_bytes",),
    "app_id": ("idempotency", "app_id"),
    "app_version": ("idempotency", "version"),
}
_MAPPINGS = {"option": ("source", "options"), "column": ("columns",), "meta": ("meta",)}


@dataclass(frozen=True)
class RunOptions:
    """How a job runs; no part of the order."""

    master: str | None = None
    remote: str | None = None
    conf: dict[str, str] = field(default_factory=dict)
    json: bool = False
    dry_run: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class IngestCall:
    order: IngestOrder
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

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def ingest_parser() -> Parser:
    parser = Parser(
        "jobs/ingest.py",
        "Read a source with Spark, map it to a type, and publish what is new or changed.",
        "Exit codes: 0 done, 2 the order is wrong, 3 the data or its schema was refused, 5 the\n"
        "storage failed, 1 anything else. Nothing is published unless the code is 0.",
    )
    add_order_options(parser)
    add_run_options(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="count what would be inserted, updated and left unchanged; publish nothing",
    )
    return parser


def add_order_options(parser: argparse.ArgumentParser) -> None:
    """What an order says; everything is optional here, since a file may say it."""
    add = parser.add_argument_group("order").add_argument
    add("--order", metavar="FILE", help="a YAML file with the order; arguments come on top")
    add("--storage-uri", metavar="URI", help="the storage: a directory, file:// or s3:// URI")
    add("--type", metavar="NAME", help="the stored name of the type to write")
    add("--models", metavar="MODULE", help="the Python module that declares the type")
    add = parser.add_argument_group("source").add_argument
    add(
        "--source",
        action="append",
        metavar="PATH",
        help="file, folder or pattern to read, or a jdbc: URL; may be given several times",
    )
    add("--format", choices=FORMATS, help="of the source; told by the names of files if left out")
    add(
        "--option",
        action="append",
        metavar="NAME=VALUE",
        help="an option of Spark's reader; the value env:NAME is taken from the environment",
    )
    add(
        "--schema",
        metavar="DDL",
        help="the columns that the source should have: 'id STRING, seats BIGINT'",
    )
    add("--null-value", metavar="TEXT", help="the text that stands for null in CSV, such as NA")
    add(
        "--drift",
        action="append",
        metavar="[CASE=]POLICY",
        help="when the source differs from --schema: fail, ignore or quarantine, for all cases "
        "or for added=, missing= or retyped= alone",
    )
    add = parser.add_argument_group("mapping").add_argument
    add(
        "--column",
        action="append",
        metavar="NAME=SQL",
        help="a column of the type as an expression over the source: \"id=concat(a, '-', b)\"",
    )
    add("--where", metavar="SQL", help="only rows of the source for which this holds")
    add(
        "--transform",
        metavar="MODULE:FUNCTION",
        help="a function DataFrame -> DataFrame for what expressions cannot say",
    )
    add(
        "--distinct",
        action=argparse.BooleanOptionalAction,
        help="equal rows count once",
    )
    add = parser.add_argument_group("writing").add_argument
    add(
        "--order-by",
        metavar="FIELD",
        help="of rows with one identity the greatest wins, and an older row never replaces a "
        "newer one",
    )
    add(
        "--on-bad-rows",
        choices=("fail", "quarantine"),
        help="stop at rows that cannot be stored (fail, the default) or set them aside",
    )
    add(
        "--quarantine", metavar="URI", help="where such rows go; default: beside the storage's data"
    )
    add(
        "--expect",
        action="append",
        metavar="JSON",
        help='what the data must satisfy: \'{"not_null": "name"}\'; replaces those of the file',
    )
    add("--app-id", metavar="TEXT", help="with --app-version: this work is applied at most once")
    add(
        "--app-version",
        metavar="N|TEXT",
        help="of the work; a number must grow, a text must differ from the last one",
    )
    add(
        "--meta",
        action="append",
        metavar="NAME=TEXT",
        help="a text kept with the commit; may be given several times",
    )
    add(
        "--target-part-bytes",
        type=size,
        metavar="N",
        help="about how large the written files should be",
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("running").add_argument
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
    return IngestCall(order_of(given), run_options(given))


def run_options(given: argparse.Namespace) -> RunOptions:
    if given.master is not None and given.remote is not None:
        raise ConfigurationError("--master and --remote exclude each other: a server has its own")
    return RunOptions(
        master=given.master,
        remote=given.remote,
        conf=_pairs("--conf", given.conf),
        json=given.json,
        dry_run=getattr(given, "dry_run", False),
        verbose=given.verbose,
    )


def order_of(given: argparse.Namespace) -> IngestOrder:
    raw = read_yaml(given.order) if given.order is not None else {}
    for name, path in _PLAIN.items():
        value = getattr(given, name)
        if value is not None:
            _put(raw, path, _version(value) if name == "app_version" else value)
    for name, path in _MAPPINGS.items():
        for key, value in _pairs(f"--{name}", getattr(given, name)).items():
            _put(raw, (*path, key), value)
    if given.source is not None:
        _put(raw, ("source", "paths"), tuple(given.source))
    if given.drift is not None:
        raw["drift"] = _drift(raw.get("drift"), given.drift)
    if given.expect is not None:
        raw["expectations"] = [_json("--expect", text) for text in given.expect]
    return parse_order(raw)


def order_arguments(order: IngestOrder) -> list[str]:
    """The arguments that `parse_ingest` reads as this order. Values are joined to their option
    by `=`, so that none is taken for an option itself."""
    described = order.as_dict()
    arguments: list[str] = []
    for name, path in _PLAIN.items():
        value = _get(described, path)
        if value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        if name == "app_version":
            value = _version_text(value)
        arguments.append(option if value is True else f"{option}={value}")
    arguments += [f"--source={path}" for path in order.source.paths]
    for name, path in _MAPPINGS.items():
        for key, value in (_get(described, path) or {}).items():
            arguments.append(f"--{name}={key}={value}")
    for case, policy in described.get("drift", {}).items():
        arguments.append(f"--drift={case}={policy}")
    for expectation in order.expectations:
        arguments.append(f"--expect={json.dumps(expectation)}")
    return arguments


def _put(raw: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *inner, last = path
    for name in inner:
        found = raw.setdefault(name, {})
        if found is None:
            found = raw[name] = {}
        if not isinstance(found, dict):
            raise ConfigurationError(f"{name} is a mapping, not {found!r}")
        raw = found
    raw[last] = value


def _get(described: Any, path: Sequence[str]) -> Any:
    for name in path:
        described = (described or {}).get(name)
    return described


def _pairs(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"{option} takes NAME=VALUE, not {text!r}")
        found[name] = value
    return found


def _drift(before: Any, texts: Sequence[str]) -> dict[str, str]:
    policy = DriftPolicy.parse(before).as_dict() if before is not None else {}
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
        found = _json("--app-version", text)
        if isinstance(found, str):
            return found
    return int(text) if text.removeprefix("-").isdecimal() and text.isascii() else text


def _version_text(version: int | str) -> str:
    text = str(version)
    return text if type(_version_of(text)) is type(version) else json.dumps(text)


def _version_of(text: str) -> int | str | None:
    return None if text.startswith('"') else _version(text)


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{option}: {text!r} is not JSON: {error.msg}") from None


def size(text: str) -> int:
    from storage_engine.config import size_in_bytes

    try:
        return int(text) if text.isdecimal() else size_in_bytes(text)
    except (ValueError, KeyError, IndexError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256MB") from None
