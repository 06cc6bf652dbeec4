"""For each known type, the commit that last touched it: inline in the manifest while there are few
types, in buckets when there are many.

A bucket holds the heads of the types whose names hash to its number. A commit writes the buckets
of the types that it touches, a few of them together as one object, and names those of its parent
for the rest, so that its cost does not grow with the number of types. Such an object stays as long
as the manifest that it was written with.
"""

from __future__ import annotations

import hashlib
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    ValuesView,
)
from dataclasses import dataclass, replace

from storage_engine.commitlog.parsing import parsing, require_object
from storage_engine.commitlog.records import (
    TYPES_IN_A_BUCKET,
    BucketRef,
    BucketTable,
    ManifestLink,
    TypeHead,
    TypeRef,
    from_json,
    parse_type_heads,
    sha256,
    to_json,
    type_heads_json,
)
from storage_engine.errors import IntegrityError

INLINE_TYPES = 100
_FEWEST_BUCKETS = 64
_FULL_BUCKET = TYPES_IN_A_BUCKET  # on average, above which there are four times as many buckets
_TOGETHER = 8  # buckets in one object

Bucket = Mapping[TypeRef, TypeHead]
BucketObject = Mapping[int, Bucket]  # by number
Load = Callable[[Sequence[BucketRef]], Sequence[BucketObject]]


class BucketedTypeHeads(Mapping[TypeRef, TypeHead]):
    """Type heads that are read bucket by bucket, as they are asked for."""

    def __init__(self, table: BucketTable, load: Load) -> None:
        self.table = table
        self._load = load

    def __getitem__(self, ref: TypeRef) -> TypeHead:
        return self.bucket(bucket_number(ref, len(self.table.buckets)))[ref]

    def __iter__(self) -> Iterator[TypeRef]:
        return iter(self._all())

    def items(self) -> ItemsView[TypeRef, TypeHead]:
        return self._all().items()

    def values(self) -> ValuesView[TypeHead]:
        return self._all().values()

    def _all(self) -> dict[TypeRef, TypeHead]:
        """IntegrityError where a type is in another bucket than the one it is looked for in."""
        refs = list(dict.fromkeys(ref for ref in self.table.buckets if ref is not None))
        objects = dict(zip(refs, self._load(refs), strict=True))
        count = len(self.table.buckets)
        heads: dict[TypeRef, TypeHead] = {}
        for number, ref in enumerate(self.table.buckets):
            if ref is None:
                continue
            bucket = _bucket_in(objects[ref], number, ref)
            for kind, name in bucket:
                if bucket_number((kind, name), count) != number:
                    raise IntegrityError(
                        f"{ref.path} has the {kind} {name} in bucket {number} of {count}, where "
                        "nobody looks for it: it is damaged, or the list of buckets is",
                        key=ref.path,
                    )
            heads.update(bucket)
        return heads

    def __len__(self) -> int:
        return self.table.types

    def bucket(self, number: int) -> Bucket:
        ref = self.table.buckets[number]
        return _bucket_in(self._load([ref])[0], number, ref) if ref is not None else {}


class LiveTypes(Set[TypeRef]):
    """The types that were not dropped. To ask for one costs no more than to ask for its head."""

    def __init__(self, heads: Mapping[TypeRef, TypeHead]) -> None:
        self._heads = heads

    @classmethod
    def _from_iterable(cls, it: Iterable[TypeRef]) -> Set[TypeRef]:  # type: ignore[override]
        return set(it)

    def __contains__(self, ref: object) -> bool:
        head = self._heads.get(ref)  # type: ignore[call-overload]
        return head is not None and not head.is_dropped

    def __iter__(self) -> Iterator[TypeRef]:
        return (ref for ref, head in self._heads.items() if not head.is_dropped)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class NextTypeHeads:
    """What the next manifest has, and the buckets to write with it."""

    inline: Mapping[TypeRef, TypeHead] | None
    table: BucketTable | None = None
    uploads: Sequence[tuple[str, bytes]] = ()


def next_type_heads(
    before: Mapping[TypeRef, TypeHead],
    touched: Mapping[TypeRef, TypeHead],
    parent: ManifestLink | None,
    bucket_key: Callable[[int], str],
) -> NextTypeHeads:
    """The heads before with those of the touched types.

    What the parent wrote about itself lacks the parent's hash: it is known now.
    """
    if not isinstance(before, BucketedTypeHeads):
        heads = {**_proven(before, parent), **touched}
        if len(heads) <= INLINE_TYPES:
            return NextTypeHeads(heads)
        return _all_buckets(heads, bucket_key)
    table = before.table
    count = len(table.buckets)
    changed: dict[int, dict[TypeRef, TypeHead]] = {}
    for ref, head in touched.items():
        number = bucket_number(ref, count)
        if number not in changed:
            changed[number] = _proven(before.bucket(number), parent)
        changed[number][ref] = head
    types = table.types + sum(
        len(bucket) - len(before.bucket(number)) for number, bucket in changed.items()
    )
    if types > count * _FULL_BUCKET:
        return _all_buckets({**_proven(before, parent), **touched}, bucket_key)
    return _written(types, table.buckets, changed, bucket_key)


def bucket_number(ref: TypeRef, count: int) -> int:
    digest = hashlib.sha256("/".join(ref).encode()).digest()
    return int.from_bytes(digest[:4], "big") % count


def parse_buckets(data: bytes, *, key: str) -> BucketObject:
    raw = from_json(data, key=key)
    with parsing(key, "bucket of type heads"):
        return {int(number): parse_type_heads(require_object(raw, number)) for number in raw}


def _bucket_in(buckets: BucketObject, number: int, ref: BucketRef) -> Bucket:
    if number not in buckets:
        raise IntegrityError(
            f"{ref.path} has no bucket {number}, which the manifest says is in it", key=ref.path
        )
    return buckets[number]


def _all_buckets(
    heads: Mapping[TypeRef, TypeHead], bucket_key: Callable[[int], str]
) -> NextTypeHeads:
    count = _FEWEST_BUCKETS
    while len(heads) > count * _FULL_BUCKET:
        count *= 4
    contents: dict[int, dict[TypeRef, TypeHead]] = {}
    for ref, head in heads.items():
        contents.setdefault(bucket_number(ref, count), {})[ref] = head
    return _written(len(heads), [None] * count, contents, bucket_key)


def _written(
    types: int,
    before: Sequence[BucketRef | None],
    changed: BucketObject,
    bucket_key: Callable[[int], str],
) -> NextTypeHeads:
    buckets, uploads = list(before), []
    numbers = sorted(changed)
    step = 1 if len(numbers) > _TOGETHER else _TOGETHER
    for start in range(0, len(numbers), step):
        together = numbers[start : start + step]
        key = bucket_key(together[0])
        data = to_json({str(number): type_heads_json(changed[number]) for number in together})
        for number in together:
            buckets[number] = BucketRef(key, sha256(data))
        uploads.append((key, data))
    return NextTypeHeads(None, BucketTable(types, tuple(buckets)), uploads)


def _proven(
    heads: Mapping[TypeRef, TypeHead], parent: ManifestLink | None
) -> dict[TypeRef, TypeHead]:
    if parent is None:
        return dict(heads)
    return {
        ref: replace(head, manifest_sha256=parent.sha256)
        if head.manifest_path == parent.path
        else head
        for ref, head in heads.items()
    }
