"""Where a location works: `ONTOLOGIA_ENV` selects the storage, its prefix and Spark's settings.

Environments are tables of a TOML file (`environments.toml`, or what `ONTOLOGIA_ENVIRONMENTS`
names). Without one there is `development` alone: a directory, and Spark in process. Nothing here
opens a storage, and no secret is read: fields that hold one name the variable it is in.

A location that is not production never gets at a production storage: its URI is refused when the
definitions are loaded, and again whenever the resource is opened. Storages of one environment never
lie inside each other.
"""

from __future__ import annotations

import os
import posixpath
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic import ValidationError as PydanticValidationError

from ontologia_dagster.resources.branches import (
    DIRECT,
    Publish,
    checked_branch,
    checked_retention,
    location_branch,
    refuse_without_branches,
)
from storage_engine.errors import ConfigurationError
from storage_engine.repository.open import DEFAULT_FOLDER, STORAGE_URI_VARIABLE, target_of

ENVIRONMENT_VARIABLE = "ONTOLOGIA_ENV"
FILE_VARIABLE = "ONTOLOGIA_ENVIRONMENTS"
DEFAULT_FILE = "environments.toml"
DEVELOPMENT = "development"
PRODUCTION = "production"
_PRODUCTION_WORDS = frozenset({"prod", "production"})
_TENANT = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class S3Table(_Table):
    """How to reach S3. Secrets are named by the variable that holds them, never given."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_id_variable: str | None = None
    secret_access_key_variable: str | None = None
    session_token_variable: str | None = None


class SparkTable(_Table):
    """How ingestion runs: in this process, or on a cluster through Pipes and spark-submit."""

    mode: Literal["in_process", "pipes"] = "in_process"
    master: str | None = None
    config: Mapping[str, str] = Field(default_factory=dict)
    submit_arguments: tuple[str, ...] = ()


class TenantTable(_Table):
    """One more storage of the location, by a prefix of its own (or another URI altogether)."""

    prefix: str = ""
    storage_uri: str | None = None
    s3: S3Table | None = None


class Environment(_Table):
    """One environment: its storage, its tenants, its Spark."""

    name: str = DEVELOPMENT
    storage_uri: str = DEFAULT_FOLDER
    prefix: str = ""
    production: bool = False
    runtime_id: str = "dagster"
    engine: Mapping[str, Any] = Field(default_factory=dict)
    webhook_url_variable: str | None = None
    explore_url: str | None = None
    s3: S3Table = S3Table()
    spark: SparkTable = SparkTable()
    handlers: tuple[str, ...] = ()
    create_storage: bool | None = None
    publish: Publish = DIRECT
    recheck: bool = False
    branch_retention: str = "7d"
    branch: str | None = None
    tenants: Mapping[str, TenantTable] = Field(default_factory=dict)

    @field_validator("branch_retention")
    @classmethod
    def _is_retention(cls, text: str) -> str:
        return checked_retention(text)

    @property
    def uri(self) -> str:
        """The storage of the environment itself."""
        return join_uri(self.storage_uri, self.prefix)

    def uri_of(self, tenant: str) -> str:
        """Beside the environment's own storage: under the tenant's prefix, or a storage URI that
        is its own. Without either, the environment's prefix is part of the name."""
        table = self.tenants[tenant]
        if table.storage_uri is not None:
            return join_uri(table.storage_uri, table.prefix)
        own = "-".join(filter(None, [self.prefix.strip("/"), tenant]))
        return join_uri(self.storage_uri, table.prefix or own)

    def creates(self, uri: str) -> bool:
        """Whether a storage that is not there is made when it is first used: unless told, in
        development, and on this machine. Anywhere else a wrong name would make an empty one."""
        if self.create_storage is not None:
            return self.create_storage
        return self.name == DEVELOPMENT and _is_local(uri)

    @property
    def uris(self) -> list[str]:
        return [self.uri, *(self.uri_of(tenant) for tenant in self.tenants)]


class Environments(_Table):
    """All that are known, and which one this process works in."""

    known: Mapping[str, Environment]
    current: Environment

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the file, choose by ONTOLOGIA_ENV, and refuse a storage that is not ours to use."""
        environments_by_name = _known(environ)
        name = environ.get(ENVIRONMENT_VARIABLE) or DEVELOPMENT
        if name not in environments_by_name:
            raise ConfigurationError(
                f"{ENVIRONMENT_VARIABLE} is {name!r}, which is none of the environments: "
                f"{', '.join(sorted(environments_by_name))}; {_what_next(environ, name)}"
            )
        current = environments_by_name[name]
        override = environ.get(STORAGE_URI_VARIABLE)
        if override:
            current = current.model_copy(
                update={
                    "storage_uri": override,
                    "prefix": "",
                    "tenants": {
                        tenant: table.model_copy(
                            update={"storage_uri": current.uri_of(tenant), "prefix": ""}
                        )
                        for tenant, table in current.tenants.items()
                    },
                }
            )
        own = location_branch(environ) or checked_branch(current.branch, f"[{name}]: branch")
        current = current.model_copy(update={"branch": own})
        environments = cls(known=environments_by_name, current=current)
        for uri in current.uris:
            environments.guard(uri)
            refuse_without_branches(uri, current.publish, current.branch)
        _refuse_nesting(current)
        return environments

    def guard(self, uri: str) -> None:
        """Refuse a production storage anywhere but in production."""
        if not self.current.production:
            refuse_production(uri, self.current.name, self.production_uris)

    @property
    def production_uris(self) -> tuple[str, ...]:
        return tuple(
            uri
            for environment in self.known.values()
            if environment.production
            for uri in environment.uris
        )


def refuse_production(uri: str, environment: str, production_uris: tuple[str, ...]) -> None:
    """Raise when `uri` is a production storage: listed as one, inside or around one, or named like
    one. How it is spelled makes no difference."""
    meant = canonical_uri(uri)
    why = None
    for production_uri in production_uris:
        if _is_inside(meant, canonical_uri(production_uri)):
            why = f"it is production's {production_uri}"
        elif _is_inside(canonical_uri(production_uri), meant):
            why = f"production's {production_uri} is inside it"
    if why is None and _PRODUCTION_WORDS & set(re.split(r"[/\\]+", meant.lower())):
        why = "its prefix says production"
    if why is not None:
        raise ConfigurationError(
            f"the {environment} location refuses the storage {uri}: {why}. Set "
            f"{ENVIRONMENT_VARIABLE}={PRODUCTION} where production is meant, or name another prefix"
        )


def join_uri(uri: str, prefix: str) -> str:
    """A prefix under a storage URI; directories become absolute, as runs start elsewhere."""
    prefix = prefix.strip("/")
    if "://" in uri:
        return f"{uri.rstrip('/')}/{prefix}" if prefix else uri
    path = Path(uri).expanduser()
    return str((path / prefix if prefix else path).resolve())


def canonical_uri(uri: str) -> str:
    """One spelling for each place, to compare: an absolute path, or scheme://bucket/prefix."""
    sqlite = target_of(uri).sqlite_path
    scheme, mark, rest = uri.partition("://")
    if sqlite is not None:
        path = sqlite
    elif not mark:
        path = uri
    elif scheme.lower() == "file":
        path = "/" + unquote(rest).partition("/")[2]
    else:
        bucket, _, key = rest.partition("/")
        key = posixpath.normpath(f"/{key}").strip("/")
        return f"{scheme.lower()}://{bucket}/{key}".rstrip("/")
    return str(Path(path).expanduser().resolve())


def _is_local(uri: str) -> bool:
    scheme, mark, _ = uri.partition("://")
    return not mark or scheme.lower() in ("file", "sqlite")


def _is_inside(inner: str, other: str) -> bool:
    return inner == other or inner.startswith(other.rstrip("/") + "/")


def _refuse_nesting(environment: Environment) -> None:
    """A storage inside another one would be taken for its garbage, and for its data by policies."""
    named = {"the environment's own": environment.uri} | {
        f"the tenant {tenant}'s": environment.uri_of(tenant) for tenant in environment.tenants
    }
    for outer, around in named.items():
        for inner, uri in named.items():
            if inner != outer and _is_inside(canonical_uri(uri), canonical_uri(around)):
                raise ConfigurationError(
                    f"[{environment.name}]: {inner} storage {uri} is inside {outer}, {around}. "
                    "Give the environment a `prefix`, so that tenants are beside it, or the tenant "
                    "a `prefix` or `storage_uri` of its own"
                )


def _what_next(environ: Mapping[str, str], name: str) -> str:
    path = Path(environ.get(FILE_VARIABLE) or DEFAULT_FILE).absolute()
    if path.is_file():
        return f"correct the name, or add [{name}] to {path}"
    return (
        f"correct the name, or let {FILE_VARIABLE} name the file that has it: there is no {path}, "
        f"and without a file there is {DEVELOPMENT} alone"
    )


def _known(environ: Mapping[str, str]) -> dict[str, Environment]:
    stated = environ.get(FILE_VARIABLE)
    path = Path(stated or DEFAULT_FILE)
    if not path.is_file():
        if stated:
            raise ConfigurationError(f"{FILE_VARIABLE} names {stated}, which is no file")
        return {DEVELOPMENT: Environment()}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read as TOML: {error}") from error
    environments = {name: _environment(path, name, table) for name, table in tables.items()}
    environments.setdefault(DEVELOPMENT, Environment())
    return environments


def _environment(path: Path, name: str, table: Any) -> Environment:
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: {name} must be a table, [{name}]")
    try:
        environment = Environment(**{"name": name, "production": name == PRODUCTION, **table})
    except PydanticValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors()
        )
        raise ConfigurationError(f"{path}: [{name}]: {problems}") from None
    for tenant in environment.tenants:
        if not _TENANT.fullmatch(tenant):
            raise ConfigurationError(
                f"{path}: [{name}.tenants.{tenant}]: a tenant's name is letters, digits and _"
            )
    return environment
