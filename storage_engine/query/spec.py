"""A query as data: what the builder makes, and what executors get.

Immutable and checked: an executor may rely on every rule that is enforced here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from storage_engine.model.declarations import Side
from storage_engine.model.expressions import And, Filter, Operand, json_form
from storage_engine.model.spec import TypeSpec
from storage_engine.query.aggregates import Aggregate, Having
from storage_engine.query.reference import Reference


@dataclass(frozen=True, slots=True)
class When:
    """Which versions are seen: latest, as of a reference, all, or all after a commit.

    `schema_version`: rows of that version of the type alone, whichever is current.
    """

    as_of: Reference | None = None
    history: bool = False
    since: int | None = None
    schema_version: int | None = None

    @property
    def latest(self) -> bool:
        return self.as_of is None and not self.history

    def __str__(self) -> str:
        shown = self._shown()
        if self.schema_version is None:
            return shown
        return f"{shown} of schema version {self.schema_version}"

    def _shown(self) -> str:
        if self.since is not None:
            return f"history_since({self.since})"
        if self.history:
            return "with_history()"
        return "latest" if self.as_of is None else f"as_of({self.as_of!r})"


def after_pin(when: When, pinned: int) -> ValueError:
    """What a reader of a pinned view is told who asks for what came later."""
    return ValueError(
        f"{when} is after commit {pinned}, at which this view is pinned; ask the session itself"
    )


@dataclass(frozen=True, slots=True)
class Order:
    """One sort key. NULLs come last in both directions."""

    operand: Operand
    descending: bool = False


@dataclass(frozen=True)
class QuerySpec:
    """What is asked.

    where:       a condition on rows, None for all
    order:       sort keys; ties, and rows without any, are ordered by identity (by commit and
                 identity in history reads)
    via:         relation types to follow, in order, each from the entities reached so far
    backwards:   the numbers of the steps in `via` that go from right to left
    groups:      places to group by, with the names of their columns
    aggregates:  the result's columns by name; empty for a query of rows
    having:      a condition on groups
    """

    type: TypeSpec
    where: Filter | None = None
    order: tuple[Order, ...] = ()
    limit: int | None = None
    offset: int = 0
    when: When = When()
    via: tuple[TypeSpec, ...] = ()
    groups: tuple[tuple[str, Operand], ...] = ()
    aggregates: tuple[tuple[str, Aggregate], ...] = ()
    having: Having | None = None
    backwards: frozenset[int] = frozenset()

    def and_where(self, condition: Filter) -> Filter:
        return condition if self.where is None else self.where & condition

    def ends(self, step: int) -> tuple[Side, Side]:
        """At which side of its relations a step begins, and where it ends."""
        return ("right", "left") if step in self.backwards else ("left", "right")

    @property
    def reached(self) -> str:
        """The entity type in which paths end."""
        if not self.via:
            return self.type.name
        last = len(self.via) - 1
        return str(self.via[last].left if last in self.backwards else self.via[last].right)

    def followed(self, relation: TypeSpec, *, backwards: bool, call: str) -> QuerySpec:
        """With another step: from whichever side fits, or from right to left where told so.

        `call` is what the user wrote, for the message."""
        starts = [relation.right] if backwards else [relation.left, relation.right]
        if self.reached not in starts:
            raise ValueError(
                f"{call} starts at {' or '.join(map(str, dict.fromkeys(starts)))}, but the path "
                f"has reached {self.reached}"
            )
        number = len(self.via)
        against = backwards or self.reached != relation.left
        return replace(
            self,
            via=(*self.via, relation),
            backwards=self.backwards | {number} if against else self.backwards,
        )

    @property
    def left(self) -> bool:
        """Whether the filter asks about left endpoints."""
        return self._asks("left")

    @property
    def right(self) -> bool:
        """Whether the filter asks about right endpoints."""
        return self._asks("right")

    def _asks(self, source: str) -> bool:
        return self.where is not None and any(o.source == source for o in self.where.operands())

    def fields(self) -> frozenset[str]:
        """The queried type's own fields that filter, order, groups and aggregates look at; its
        identity columns are not among them."""
        places = list(self.where.operands()) if self.where is not None else []
        places += [key.operand for key in self.order]
        places += [operand for _, operand in self.groups]
        asked = [aggregate for _, aggregate in self.aggregates]
        asked += self.having.aggregates() if self.having is not None else []
        places += [a.operand for a in asked if a.operand is not None]
        return frozenset(o.name for o in places if o.source == "self" and o.identity is None)

    def as_json(self) -> dict[str, Any]:
        """For `explain`: plain JSON values."""
        as_of = self.when.as_of
        described: dict[str, Any] = {
            "kind": self.type.kind,
            "type": self.type.name,
            "when": {
                "as_of": json_form(as_of) if as_of is not None else None,
                "history": self.when.history,
                "since": self.when.since,
                **(
                    {"schema_version": self.when.schema_version}
                    if self.when.schema_version is not None
                    else {}
                ),
            },
            "where": self.where.as_json() if self.where is not None else None,
            "order": [
                {"operand": key.operand.as_json(), "descending": key.descending}
                for key in self.order
            ],
            "limit": self.limit,
            "offset": self.offset,
        }
        if self.via:
            described["via"] = [relation.name for relation in self.via]
            described["backwards"] = sorted(self.backwards)
        if self.aggregates:
            described["groups"] = {name: operand.as_json() for name, operand in self.groups}
            described["aggregates"] = {name: a.as_json() for name, a in self.aggregates}
            described["having"] = self.having.as_json() if self.having is not None else None
        return described


def all_of(conditions: tuple[Filter, ...]) -> Filter:
    """Several conditions as one."""
    return conditions[0] if len(conditions) == 1 else And(conditions)
