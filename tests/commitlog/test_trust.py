"""What the log believes, and why: hashes beside names, marks of units that changed nothing, type
heads in buckets, commit points in pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from storage_engine.commitlog import layout, series, state, type_heads
from storage_engine.commitlog.records import BucketRef, ManifestLink, TypeHead, TypeRef
from storage_engine.commitlog.rewrite import rewrite_head
from storage_engine.commitlog.type_heads import (
    BucketedTypeHeads,
    BucketObject,
    next_type_heads,
    parse_buckets,
)
from storage_engine.errors import IntegrityError
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository import Idempotency
from storage_engine.repository.protocol import AppliedUnit
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, at, new_world
from tests.engines import CUSTOMER, PRODUCT, Row, customer, product, rows_of

# -- hashes ---------------------------------------------------------------------------------------


def change_a_byte(world: World, key: str) -> None:
    """As a disk does, leaving JSON that parses: one digit of a time."""
    data = world.backend.objects()[key]
    place = data.index(b"2026-") + 3
    world.backend.write(key, data[:place] + b"7" + data[place + 1 :])


def ask_everything(writer: Writer) -> list[Callable[[], object]]:
    return [
        writer.ages,
        lambda: writer.put(customer("new", age=1)),
        lambda: writer.repo.list_commits(limit=10),
        lambda: writer.repo.storage_info(),
    ]


def test_a_changed_byte_in_the_head_manifest_is_never_answered_from(either_world: World) -> None:
    writer = either_world.open("writer")
    writer.put(customer("a", age=1))
    writer.put(customer("a", age=2))
    writer.close()
    path = either_world.head().manifest_path
    assert path is not None
    change_a_byte(either_world, path)
    for ask in ask_everything(either_world.open("reader")):
        with pytest.raises(IntegrityError, match="has other content than was committed") as caught:
            ask()
        assert caught.value.key == path


@pytest.mark.parametrize("commit_id", range(1, 8))
def test_a_changed_byte_anywhere_in_the_chain_is_found_by_who_reads_it(
    world: World, commit_id: int
) -> None:
    writer = world.open("writer", checkpoint_interval=1000)
    for number in range(1, 9):
        writer.put(customer(f"c{number}", age=number))
    writer.close()
    path = [*(m.parent_manifest_path for m in world.chain()[1:])][commit_id - 1]
    assert path is not None
    change_a_byte(world, path)
    reader = world.open("reader").repo
    with pytest.raises(IntegrityError, match="other content"):
        reader.list_commits(limit=10)
    with pytest.raises(IntegrityError, match="other content"):
        reader.get_commit(commit_id)
    report = verify_storage(world.open("verifier").repo)
    assert (path, "hash_mismatch") in {(f.key, f.reason) for f in report.findings}


def test_every_name_of_a_manifest_has_its_hash(world: World) -> None:
    writer = world.open("writer", checkpoint_interval=4)
    for number in range(1, 10):
        writer.put(customer(f"c{number}", age=number))
        if number % 3 == 0:
            writer.commit(rows_of(PRODUCT, product("p", float(number))))
    writer.repo.flush()
    for manifest in world.chain():
        links = [*manifest.skip, *([manifest.parent] if manifest.parent else [])]
        links += [
            ManifestLink(f.previous.commit_id, f.previous.manifest_path, f.previous.manifest_sha256)
            for f in manifest.files
            if f.previous is not None
        ]
        links += [
            head.link
            for head in (manifest.type_heads or {}).values()
            if head.commit_id != manifest.commit_id
        ]
        assert all(link.sha256 for link in links)
    chain = world.open("reader").repo.chain
    head = chain.read_head().head
    assert head.checkpoint is not None
    *older, last = chain.commit_points(chain.checkpoint(head.checkpoint))
    assert all(point.manifest_sha256 for point in older)
    assert last.commit_id == head.checkpoint.commit_id


def test_a_checkpoint_of_another_commit_is_refused(world: World) -> None:
    writer = world.open("writer", checkpoint_interval=2)
    for number in range(1, 3):
        writer.put(customer("c", age=number))
    writer.close()
    head = world.document(layout.HEAD)
    head["checkpoint"]["commit_id"] = 1
    world.backend.write(layout.HEAD, json.dumps(head).encode())
    with pytest.raises(IntegrityError, match="checkpoint"):
        world.open("reader").repo.get_commit(1)


# -- marks ----------------------------------------------------------------------------------------


def unit(version: int | str, app: str = "loader") -> dict[str, Any]:
    return {"idempotency": Idempotency(app, version)}


def same(writer: Writer, **request: Any) -> None:
    """A unit of work that changes nothing: customer a is 1 already."""
    head = writer.repo.head_commit_id()
    assert writer.commit(rows_of(CUSTOMER, customer("a", age=1)), **request) is None
    assert writer.repo.head_commit_id() == head


def test_a_unit_that_changed_nothing_is_not_done_again_over_newer_values(
    either_world: World,
) -> None:
    first, other = either_world.open("first"), either_world.open("other")
    first.put(customer("a", age=1))
    same(first, **unit(7))
    other.put(customer("a", age=2))
    retry = either_world.open("retry")
    assert retry.commit(rows_of(CUSTOMER, customer("a", age=1)), **unit(7)) is None
    assert retry.commit(rows_of(CUSTOMER, customer("a", age=0)), **unit(6)) is None, "late, older"
    assert retry.ages() == {"a": 2}
    assert retry.repo.applied(Idempotency("loader", 7)) == AppliedUnit(None)
    assert retry.repo.applied(Idempotency("loader", 8)) is None
    assert retry.put(customer("a", age=3), **unit(8)).commit_id == 3


def test_a_mark_is_kept_by_commits_checkpoints_and_rewrites_of_head(world: World) -> None:
    writer = world.open("writer", checkpoint_interval=3)
    writer.put(customer("a", age=1))
    same(writer, **unit("x"))
    same(writer, **unit(5, "other"))
    assert world.head().marks == {"loader": "x", "other": 5}

    def known() -> bool:
        reader = world.open("reader").repo
        return (
            reader.applied(Idempotency("loader", "x")) == AppliedUnit(None)
            and reader.applied(Idempotency("other", 4)) == AppliedUnit(None)
            and reader.applied(Idempotency("loader", "y")) is None
        )

    rewrite_head(
        writer.repo.chain,
        writer.repo.lock,
        runtime_id="test",
        max_attempts=1,
        change=lambda head: state.current_checkpoint(writer.repo.chain, head),
    )
    assert world.head().marks, "a rewrite keeps them"
    assert known()
    for number in range(2, 9):
        writer.put(customer("b", age=number))
        assert known(), f"after commit {number}"
    assert world.chain()[1].marks == {"loader": "x", "other": 5}
    assert world.head().marks == {}
    assert verify_storage(world.open("verifier").repo).findings == []


def test_a_newer_unit_of_the_same_application_counts_from_then_on(world: World) -> None:
    writer = world.open("writer", checkpoint_interval=2)
    writer.put(customer("a", age=1), **unit("one"))
    same(writer, **unit("two"))
    assert writer.repo.applied(Idempotency("loader", "one")) is None, "not the last one any more"
    writer.put(customer("b", age=1), **unit("three"))
    assert writer.repo.applied(Idempotency("loader", "three")) == AppliedUnit(2)
    same(writer, **unit("four"))
    writer.put(customer("c", age=1))
    reader = world.open("reader").repo
    assert reader.applied(Idempotency("loader", "four")) == AppliedUnit(None)
    assert reader.applied(Idempotency("loader", "three")) is None


def test_many_marks_go_to_a_checkpoint(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_MARKS_IN_HEAD", 3)
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    for number in range(10):
        same(writer, **unit(1, f"app-{number}"))
        assert len(world.head().marks) <= 3
    reader = world.open("reader").repo
    for number in range(10):
        assert reader.applied(Idempotency(f"app-{number}", 1)) == AppliedUnit(None)
    assert verify_storage(reader).findings == []


@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_crash_while_a_mark_is_written_leaves_it_done_or_to_do(kind: FaultKind) -> None:
    for key in (layout.LOCK, layout.HEAD):
        world = new_world()
        world.open("writer").put(customer("a", age=1))
        world.writers[0].close()
        crashing = world.open("crashing")
        crashing.fail(kind, "PUT_IF", key)
        with pytest.raises(SimulatedCrash):
            crashing.commit(rows_of(CUSTOMER, customer("a", age=1)), **unit(1))
        world.pass_lease()
        done = kind is FaultKind.CRASH_AFTER and key == layout.HEAD
        assert ("loader" in world.head().marks) is done
        later = world.open("later")
        same(later, **unit(1))
        assert later.repo.applied(Idempotency("loader", 1)) == AppliedUnit(None)
        world.close()


def test_a_mark_that_lost_to_a_commit_is_looked_at_again(world: World) -> None:
    """The other commit changed what the unit says: now it is no unit without change."""
    ours, rival = world.open("ours"), world.open("rival")
    ours.put(customer("a", age=1))
    ours.repo.flush()
    at(ours.store, "PUT_IF", layout.HEAD, lambda: broken_into(world, rival, customer("a", age=2)))
    result = ours.commit(rows_of(CUSTOMER, customer("a", age=1)), **unit(1))
    assert result is not None
    assert (result.commit_id, ours.ages()) == (3, {"a": 1})
    assert rival.repo.applied(Idempotency("loader", 1)) == AppliedUnit(3)


def broken_into(world: World, rival: Writer, row: Row) -> None:
    """An operator breaks a lock whose holder lives, and somebody else commits."""
    lock = world.backend.objects()[layout.LOCK]
    world.backend.remove([layout.LOCK])
    rival.put(row)
    rival.repo.flush()
    world.backend.write(layout.LOCK, lock)


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT])
def test_a_mark_whose_answer_was_lost_is_there_once(world: World, kind: FaultKind) -> None:
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    writer.repo.flush()
    writer.fail(kind, "PUT_IF", layout.HEAD, times=1)
    same(writer, **unit(1))
    assert world.head().marks == {"loader": 1}
    assert writer.put(customer("a", age=2)).commit_id == 2, "the next commit knows the new head"


# -- type heads in buckets ------------------------------------------------------------------------


def test_buckets_say_what_a_dictionary_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the step from inline to buckets, and to more of them."""
    monkeypatch.setattr(type_heads, "INLINE_TYPES", 5)
    monkeypatch.setattr(type_heads, "_FEWEST_BUCKETS", 4)
    monkeypatch.setattr(type_heads, "_FULL_BUCKET", 3)
    monkeypatch.setattr(type_heads, "_TOGETHER", 2)
    objects: dict[str, BucketObject] = {}

    def load(refs: Sequence[BucketRef]) -> list[BucketObject]:
        return [objects[ref.path] for ref in refs]

    expected: dict[TypeRef, TypeHead] = {}
    carried: Any = {}
    written: list[int] = []
    parent: ManifestLink | None = None
    for commit_id in range(1, 120):
        path = f"commits/{commit_id}"
        names = {f"T{commit_id % 60}", f"T{commit_id * 7 % 60}"}
        touched: dict[TypeRef, TypeHead] = {
            ("entity" if len(name) % 2 else "relation", name): TypeHead(commit_id, path)
            for name in names
        }

        def key(number: int, commit_id: int = commit_id) -> str:
            return layout.type_head_bucket(commit_id, "a", number)

        following = next_type_heads(carried, touched, parent, key)
        objects.update((key, parse_buckets(data, key=key)) for key, data in following.uploads)
        written.append(len(following.uploads))
        if following.table is not None:
            carried = BucketedTypeHeads(following.table, load)
        else:
            carried = following.inline
        expected |= touched
        assert {ref: head.commit_id for ref, head in carried.items()} == {
            ref: head.commit_id for ref, head in expected.items()
        }
        assert len(carried) == len(expected)
        assert carried.get(("entity", "unknown")) is None
        parent = ManifestLink(commit_id, path, f"hash-{commit_id}")
    proven = [head for head in carried.values() if head.manifest_sha256]
    assert all(head.manifest_sha256 == f"hash-{head.commit_id}" for head in proven)
    assert max(written[-20:]) == 1, "a commit that touches two types writes one object"


@pytest.fixture
def many_types(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Two types are many: heads are in buckets from the second on."""
    monkeypatch.setattr(type_heads, "INLINE_TYPES", 1)
    writer = world.open("writer", checkpoint_interval=4)
    for number in range(1, 12):
        writer.put(customer("c", age=number))
        if number % 3 == 0:
            writer.commit(rows_of(PRODUCT, product("p", float(number))))
    writer.close()
    return world


def test_a_storage_with_buckets_answers_from_the_chain_alone(many_types: World) -> None:
    many_types.backend.remove(many_types.stored_keys(layout.INDICES))
    reader = many_types.open("reader")
    assert reader.ages() == {"c": 11}
    assert [row["price"] for row in reader.rows(PRODUCT)] == [9.0]
    assert len(reader.history()) == 11
    assert verify_storage(reader.repo).findings == []


def test_collecting_garbage_leaves_buckets_and_pages(
    many_types: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "PAGE_COMMITS", 3)
    writer = many_types.open("writer", checkpoint_interval=4)
    for number in range(12, 24):
        writer.put(customer("c", age=number))
    writer.close()
    kept = {
        k for k in many_types.stored_keys() if "/type_heads/" in k or k.startswith(layout.PAGES)
    }
    assert kept
    many_types.backend.clock.sleep(90 * 86_400)
    collector = many_types.open("collector").repo
    sweep(collector, plan_gc(collector, grace=timedelta(0), purge_compacted=True))
    assert kept <= set(many_types.stored_keys())
    assert verify_storage(many_types.open("verifier").repo).findings == []
    assert many_types.open("reader").ages() == {"c": 23}


def test_a_changed_bucket_is_refused_and_found(many_types: World) -> None:
    manifest = many_types.chain()[-1]
    assert manifest.type_head_buckets is not None
    refs = [ref for ref in manifest.type_head_buckets.buckets if ref is not None]
    data = many_types.backend.objects()[refs[0].path]
    many_types.backend.write(refs[0].path, data.replace(b'"commit_id":', b'"commit_id": '))
    reader = many_types.open("reader").repo
    with pytest.raises(IntegrityError, match="other content"):
        reader.storage_info()
    reasons = {finding.reason for finding in verify_storage(reader).findings}
    assert "unreadable_type_heads" in reasons


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_bucket_that_only_older_manifests_name_is_verified(
    many_types: World, damage: str
) -> None:
    """Reads of the past go by it."""
    manifests = [m for m in many_types.chain() if m.type_head_buckets is not None]
    tables = [m.type_head_buckets.buckets for m in manifests if m.type_head_buckets is not None]
    newest = {ref.path for ref in tables[-1] if ref is not None}
    older = sorted({ref.path for table in tables for ref in table if ref is not None} - newest)
    assert older
    if damage == "gone":
        many_types.backend.remove([older[0]])
    else:
        many_types.backend.write(older[0], many_types.backend.objects()[older[0]] + b" ")
    findings = verify_storage(many_types.open("verifier").repo).findings
    assert {finding.reason for finding in findings} == {"unreadable_type_heads"}
    assert all(older[0] in finding.message for finding in findings)


# -- pages ----------------------------------------------------------------------------------------


@pytest.fixture
def paged(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(state, "PAGE_COMMITS", 5)
    writer = world.open("writer", checkpoint_interval=4)
    for number in range(1, 31):
        world.backend.clock.sleep(60)
        writer.put(customer("c", age=number))
    writer.close()
    return world


def test_every_commit_is_found_in_pages_by_number_and_by_time(paged: World) -> None:
    head = paged.head()
    assert head.checkpoint is not None
    written = paged.document(head.checkpoint.path)
    assert len(written["commits"]) <= 5
    assert len(written["pages"]) == 5
    chain = paged.open("reader").repo.chain
    manifests = paged.chain()
    for manifest in manifests:
        link = chain.locate(head, manifest.commit_id)
        assert link is not None
        assert chain.manifest(link) == manifest
        moment = datetime.fromisoformat(manifest.created_at)
        assert state.commit_at(chain, head, moment) == manifest.commit_id
    assert state.commit_at(chain, head, datetime.fromisoformat("2000-01-01T00:00:00+00:00")) == 0
    assert chain.newest(head, limit=30) == manifests[::-1]
    assert chain.newest(head, limit=9, above=3) == manifests[::-1][:9]
    assert verify_storage(paged.open("verifier").repo).findings == []


def test_pages_are_shared_from_one_checkpoint_to_the_next(paged: World) -> None:
    manifests = paged.chain()
    refs = {m.checkpoint.path for m in manifests if m.checkpoint is not None}
    named = [
        page[3]
        for path in sorted(refs, key=layout.checkpoint_commit)
        for page in paged.document(path)["pages"]
    ]
    assert len(set(named)) == 5
    assert len(named) > 10
    assert len(paged.stored_keys(layout.PAGES)) == 5


def test_a_lost_attempt_leaves_the_pages_that_another_relies_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write the same page; who loses may not delete it."""
    monkeypatch.setattr(state, "PAGE_COMMITS", 3)
    ours, rival = (world.open(name, checkpoint_interval=4) for name in ("ours", "rival"))
    for number in range(1, 4):
        ours.put(customer("c", age=number))
    ours.repo.flush()

    at(ours.store, "PUT_IF", layout.HEAD, lambda: broken_into(world, rival, customer("r", age=1)))
    assert ours.put(customer("c", age=4)).commit_id == 5, "on the new head"
    world.pass_lease()
    assert world.open("reader").repo.get_commit(2) is not None
    assert verify_storage(world.open("verifier").repo).findings == []


def test_a_missing_page_is_named(paged: World) -> None:
    key = paged.stored_keys(layout.PAGES)[0]
    paged.backend.remove([key])
    repo = paged.open("reader").repo
    with pytest.raises(IntegrityError, match=r"page of commits .* is missing"):
        list(map(repo.get_commit, range(1, 31)))
    assert "unreadable_page" in {finding.reason for finding in verify_storage(repo).findings}


# -- pointers to events and acks ------------------------------------------------------------------


def test_each_manifest_names_the_newest_one_before_it_with_events(world: World) -> None:
    writer = world.open("writer")
    with_events = {3, 4, 9}
    for number in range(1, 13):
        events = [{"id": f"e{number}", "type": "T", "namespace": "default"}]
        writer.put(customer("c", age=number), events=events if number in with_events else [])
    for manifest in world.chain():
        before = [n for n in with_events if n < manifest.commit_id]
        named = manifest.events_before.commit_id if manifest.events_before else None
        assert named == (max(before) if before else None)
        assert manifest.acks_before is None
