"""From engine v1 to v2: a v2 storage is built beside the v1 one, with all of its history, and
compared with it.

Never in place. The engines keep rows in different files and tables, and v1 and v2 are never mixed
in one storage (RFC 0009), so there is no single write that would turn one into the other; and a
SQLite file that is swapped by renaming loses what open sessions write to the old one. The source is
not written to: until somebody points programs at the new storage, nothing has happened.

The preview prints a token, which names the source, the target and the head that was looked at. With
it exactly that much is migrated, also where the source goes on: what came since is brought by a
preview and a run more, the last of them after the writers were stopped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError, MigrationTokenError
from storage_engine.repository.open import LATEST_ENGINE, Location, target_of
from storage_engine.repository.protocol import Repository
from storage_engine.transfer.compare import Progress
from storage_engine.transfer.copy import CopyReport, copy_storage
from storage_engine.transfer.ends import opened_source

_SUFFIX = f"-{LATEST_ENGINE}"


@dataclass(frozen=True, slots=True)
class EngineMigration:
    """A plan with its token, or (with `applied`) what was done."""

    copy: CopyReport
    token: str

    @property
    def applied(self) -> bool:
        return self.copy.applied

    def as_dict(self) -> dict[str, Any]:
        return {**self.copy.as_dict(), "token": self.token}


def migrate_engine(
    source: str | Path | Location,
    target: str | Path | Location | None = None,
    *,
    apply: bool = False,
    token: str | None = None,
    config: OntologiaConfig | None = None,
    target_config: OntologiaConfig | None = None,
    progress: Progress | None = None,
) -> EngineMigration:
    """Say what building the v2 storage would do or, with the token of that, do it.

    `target`: by default beside the source, with `-v2` at the end of its name. Raises
    MigrationTokenError when the token does not fit, CopyRefusedError when the target holds
    something else.
    """
    if token is not None and not apply:
        raise ConfigurationError("a token goes with --apply")
    config = config or OntologiaConfig()
    here = source if isinstance(source, Location) else target_of(source)
    if target is None:
        there = beside(here)
    else:
        there = target if isinstance(target, Location) else target_of(target)
    with opened_source(here, config) as repository:
        _check_engine(repository)
        head = repository.head_commit_id()
        if apply:
            head = _head_of(token, head)
        needed = _token(repository, there, head)
    if apply and token != needed:
        raise _unfit(here, token)
    report = copy_storage(
        here,
        there,
        apply=apply,
        engine_version=LATEST_ENGINE,
        upto=head,
        config=config,
        target_config=target_config,
        progress=progress,
    )
    return EngineMigration(report, needed)


def beside(location: Location) -> Location:
    """Where the new storage is made unless told."""
    if location.sqlite_path is not None:
        path = Path(location.sqlite_path)
        name = str(path.with_name(f"{path.stem}{_SUFFIX}{path.suffix}"))
        return Location(f"sqlite:///{quote(name)}", name)
    uri = location.uri.rstrip("/")
    scheme, _, rest = uri.partition("://")
    if scheme == "s3" and len(PurePosixPath(rest).parts) < 2:
        raise ConfigurationError(
            f"{uri} is a whole bucket, beside which nothing can be put: name the new storage with "
            "--to, such as another bucket"
        )
    return Location(f"{uri}{_SUFFIX}")


def _check_engine(repository: Repository) -> None:
    if repository.engine_version == LATEST_ENGINE:
        raise ConfigurationError(
            f"{repository.uri} is kept by engine {LATEST_ENGINE}: there is nothing to migrate "
            "(`onto copy` copies it)"
        )


def _head_of(token: str | None, head: int) -> int:
    """The head that a token was given for."""
    number = (token or "").partition("-")[0]
    return min(int(number), head) if number.isdecimal() else head


def _token(repository: Repository, target: Location, head: int) -> str:
    """The commit at head is part of it: one whose history was put back does not fit."""
    newest = repository.get_commit(head)
    state = {
        "source": repository.uri,
        "log": repository.history.identity(),
        "target": target.uri,
        "head": newest.as_dict() if newest is not None else None,
    }
    text = json.dumps(state, sort_keys=True, default=str)
    return f"{head}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _unfit(location: Location, token: str | None) -> MigrationTokenError:
    problem = "needs a token" if token is None else "was given a token that does not fit"
    return MigrationTokenError(
        f"migrating {location.uri} {problem}: run `onto migrate-engine` without --apply, for the "
        "same storages, and pass the token that it prints with --token"
    )
