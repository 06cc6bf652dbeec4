"""What each page shows, as one JSON document: templates draw it, and programs get it as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from storage_engine.explore import branches, bus, commits, graph, health, objects
from storage_engine.explore.filters import OPERATORS, TableQuery, typed_filter
from storage_engine.explore.links import (
    commit_path,
    identity_path,
    parse_identity,
    parse_segment,
    segment,
    type_path,
    with_query,
)
from storage_engine.explore.rows import Row
from storage_engine.explore.view import (
    NothingThere,
    PageError,
    ShownType,
    Storage,
    StorageView,
)
from storage_engine.model.spec import MISSING, FieldSpec
from storage_engine.query.aggregates import count
from storage_engine.query.spec import QuerySpec
from storage_engine.repository.object.merge.rows import POLICIES, Policy
from storage_engine.schema.lineage import diff_versions
from storage_engine.wording import counted

ROWS = 50
MOST_ROWS = 500

Document = dict[str, Any]


@dataclass(frozen=True)
class PageAddress:
    """An address, taken apart."""

    path: tuple[str, ...]  # segments, still encoded
    parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        values = [value for value in self.parameters.get(name, ()) if value.strip()]
        return values[-1] if values else None

    def number(self, name: str, most: int = 2**63 - 1) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not text.isascii() or not text.isdigit() or len(text) > 19:
            raise PageError(f"{name}={text}: takes a number", "Leave it out to see the first page.")
        return min(int(text), most)


@dataclass(frozen=True)
class Page:
    """A page to be shown: `document` for programs, `drawings` for people alone."""

    template: str
    title: str
    document: Document
    view: StorageView | None = None
    drawings: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True)
class Moved:
    """The page is at another address."""

    location: str


# --- types --------------------------------------------------------------------------------------


def types(storage: Storage, asked: PageAddress) -> Page:
    view = storage.view(asked.text("as_of"))
    counts = storage.row_counts(view.head)
    listed = [_type_summary(view, view.shown(ref), counts.get(ref)) for ref in sorted(view.labels)]
    there = [each for each in listed if each["is_there"]]
    document = {
        "entities": [each for each in there if each["kind"] == "entity"],
        "relations": [each for each in there if each["kind"] == "relation"],
        "others": [each for each in listed if not each["is_there"]],
        "commits": commits.listed(view, None)["commits"][:5],
    }
    drawing = graph.type_map(document["entities"], document["relations"])
    return Page("types.html", "Types", document, view, {"map": drawing})


def _type_summary(view: StorageView, shown: ShownType, rows: int | None) -> Document:
    spec, latest = shown.spec, view.commit_id == view.head
    ends = {
        side: None if name is None else view.label(("entity", name))
        for side, name in (("left", spec.left), ("right", spec.right))
    }
    known_count = rows if latest else None
    declared = view.storage.declared.get(shown.ref)
    return {
        "label": shown.label,
        "name": shown.name,
        "kind": spec.kind,
        "url": type_path(shown.label),
        "schema_url": type_path(shown.label, "schema"),
        "is_there": shown.stage is not None,
        "dropped_commit_id": shown.line.history.dropped_commit_id,
        "renamed_to": shown.line.history.renamed_to,
        "schema_version": shown.stage.number if shown.stage is not None else None,
        "fields": [described.name for described in spec.fields],
        "key": spec.primary_key or spec.instance_key,
        "description": declared.description if declared is not None else None,
        "rows": known_count,
        "shown_count": counted(known_count, "object") if known_count is not None else "",
        **ends,
    }


def schema(storage: Storage, asked: PageAddress) -> Page:
    """The versions of a type, newest first, each with its fields and what it changed."""
    view = storage.view(asked.text("as_of"))
    shown = view.type(_decoded(asked.path[1]))
    history = shown.line.history
    declared = storage.declared.get(shown.ref)
    from_class = {f.name: f for f in declared.fields} if declared is not None else {}
    versions = []
    for stage in shown.line.stages:
        changed: Sequence[str] = ()
        if (before := shown.line.before(stage)) is not None:
            changed = diff_versions(before.version, stage.version).sentences()
        versions.append(
            {
                "number": stage.number,
                "name": stage.ref[1],
                "current": shown.stage is stage,
                "activation_commit_id": stage.since,
                "activation_url": commit_path(stage.since),
                "superseded_at_commit_id": stage.until,
                "fields": [
                    _field(each, stage.spec.primary_key, from_class.get(each.name))
                    for each in stage.spec.fields
                ],
                "changes": list(changed),
            }
        )
    document = {
        **_type_summary(view, shown, storage.row_counts(view.head).get(shown.ref)),
        "instance_key": shown.spec.instance_key,
        "left_url": _type_url(view, shown.spec.left),
        "right_url": _type_url(view, shown.spec.right),
        "purged": history.purged,
        "versions": versions[::-1],
    }
    return Page("schema.html", f"{shown.label}: schema", document, view)


def _type_url(view: StorageView, name: str | None) -> str | None:
    ref = ("entity", name or "")
    return type_path(view.label(ref)) if ref in view.histories else None


def _field(spec: FieldSpec, primary_key: str | None, declared: FieldSpec | None) -> Document:
    return {
        "name": spec.name,
        "type": spec.column_type,
        "nullable": spec.nullable,
        "indexed": spec.index,
        "is_key": spec.name == primary_key,
        "default": None if spec.default is MISSING else spec.default,
        "has_default": spec.default is not MISSING,
        "description": declared.description if declared is not None else None,
        "sensitive": declared is not None and declared.sensitive,
    }


# --- objects ------------------------------------------------------------------------------------


def table(storage: Storage, asked: PageAddress) -> Page | Moved:
    """Objects of a type, by key: as many as a page takes, after the last of the page before."""
    view = storage.view(asked.text("as_of"))
    shown = view.type(_decoded(asked.path[1]))
    query = TableQuery(
        [text for text in asked.parameters.get("filter", ()) if text.strip()],
        *(asked.text(name) for name in ("prefix", "left", "right")),
    )
    here = type_path(shown.label)
    keep = [
        ("branch", view.branch_name),
        ("as_of", view.as_of),
        ("limit", asked.text("limit")),
    ]
    if (path := asked.text("field")) is not None:
        typed = typed_filter(
            shown.spec, path, asked.text("op") or "==", (asked.parameters.get("value") or [""])[-1]
        )
        return Moved(with_query(here, [*query.parameters, ("filter", typed), *keep]))
    limit = asked.number("limit", MOST_ROWS) or ROWS
    rows, problem, notes, more, total = _page(shown, query, asked, limit)
    counts = storage.row_counts(view.head)
    document = {
        **_type_summary(view, shown, counts.get(shown.ref)),
        "problem": problem,
        "notes": notes,
        "matching": total,
        "filters": [
            {"text": text, "without": _without(here, query, number, keep)}
            for number, text in enumerate(query.filters)
        ],
        "prefix": query.prefix,
        "ends": [
            {"side": side, "key": text}
            for side, text in (("left", query.left), ("right", query.right))
            if text is not None
        ],
        "is_everything": query.is_everything,
        "columns": [each.name for each in shown.spec.fields],
        "objects": [_listed(shown, row) for row in rows],
        "first_url": with_query(here, [*query.parameters, *keep]),
        "everything_url": with_query(here, keep),
        "count_url": with_query(here, [*query.parameters, *keep, ("count", "1")]),
        "next_url": None,
        "on_first_page": asked.text("after") is None,
        "operators": OPERATORS,
    }
    if more:
        after = identity_path(tuple(rows[-1]["identity"]))
        document["next_url"] = with_query(here, [*query.parameters, *keep, ("after", after)])
    return Page("table.html", shown.label, document, view, status=400 if problem else 200)


def _page(
    shown: ShownType, query: TableQuery, asked: PageAddress, limit: int
) -> tuple[list[Row], str | None, list[str], bool, int | None]:
    """Rows, what is wrong with the question, remarks, whether there are more, and how many match
    where that was asked."""
    try:
        where = query.condition(shown)
        after = asked.text("after")
        start = None
        if after is not None:
            start = shown.identity(_identity_names(after, shown))
        rows, remarks = shown.rows(where, limit=limit + 1, after=start)
        total = None
        if asked.text("count") is not None and shown.stage is not None:
            counting = QuerySpec(
                shown.spec,
                where=where,
                when=shown.when,
                aggregates=(("count", count()),),
            )
            total = shown.view.executor.aggregate(counting).column("count")[0].as_py()
    except NothingThere:
        raise
    except PageError as error:
        return [], str(error), [], False, None
    notes = [" ".join(str(part) for part in remark.values()) for remark in remarks]
    return rows[:limit], None, notes, len(rows) > limit, total


def _identity_names(text: str, shown: ShownType) -> Any:
    try:
        return parse_identity(text, shown.ref[0])
    except ValueError as error:
        raise NothingThere(f"{shown.label}: {error}") from None


def _without(
    here: str, query: TableQuery, number: int, keep: Sequence[tuple[str, str | None]]
) -> str:
    filters = [text for place, text in enumerate(query.filters) if place != number]
    rest = TableQuery(filters, query.prefix, query.left, query.right)
    return with_query(here, [*rest.parameters, *keep])


def _listed(shown: ShownType, row: Row) -> Document:
    identity = tuple(row["identity"])
    ends: Document = {}
    if shown.ref[0] == "relation":
        spec, view = shown.spec, shown.view
        for place, (side, name) in enumerate((("left", spec.left), ("right", spec.right))):
            label = view.label(("entity", name or ""))
            ends[f"{side}_url"] = type_path(label, "objects", segment(identity[place]))
    return {**row, "url": shown.url(identity), "commit_url": commit_path(row["commit_id"]), **ends}


def single_object(storage: Storage, asked: PageAddress) -> Page:
    """One object with its fields, relations and versions."""
    view = storage.view(asked.text("as_of"))
    shown = view.type(_decoded(asked.path[1]))
    identity = shown.identity(_identity_names("/".join(asked.path[3:]), shown))
    row = shown.row(identity)
    if row is None:
        raise shown.missing(identity)
    related: list[Document] = []
    left_out = 0
    if shown.ref[0] == "entity":
        related, left_out = objects.relations(shown, identity)
    name = objects.called(row)
    types_of = {each.name: each.column_type for each in shown.spec.fields}
    document = {
        "type": shown.label,
        "type_url": type_path(shown.label),
        "kind": shown.ref[0],
        "schema_url": type_path(shown.label, "schema"),
        "schema_version": shown.stage.number if shown.stage is not None else None,
        **_listed(shown, row),
        "name": name,
        "left_type": shown.spec.left,
        "right_type": shown.spec.right,
        "field_types": types_of,
        "made_by": objects.commit_facts(view, row["commit_id"]),
        "relations": related,
        "relation_types_left_out": left_out,
        "timeline": objects.timeline(shown, identity, before=asked.number("before")),
    }
    drawing = graph.neighbours(identity, name, shown.label, related)
    return Page("object.html", shown.label, document, view, {"neighbours": drawing})


# --- commits, events, health --------------------------------------------------------------------


def commit_list(storage: Storage, asked: PageAddress) -> Page:
    view = storage.view()
    return Page("commits.html", "Commits", commits.listed(view, asked.number("before")), view)


def commit(storage: Storage, asked: PageAddress) -> Page:
    view = storage.view()
    text = _decoded(asked.path[1])
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise NothingThere(f"there is no commit {text}", "Commits are numbered from 1 on.")
    only, after = asked.text("type"), asked.text("after")
    names = _identity_names(after, view.type(only)) if only and after else ()
    document = commits.commit(view, int(text), only, names)
    document["only"] = only
    return Page("commit.html", f"Commit {text}", document, view)


def branch_list(storage: Storage, asked: PageAddress) -> Page:
    trunk = storage.trunk or storage
    document = branches.listed(trunk, asked.text("after"), asked.text("place"))
    return Page("branches.html", "Branches", document, storage.view())


def branch(storage: Storage, asked: PageAddress) -> Page:
    view, name = storage.view(), _decoded(asked.path[1])
    with branches.compared(storage, name) as comparison:
        document = branches.branch(comparison, asked.number("before"))
    return Page("branch.html", f"Branch {name}", document, view)


def branch_diff(storage: Storage, asked: PageAddress) -> Page:
    view, name = storage.view(), _decoded(asked.path[1])
    with branches.compared(storage, name) as comparison:
        only, after = asked.text("type"), asked.text("after")
        names: Any = ()
        if only and after:
            names = _identity_names(after, comparison.shown(only))
        document = branches.diff(comparison, only, names)
    return Page("branch_diff.html", f"{name} against {document['parent']}", document, view)


def branch_merge(storage: Storage, asked: PageAddress) -> Page:
    view, name = storage.view(), _decoded(asked.path[1])
    text = asked.text("on_conflict") or "fail"
    if text not in POLICIES:
        raise PageError(f"on_conflict={text}: takes one of {', '.join(POLICIES)}")
    with branches.compared(storage, name) as comparison:
        document = branches.merge_preview(comparison, cast("Policy", text))
    document["policies"] = POLICIES
    return Page("branch_merge.html", f"Merge of {name}", document, view)


def events(storage: Storage, _asked: PageAddress) -> Page:
    storage = storage.trunk or storage  # the bus is the storage's, not a branch's
    return Page("events.html", "Events", {"namespaces": bus.namespaces(storage)}, storage.view())


def namespace(storage: Storage, asked: PageAddress) -> Page:
    storage = storage.trunk or storage
    view, name = storage.view(), _decoded(asked.path[1])
    status = asked.text("status")
    if status is not None and status not in bus.STATUSES:
        raise PageError(f"{status} is no status", f"There are {', '.join(bus.STATUSES)}.")
    document = bus.namespace(storage, name, status, asked.text("type"))
    document["statuses"] = bus.STATUSES
    return Page("namespace.html", f"Events in {name}", document, view)


def event(storage: Storage, asked: PageAddress) -> Page:
    storage = storage.trunk or storage
    view = storage.view()
    document = bus.event(storage, _decoded(asked.path[1]), _decoded(asked.path[2]))
    return Page("event.html", f"{document['type']} {document['id']}", document, view)


def health_page(storage: Storage, _asked: PageAddress) -> Page:
    view = storage.view()
    return Page("health.html", "Health", health.health(view), view)


def route(storage: Storage, asked: PageAddress) -> Page | Moved:
    """The page of an address."""
    match asked.path:
        case () | ("",) | ("types",):
            return types(storage, asked)
        case ("types", _):
            return table(storage, asked)
        case ("types", _, "schema"):
            return schema(storage, asked)
        case ("types", label, "objects") | ("types", label, "objects", ""):
            kept = {name: asked.text(name) for name in ("branch", "as_of")}
            return Moved(with_query(type_path(_decoded(label)), kept))
        case ("types", _, "objects", *_):
            return single_object(storage, asked)
        case ("commits",):
            return commit_list(storage, asked)
        case ("commits", _):
            return commit(storage, asked)
        case ("branches",):
            return branch_list(storage, asked)
        case ("branches", _):
            return branch(storage, asked)
        case ("branches", _, "diff"):
            return branch_diff(storage, asked)
        case ("branches", _, "merge"):
            return branch_merge(storage, asked)
        case ("events",):
            return events(storage, asked)
        case ("events", _):
            return namespace(storage, asked)
        case ("events", _, _):
            return event(storage, asked)
        case ("health",):
            return health_page(storage, asked)
    raise NothingThere(
        "there is no such page",
        "Begin at the types, the commits, the branches, the events or the health.",
    )


def _decoded(text: str) -> str:
    try:
        name = parse_segment(text)
    except ValueError:
        raise NothingThere("the address is not UTF-8") from None
    return name if isinstance(name, str) else f"{name.prefix}…"
