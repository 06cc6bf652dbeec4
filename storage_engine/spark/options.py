"""Options of the `ontologia` data source: texts, checked all at once, with what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError
from storage_engine.model.validation import unknown_name
from storage_engine.query.spec import Reference
from storage_engine.spark.opening import parse_reference

_COMMON = ("storage_uri", "type", "models")
_READ = (
    *_COMMON,
    "as_of",
    "history",
    "since",
    "columns",
    "filter",
    "with_commit_id",
    "changes",
    "max_commits",
)
_WRITE = (
    *_COMMON,
    "app_id",
    "version",
    "order_by",
    "on_bad_rows",
    "quarantine",
    "target_part_bytes",
)
_SPARKS_OWN = frozenset({"checkpointlocation", "path", "queryname"})  # in every sink's options
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class Place:
    """A type in a storage. `config` is JSON, so that it travels."""

    uri: str
    type: str
    models: str | None
    config: str

    @classmethod
    def parse(cls, options: Mapping[str, str], known: tuple[str, ...]) -> Self:
        given = {name.lower(): value for name, value in options.items()}
        settings = {name.lower(): name for name in OntologiaConfig.model_fields}
        names = [*known, *settings]
        wrong = [
            f"{unknown_name(name, names, what='option')}"
            for name in given
            if name not in names and name not in _SPARKS_OWN
        ]
        if "path" in given:
            wrong.append("a path is given; the place of a storage goes into storage_uri")
        wrong += [
            f"the option {name} is missing"
            for name in ("storage_uri", "type")
            if not given.get(name, "").strip()
        ]
        if wrong:
            raise ConfigurationError(
                f"data source ontologia: {'; '.join(wrong)} (options are {', '.join(known)}, and "
                "settings of OntologiaConfig)"
            )
        config = OntologiaConfig(**{settings[n]: v for n, v in given.items() if n in settings})
        return cls(
            given["storage_uri"], given["type"], given.get("models"), config.model_dump_json()
        )

    @property
    def settings(self) -> OntologiaConfig:
        return OntologiaConfig.model_validate_json(self.config)


@dataclass(frozen=True)
class ReadOptions:
    """What `spark.read` and `spark.readStream` ask for."""

    place: Place
    as_of: Reference | None = None
    history: bool = False
    since: int | None = None
    columns: tuple[str, ...] | None = None
    filter: str | None = None
    with_commit_id: bool = False
    changes: bool = False
    max_commits: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        place = Place.parse(options, _READ)
        given = {name.lower(): value for name, value in options.items()}
        listed = [name.strip() for name in given.get("columns", "").split(",") if name.strip()]
        made = cls(
            place,
            as_of=parse_reference(given["as_of"]) if "as_of" in given else None,
            history=_flag(given, "history"),
            since=_number(given, "since", least=0),
            columns=tuple(listed) or None,
            filter=given.get("filter"),
            with_commit_id=_flag(given, "with_commit_id"),
            changes=_flag(given, "changes"),
            max_commits=_number(given, "max_commits", least=1),
        )
        if made.changes and made.history:
            raise ConfigurationError(
                "data source ontologia: history and changes contradict each other; changes are "
                "the history with an operation column"
            )
        return made


@dataclass(frozen=True)
class SinkOptions:
    """What `df.write` and `writeStream` ask for."""

    place: Place
    idempotency: tuple[str, int | str] | None = None
    app_id: str | None = None
    order_by: str | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> Self:
        place = Place.parse(options, _WRITE)
        given = {name.lower(): value for name, value in options.items()}
        app_id, version = given.get("app_id"), given.get("version")
        if streaming and version is not None:
            raise ConfigurationError(
                "data source ontologia: a stream has no version, each batch is one by itself; "
                "leave the option out"
            )
        if not streaming and (app_id is None) != (version is None):
            raise ConfigurationError(
                "data source ontologia: app_id and version go together, to name a unit of work "
                "that is written once"
            )
        idempotency = None
        if app_id is not None and version is not None:
            idempotency = (app_id, int(version) if version.isdecimal() else version)
        rest: dict[str, Any] = {}
        if "on_bad_rows" in given:
            rest["on_bad_rows"] = given["on_bad_rows"]
        if "quarantine" in given:
            rest["quarantine"] = given["quarantine"]
        if (size := _number(given, "target_part_bytes", least=1)) is not None:
            rest["target_part_bytes"] = size
        return cls(place, idempotency, app_id, given.get("order_by"), rest)


def _flag(given: Mapping[str, str], name: str) -> bool:
    value = given.get(name, "false").strip().lower()
    if value not in _FLAGS:
        raise ConfigurationError(
            f"data source ontologia: {name} takes true or false, not {given[name]!r}"
        )
    return _FLAGS[value]


def _number(given: Mapping[str, str], name: str, *, least: int) -> int | None:
    if name not in given:
        return None
    try:
        value = int(given[name])
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigurationError(
            f"data source ontologia: {name} takes a whole number from {least} on, not "
            f"{given[name]!r}"
        )
    return value
