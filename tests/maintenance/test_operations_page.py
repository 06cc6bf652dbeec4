"""docs/operations.md: a living storage copied in the order that it says, and every finding of
`verify` in its table."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from storage_engine import CompactionPolicy, Entity, Event, Field, Session, initialize_storage
from storage_engine.commitlog import layout
from storage_engine.maintenance import integrity
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository import open_repository

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


class Reading(Entity):
    id: Field[str] = Field(primary_key=True)
    value: Field[int]


class Measured(Event):
    number: Field[int]


@pytest.fixture
def example() -> Iterator[ModuleType]:
    path = ROOT / "docs/examples/copy_storage.py"
    spec = importlib.util.spec_from_file_location("copy_storage", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["copy_storage"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["copy_storage"]


class Life:
    """One more commit, tag, event and now and then a compaction, each time it is asked."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.count = 0

    def go_on(self) -> None:
        self.count += 1
        self.session.ensure(Reading(id=f"r{self.count}", value=self.count))
        self.session.ensure(Reading(id="same", value=self.count))
        self.session.emit(Measured(number=self.count))
        assert self.session.commit() == self.count
        self.session.repository.create_tag(f"t{self.count}")
        if self.count % 3 == 0:
            self.session.compact(CompactionPolicy(min_entries=2))
        self.session.flush()


@pytest.mark.parametrize("engine", ["v1", "v2"])
def test_a_storage_that_lives_is_copied_whole(
    example: ModuleType, tmp_path: Path, engine: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "copy"
    initialize_storage(source, engine)
    with Session(source) as session:
        life = Life(session)
        for _ in range(5):
            life.go_on()

        class Living(example.Place):  # type: ignore[name-defined, misc]
            """Something happens before each look at it."""

            def listing(self) -> Iterator[tuple[str, int]]:
                life.go_on()
                yield from super().listing()
                life.go_on()

            def read_head(self) -> bytes:
                life.go_on()
                data: bytes = super().read_head()
                self.at = life.count
                life.go_on()
                return data

        for _ in range(2):  # the second time into the copy that is there
            place = Living(str(source))
            example.copy_storage(place, example.Place(str(target)))
            moment = place.at

            repository = open_repository(target)
            report = verify_storage(repository, deep=True)
            assert report.findings == []
            assert report.head_commit_id == moment < life.count
            assert {tag.name for tag in repository.list_tags()} <= {
                f"t{n}" for n in range(moment + 1)
            }
            repository.close()
            assert not (target / "meta/locks").exists()

    with Session(target) as copy:  # and it lives on by itself
        assert copy.query().entities(Reading).count() == moment + 1
        for extra in range(3):
            copy.ensure(Reading(id=f"new{extra}", value=-extra))
            assert copy.commit() == moment + extra + 1
        ids = {r.id for r in copy.query().entities(Reading).collect()}
        assert ids == {"same", *(f"r{n}" for n in range(1, moment + 1)), "new0", "new1", "new2"}
        copy.flush()
        assert verify_storage(copy.repository, deep=True).findings == []


def test_the_copy_knows_every_prefix(example: ModuleType) -> None:
    """A new prefix of the layout has to find its place in the order of a copy."""
    kinds = {
        prefix.path: example._kind(f"{prefix.path}x/y")
        for prefix in layout.PREFIXES
        if prefix.collected != "reach"
    }
    once = {prefix.path for prefix in layout.PREFIXES if prefix.collected == "reach"}
    assert {example._kind(f"{path}x") for path in once} == {None}, "written once"
    assert kinds == {
        layout.ATTEMPTS: example.LEFT_OUT,
        layout.LEASES: example.LEFT_OUT,
        layout.LINES: example.LEFT_OUT,
        layout.SESSIONS: example.LEFT_OUT,
        layout.INDICES: example.CAN_CHANGE,
        layout.SCHEMA: example.CAN_CHANGE,
        layout.TAGS: example.CAN_CHANGE,
        layout.BRANCHES: example.CAN_CHANGE,
        layout.PAGES: None,
        layout.QUARANTINE: None,
        layout.EVENTS: example.EVENTS,
        layout.CLAIMS: example.BOOKKEEPING,
        layout.DEAD_LETTERS: example.BOOKKEEPING,
    }
    for key in (layout.ENGINE, layout.LAYOUT_CATALOG):
        assert example._kind(key) is example.CAN_CHANGE
    for key in (layout.LOCK, layout.HEAD, layout.probe()):
        assert example._kind(key) is example.LEFT_OUT
    for key in (layout.projected("default"), layout.position("default", "a.b")):
        assert example._kind(key) is example.BOOKKEEPING


def _reasons() -> set[tuple[str, str]]:
    """Areas and reasons that the code can note."""
    areas = {"_chain": "chain", "_checkpoints": "checkpoint", "_note": "file", "_rows": "rows"}
    pairs: set[tuple[str, str]] = set()
    for path in Path(integrity.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            texts = [a.value for a in call.args if isinstance(a, ast.Constant)]
            words = [str(w) for w in texts if re.fullmatch(r"[a-z_]+", str(w))]
            if name == "note" and len(words) >= 2:
                pairs.add((words[0], words[1]))
            elif name in areas and words:
                pairs.add((areas[name], words[0]))
    return pairs | {("index", reason) for reason in integrity.CONTRADICTIONS}


def test_every_finding_of_verify_has_its_advice() -> None:
    table = OPERATIONS.partition("<!-- findings -->")[2].partition("<!-- end -->")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    told = {
        (area, name)
        for row in rows
        for area in row[0].strip("| ").split(", ")
        for name in re.findall(r"`(\w+)`", row[1])
    }
    reasons = _reasons()
    assert {("chain", "cycle"), ("file", "not_parquet"), ("tag", "wrong_commit")} <= reasons
    assert reasons - told == set(), "docs/operations.md, 'What to do with a finding', misses these"
    assert all(row[3].strip(" |") for row in rows)
