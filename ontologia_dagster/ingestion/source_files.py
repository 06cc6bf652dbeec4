"""Which files a path of a source names, seen without Spark: to tell when they have changed.

Paths are Hadoop's, as Spark reads them: `*` and `?` stay within a folder, `[ab]` and `[^ab]` are
one character, `{a,b}` is either, a backslash takes a character as it is, and a folder stands for
what is in it except names that begin with `_` or `.`. Directories and S3 can be looked at; of any
other file system nobody here can tell.
"""

from __future__ import annotations

import glob
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from storage_engine.errors import StorageBackendError

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource

PARTITION_KEY = "{partition_key}"
_MARK = "\ue000"  # stands for the partition's key while a path is taken apart
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<rest>/.*)", re.S)
_S3 = frozenset({"s3", "s3a"})
_AT_ONCE = 16  # paths that are looked at
_ANSWER_S = 20.0  # in which a server answers; Dagster ends a tick after 60
_SPECIAL = re.compile(r"[*?\[{\\]")


@dataclass(frozen=True, order=True)
class SourceFile:
    """A file as it is now: `state` is another one whenever its content is."""

    name: str
    state: str


class SourceFiles:
    """Looks at files; on S3 as the storage's own S3Resource says, through one client."""

    def __init__(self, ontology: OntologyResource) -> None:
        self._ontology = ontology
        self._heard_at = 0.0  # when a server answered last

    def at(self, path: str) -> list[SourceFile] | None:
        """The files that a path names, by name; None where nobody can tell. StorageBackendError
        when a server does not answer."""
        return self.at_each([path])[0]

    def at_each(self, paths: Sequence[str]) -> list[list[SourceFile] | None]:
        """The same of many paths, together."""
        if any(_parts(path)[0] in _S3 for path in paths):
            self._client  # noqa: B018 - made by one thread, used by all
        self._heard_at = time.monotonic()
        waiting = list(enumerate(paths))[::-1]
        done: SimpleQueue[tuple[int, Any]] = SimpleQueue()

        def look() -> None:
            while waiting:
                try:
                    number, path = waiting.pop()
                except IndexError:
                    return  # another was faster
                try:
                    done.put((number, self._at(path)))
                except Exception as error:  # noqa: BLE001 - raised where it is waited for
                    done.put((number, error))

        for _ in range(min(_AT_ONCE, len(paths))):
            # One that is stuck must not keep its process from ending.
            threading.Thread(target=look, name="onto-source-files", daemon=True).start()
        files: dict[int, list[SourceFile] | None] = {}
        try:
            while len(files) < len(paths):
                number, outcome = self._next(done, paths)
                if isinstance(outcome, BaseException):
                    raise outcome
                files[number] = outcome
        finally:
            waiting.clear()
        return [files[number] for number in range(len(paths))]

    def _next(self, done: SimpleQueue[tuple[int, Any]], paths: Sequence[str]) -> tuple[int, Any]:
        while True:
            patience = self._heard_at + _ANSWER_S - time.monotonic()
            if patience <= 0:
                more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
                raise StorageBackendError(
                    f"{paths[0]}{more}: no answer for {_ANSWER_S:g} s from "
                    f"{self._ontology.s3.endpoint_url or 'S3'}: check the network and the endpoint",
                    operation="list",
                    retryable=True,
                )
            with suppress(Empty):
                return done.get(timeout=patience)

    def _at(self, path: str) -> list[SourceFile] | None:
        scheme, bucket, rest = _parts(path)
        if scheme == "file":
            return sorted(set(_local(rest)))
        if scheme in _S3:
            return sorted(set(self._on_s3(bucket, rest)))
        return None

    def by_key(self, path: str, keys: Sequence[str]) -> dict[str, list[SourceFile]] | None:
        """Of a path with `{partition_key}` in it the files of each of these keys, by one look.

        Keys must not be parts of each other, as those of time partitions never are.
        """
        listed = self.at(path.replace(PARTITION_KEY, "*"))
        if listed is None:
            return None
        named = _keyed(path, keys)
        by_key: dict[str, list[SourceFile]] = {key: [] for key in keys}
        for file in listed:
            for key in {
                match["key"] for pattern in named if (match := pattern.fullmatch(file.name))
            }:
                by_key[key].append(file)
        return by_key

    def _on_s3(self, bucket: str, key: str) -> Iterator[SourceFile]:
        whole = key.rstrip("/")
        named = "|".join(_regex(alternative) for alternative in alternatives(whole))
        inside = re.compile(f"(?:{named})(?:/(?P<below>.*))?" if whole else "(?P<below>.*)", re.S)
        for page in self._pages(bucket, _SPECIAL.split(whole, maxsplit=1)[0]):
            for item in page.get("Contents", []):
                match = inside.fullmatch(item["Key"])
                if match and not item["Key"].endswith("/") and not _is_hidden(match["below"] or ""):
                    name = f"s3://{bucket}/{item['Key']}"
                    yield SourceFile(name, f"{item['Size']} {item['ETag']}")

    def _pages(self, bucket: str, prefix: str) -> Iterator[Any]:
        pages = self._client.get_paginator("list_objects_v2")
        try:
            for page in pages.paginate(Bucket=bucket, Prefix=prefix):
                self._heard_at = time.monotonic()
                yield page
        except Exception as error:
            # botocore's, which only the engine's S3 adapter imports. A server that has answered
            # would say the same again.
            raise StorageBackendError(
                f"s3://{bucket}/{prefix} cannot be listed: {error}",
                operation="list",
                retryable=not hasattr(error, "response"),
            ) from error

    @cached_property
    def _client(self) -> Any:
        return self._ontology.s3.get_client()


def alternatives(path: str) -> list[str]:
    """A path for each choice that its braces leave."""
    begin = _opening(path)
    if begin is None:
        return [path]
    choices, end = _choices(path, begin)
    rest = alternatives(path[end:])
    return [
        path[:begin] + inner + after
        for choice in choices
        for inner in alternatives(choice)
        for after in rest
    ]


def _opening(path: str) -> int | None:
    """Where the first brace is that has an end; an escaped one is a character."""
    at = 0
    while at < len(path):
        if path[at] == "\\":
            at += 1
        elif path[at] == "{" and _choices(path, at)[1] > 0:
            return at
        at += 1
    return None


def _choices(path: str, begin: int) -> tuple[list[str], int]:
    """What stands between the commas of a brace, and where it ends; 0 when it does not."""
    choices, depth, start, at = [], 0, begin + 1, begin
    while at < len(path):
        character = path[at]
        if character == "\\":
            at += 1
        elif character == "{":
            depth += 1
        elif character in ",}" and depth == 1:
            choices.append(path[start:at])
            start = at + 1
            if character == "}":
                return choices, at + 1
        elif character == "}":
            depth -= 1
        at += 1
    return choices, 0


def _parts(path: str) -> tuple[str, str, str]:
    """Scheme, bucket or host, and the rest."""
    match = _SCHEME.fullmatch(path)
    if match is None:
        return "file", "", path
    scheme, rest = match["scheme"].lower(), match["rest"]
    if not rest.startswith("//"):
        return scheme, "", rest
    host, slash, below = rest[2:].partition("/")
    return scheme, host, below if scheme in _S3 else slash + below


def _keyed(path: str, keys: Sequence[str]) -> list[re.Pattern[str]]:
    """What the names of files match, with the key that they are of."""
    scheme, bucket, rest = _parts(path.replace(PARTITION_KEY, _MARK))
    key_pattern = f"(?P<key>{'|'.join(re.escape(key) for key in keys)})"
    place = re.escape(f"s3://{bucket}/") if scheme in _S3 else ""
    named = [
        _regex(alternative).replace(_MARK, key_pattern, 1)
        for alternative in alternatives(rest.rstrip("/"))
    ]
    return [
        re.compile(f"{place}{pattern.replace(_MARK, '(?P=key)')}(?:/.*)?", re.S)
        for pattern in named
    ]


def _regex(path: str) -> str:
    return "".join(_piece(piece, "[^/]*", "[^/]", "^", re.escape) for piece in _pieces(path))


def _as_glob(path: str) -> str:
    return "".join(_piece(piece, "*", "?", "!", glob.escape) for piece in _pieces(path))


def _pieces(path: str) -> Iterator[str]:
    """Characters one by one; an escaped one with its backslash, a set of them with its brackets."""
    for match in re.finditer(r"\\.|\[[\^!]?\]?[^\]]*\]|.", path, re.S):
        yield match.group()


def _piece(piece: str, many: str, single: str, but: str, escape: Callable[[str], str]) -> str:
    """In the language of regular expressions or of `glob`."""
    if piece in ("*", "?"):
        return many if piece == "*" else single
    if len(piece) > 1 and piece[0] == "[":
        negated = piece[1] in "^!"
        return f"[{but if negated else ''}{piece[1 + negated : -1]}]"
    return escape(piece[-1])


def first_local_file(path: str) -> Path | None:
    """Some file that a path on this machine names, without looking at all of them."""
    scheme, _, rest = _parts(path)
    if scheme != "file":
        return None
    for alternative in alternatives(rest):
        for place in glob.iglob(_as_glob(alternative)):
            for file in _in(place):
                return Path(file.name)
    return None


def _local(path: str) -> Iterator[SourceFile]:
    for alternative in alternatives(path):
        for place in glob.glob(_as_glob(alternative)):
            yield from _in(place)


def _in(root: str) -> Iterator[SourceFile]:
    top = Path(root)
    for file in top.rglob("*") if top.is_dir() else [top]:
        below = file.relative_to(top).as_posix() if file != top else ""
        if file.is_file() and not _is_hidden(below):
            facts = file.stat()
            name = f"{root.rstrip('/')}/{below}" if below else root
            yield SourceFile(name, f"{facts.st_size} {facts.st_mtime_ns}")


def _is_hidden(below: str) -> bool:
    """As Spark passes over them: what other programs keep beside data, or have not finished."""
    return any(
        name.startswith(".") or (name.startswith("_") and "=" not in name)
        for name in below.split("/")
    )
