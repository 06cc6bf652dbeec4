"""Looking at index objects, and spoiling them."""

from __future__ import annotations

import json
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.index.record import sealed
from storage_engine.model import TypeSpec
from tests.commitlog.support import World, Writer
from tests.engines import CUSTOMER, PRODUCT, product, rows_of


def index_of(world: World, spec: TypeSpec = CUSTOMER) -> dict[str, Any]:
    return world.document(layout.index(*spec.ref))


def watermark(world: World, spec: TypeSpec = CUSTOMER) -> int:
    return int(index_of(world, spec)["max_indexed_commit"])


def covered(world: World, spec: TypeSpec = CUSTOMER) -> list[int]:
    """The commits that have an entry of their own."""
    entries = index_of(world, spec)["entries"]
    assert all(e["min_commit_id"] == e["max_commit_id"] for e in entries)
    return [e["min_commit_id"] for e in entries]


def spoil(world: World, document: dict[str, Any], spec: TypeSpec = CUSTOMER) -> None:
    """Damage: no writer would leave it, as its hash is another."""
    world.backend.write(layout.index(*spec.ref), json.dumps(document).encode())


def unproven(document: dict[str, Any]) -> dict[str, Any]:
    """An index as it was written before indices could be proven."""
    return {n: v for n, v in document.items() if n not in ("sha256", "max_indexed_manifest")}


def resealed(document: dict[str, Any]) -> bytes:
    """As a writer would have left it."""
    unsealed = {name: value for name, value in document.items() if name != "sha256"}
    return sealed(json.dumps(unsealed).encode())


def set_back(document: dict[str, Any], commit_id: int) -> dict[str, Any]:
    """An index as it was at a commit."""
    kept = [e for e in document["entries"] if e["max_commit_id"] <= commit_id]
    following = document["entries"][len(kept) : len(kept) + 1]
    newest = document["max_indexed_manifest"]
    if following:
        newest = following[0].get("previous", {}).get("manifest_path")
    return {
        **document,
        "entries": kept,
        "max_indexed_commit": commit_id,
        "max_indexed_manifest": newest,
    }


def lag_behind(world: World, commit_id: int, spec: TypeSpec = CUSTOMER) -> None:
    """Set an index back to what it was when head was at `commit_id`."""
    document = set_back(index_of(world, spec), commit_id)
    world.backend.write(layout.index(*spec.ref), resealed(document))


def put_product(writer: Writer, key: str, price: float) -> int:
    result = writer.commit(rows_of(PRODUCT, product(key, price)))
    assert result is not None
    return result.commit_id


class Watch:
    """The keys that a client asks for from now on."""

    def __init__(self, writer: Writer) -> None:
        self.seen: list[tuple[str, str]] = []
        writer.store.on_request(lambda kind, key: self.seen.append((kind, key)))

    def gets(self, part: str) -> list[str]:
        return [key for kind, key in self.seen if kind == "GET" and part in key]

    def puts(self, part: str) -> list[str]:
        return [key for kind, key in self.seen if kind.startswith("PUT") and part in key]
