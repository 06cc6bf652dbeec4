"""Byte order for listings of servers that keep keys as a tree of folders, as SeaweedFS does.

Such a server lists `a/c` before `a.txt`, because it compares names folder by folder; S3 lists
`a.txt` first, because `.` comes before `/`. Only entries beside a folder whose names continue the
folder's by a character below `/` are out of place, so no more than those is held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from storage_engine.objectstore.port import ObjectInfo


def in_byte_order(found: Iterable[ObjectInfo], prefix: str) -> Iterator[ObjectInfo]:
    """The same objects in byte order of the key, from an order by folders (or by bytes)."""
    base = len(prefix.rpartition("/")[0])
    base += 1 if base else 0
    folder = ""  # Its objects wait in `held` until its siblings have passed.
    held: list[ObjectInfo] = []
    for info in found:
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
