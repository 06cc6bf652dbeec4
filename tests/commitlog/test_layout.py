"""All keys are made in layout.py: nobody else spells a prefix, and collectors go by its table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage_engine.commitlog import layout
from storage_engine.maintenance.gc import plan_gc
from storage_engine.maintenance.indices import verify_indices
from tests.commitlog.support import World
from tests.engines import customer

ROOT = Path(layout.__file__).parents[2]
OWNER = Path(layout.__file__).resolve()
FOLDERS = sorted({prefix.path.partition("/")[0] for prefix in layout.PREFIXES})
# A text that begins like a key, is a folder of keys anywhere, or names one of our own objects.
KEY = re.compile(rf"^/?(?:{'|'.join(FOLDERS)})/|/manifest\.json$|_projected\.json|_positions/")
OTHERS = {
    # What an alert is about, for Dagster's cursor: no object.
    ("ontologia_dagster/storage/alerts.py", "dead_letters/"),
    # Addresses of web pages.
    ("storage_engine/explore/links.py", "/commits/"),
    ("storage_engine/explore/links.py", "/events/"),
    ("ontologia_dagster/downstream/metadata.py", "/commits/"),
}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """String constants, the parts of f-strings among them, without docstrings."""
    tree = ast.parse(source)
    plain = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain:
            yield node.lineno, node.value


def keys_in(source: str) -> list[tuple[int, str]]:
    return [(line, text) for line, text in texts(source) if KEY.search(text)]


def modules() -> list[Path]:
    folders = ("storage_engine", "ontologia_dagster", "jobs")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 150
    return [path for path in files if path.resolve() != OWNER]


def test_nobody_else_spells_a_key() -> None:
    spelled = [
        f"{name}:{line}: {text!r}"
        for path in modules()
        for name in [path.relative_to(ROOT).as_posix()]
        for line, text in keys_in(path.read_text())
        if (name, text) not in OTHERS
    ]
    assert spelled == []


@pytest.mark.parametrize(
    "planted",
    [
        'key = f"meta/foo/{x}"',
        'store.list("commits/")',
        'store.get(prefix + "/manifest.json")',
        'path.contains(f"/staged/{attempt}/")',
        'if key.startswith("events/"): pass',
    ],
)
def test_a_planted_key_is_found(planted: str) -> None:
    assert keys_in(planted)
    assert keys_in(f'"""Keys: meta/ and such."""\n{planted}')


def test_words_are_no_keys() -> None:
    assert not keys_in('"""meta/head.json is the head."""\nkinds = ["events", "commits", "meta"]')


def test_prefixes_do_not_overlap_and_hold_every_key() -> None:
    paths = [prefix.path for prefix in layout.PREFIXES]
    assert all(path.endswith("/") for path in paths)
    assert not [(a, b) for a in paths for b in paths if a != b and b.startswith(a)]
    now = datetime(2026, 1, 1, tzinfo=UTC)
    made = {
        layout.manifest(1, "a"): layout.COMMITS,
        layout.data_file(layout.attempt_prefix(1, "a"), "entity", "T", "v2", 1, 0): layout.COMMITS,
        layout.staged_part("a", "entity", "T", 1, "x"): layout.STAGED,
        layout.snapshot("entity", "T", 1, 2): layout.SNAPSHOTS,
        layout.type_head_bucket(1, "a", 7): layout.COMMITS,
        layout.checkpoint(1, "a"): layout.CHECKPOINTS,
        layout.commit_page("0f"): layout.PAGES,
        layout.attempt_heartbeat("a"): layout.ATTEMPTS,
        layout.compaction_lease("entity", "T"): layout.LEASES,
        layout.ticket(
            layout.line_of(layout.LOCK) or "", layout.Ticket(now, now, "0" * 32, "", 0, 0, "o")
        ): layout.LINES,
        layout.index("relation", "T"): layout.INDICES,
        layout.TYPES: layout.SCHEMA,
        layout.schema_versions("entity", "T"): layout.SCHEMA,
        layout.tag("t"): layout.TAGS,
        layout.branch_head("run/42"): layout.BRANCHES,
        layout.branch_lock("run/42", "0" * 32): layout.BRANCHES,
        layout.index("entity", "T", layout.branch_indices("a", "0" * 32)): layout.BRANCHES,
        layout.quarantine("entity", "T", "a"): layout.QUARANTINE,
        layout.event("n", now, "e"): layout.EVENTS,
        layout.position("n", "h"): layout.EVENTS,
        layout.claim("n", "e", "h"): layout.CLAIMS,
        layout.dead_letter("n", "e", "h"): layout.DEAD_LETTERS,
        layout.event_session("n", "s"): layout.SESSIONS,
    }
    assert set(made.values()) == set(paths)
    for key, path in made.items():
        assert key.startswith(path)


def test_keys_are_taken_apart_as_they_were_made() -> None:
    prefix = layout.attempt_prefix(12, "0a1b2c3d")
    manifest = layout.manifest(12, "0a1b2c3d")
    assert layout.is_manifest(manifest)
    assert layout.manifest_prefix(manifest) == prefix
    assert layout.commit_attempt(manifest) == (12, prefix, "")
    incarnation = "0123456789abcdef" * 2
    on_branch = layout.manifest(12, layout.on_chain("0a1b2c3d", incarnation))
    attempt = layout.commit_attempt(on_branch)
    assert attempt == (12, layout.manifest_prefix(on_branch), incarnation)
    staged_there = layout.on_chain(layout.new_id(), incarnation)
    assert layout.attempt_incarnation(staged_there) == incarnation
    assert layout.attempt_incarnation(layout.new_id()) == ""
    assert layout.checkpoint_incarnation(layout.checkpoint(7, staged_there)) == incarnation
    assert layout.checkpoint_incarnation(layout.checkpoint(7, layout.new_id())) == ""
    assert layout.commit_attempt("commits/readme") is None
    for part in (None, 3):
        for version in ("v1", "v2"):
            key = layout.data_file(prefix, "relation", "Owns", version, 2, part)
            assert layout.commit_attempt(key) == (12, prefix, "")
            assert layout.data_file_type(key) == ("relation", "Owns")
    staged = layout.staged_part("0a1b2c3d", "entity", "Customer", 1, "00000-x")
    assert layout.staged_attempt(staged) == "0a1b2c3d"
    assert layout.data_file_type(staged) == ("entity", "Customer")
    found = re.search(layout.STAGED_PART_URL, f"s3a://bucket/root/{staged}")
    assert found is not None
    assert found[1] == "0a1b2c3d"
    assert layout.data_file_type(manifest) is None
    assert layout.checkpoint_commit(layout.checkpoint(7, "a")) == 7
    assert layout.checkpoint_commit(f"{layout.CHECKPOINTS}notes.txt") == -1
    assert layout.heartbeat_attempt(layout.attempt_heartbeat("0a1b2c3d")) == "0a1b2c3d"
    assert layout.index_type(layout.index("relation", "Owns")) == ("relation", "Owns")
    assert layout.tag_name(layout.tag("q3.final")) == "q3.final"


def test_snapshot_keys() -> None:
    one = layout.snapshot("entity", "A-1-2", 3, 17)
    assert layout.snapshot_of(one) == ("entity", "A-1-2", None)
    plain = layout.snapshot("entity", "Customer", 3, 17)
    assert layout.snapshot_of(plain) == ("entity", "Customer", None)
    retried = layout.with_attempt(plain, "0a1b2c3d")
    assert layout.snapshot_of(retried) == ("entity", "Customer", "0a1b2c3d")
    folder = layout.snapshot_folder("relation", "Owns", 3, 17, "0a1b2c3d")
    for part in (None, 2, "00001-abc-000"):
        key = layout.snapshot_part(folder, "current", part)
        assert layout.snapshot_of(key) == ("relation", "Owns", "0a1b2c3d")
    assert layout.snapshot_part(folder, "current", 2).endswith("/current/part-00002.parquet")
    assert layout.snapshot_of(f"{layout.SNAPSHOTS}readme.md") is None


def test_event_keys() -> None:
    event = layout.event("billing", datetime(2026, 1, 1, tzinfo=UTC), "_a/b")
    assert layout.is_event(event)
    assert layout.namespace_of(event) == "billing"
    assert layout.event_name(event) == layout.segment("_a/b")
    assert layout.claim_event(layout.claim("billing", "_a/b", "h")) == layout.event_name(event)
    for own in (layout.projected("billing"), layout.position("billing", "h")):
        assert not layout.is_event(own)
        assert own > event
    letter = layout.dead_letter("billing", "e", "h")
    assert layout.is_dead_letter_of(letter, "h")
    assert not layout.is_dead_letter_of(letter, "other")


def test_collection_lists_what_the_table_says(either_world: World) -> None:
    """And to know what is needed the indices, the tags and (v2) the branches, nothing else."""
    writer = either_world.open("collector")
    listed: list[str] = []
    writer.store.on_request(lambda kind, key: listed.append(key) if kind == "LIST" else None)
    plan_gc(writer.repo)
    collected = [prefix.path for prefix in layout.PREFIXES if prefix.collected is not None]
    branches = [layout.BRANCHES] if either_world.engine_version == "v2" else []
    assert set(listed) == {*collected, *layout.index_folders(), layout.TAGS, *branches}
    assert [key for key in listed if key in layout.REACHED_PREFIXES] == [*layout.REACHED_PREFIXES]


def test_verification_lists_where_rows_are(either_world: World) -> None:
    writer = either_world.open("verifier")
    writer.put(customer("a", age=1))
    writer.repo.flush()
    listed: list[str] = []
    writer.store.on_request(lambda kind, key: listed.append(key) if kind == "LIST" else None)
    assert verify_indices(writer.repo).ok
    assert listed
    assert set(listed) <= set(layout.DATA_PREFIXES)


def test_names_that_must_be_unique_for_ever_have_128_bits() -> None:
    """A collision of 32 bits is expected after some 77,000 names."""
    assert re.fullmatch(r"[0-9a-f]{32}", layout.new_id())
    assert len({layout.new_id() for _ in range(1000)}) == 1000
    assert re.fullmatch(r"[0-9a-f]{8}", layout.new_commit_attempt()), "the id is in the key as well"
