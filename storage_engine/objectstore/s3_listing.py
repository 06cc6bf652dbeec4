"""Listings of S3 servers: in byte order whatever the server does, and read quickly.

A server that keeps keys as a tree of folders, as SeaweedFS does, lists `a/c` before `a.txt`,
because it compares names folder by folder; S3 lists `a.txt` first, because `.` comes before `/`.
Only entries beside a folder whose names continue the folder's by a character below `/` are out of
place, so no more than those is held back.

botocore's parser goes through every element of a page by the model of S3, 0.05 ms a key; a worker
that starts after a burst of events, or `gc`, reads a hundred thousand keys. Here the keys are cut
out of the answer first, in a third of the processor time, and botocore parses what is left:
whether there is more, or what is wrong. An answer that does not look as expected is left to it
altogether.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from html import unescape
from typing import Any

from storage_engine.objectstore.protocol import ObjectInfo


def in_byte_order(listed: Iterable[ObjectInfo], prefix: str) -> Iterator[ObjectInfo]:
    """The same objects in byte order of the key, from an order by folders (or by bytes)."""
    base = len(prefix.rpartition("/")[0])
    base += 1 if base else 0
    folder = ""  # Its objects wait in `held` until its siblings have passed.
    held: list[ObjectInfo] = []
    for info in listed:
        name, slash, _ = info.key[base:].partition("/")
        if folder and (name == folder or _sorts_before(name, folder)):
            held.append(info)
            continue
        yield from sorted(held, key=lambda waiting: waiting.key)
        folder, held = (name, [info]) if slash else ("", [])
        if not slash:
            yield info
    yield from sorted(held, key=lambda waiting: waiting.key)


def _sorts_before(name: str, folder: str) -> bool:
    """Whether `name` comes after `folder` by names but before `folder/` by bytes."""
    return name.startswith(folder) and name[len(folder)] < "/"


def just_before(key: str) -> str:
    """A place shortly before `key` in either order, from which to list for what follows it.

    Asked for what follows `a/b`, a server of folders leaves out the folder `a/b/`, although its
    objects do follow by bytes. From here it lists them; the few too many are left out later.
    """
    last = key[-1:]
    if not (last.isascii() and last.isalnum()):
        return key
    return key[:-1] + chr(ord(last) - 1) + "~"


def take_contents(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any
) -> None:
    """botocore's `before-parse` of ListObjectsV2: what is put in the second goes in the result."""
    body: bytes = response_dict["body"]
    if response_dict["status_code"] != 200 or not body.rstrip().endswith(b"</ListBucketResult>"):
        return
    try:
        text = body.decode()
        before, *items = text.split("<Contents>")
        contents, after = [], []
        for item in items:
            content, end, rest = item.partition("</Contents>")
            if not end:
                return
            contents.append(_parsed(content))
            after.append(rest)
    except (UnicodeDecodeError, ValueError):
        return
    if contents:
        customized_response_dict["Contents"] = contents
        response_dict["body"] = "".join([before, *after]).encode()


def _parsed(content: str) -> dict[str, Any]:
    key = _between(content, "<Key>", "</Key>")
    return {
        "Key": unescape(key) if "&" in key else key,
        "Size": int(_between(content, "<Size>", "</Size>")),
        "LastModified": datetime.fromisoformat(
            _between(content, "<LastModified>", "</LastModified>")
        ),
    }


def _between(text: str, begin: str, end: str) -> str:
    """ValueError where one of the two is missing."""
    start = text.index(begin) + len(begin)
    return text[start : text.index(end, start)]
