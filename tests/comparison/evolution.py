"""Random schema histories: a type changes, again and again, with data in between, and a plain
Python model of what every read must say."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from storage_engine import Entity, Field, Relation, Session
from storage_engine.maintenance.restore import restore
from storage_engine.runtime.migration import apply_drop, preview_drop
from tests.comparison.storages import DISTURBANCES, LAYOUTS, Storage, opened

Row = dict[str, Any]
RowStep = Callable[[Row], Row]

ANNOTATIONS: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "text": str | None,
    "list": list[str],
}
DEFAULTS: dict[str, Any] = {"int": 7, "float": 1.5, "str": "d", "text": None, "list": []}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-3, 3),
    "float": st.sampled_from([0.0, 0.5, -2.25, 3.0]),
    "str": st.sampled_from(["", "a", "b'", "ö"]),
    "text": st.sampled_from([None, "a", "z"]),
    "list": st.sampled_from([[], ["x"], ["x", "y"]]),
}
_NAMES = ["Thing", "Item", "Abc", "Zed", "Order", "Piece"]
_KEYS = ["k1", "k2", "k3", "ö", "k 5"]


# --- forms of the entity type -------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """The entity type as one version of its class has it: the kind of each field."""

    name: str
    fields: Mapping[str, str]
    markers: Mapping[str, str] = field(default_factory=dict)  # new name -> old name
    renamed_from: str | None = None

    def declare(self) -> Any:
        body: dict[str, Any] = {
            "__annotations__": {"id": Field[str]},
            "__module__": __name__,
            "id": Field(primary_key=True),
        }
        for name, kind in self.fields.items():
            body["__annotations__"][name] = Field[ANNOTATIONS[kind]]  # type: ignore[valid-type]
            options: dict[str, Any] = {"default": DEFAULTS[kind]}
            if kind == "list":
                options = {"default_factory": list}
            body[name] = Field(renamed_from=self.markers.get(name), **options)
        options = {"name": self.name, "renamed_from": self.renamed_from}
        return types.new_class("Evolving", (Entity,), options, lambda space: space.update(body))


@dataclass(frozen=True)
class Change:
    """What becomes of the class and of a row. `by_itself`: without an upgrader."""

    what: str
    field: str
    to: str
    by_itself: bool

    def form(self, form: Form) -> Form:
        fields = dict(form.fields)
        markers = dict(form.markers)
        match self.what:
            case "add" | "fill":
                fields[self.field] = self.to
            case "widen" | "retype":
                fields[self.field] = self.to
            case "remove":
                del fields[self.field]
                markers.pop(self.field, None)
            case "rename":
                fields = {self.to if n == self.field else n: k for n, k in fields.items()}
                was = markers.pop(self.field, self.field)
                markers[self.to] = was
            case "name":
                return replace(form, name=self.to, renamed_from=form.name)
        return replace(form, fields=fields, markers=markers)

    def row(self, row: Row) -> Row:
        made = dict(row)
        match self.what:
            case "add":
                made[self.field] = DEFAULTS[self.to]
            case "fill":
                made[self.field] = _filled(self.to, row["id"])
            case "widen":
                made[self.field] = float(row[self.field]) if self.to == "float" else row[self.field]
            case "retype":
                made[self.field] = str(row[self.field])
            case "remove":
                del made[self.field]
            case "rename":
                made = {self.to if n == self.field else n: v for n, v in row.items()}
        return made


def _filled(kind: str, key: str) -> Any:
    return {"int": len(key), "float": 0.25, "str": f"{key}!", "text": key, "list": [key]}[kind]


@dataclass(frozen=True)
class Step:
    """One migration's worth of changes, together with the upgrader that it may take."""

    changes: tuple[Change, ...]

    @property
    def by_itself(self) -> bool:
        return all(change.by_itself for change in self.changes)

    def form(self, form: Form) -> Form:
        form = replace(form, markers={}, renamed_from=None)
        for change in self.changes:
            form = change.form(form)
        return form

    def row(self, row: Row) -> Row:
        for change in self.changes:
            row = change.row(row)
        return row


# --- the model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    commit: int
    stage: int
    identity: tuple[str, ...]
    row: Row


@dataclass
class TypeModel:
    """One type: its stages (version, first commit), the way from each to the next, and every row
    that was written."""

    versions: list[tuple[int, int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    ways: list[RowStep] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)  # commits that migrated it
    ended: dict[int, int] = field(default_factory=dict)  # stages that ended by a drop, and when

    @property
    def stage(self) -> int:
        return len(self.versions) - 1

    def state(self, stage: int, upto: int) -> dict[tuple[str, ...], Written]:
        rows = [w for w in self.written if w.stage == stage and w.commit <= upto]
        return dict(sorted({w.identity: w for w in rows}.items()))

    def active(self, commit: int) -> int | None:
        begun = [n for n, (_, since) in enumerate(self.versions) if since <= commit]
        if not begun or self.ended.get(begun[-1], commit + 1) <= commit:
            return None
        return begun[-1]

    def upgraded(self, written: Written, upto: int | None = None) -> Row:
        row = written.row
        for way in self.ways[written.stage : upto]:
            row = way(row)
        return row

    def lives(self) -> list[range]:
        """The stages from each creation to the drop after it, or to now."""
        ends = [*sorted(self.ended), self.stage]
        begins = [0, *(end + 1 for end in ends[:-1])]
        return [range(b, e + 1) for b, e in zip(begins, ends, strict=True) if b <= e]

    def drop(self, commit: int) -> None:
        self.ended[self.stage] = commit

    def create_anew(self, commit: int, version: int, name: str) -> None:
        self.versions.append((version, commit))
        self.names.append(name)
        self.ways.append(dict)

    def changed(self, rows: Mapping[tuple[str, ...], Row]) -> dict[tuple[str, ...], Row]:
        if not self.versions:
            return dict(rows)
        now = self.state(self.stage, 2**62)
        return {k: row for k, row in rows.items() if k not in now or now[k].row != row}

    def write(self, commit: int, rows: Mapping[tuple[str, ...], Row], name: str) -> None:
        if rows and not self.versions:
            self.versions.append((1, commit))
            self.names.append(name)
        self.written += [Written(commit, self.stage, key, rows[key]) for key in sorted(rows)]

    def migrate(self, commit: int, version: int, way: RowStep, name: str) -> None:
        before = self.state(self.stage, commit)
        self.versions.append((version, commit))
        self.names.append(name)
        self.ways.append(way)
        self.moved.add(commit)
        self.write(commit, {key: way(w.row) for key, w in before.items()}, name)

    def history(self, since: int) -> list[Written]:
        return sorted(
            (w for w in self.written if w.commit > since), key=lambda w: (w.commit, w.identity)
        )


# --- what happens -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commit:
    things: Mapping[tuple[str, ...], Row]  # by key, with values for the form of the time
    links: Mapping[tuple[str, ...], Row]


@dataclass(frozen=True)
class Migrate:
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Restore:
    back: int  # so many commits


@dataclass(frozen=True)
class DropAndCreate:
    """The type goes, with its relations, and is created anew as it was."""


@dataclass(frozen=True)
class Disturb:
    name: str
    choice: int


Action = Commit | Migrate | Restore | DropAndCreate | Disturb


@dataclass(frozen=True)
class Evolution:
    layout: tuple[str, ...]
    first: Form
    actions: tuple[Action, ...]

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text("\n".join(["", f"{self.layout} {self.first}", *map(repr, self.actions)]))

    def run(self) -> None:
        with opened(self.layout, checkpoint_interval=3, cached=False) as storages:
            for storage in storages:
                world = World(storage, self.first)
                for action in self.actions:
                    try:
                        world.act(action)
                    except Exception as error:
                        error.add_note(f"on {storage.name}, head {world.head}, at {action!r}")
                        raise
                try:
                    world.check()
                except Exception as error:
                    error.add_note(f"on {storage.name}, head {world.head}, at the end")
                    raise


class World:
    """One storage beside its model."""

    def __init__(self, storage: Storage, first: Form) -> None:
        self.storage = storage
        self.form = first
        self.head = 0
        self.version = 1
        self.things = TypeModel()
        self.links = TypeModel()
        self.upgraders: dict[tuple[str, int], RowStep] = {}
        self.link_version = 1
        self._declare()

    def _declare(self) -> None:
        self.thing = self.form.declare()
        ends = Relation.__class_getitem__((self.thing, self.thing))  # type: ignore[attr-defined]
        body = {"__annotations__": {"weight": Field[int]}, "__module__": __name__}
        self.link = types.new_class(
            "Link", (ends,), {"name": "Link"}, lambda space: space.update(body)
        )

    @property
    def session(self) -> Session:
        return self.storage.session

    def act(self, action: Action) -> None:
        match action:
            case Commit():
                self._commit(action)
            case Migrate():
                self._migrate(action)
                self.check()
            case Restore():
                self._restore(action)
            case DropAndCreate():
                self._drop_and_create()
            case Disturb():
                DISTURBANCES[action.name](self.storage, action.choice)

    def _commit(self, action: Commit) -> None:
        kinds = self.form.fields
        rows = {
            key: {"id": key[0], **{n: row.get(n, DEFAULTS[k]) for n, k in kinds.items()}}
            for key, row in action.things.items()
        }
        rows = {
            key: {n: _fit(kinds.get(n, "str"), v) for n, v in row.items()}
            for key, row in rows.items()
        }
        things, links = self.things.changed(rows), self.links.changed(action.links)
        self.session.ensure([self.thing(**row) for row in rows.values()])
        self.session.ensure(
            [self.link(left_key=k[0], right_key=k[1], **row) for k, row in action.links.items()]
        )
        expected = self.head + 1 if things or links else None
        assert self.session.commit() == expected
        if expected is not None:
            self.head = expected
            self.things.write(expected, things, self.form.name)
            self.links.write(expected, links, "Link")

    def _migrate(self, action: Migrate) -> None:
        if not self.things.versions:
            return
        before = self.form
        version = self.version
        for step in action.steps:
            if not step.by_itself:
                self.upgraders[before.name, version] = step.row
            version += 1
            self.form = step.form(self.form)
        if len(action.steps) > 1:
            self.form = replace(self.form, markers={})
        if before.name != self.form.name:
            self.form = replace(self.form, renamed_from=before.name)
        self._declare()
        self.session.close()
        classes: dict[str, Any] = {"entity_types": [self.thing]}
        if self.links.versions:
            classes["relation_types"] = [self.link]
        config = self.storage.config
        with Session(self.storage.uri, config=config, **classes) as session:
            preview = session.migrate(upgraders=self.upgraders)
            assert preview.has_changes
            result = session.migrate(dry_run=False, token=preview.token, upgraders=self.upgraders)
            self.head += 1
            assert result.commit_id == self.head
            assert result.new_schema_versions[self.form.name] == version
            assert result.rows_migrated == {**preview.estimated_rows}
            session.validate()
        self.version = version

        def way(row: Row) -> Row:
            for step in action.steps:
                row = step.row(row)
            return row

        self.things.migrate(self.head, version, way, self.form.name)
        if before.name != self.form.name and self.links.versions:
            self.link_version += 1
            self.links.migrate(self.head, self.link_version, dict, "Link")
        self.storage.session = Session(self.storage.uri, config=self.storage.config)
        self.storage.views.clear()

    def _drop_and_create(self) -> None:
        if not self.things.versions:
            return
        repository, name = self.session.repository, self.form.name
        preview = preview_drop(repository, name, cascade=True)
        _, commit = apply_drop(repository, name, token=preview.token, cascade=True)
        self.head += 1
        assert commit == self.head
        models = [m for m in (self.things, self.links) if m.versions]
        for model in models:
            model.drop(self.head)
        found = self.session.query().entities(self.thing).collect()
        assert found == []
        assert found.diagnostics == ({"reason": "type_dropped", "dropped_commit_id": self.head},)
        self._check_raw()
        self._check_upgraded()
        self._check_feed()
        self._check_diff()
        if self.links.versions:
            self.session.query().relations(self.link)  # one of the session's types
            self.link_version += 1
        result = self.session.migrate(dry_run=False, force=True, upgraders={})
        self.head += 1
        self.version += 1
        assert result.commit_id == self.head
        assert result.new_schema_versions[name] == self.version
        self.things.create_anew(self.head, self.version, name)
        if self.links.versions:
            self.links.create_anew(self.head, self.link_version, "Link")
        self.check()

    def _restore(self, action: Restore) -> None:
        if not self.things.versions:
            return
        last = max(m.versions[-1][1] for m in (self.things, self.links) if m.versions)
        target = max(self.head - action.back, last)
        made = restore(self.session.repository, target, apply=True)
        old = [
            (model, {k: w.row for k, w in model.state(model.stage, target).items()})
            for model in (self.things, self.links)
            if model.versions
        ]
        changed = [(model, model.changed(rows)) for model, rows in old]
        expected = self.head + 1 if any(rows for _, rows in changed) else None
        assert made.new_commit_id == expected
        if expected is not None:
            self.head = expected
            for model, rows in changed:
                model.write(expected, rows, "")

    # --- every mode of reading ------------------------------------------------------------------

    def check(self) -> None:
        if not self.things.versions:
            return
        self._check_latest()
        self._check_raw()
        self._check_upgraded()
        self._check_typed_past()
        self._check_feed()
        self._check_diff()

    def _check_latest(self) -> None:
        found = self.session.query().entities(self.thing).collect()
        expected = self.things.state(self.things.stage, self.head)
        assert [_plain(o) for o in found] == [w.row for w in expected.values()]
        assert [o.meta().commit_id for o in found] == [w.commit for w in expected.values()]
        if self.links.versions:
            links: list[Any] = self.session.query().relations(self.link).collect()
            rows = self.links.state(self.links.stage, self.head)
            assert [(o.left_key, o.right_key) for o in links] == [key[:2] for key in rows]

    def _check_raw(self) -> None:
        model = self.things
        for stage, (version, since) in enumerate(model.versions):
            raw = self.session.query().raw(model.names[stage], schema_version=version)
            state = model.state(stage, self.head).values()
            assert raw.collect() == [w.row for w in state]
            history = raw.with_history().with_commit_ids().collect()
            expected = [w for w in model.history(0) if w.stage == stage]
            assert history == [{"commit_id": w.commit, **w.row} for w in expected]
            at = raw.as_of(since).collect()
            assert at == [w.row for w in model.state(stage, since).values()]

    def _check_upgraded(self) -> None:
        model = self.things
        query = self.session.query().entities(self.thing).upgraded(self.upgraders)
        for commit in self._moments():
            stage = model.active(commit)
            state = model.state(stage, commit).values() if stage is not None else ()
            found = query.as_of(commit).collect()
            assert [_plain(o) for o in found] == [model.upgraded(w) for w in state], commit
            assert [o.meta().commit_id for o in found] == [w.commit for w in state]
        for since in (0, self.head // 2):
            found = query.history_since(since).collect()
            expected = model.history(since)
            assert [_plain(o) for o in found] == [model.upgraded(w) for w in expected]
            assert query.history_since(since).count() == len(expected)

    def _check_typed_past(self) -> None:
        if not self.storage.has_activations:
            return
        model = self.things
        query = self.session.query().entities(self.thing)
        _, since = model.versions[-1]
        before = query.as_of(since - 1).collect()
        assert before == []
        assert before.diagnostics[0]["activation_commit_id"] == since
        rows = [w for w in model.history(0) if w.stage == model.stage]
        assert [_plain(o) for o in query.with_history().collect()] == [w.row for w in rows]

    def _check_feed(self) -> None:
        expected: list[Any] = []
        for life in self.things.lives():
            seen: set[tuple[str, ...]] = set()
            name = self.things.names[life[-1]]
            for written in self.things.history(0):
                if written.stage not in life or written.commit in self.things.moved:
                    continue
                operation = "update" if written.identity in seen else "insert"
                seen.add(written.identity)
                fields = self.things.upgraded(written, life[-1])
                expected.append((written.commit, name, written.identity[0], operation, fields))
            if life[-1] in self.things.ended:
                expected.append((self.things.ended[life[-1]], name, None, "drop", None))
        found: list[Any] = []
        cursor: int | str = 0
        limits = iter([2, 3, 1, 50] * 100)
        while page := self.session.changes(cursor, next(limits), upgraders=self.upgraders):
            found += page
            cursor = page.cursor
        told = [
            (c["commit_id"], c["type_name"], c.get("key"), c["operation"], c.get("fields"))
            for c in found
            if c["kind"] == "entity"
        ]
        assert told == expected
        links = [
            (c["commit_id"], c["left_key"], c["right_key"])
            for c in found
            if c["kind"] != "entity" and c["operation"] != "drop"
        ]
        stated = [w for w in self.links.history(0) if w.commit not in self.links.moved]
        assert links == [(w.commit, *w.identity[:2]) for w in stated]

    def _check_diff(self) -> None:
        before, after = self.head // 3, self.head
        found = self.session.diff(before, after, upgraders=self.upgraders)
        told = [
            (d.get("key"), d.get("before"), d.get("after")) for d in found if d["kind"] == "entity"
        ]
        expected: list[Any] = []
        for life in self.things.lives():
            old, now = (self._state_in(life, commit) for commit in (before, after))
            if now is None:
                expected += [(None, None, None)] if old is not None else []
                continue
            for key, new in now.items():
                was = (old or {}).get(key)
                names = [n for n in new if was is None or was[n] != new[n]]
                if names or was is None:
                    kept = None if was is None else {n: was[n] for n in names}
                    expected.append((key[0], kept, {n: new[n] for n in names}))

        def place(item: Any) -> tuple[str, str]:
            return str(item[0]), repr(sorted((item[2] or {}).items()))

        assert sorted(told, key=place) == sorted(expected, key=place)

    def _state_in(self, life: range, commit: int) -> dict[tuple[str, ...], Row] | None:
        """As of a commit, brought up to the last form of a life; None when that was not on."""
        stage = self.things.active(commit)
        if stage is None or stage not in life:
            return None
        state = self.things.state(stage, commit)
        return {key: self.things.upgraded(w, life[-1]) for key, w in state.items()}

    def _moments(self) -> Iterator[int]:
        """Each side of each activation, and both ends."""
        edges = [since for _, since in self.things.versions] + list(self.things.ended.values())
        around = {edge + n for edge in edges for n in (-1, 0)}
        yield from sorted({0, 1, self.head, *around})


def _fit(kind: str, value: Any) -> Any:
    """A value that was drawn for an earlier kind of the field."""
    match kind:
        case "int":
            return value if isinstance(value, int) else DEFAULTS[kind]
        case "float":
            return float(value) if isinstance(value, int | float) else DEFAULTS[kind]
        case "str":
            return value if isinstance(value, str) else DEFAULTS[kind]
        case "text":
            return value if isinstance(value, str | None) else None
        case _:
            return value if isinstance(value, list) else []


def _plain(thing: Any) -> Row:
    return dict(thing.model_dump())


# --- strategies ---------------------------------------------------------------------------------


@st.composite
def evolutions(draw: st.DrawFn, layouts: Sequence[tuple[str, ...]] = LAYOUTS) -> Evolution:
    kinds = st.sampled_from(sorted(ANNOTATIONS))
    count = draw(st.integers(1, 3))
    first = Form("Thing", {f"f{n}": draw(kinds) for n in range(count)})
    names = iter([name for name in _NAMES if name != "Thing"])
    numbers = iter(range(10, 100))
    actions: list[Action] = [_commit(draw, first)]
    form = first
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(0, 2))):
            actions.append(_commit(draw, form))
        if draw(st.booleans()):
            actions.append(Disturb(draw(st.sampled_from(sorted(DISTURBANCES))), draw(_CHOICE)))
        steps = [_step(draw, form, names, numbers)]
        form = steps[0].form(form)
        if not steps[0].by_itself and draw(st.integers(0, 2)) == 0:
            second = _step(draw, form, iter(()), numbers)
            if not second.by_itself:
                steps.append(second)
                form = second.form(form)
        actions.append(Migrate(tuple(steps)))
        if draw(st.integers(0, 2)) == 0:
            actions.append(Disturb(draw(st.sampled_from(sorted(DISTURBANCES))), draw(_CHOICE)))
        if draw(st.integers(0, 2)) == 0:
            actions += [_commit(draw, form), Restore(draw(st.integers(1, 3)))]
        if draw(st.integers(0, 4)) == 0:
            actions.append(DropAndCreate())
    actions.append(_commit(draw, form))
    return Evolution(draw(st.sampled_from(layouts)), first, tuple(actions))


_CHOICE = st.integers(0, 11)


def _commit(draw: st.DrawFn, form: Form) -> Commit:
    keys = draw(st.lists(st.sampled_from(_KEYS), min_size=1, max_size=4, unique=True))
    things: dict[tuple[str, ...], Row] = {
        (key,): {name: draw(VALUES[kind]) for name, kind in form.fields.items()} for key in keys
    }
    links: dict[tuple[str, ...], Row] = {}
    if draw(st.integers(0, 1)):
        links[keys[0], keys[-1], ""] = {"weight": draw(st.integers(0, 2))}
    return Commit(things, links)


def _step(draw: st.DrawFn, form: Form, names: Iterator[str], numbers: Iterator[int]) -> Step:
    changes: list[Change] = []
    touched: set[str] = set()
    for _ in range(draw(st.integers(1, 2))):
        free = [name for name in form.fields if name not in touched]
        change = _change(draw, form, free, names, numbers)
        touched |= {change.field, change.to}
        form = change.form(form)
        changes.append(change)
    return Step(tuple(changes))


def _change(
    draw: st.DrawFn,
    form: Form,
    free: Sequence[str],
    names: Iterator[str],
    numbers: Iterator[int],
) -> Change:
    """A change of a field that is `free`, a new field, or another name for the type."""
    options: list[Change] = []
    kind = draw(st.sampled_from(sorted(ANNOTATIONS)))
    new = f"f{next(numbers)}"
    options += [Change("add", new, kind, True), Change("fill", new, kind, False)]
    for name in free:
        kind = form.fields[name]
        options.append(Change("rename", name, new, True))
        if len(form.fields) > 1:
            options.append(Change("remove", name, "", False))
        if kind == "int":
            options += [Change("widen", name, "float", True), Change("retype", name, "str", False)]
        if kind == "str":
            options.append(Change("widen", name, "text", True))
    chosen = draw(st.sampled_from(options))
    if draw(st.integers(0, 4)) == 0 and (other := next(names, None)) is not None:
        return Change("name", "", other, True)
    return chosen
