"""Random questions that are no queries: reads by window, differences, the change feed, SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from storage_engine.repository.protocol import ReadWindow
from tests.comparison.model import Model, Seen, Version, comparable, row_of, versioned_schema
from tests.comparison.questions import Asking, Time
from tests.comparison.schemas import Type
from tests.comparison.storages import Storage


@dataclass(frozen=True)
class Read:
    """`Repository.read`, of all identities or of some."""

    of: Type
    window: ReadWindow
    keys: tuple[tuple[str, ...], ...] | None

    def check(self, model: Model, storage: Storage) -> None:
        spec, window = self.of.spec, self.window
        keys = None
        if self.keys is not None:
            columns = [[key[n] for key in self.keys] for n in range(len(spec.identity))]
            arrays = [pa.array(column, pa.string()) for column in columns]
            keys = pa.table(arrays, names=list(spec.identity))
        upto = model.head if window.as_of is None else min(max(window.as_of, 0), model.head)
        expected = model.visible(spec, Seen(upto, max(window.since or 0, 0), window.history))
        expected = [v for v in expected if self.keys is None or v.identity in self.keys]
        found = storage.session.repository.read(spec, window, keys=keys)
        assert found.schema.equals(versioned_schema(spec))
        assert comparable(found) == comparable(model.table(spec, expected))


@dataclass(frozen=True)
class Diff:
    before: Time
    after: Time

    def check(self, model: Model, storage: Storage) -> None:
        references = [
            time.instant(storage) if time.mode == "instant" else time.commit
            for time in (self.before, self.after)
        ]
        before, after = (time.seen(model, storage).upto for time in (self.before, self.after))
        if before > after:
            try:
                storage.session.diff(*references)
            except ValueError:
                return
            raise AssertionError("ValueError expected")
        _same(storage.session.diff(*references), model.diff(before, after))


@dataclass(frozen=True)
class Feed:
    """The change feed from a commit on, page by page."""

    since: int
    limits: tuple[int, ...]

    def check(self, model: Model, storage: Storage) -> None:
        found: list[Any] = []
        cursor: int | str = self.since
        pages = 0
        while True:
            limit = self.limits[pages % len(self.limits)]
            page = storage.session.changes(cursor, limit)
            assert len(page) <= limit
            cursor = page.cursor
            if not page:
                break
            found += page
            pages += 1
        _same(found, model.changes(max(self.since, 0)))
        assert storage.session.changes(cursor) == []


@dataclass(frozen=True)
class Commits:
    """What each commit wrote."""

    def check(self, model: Model, storage: Storage) -> None:
        expected: dict[int, list[Any]] = {n: [] for n in range(1, model.head + 1)}
        for change in model.changes():
            del change["fields"]
            expected[change.pop("commit_id")].append(change)
        found = {n: storage.session.list_commit_changes(n) for n in expected}
        for n, changes in found.items():
            for change in changes:  # a key by its column's name or by the feed's
                if "entity_key" in change:
                    change["key"] = change.pop("entity_key")
            assert sorted(changes, key=_place) == sorted(expected[n], key=_place)
        listed = storage.session.list_commits(limit=model.head + 1)
        assert [commit["id"] for commit in listed] == list(range(model.head, 0, -1))


def _place(change: dict[str, Any]) -> tuple[str, ...]:
    names = ("kind", "type_name", "key", "left_key", "right_key", "instance_key")
    return tuple(change.get(name, "") for name in names)


@dataclass(frozen=True)
class Sql:
    """All rows of a type by SQL, of the session or of a pinned view."""

    of: Type
    view: int | None

    def check(self, model: Model, storage: Storage) -> None:
        spec = self.of.spec
        if spec.ref not in model.versions:
            return  # SQL knows the stored types alone
        view = storage.views.get(self.view) if self.view is not None else None
        upto = model.head if view is None else view.commit_id
        by = ", ".join(spec.identity)
        statement = f'select * from "{spec.name}" order by {by}'
        found = (view or storage.session).sql(statement).to_arrow()
        wanted = model.table(spec, model.visible(spec, Seen(upto)))
        assert found.schema.names == wanted.schema.names
        assert found.schema.types == wanted.schema.types
        assert comparable(found) == comparable(wanted)


def _same(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    assert [_typed(change) for change in found] == [_typed(change) for change in expected]


def _typed(value: Any) -> Any:
    """1, 1.0 and True are three values; 0.0 and -0.0 are one."""
    if isinstance(value, dict):
        return {key: _typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    return isinstance(value, bool), isinstance(value, float), value


# --- random ones --------------------------------------------------------------------------------


def questions(asking: Asking) -> st.SearchStrategy[Any]:
    types = st.sampled_from(asking.schema.types)
    commits = st.integers(-1, asking.commits + 1)
    moments = st.builds(
        Time,
        mode=st.sampled_from(["as_of", "as_of", "instant"]),  # type: ignore[arg-type]
        commit=commits,
        distance=st.sampled_from([0, 1, -1]),
    )
    limits = st.lists(st.sampled_from([1, 2, 3, 5, 1000]), min_size=1, max_size=3).map(tuple)
    views = st.none() | st.integers(1, asking.commits)
    return st.one_of(
        types.flatmap(lambda one: _reads(asking, one)),
        st.builds(Diff, moments, moments),
        st.builds(Feed, st.sampled_from([-1, 0, 0, 1, 2, 9]), limits),
        st.builds(Commits),
        st.builds(Sql, types, views),
    )


def _reads(asking: Asking, one: Type) -> st.SearchStrategy[Read]:
    commits = st.none() | st.integers(-1, asking.commits + 1)
    windows = st.builds(ReadWindow, as_of=commits, since=commits, history=st.booleans())
    known = {Version(0, t, row_of(t)).identity for t in asking.things if type(t) is one.cls}
    unknown = ("nobody",) * len(one.spec.identity)
    keys = st.lists(st.sampled_from([*sorted(known), unknown]), max_size=4, unique=True)
    return st.builds(Read, st.just(one), windows, st.none() | keys.map(tuple))
