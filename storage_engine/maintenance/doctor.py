"""Is everything there that Ontologia needs? Each finding with what to do.

Looks at the machine (versions, Java, Dagster) and at the storage as a user of it does: credentials,
every permission by a request of its kind, whether conditional writes are honoured, clocks. The
only object that it writes is one of its own, which it deletes again.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from storage_engine import __version__
from storage_engine.commitlog import layout
from storage_engine.config import OntologiaConfig
from storage_engine.errors import OntologiaError, UninitializedStorageError
from storage_engine.objectstore.open import open_store, parse_uri, probe_conditional_writes
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.repository.open import Location, open_repository
from storage_engine.repository.protocol import Repository
from storage_engine.wording import counted

State = Literal["ok", "note", "warning", "problem"]
PYTHONS = ((3, 11), (3, 13))
OLDEST_JAVA = 17
SKEW_S = 5.0  # a lease is renewed long before this matters
_PACKAGES = ("duckdb", "pyarrow", "obstore", "boto3", "pydantic")
_JAVA_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was looked at, how it is, and what to do where that is not well."""

    about: str
    state: State
    what: str
    do: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)


def examine(target: Location, config: OntologiaConfig) -> Iterator[Diagnosis]:
    """One after the other, as they are made."""
    yield from machine()
    yield from storage(target, config)


# -- the machine ----------------------------------------------------------------------------------


def machine() -> Iterator[Diagnosis]:
    version = ".".join(map(str, sys.version_info[:3]))
    first, last = (".".join(map(str, each)) for each in PYTHONS)
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        yield Diagnosis("python", "ok", f"{version}, ontologia {__version__}")
    else:
        yield Diagnosis(
            "python",
            "warning",
            f"{version} is none that ontologia {__version__} is tested with",
            f"use Python {first} to {last}",
        )
    versions = {name: _version(name) for name in _PACKAGES}
    missing = [name for name, there in versions.items() if there is None]
    if missing:
        yield Diagnosis(
            "packages", "problem", f"{', '.join(missing)} missing", "pip install ontologia"
        )
    else:
        yield Diagnosis("packages", "ok", ", ".join(f"{n} {v}" for n, v in versions.items()))
    yield _spark()
    yield _dagster()


def _spark() -> Diagnosis:
    spark = _version("pyspark")
    if spark is None:
        return Diagnosis(
            "spark", "note", "pyspark is not installed", "pip install 'ontologia[spark]', if wanted"
        )
    java = _java()
    if java is None:
        return Diagnosis(
            "spark",
            "problem",
            f"pyspark {spark}, but no Java: neither JAVA_HOME nor the PATH has one that starts",
            f"install a JDK of version {OLDEST_JAVA} or later, or set JAVA_HOME",
        )
    version, program = java
    if version < OLDEST_JAVA:
        return Diagnosis(
            "spark",
            "problem",
            f"pyspark {spark} needs Java {OLDEST_JAVA}, and {program} is {version}",
            "install a later one, or set JAVA_HOME to it",
        )
    return Diagnosis("spark", "ok", f"pyspark {spark} with Java {version} ({program})")


def _java() -> tuple[int, str] | None:
    """Major version and path of the Java that Spark would start."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if program is None:
        return None
    try:
        told = subprocess.run(
            [program, "-version"],
            capture_output=True,
            text=True,
            timeout=_JAVA_TIMEOUT_S,
            check=True,
        ).stderr
        number = told.split('"')[1]
        first, _, rest = number.partition(".")
        return int(rest.partition(".")[0] if first == "1" else first), program
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def _dagster() -> Diagnosis:
    dagster = _version("dagster")
    if dagster is None:
        return Diagnosis(
            "dagster",
            "note",
            "dagster is not installed",
            "pip install 'ontologia[dagster]', if wanted",
        )
    home = os.environ.get("DAGSTER_HOME")
    if not home:
        return Diagnosis(
            "dagster",
            "note",
            f"dagster {dagster}; DAGSTER_HOME is not set, so that runs are forgotten when `dagster "
            "dev` ends",
            "export DAGSTER_HOME=/a/folder/that/lasts",
        )
    folder = Path(home)
    if not folder.is_absolute() or not folder.is_dir() or not os.access(folder, os.W_OK):
        return Diagnosis(
            "dagster",
            "problem",
            f"DAGSTER_HOME is {home}, which is no folder that can be written to, by a whole path",
            f"mkdir -p {home}, or set it to another",
        )
    return Diagnosis("dagster", "ok", f"dagster {dagster}, home {home}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- the storage ----------------------------------------------------------------------------------


def storage(target: Location, config: OntologiaConfig) -> Iterator[Diagnosis]:
    if target.sqlite_path is not None:
        yield from _database(target, config)
        return
    try:
        folder = parse_uri(target.uri).path
        if folder is not None and not folder.exists():
            yield Diagnosis("storage", "note", f"{folder} is not there yet", _init(target))
            return
        store = open_store(target.uri, config)
    except OntologiaError as error:
        yield Diagnosis("storage", "problem", str(error), "name another with --storage-uri")
        return
    try:
        reachable = True
        for finding in _requests(store):
            reachable &= finding.state != "problem"
            yield finding
        if reachable:
            yield _clock(store)
            yield _opened(target, config)
    finally:
        store.close()


def _requests(store: ObjectStore) -> Iterator[Diagnosis]:
    """A request of each kind, as the permissions of S3 are given for them."""
    key = layout.probe()
    asked: list[tuple[str, str, Callable[[], object]]] = [
        ("list", "s3:ListBucket on the bucket, for the prefix", lambda: next(store.list(""), None)),
        ("read", "s3:GetObject", lambda: _get(store, layout.HEAD)),
        ("write", "s3:PutObject", lambda: store.put(key, b"onto doctor")),
        ("delete", "s3:DeleteObject", lambda: store.delete_many([key])),
    ]
    for what, permission, ask in asked:
        try:
            ask()
        except OntologiaError as error:
            is_refusal = "denied" in str(error)
            advice = f"allow {permission}" if is_refusal else "mend this, and run it again"
            yield Diagnosis(what, "problem", str(error), advice)
            return
        yield Diagnosis(what, "ok", f"{store.uri} lets us {what}")
    try:
        probe_conditional_writes(store, key)
    except OntologiaError as error:
        yield Diagnosis(
            "conditional writes", "problem", str(error), "use a server that honours them"
        )
        return
    yield Diagnosis("conditional writes", "ok", "If-Match and If-None-Match are honoured")


def _get(store: ObjectStore, key: str) -> None:
    try:
        store.get(key)
    except ObjectNotFound:
        return  # who may read is told so


def _clock(store: ObjectStore) -> Diagnosis:
    skew = (store.now() - datetime.now(UTC)).total_seconds()
    if abs(skew) <= SKEW_S:
        return Diagnosis("clock", "ok", f"within {SKEW_S:.0f} s of the store's")
    way = "behind" if skew > 0 else "ahead of"
    return Diagnosis(
        "clock",
        "warning",
        f"this machine's clock is {abs(skew):.0f} s {way} the store's; leases go by the store's, "
        "times of commits by this one's",
        "let the machine keep its time (NTP)",
    )


def _database(target: Location, config: OntologiaConfig) -> Iterator[Diagnosis]:
    assert target.sqlite_path is not None
    folder = Path(target.sqlite_path).expanduser().absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Diagnosis(
            "write",
            "problem",
            f"{folder} is no folder that can be written to",
            f"mkdir -p {folder}, or name another file with --db",
        )
        return
    yield Diagnosis("write", "ok", f"{folder} can be written to")
    yield _opened(target, config)


def _init(target: Location) -> str:
    return f"onto init --storage-uri {shlex.quote(target.uri)}"


def _opened(target: Location, config: OntologiaConfig) -> Diagnosis:
    try:
        repository = open_repository(target, config)
    except UninitializedStorageError:
        return Diagnosis("storage", "note", f"{target.uri} is not initialised", _init(target))
    except OntologiaError as error:
        return Diagnosis("storage", "problem", str(error), "onto verify tells more")
    try:
        info = repository.storage_info()
        branches = _branches(repository)
    except OntologiaError as error:
        return Diagnosis("storage", "problem", str(error), "onto verify tells more")
    finally:
        repository.close()
    what = f"engine {info['engine_version']}, format {info['format']}"
    what += f", head at {info['head_commit_id']}{branches}"
    return Diagnosis("storage", "ok", f"{target.uri}: {what}")


def _branches(repository: Repository) -> str:
    """All of their heads are read: one that cannot be is a problem."""
    objects = repository.objects
    if objects is None or not objects.may_have_branches:
        return ""
    others = objects.branches.list()[1:]
    now = objects.store.now()
    expired = [branch.name for branch in others if branch.expired(now)]
    told = f" ({', '.join(expired[:3])} expired: onto gc --apply)" if expired else ""
    return f", {counted(len(others), 'branch', 'branches')} beside main{told}"
