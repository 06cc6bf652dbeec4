"""Pictures to click along, as SVG: an object among its neighbours, and the types of an ontology.

Only places are reckoned here; a template draws them. Everything in a picture is also in a list on
the same page, for those who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage_engine.explore.links import type_path
from storage_engine.explore.values import key_label, shortened, title

WIDTH = 920
_BOX, _ROW, _LABEL, _GAP = 236, 44, 26, 14  # of a neighbour: width, height of its row, ...
_CENTRE, _CENTRE_HEIGHT = 232, 60
_NODES = 5  # of a relation type, on one side
_GROUPS = 5  # on one side
_TYPES = 18  # in the map of types
_LETTERS = 25


@dataclass(frozen=True, slots=True)
class Node:
    x: float
    y: float
    width: float
    height: float
    title: str
    subtitle: str
    url: str | None
    style: str = ""

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


@dataclass(frozen=True, slots=True)
class Edge:
    path: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Caption:
    x: float
    y: float
    text: str
    url: str | None
    anchor: str = "start"


@dataclass(frozen=True, slots=True)
class Graph:
    width: int
    height: int
    label: str
    nodes: Sequence[Node]
    edges: Sequence[Edge]
    captions: Sequence[Caption]


# --- an object ----------------------------------------------------------------------------------


def neighbours(
    identity: Sequence[str], name: str | None, type_label: str, groups: Sequence[Mapping[str, Any]]
) -> Graph | None:
    """An entity in the middle, what points to it on the left, what it points to on the right."""
    sides = {
        way: [group for group in groups if group["direction"] == way][:_GROUPS]
        for way in ("incoming", "outgoing")
    }
    if not groups:
        return None
    heights = {way: sum(map(_height, listed)) for way, listed in sides.items()}
    height = max(_CENTRE_HEIGHT + 40, *heights.values()) + 20
    middle = height / 2
    centre = Node(
        (WIDTH - _CENTRE) / 2,
        middle - _CENTRE_HEIGHT / 2,
        _CENTRE,
        _CENTRE_HEIGHT,
        title(name or key_label(identity, _LETTERS), _LETTERS),
        f"{type_label} {key_label(identity, 18)}" if name else type_label,
        None,
        "centre",
    )
    nodes, edges, captions = [centre], [], []
    for way, listed in sides.items():
        top = (height - heights[way]) / 2
        for group in listed:
            drawn = _side(group, way == "incoming", top, middle)
            nodes += drawn[0]
            edges += drawn[1]
            captions += drawn[2]
            top += _height(group)
    return Graph(
        WIDTH, round(height), f"{type_label} and what it relates to", nodes, edges, captions
    )


def _by_key(group: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """The relations to the same entity together."""
    entities: dict[str, list[Mapping[str, Any]]] = {}
    for other in group["related"]:
        entities.setdefault(other["key"], []).append(other)
    return list(entities.values())


def _has_more(group: Mapping[str, Any]) -> bool:
    return bool(group["more"]) or len(_by_key(group)) > _NODES


def _height(group: Mapping[str, Any]) -> int:
    rows = min(len(_by_key(group)), _NODES)
    return _LABEL + _ROW * rows + (22 if _has_more(group) else 0) + _GAP


def _side(
    group: Mapping[str, Any], incoming: bool, top: float, middle: float
) -> tuple[list[Node], list[Edge], list[Caption]]:
    x = 0 if incoming else WIDTH - _BOX
    # From the box's inner side to the centre's near side.
    start = _BOX if incoming else WIDTH - _BOX
    end = (WIDTH - _CENTRE) / 2 if incoming else (WIDTH + _CENTRE) / 2
    captions = [Caption(x + 4, top + 17, f"{group['relation']} →", type_path(group["relation"]))]
    nodes: list[Node] = []
    edges: list[Edge] = []
    y = top + _LABEL
    for several in _by_key(group)[:_NODES]:
        other = several[0]
        name = other["name"] or key_label([other["key"]], _LETTERS)
        details = [str(group["other_type"])]
        if other["name"]:
            details.append(key_label([other["key"]], 14))
        if len(several) > 1:
            details.append(f"{len(several)} relations")
        elif other["instance"]:
            details.append(title(other["instance"], 20))
        nodes.append(
            Node(
                x,
                y,
                _BOX,
                _ROW - 6,
                title(name, _LETTERS),
                shortened(" · ".join(details), 38),
                other["url"],
            )
        )
        level = y + (_ROW - 6) / 2
        bend = (start + end) / 2
        first, last = (
            ((start, level), (end, middle)) if incoming else ((end, middle), (start, level))
        )
        edges.append(
            Edge(
                f"M{first[0]:.0f},{first[1]:.0f} C{bend:.0f},{first[1]:.0f} "
                f"{bend:.0f},{last[1]:.0f} {last[0]:.0f},{last[1]:.0f}"
            )
        )
        y += _ROW
    if _has_more(group):
        captions.append(Caption(x + 4, y + 11, "more…", group["all_url"]))
    return nodes, edges, captions


# --- the types ----------------------------------------------------------------------------------


def type_map(
    entities: Sequence[Mapping[str, Any]], relations: Sequence[Mapping[str, Any]]
) -> Graph | None:
    """Entity types on an ellipse, relation types between them; None where that shows nothing.

    `relations` have the labels of their ends as `left` and `right`."""
    joined = {str(r[side]) for r in relations for side in ("left", "right")}
    drawn = [entity for entity in entities if entity["label"] in joined]
    if not relations or not 1 <= len(drawn) <= _TYPES:
        return None
    drawn = _in_order(drawn, relations)
    width, box, tall = WIDTH, 168, 46
    ring = max(110, 34 * len(drawn))
    height = round(2 * ring * 0.62 + tall + 90) if len(drawn) > 1 else 170
    places: dict[str, tuple[float, float]] = {}
    nodes = []
    for number, entity in enumerate(drawn):
        angle = 2 * math.pi * number / len(drawn) - math.pi / 2 - math.pi / len(drawn)
        x = width / 2 + (width / 2 - box / 2 - 70) * math.cos(angle) * (len(drawn) > 1)
        y = height / 2 + (height / 2 - tall / 2 - 34) * math.sin(angle) * (len(drawn) > 1)
        places[str(entity["label"])] = (x, y)
        nodes.append(
            Node(
                x - box / 2,
                y - tall / 2,
                box,
                tall,
                title(str(entity["label"]), 20),
                str(entity["shown_count"]),
                type_path(str(entity["label"])),
                "type",
            )
        )
    edges, captions = [], []
    between: dict[frozenset[str], int] = {}
    for relation in relations:
        ends = (str(relation["left"]), str(relation["right"]))
        if not all(end in places for end in ends):
            continue
        number = between[frozenset(ends)] = between.get(frozenset(ends), -1) + 1
        path, x, y = _link(places[ends[0]], places[ends[1]], number, tall, (width / 2, height / 2))
        edges.append(Edge(path))
        captions.append(
            Caption(
                x, y, title(str(relation["label"]), 24), type_path(str(relation["label"])), "middle"
            )
        )
    return Graph(width, height, "The types and their relations", nodes, edges, captions)


def _in_order(
    entities: Sequence[Mapping[str, Any]], relations: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Those that are related beside each other."""
    by_label = {str(entity["label"]): entity for entity in entities}
    left = list(by_label)
    order: list[str] = []
    while left:
        following = left[0]
        if order:
            near = [
                other
                for r in relations
                for here, other in ((r["left"], r["right"]), (r["right"], r["left"]))
                if here == order[-1] and other in left
            ]
            following = near[0] if near else left[0]
        order.append(following)
        left.remove(following)
    return [by_label[label] for label in order]


def _link(
    start: tuple[float, float],
    end: tuple[float, float],
    number: int,
    tall: float,
    centre: tuple[float, float],
) -> tuple[str, float, float]:
    """The way between two types, and the place of its name. Several between the same two bend
    more and more."""
    if start == end:
        x, y = start
        up = y > centre[1]
        top = y + tall / 2 if up else y - tall / 2
        reach = (42 + 18 * number) * (1 if up else -1)
        west, east, far = x - 34, x + 34, top + reach
        path = (
            f"M{west:.0f},{top:.0f} C{west:.0f},{far:.0f} {east:.0f},{far:.0f} {east:.0f},{top:.0f}"
        )
        return path, x, top + reach * 0.75 + (14 if up else -4)
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy)
    bend = 26 + 30 * number
    mx = (start[0] + end[0]) / 2 - dy / length * bend
    my = (start[1] + end[1]) / 2 + dx / length * bend
    first, last = _edge_of(start, (mx, my), tall), _edge_of(end, (mx, my), tall)
    path = f"M{first[0]:.0f},{first[1]:.0f} Q{mx:.0f},{my:.0f} {last[0]:.0f},{last[1]:.0f}"
    return path, (first[0] + 2 * mx + last[0]) / 4, (first[1] + 2 * my + last[1]) / 4 - 5


def _edge_of(
    box: tuple[float, float], towards: tuple[float, float], tall: float
) -> tuple[float, float]:
    """Where a line from the middle of a box leaves it."""
    dx, dy = towards[0] - box[0], towards[1] - box[1]
    wide = 168 / 2 + 3
    high = tall / 2 + 3
    scale = min(wide / abs(dx) if dx else math.inf, high / abs(dy) if dy else math.inf)
    return box[0] + dx * scale, box[1] + dy * scale
