"""What a storage URI or path means: a SQLite file or an object store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from storage_engine.errors import ConfigurationError

DEFAULT_PATH = "onto.db"
MEMORY = ":memory:"
_SQLITE_SUFFIXES = {".db", ".sqlite", ".sqlite3"}


@dataclass(frozen=True, slots=True)
class Target:
    """`sqlite_path` is set for SQLite; otherwise `uri` names an object store."""

    uri: str
    sqlite_path: str | None = None


def target_of(uri_or_path: str | Path | None) -> Target:
    """`onto.db`, `:memory:`, `sqlite:///path`, `file:///path`, a directory, `s3://bucket/prefix`.

    A plain path is a SQLite file when it is one, or ends like one; otherwise a directory.
    """
    text = str(uri_or_path) if uri_or_path is not None else DEFAULT_PATH
    if text == MEMORY:
        return Target("sqlite:///:memory:", MEMORY)
    if text.lower().startswith("sqlite:"):
        return _sqlite(text)
    if "://" in text:
        return Target(text)
    path = Path(text).expanduser()
    if path.is_file() or (not path.is_dir() and path.suffix.lower() in _SQLITE_SUFFIXES):
        return Target(f"sqlite:///{path}", str(path))
    return Target(text)


def bind(db_path: str | Path | None, storage_uri: str | None) -> Target:
    """RFC 0004 1.1: `db_path` means SQLite; both are allowed only if they mean the same file."""
    if storage_uri is None:
        return target_of(db_path)
    target = target_of(storage_uri)
    if db_path is None:
        return target
    path = str(db_path)
    stated = Target(f"sqlite:///{path}", path) if "://" not in path else target_of(path)
    if target.sqlite_path is None or not _same_file(stated.sqlite_path, target.sqlite_path):
        raise ConfigurationError(
            f"db path {path!r} and storage URI {storage_uri!r} name different storages; give one"
        )
    return target


def _sqlite(uri: str) -> Target:
    rest = uri[len("sqlite:") :]
    if not rest.startswith("///"):
        raise ConfigurationError(
            f"storage URI {uri!r} must have three slashes: sqlite:///relative/path.db, "
            "or four for an absolute path: sqlite:////data/onto.db"
        )
    path = unquote(rest[len("///") :])
    if not path:
        raise ConfigurationError(f"storage URI {uri!r} names no file")
    return Target(uri, path)


def _same_file(a: str | None, b: str) -> bool:
    if a is None:
        return False
    if MEMORY in (a, b):
        return a == b
    return Path(a).expanduser().resolve() == Path(b).expanduser().resolve()
