"""What must be read from a stored shop, and what is read from it: two documents of one shape.

The facts beside a storage say what its writer stated: every version of every row, and the commit
that brought it. Everything else that a read may return follows from them by the rules of
docs/concepts.md, worked out here in plain Python.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

from storage_engine import Session, left
from storage_engine.query import count, sum
from tests.compatibility.shop import KINDS, NAMESAKE, Customer, Kind, Owns

Row = dict[str, Any]
Facts = Mapping[str, Any]

_LONG = 200
_PAGE = 50  # of the change feed: pages that end within commits and types


def tagged(value: Any) -> Any:
    """A value as JSON that still tells what it was."""
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, date):
        return {"date": value.isoformat()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, str) and len(value) > _LONG:
        return {"length": len(value), "sha256": hashlib.sha256(value.encode()).hexdigest()}
    if isinstance(value, list):
        return [tagged(item) for item in value]
    if isinstance(value, Mapping):
        return {key: tagged(item) for key, item in value.items()}
    return value


def _untagged(value: Any) -> Any:
    """A tagged value as it stands inside a nested field, in JSON."""
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"datetime"}:
        return datetime.fromisoformat(value["datetime"]).isoformat(timespec="microseconds")
    if value.keys() == {"date"}:
        return value["date"]
    if value.keys() == {"bytes"}:
        return b64encode(bytes.fromhex(value["bytes"])).decode()
    return {key: _untagged(item) for key, item in value.items()}


def exact(document: Any) -> str:
    """Equal only for equal types too: 1, 1.0 and true are three things."""
    return json.dumps(document, sort_keys=True, ensure_ascii=False)


def differences(said: Row, expected: Row) -> list[str]:
    """Where two documents of one shape differ, a line for each part."""
    found = [f"{name} is missing" for name in expected if name not in said]
    for name, part in said.items():
        wanted = expected.get(name)
        if name not in expected:
            found.append(f"{name} is not expected")
        elif exact(part) != exact(wanted):
            found.append(f"{name}: {_first_difference(part, wanted)}")
    return found


def _first_difference(said: Any, wanted: Any) -> str:
    """The innermost place of a difference, so that the message can be read."""
    if isinstance(said, dict) and isinstance(wanted, dict) and said.keys() == wanted.keys():
        key = next(key for key in said if exact(said[key]) != exact(wanted[key]))
        return f".{key}{_first_difference(said[key], wanted[key])}"
    if isinstance(said, list) and isinstance(wanted, list):
        for number, (one, other) in enumerate(zip(said, wanted, strict=False)):
            if exact(one) != exact(other):
                return f"[{number}]{_first_difference(one, other)}"
        return f" has {len(said)} instead of {len(wanted)}"
    return f" is {exact(said)} instead of {exact(wanted)}"


def row_of(kind: Kind, item: Any) -> Row:
    """What an object says."""
    return {name: tagged(getattr(item, name)) for name in kind.columns}


def identity_of(kind: Kind, row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in kind.identity)


# --- what must be read ------------------------------------------------------------------------


class Past:
    """The history of all types, and what follows from it."""

    def __init__(self, history: Mapping[str, Sequence[Row]]) -> None:
        self._history = history

    def versions(self, kind: Kind, *, since: int = 0, upto: int | None = None) -> list[Row]:
        rows = self._history.get(kind.label, ())
        found = [r for r in rows if since < r["commit_id"] and (upto is None or _upto(r, upto))]
        return sorted(found, key=lambda row: (row["commit_id"], identity_of(kind, row)))

    def visible(self, kind: Kind, upto: int | None = None) -> list[Row]:
        newest = {identity_of(kind, row): row for row in self.versions(kind, upto=upto)}
        return [newest[identity] for identity in sorted(newest)]

    def last_commit(self, kind: Kind) -> int:
        return max((row["commit_id"] for row in self.versions(kind)), default=0)

    def changes(self) -> list[Row]:
        """The whole change feed."""
        found = []
        for kind in by_name():
            known: set[tuple[str, ...]] = set()
            for row in self.versions(kind):
                identity = identity_of(kind, row)
                change = {
                    **_described(kind, row),
                    "fields": _fields(kind, row),
                    "operation": "update" if identity in known else "insert",
                }
                found.append(change)
                known.add(identity)
        return sorted(found, key=lambda c: c["commit_id"])  # stable: by type and identity within

    def changes_of(self, commit_id: int) -> list[Row]:
        """What `list_commit_changes` says."""
        left_out = ("commit_id", "fields")
        return [
            {name: value for name, value in change.items() if name not in left_out}
            for change in self.changes()
            if change["commit_id"] == commit_id
        ]

    def diff(self, before: int, after: int) -> list[Row]:
        found = []
        for kind in by_name():
            earlier = {identity_of(kind, r): _fields(kind, r) for r in self.visible(kind, before)}
            for row in self.visible(kind, after):
                new, old = _fields(kind, row), earlier.get(identity_of(kind, row))
                names = [n for n in new if old is None or exact(old[n]) != exact(new[n])]
                if row["commit_id"] <= before or not (names or old is None):
                    continue
                found.append(
                    {
                        **_described(kind, row),
                        "operation": "insert" if old is None else "update",
                        "before": {n: old[n] for n in names} if old is not None else None,
                        "after": {n: new[n] for n in names},
                    }
                )
        return found

    def sql_rows(self, kind: Kind, upto: int | None = None) -> list[Row]:
        """The table of a type; identities have columns of their own there."""
        return [
            {
                "commit_id": row["commit_id"],
                **_keys(kind, row, "entity_key"),
                **_fields(kind, row),
            }
            for row in self.visible(kind, upto)
        ]


def by_name() -> list[Kind]:
    """In the order in which a storage names its types."""
    return sorted(KINDS.values(), key=lambda kind: (kind.kind, kind.stored_name))


def _upto(row: Row, commit_id: int) -> bool:
    return bool(row["commit_id"] <= commit_id)


def _described(kind: Kind, row: Row) -> Row:
    return {
        "commit_id": row["commit_id"],
        "kind": kind.kind,
        "type_name": kind.stored_name,
        **_keys(kind, row, "key"),
    }


def _keys(kind: Kind, row: Row, of_entity: str) -> Row:
    """The identity in general columns; a relation without instance key has the empty one."""
    if kind.is_entity:
        return {of_entity: row[kind.identity[0]]}
    left_key, right_key, *key = identity_of(kind, row)
    return {"left_key": left_key, "right_key": right_key, "instance_key": "".join(key)}


def _fields(kind: Kind, row: Row) -> Row:
    """Without the keys of relations; nested ones as they are in JSON."""
    return {
        name: _untagged(row[name]) if name in kind.nested else row[name]
        for name in kind.columns
        if kind.is_entity or name not in kind.identity
    }


def expected_past(facts: Facts) -> Row:
    """What must be said for ever, whatever is committed later."""
    past = Past(facts["history"])
    said: Row = {"commits": facts["commits"]}
    for commit in facts["commits"]:
        said[f"commit {commit['id']}"] = commit
    for kind in KINDS.values():
        said[f"{kind.label} history"] = past.versions(kind)
        for commit_id in _some(facts["head"]):
            said[f"{kind.label} as of {commit_id}"] = past.visible(kind, commit_id)
    for name, commit_id in facts["tags"].items():
        said[f"commit of {name}"] = commit_id
        said[f"customers of {name}"] = past.sql_rows(KINDS["Customer"], commit_id)
    return said


def expected_reads(facts: Facts) -> Row:
    """What must be said as long as nothing else is committed."""
    past, head = Past(facts["history"]), facts["head"]
    times = {commit["id"]: commit["created_at"] for commit in facts["commits"]}
    said: Row = {"change feed": past.changes(), "commit 0": None}
    for commit_id in times:
        said[f"changes of commit {commit_id}"] = past.changes_of(commit_id)
    for before, after in _spans(head):
        said[f"diff {before} {after}"] = past.diff(before, after)
    for kind in KINDS.values():
        said[f"{kind.label} latest"] = past.visible(kind)
        said[f"{kind.label} in SQL"] = past.sql_rows(kind)
        said[f"{kind.label} of spring"] = past.visible(kind, facts["tags"]["spring"])
        said[f"{kind.label} since {head // 2}"] = past.versions(kind, since=head // 2)
    for commit_id in _some(head)[1:]:
        same = [other for other, time in times.items() if time == times[commit_id]]
        said[f"commit at the time of {commit_id}"] = max(same)
        said[f"as of the time of {commit_id}"] = past.visible(KINDS["Customer"], max(same))
    return {**expected_past(facts), **said, **_expected_answers(past)}


def _expected_answers(past: Past) -> Row:
    """Of the questions in `_answers`."""
    customers = past.visible(KINDS["Customer"])
    tier = {row["id"]: row["tier"] for row in customers}
    owns = past.visible(KINDS["Owns"])
    price = {row["sku"]: row["price"] for row in past.visible(KINDS["Product"])}

    def where(condition: Callable[[Row], bool]) -> list[str]:
        return [row["id"] for row in customers if condition(row)]

    def seen(row: Row, page: str) -> bool:
        return any(visit["page"] == page for visit in row["visits"])

    tiers = sorted(set(tier.values()))
    return {
        "gold": where(lambda row: row["tier"] == "Gold"),
        "vip": where(lambda row: "vip" in row["tags"]),
        "of Bern": where(lambda row: (row["address"] or {}).get("city") == "Bern"),
        "visited home": where(lambda row: seen(row, "home")),
        "nameless": where(lambda row: row["nickname"] is None),
        "tiers": [
            {
                "tier": name,
                "n": len(where(lambda row, name=name: row["tier"] == name)),  # type: ignore[misc]
                "points": _total(row["points"] for row in customers if row["tier"] == name),
            }
            for name in tiers
        ],
        "owned by gold": [
            [row["left_key"], row["right_key"]] for row in owns if tier[row["left_key"]] == "Gold"
        ],
        "paths": [[row["left_key"], row["right_key"], price[row["right_key"]]] for row in owns],
    }


def _total(numbers: Iterable[int]) -> int:
    result = 0
    for number in numbers:
        result += number
    return result


def _some(head: int) -> list[int]:
    """Before the first commit, in the middle, the last."""
    return [0, head // 2, head]


def _spans(head: int) -> list[tuple[int, int]]:
    return [(0, head // 2), (head // 2, head)]


# --- what is read -----------------------------------------------------------------------------

# Where an entity and a relation share a name, SQL tells them apart by kind.
_SQL_NAMES = {"Invoice": "entity:Invoice", "Namesake": "relation:Invoice"}


def read_past(session: Session, namesakes: Session, facts: Facts) -> Row:
    """What is said under the names of `expected_past`: by a session of the shop's types, and one
    of the type that shares its name with one of them."""
    head = facts["head"]
    commits = [_commit(commit) for commit in session.list_commits(limit=10_000)]
    said: Row = {"commits": [commit for commit in commits if commit["id"] <= head]}
    for commit in facts["commits"]:
        said[f"commit {commit['id']}"] = _commit(session.get_commit(commit["id"]) or {})
    for kind in KINDS.values():
        query = _query(namesakes if kind is NAMESAKE else session, kind)
        history = _rows(kind, query.with_history())
        said[f"{kind.label} history"] = [row for row in history if _upto(row, head)]
        for commit_id in _some(head):
            said[f"{kind.label} as of {commit_id}"] = _rows(kind, query.as_of(commit_id))
    for name in facts["tags"]:
        view = session.at(name)
        said[f"commit of {name}"] = view.commit_id
        said[f"customers of {name}"] = _sql_rows(view, KINDS["Customer"])
    return said


def read_everything(session: Session, namesakes: Session, facts: Facts) -> Row:
    """The same under the names of `expected_reads`."""
    head = facts["head"]
    times = {commit["id"]: commit["created_at"] for commit in facts["commits"]}
    said: Row = {"change feed": _feed(session), "commit 0": session.get_commit(0)}
    for commit_id in times:
        changes = session.list_commit_changes(commit_id)
        said[f"changes of commit {commit_id}"] = tagged(changes)
    for before, after in _spans(head):
        said[f"diff {before} {after}"] = tagged(session.diff(before, after))
    for kind in KINDS.values():
        query = _query(namesakes if kind is NAMESAKE else session, kind)
        since = query.history_since(head // 2)
        said[f"{kind.label} latest"] = _rows(kind, query)
        said[f"{kind.label} in SQL"] = _sql_rows(session, kind)
        said[f"{kind.label} of spring"] = _rows(kind, query.as_of("spring"))
        said[f"{kind.label} since {head // 2}"] = _rows(kind, since)
    for commit_id in _some(head)[1:]:
        view = session.at(datetime.fromisoformat(times[commit_id]))
        said[f"commit at the time of {commit_id}"] = view.commit_id
        then = _rows(KINDS["Customer"], _query(view, KINDS["Customer"]))
        said[f"as of the time of {commit_id}"] = then
    return {**read_past(session, namesakes, facts), **said, **_answers(session)}


def _commit(commit: Mapping[str, Any]) -> Row:
    """What every version tells of a commit; later ones may tell more."""
    names = ("id", "parent_id", "created_at", "runtime_id", "kind", "metadata", "types")
    return {name: commit.get(name) for name in names}


def _query(session: Any, kind: Kind) -> Any:
    query = session.query()
    return query.entities(kind.cls) if kind.is_entity else query.relations(kind.cls)


def _rows(kind: Kind, query: Any) -> list[Row]:
    return [{**row_of(kind, item), "commit_id": item.meta().commit_id} for item in query.collect()]


def _sql_rows(session: Any, kind: Kind) -> list[Row]:
    table = _SQL_NAMES.get(kind.label, kind.label)
    keys = "entity_key" if kind.is_entity else "left_key, right_key, instance_key"
    found = session.sql(f'select * from "{table}" order by {keys}').collect()
    return [
        {
            name: json.loads(value) if name in kind.nested and value is not None else tagged(value)
            for name, value in row.items()
        }
        for row in found
    ]


def _feed(session: Session) -> list[Row]:
    found: list[Row] = []
    cursor = "0"
    while page := session.changes(cursor, limit=_PAGE):
        found += page
        cursor = page.cursor
    return [{name: tagged(value) for name, value in change.items()} for change in found]


def _answers(session: Session) -> Row:
    customers = session.query().entities(Customer)

    def ids(condition: Any) -> list[str]:
        return [item.id for item in customers.where(condition).collect()]

    tiers = customers.group_by(Customer.tier).agg(n=count(), points=sum(Customer.points))
    gold = session.query().relations(Owns).where(left(Owns).tier == "Gold")
    paths = session.query().entities(Customer).via(Owns).collect()
    return {
        "gold": ids(Customer.tier == "Gold"),
        "vip": ids(Customer.tags.contains("vip")),
        "of Bern": ids(Customer.address["city"] == "Bern"),
        "visited home": ids(Customer.visits.any_path("page") == "home"),
        "nameless": ids(Customer.nickname.is_null()),
        "tiers": tiers.to_pylist(),
        "owned by gold": [[item.left_key, item.right_key] for item in gold.collect()],
        "paths": sorted(
            [path.source.id, path.relations[0].right_key, path.relations[0].right.price]
            for path in paths
        ),
    }
