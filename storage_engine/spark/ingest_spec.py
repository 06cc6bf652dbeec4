"""What an ingestion is asked to do, as data: read this, map it so, write it there.

An order comes from arguments (`storage_engine.spark.jobs.arguments`), from a YAML file or from
Python, and is checked when it is made: ConfigurationError names the member that is wrong. Nothing
here needs Spark.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from storage_engine.errors import ConfigurationError
from storage_engine.model.expectations import parse_expectations

Format = Literal["csv", "json", "parquet", "jdbc"]
Policy = Literal["fail", "ignore", "quarantine"]
OnBadRows = Literal["fail", "quarantine"]

FORMATS: tuple[str, ...] = get_args(Format)
POLICIES: tuple[str, ...] = get_args(Policy)
DRIFTS = ("added", "missing", "retyped")
DRIFTED = "source column "  # how the reasons of rows begin that drift has spoiled

_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".zip": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
_UNSAID: tuple[Any, ...] = (None, False, {}, [])
_PACKED = (".gz", ".bz2", ".zst")


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    format:      csv, json (lines), parquet or jdbc
    paths:       files, folders or patterns; for jdbc the URL of the database
    options:     of Spark's reader of that format. A value `env:NAME` is read from the
                 environment when the source is opened, so that no password stands in an order
    schema:      the columns that the source is expected to have, as `name TYPE, ...`; None takes
                 it as it comes
    null_value:  the text that stands for null beside the empty one (csv)
    """

    format: str
    paths: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    schema: str | None = None
    null_value: str | None = None

    def __post_init__(self) -> None:
        _one_of("source.format", self.format, FORMATS)
        paths: Any = self.paths
        paths = (paths,) if isinstance(paths, str) else paths
        if not isinstance(paths, Sequence) or not paths:
            raise ConfigurationError("source.paths takes at least one path")
        if not all(isinstance(path, str) and path for path in paths):
            raise ConfigurationError(f"source.paths takes texts, not {list(paths)!r}")
        _set(self, "paths", tuple(paths))
        _set(self, "options", _texts("source.options", self.options))
        for name in ("schema", "null_value"):
            _optional_text(f"source.{name}", getattr(self, name))
        if self.null_value is not None and self.format != "csv":
            raise ConfigurationError(
                f"source.null_value is for csv: {self.format} has nulls of its own"
            )
        if self.format == "jdbc":
            self._check_jdbc()

    def _check_jdbc(self) -> None:
        if len(self.paths) > 1 or not self.paths[0].startswith("jdbc:"):
            raise ConfigurationError(
                "source.paths of jdbc is one URL that begins with jdbc:, such as "
                "jdbc:postgresql://host/database"
            )
        if ("dbtable" in self.options) == ("query" in self.options):
            raise ConfigurationError(
                "source.options of jdbc needs dbtable (a table) or query (a SELECT), not both"
            )

    def as_dict(self) -> dict[str, Any]:
        described: dict[str, Any] = {"format": self.format, "paths": list(self.paths)}
        given = {"options": dict(self.options), "schema": self.schema}
        described |= {name: value for name, value in given.items() if value}
        if self.null_value is not None:
            described["null_value"] = self.null_value
        return described


@dataclass(frozen=True)
class DriftPolicy:
    """What to do when a source has other columns than its declared schema says.

    fail:        nothing is written
    ignore:      an added column is left out, a missing one is null, and so is a value that is not
                 of the declared type
    quarantine:  the rows concerned are set aside: those with a value in an added column, all rows
                 when a column is missing, those whose value is not of the declared type
    """

    added: str = "fail"
    missing: str = "fail"
    retyped: str = "fail"

    def __post_init__(self) -> None:
        for name in DRIFTS:
            _one_of(f"drift.{name}", getattr(self, name), POLICIES)

    @classmethod
    def parse(cls, raw: Any) -> DriftPolicy:
        """One word for all, or a word each."""
        if isinstance(raw, cls):
            return raw
        if isinstance(raw, str):
            return cls(raw, raw, raw)
        _members("drift", raw, DRIFTS)
        return cls(**raw)

    def as_dict(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in DRIFTS}


@dataclass(frozen=True)
class IngestOrder:
    """One ingestion: a source, how its rows become rows of a type, and how they are written.

    storage_uri:  the storage, which must exist
    type, models: the stored name of a type, and the module that declares it
    columns:      column of the type -> SQL expression over the source's columns. A field that is
                  not named takes the source's column of its own name
    where:        SQL condition on the source's columns
    transform:    "module:function", DataFrame -> DataFrame, before `columns` and after `where`
    distinct:     equal rows count once
    order_by:     a field: of rows with one identity the greatest wins, and never an older one
                  over a newer one
    The rest is passed on to the writer.
    """

    storage_uri: str
    type: str
    models: str
    source: Source
    columns: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    transform: str | None = None
    distinct: bool = False
    order_by: str | None = None
    on_bad_rows: str = "fail"
    quarantine: str | None = None
    drift: DriftPolicy = field(default_factory=DriftPolicy)
    expectations: tuple[Mapping[str, Any], ...] = ()
    idempotency: tuple[str, int | str] | None = None
    meta: Mapping[str, str] = field(default_factory=dict)
    target_part_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("storage_uri", "type", "models"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{name} is needed: a text, not {value!r}")
        _set(self, "source", parse_source(self.source))
        for name in ("columns", "meta"):
            _set(self, name, _texts(name, getattr(self, name)))
        for name in ("where", "transform", "order_by", "quarantine"):
            _optional_text(name, getattr(self, name))
        if self.transform is not None and not all(self.transform.partition(":")):
            raise ConfigurationError(
                f"transform is module:function, such as shop.cleaning:tidy, not {self.transform!r}"
            )
        if self.distinct not in (True, False):
            raise ConfigurationError(f"distinct is true or false, not {self.distinct!r}")
        _one_of("on_bad_rows", self.on_bad_rows, get_args(OnBadRows))
        _set(self, "drift", DriftPolicy.parse(self.drift))
        if self.drift != DriftPolicy() and self.source.schema is None:
            raise ConfigurationError(
                "drift needs source.schema: without it nothing is known to drift from"
            )
        if "quarantine" in self.drift.as_dict().values() and self.on_bad_rows != "quarantine":
            raise ConfigurationError("drift to quarantine needs on_bad_rows: quarantine as well")
        parsed = parse_expectations(self.expectations)
        _set(self, "expectations", tuple(expectation.as_dict() for expectation in parsed))
        _set(self, "idempotency", _idempotency(self.idempotency))
        size: Any = self.target_part_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigurationError(f"target_part_bytes is a number of bytes, not {size!r}")

    def as_dict(self) -> dict[str, Any]:
        """As a YAML file states it: `parse_order(order.as_dict()) == order`."""
        described = {each.name: getattr(self, each.name) for each in fields(self)}
        described["source"] = self.source.as_dict()
        described["columns"], described["meta"] = dict(self.columns), dict(self.meta)
        described["drift"] = self.drift.as_dict() if self.drift != DriftPolicy() else None
        described["expectations"] = [dict(each) for each in self.expectations]
        if self.idempotency is not None:
            described["idempotency"] = dict(
                zip(("app_id", "version"), self.idempotency, strict=True)
            )
        if self.on_bad_rows == "fail":
            del described["on_bad_rows"]
        return {name: value for name, value in described.items() if value not in _UNSAID}

    def to_arguments(self) -> list[str]:
        """Arguments for `jobs/ingest.py` that state this order and nothing else."""
        from storage_engine.spark.jobs.arguments import order_arguments

        return order_arguments(self)


def parse_source(raw: Any) -> Source:
    if isinstance(raw, Source):
        return raw
    _members("source", raw, [each.name for each in fields(Source)])
    given = dict(raw)
    paths = given.get("paths") or ()
    given["paths"] = (paths,) if isinstance(paths, str) else paths
    if "format" not in given:
        given["format"] = guess_format([str(path) for path in given["paths"]])
    return Source(**given)


def parse_order(raw: Any) -> IngestOrder:
    """The order that a dict states, as YAML gives it."""
    _members("order", raw, [each.name for each in fields(IngestOrder)])
    missing = [name for name in ("storage_uri", "type", "models", "source") if name not in raw]
    if missing:
        raise ConfigurationError(f"the order does not say {', '.join(missing)}")
    given = dict(raw)
    given["source"] = parse_source(given["source"])
    return IngestOrder(**given)


def read_yaml(path: str) -> dict[str, Any]:
    """A YAML file whose document is a mapping."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path}: an order is a mapping of names to values")
    return found


def guess_format(paths: Sequence[str]) -> str:
    """What the names of files say; ConfigurationError when they say nothing, or several things."""
    found = {_format_of(path) for path in paths}
    if len(found) == 1 and None not in found:
        return str(found.pop())
    raise ConfigurationError(
        f"source.format is needed, one of {', '.join(FORMATS)}: the names of the files do not "
        "tell it"
    )


def _format_of(path: str) -> str | None:
    if path.startswith("jdbc:"):
        return "jdbc"
    name = path.lower().rstrip("/")
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return next((known for end, known in _SUFFIXES.items() if name.endswith(end)), None)


def _idempotency(raw: Any) -> tuple[str, int | str] | None:
    if raw is None:
        return None
    if isinstance(raw, Mapping):
        _members("idempotency", raw, ["app_id", "version"])
        raw = (raw.get("app_id"), raw.get("version"))
    if not isinstance(raw, Sequence) or isinstance(raw, str) or len(raw) != 2:
        raise ConfigurationError("idempotency is an app_id and a version")
    app_id, version = raw
    if isinstance(version, date):  # YAML reads dates by itself
        version = version.isoformat()
    if not isinstance(app_id, str) or not app_id:
        raise ConfigurationError(f"idempotency.app_id is a text, not {app_id!r}")
    if isinstance(version, bool) or not isinstance(version, int | str) or version == "":
        raise ConfigurationError(f"idempotency.version is a number or a text, not {version!r}")
    return app_id, version


def _members(name: str, raw: Any, known: Sequence[str]) -> None:
    if not isinstance(raw, Mapping):
        raise ConfigurationError(f"{name} is a mapping of {', '.join(known)}, not {raw!r}")
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigurationError(f"{name} has no member {key!r}; {hint}")


def _texts(name: str, raw: Any) -> dict[str, str]:
    """Names to texts. A YAML file may say `header: true` or `sep: 1` and means the text."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigurationError(f"{name} is a mapping of names to texts, not {raw!r}")
    found: dict[str, str] = {}
    for key, value in raw.items():
        if not isinstance(key, str) or not key or "=" in key:
            raise ConfigurationError(f"{name}: {key!r} is not a name")
        if not isinstance(value, str | int | float):
            raise ConfigurationError(f"{name}.{key} is a text, not {value!r}")
        found[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _optional_text(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigurationError(f"{name} is a text, not {value!r}")


def _one_of(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigurationError(f"{name} is one of {', '.join(known)}, not {value!r}")


def _set(target: Any, name: str, value: Any) -> None:
    object.__setattr__(target, name, value)
