"""Brings filters with endpoint conditions into the form in which they are asked.

An endpoint condition is asked of the endpoint's visible versions: it holds when some version makes
it true (one version in latest and as-of reads, possibly several in history reads). So negations
are pushed down to single conditions first, and conditions on one endpoint that are joined by `&`
are asked together, of the same version. Filters without endpoints stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_engine.model.expressions import And, Filter, Not, Operand, Or, Source


@dataclass(frozen=True, repr=False)
class Endpoint(Filter):
    """Some visible version of the left or right entity makes `part` true."""

    source: Source
    part: Filter

    def __repr__(self) -> str:
        return f"some {self.source} version: {self.part!r}"

    def as_json(self) -> dict[str, Any]:
        return {"op": "endpoint", "source": self.source, "part": self.part.as_json()}

    def operands(self) -> Iterator[Operand]:
        yield from self.part.operands()


def normalise(expression: Filter) -> Filter:
    """The same filter with every endpoint condition inside an `Endpoint`."""
    if all(operand.source == "self" for operand in expression.operands()):
        return expression
    return _group(_push_down(expression, negate=False))


def conjuncts(expression: Filter | None) -> tuple[Filter, ...]:
    """Conditions that must all be true, the fewest that say the same."""
    if expression is None:
        return ()
    if isinstance(expression, And):
        return tuple(part for p in expression.parts for part in conjuncts(p))
    return (expression,)


def _push_down(node: Filter, *, negate: bool) -> Filter:
    if isinstance(node, Not):
        return _push_down(node.part, negate=not negate)
    if isinstance(node, And | Or):
        kind = And if isinstance(node, And) != negate else Or
        parts: list[Filter] = []
        for part in node.parts:
            inner = _push_down(part, negate=negate)
            parts += (
                inner.parts if isinstance(inner, And | Or) and type(inner) is kind else (inner,)
            )
        return kind(tuple(parts))
    return Not(node) if negate else node


def _group(node: Filter) -> Filter:
    sources = {operand.source for operand in node.operands()}
    if len(sources) == 1:
        source = sources.pop()
        return node if source == "self" else Endpoint(source, node)
    assert isinstance(node, And | Or)
    grouped: dict[Source | None, list[Filter]] = {}
    for part in node.parts:
        own = {operand.source for operand in part.operands()}
        grouped.setdefault(own.pop() if len(own) == 1 else None, []).append(part)
    parts: list[Filter] = []
    for source_, found in grouped.items():
        if source_ in ("left", "right"):
            parts.append(
                Endpoint(source_, found[0] if len(found) == 1 else type(node)(tuple(found)))
            )
        else:
            parts += found if source_ == "self" else map(_group, found)
    return parts[0] if len(parts) == 1 else type(node)(tuple(parts))
