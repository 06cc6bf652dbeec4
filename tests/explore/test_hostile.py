"""Whatever is stored is shown as text, and every key has an address that leads back to it."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Entity, Field, Relation, Session, initialize_storage
from storage_engine.explore.links import (
    LONGEST_SEGMENT,
    identity_path,
    object_path,
    parse_identity,
    parse_segment,
    segment,
)
from storage_engine.explore.values import title, visible
from tests.explore.client import PageClient
from tests.explore.conftest import browsing

SCRIPT = "<script>document.title='owned'</script>"
KEYS = [
    "plain",
    SCRIPT,
    "\"'><img src=x onerror=alert(1)>",
    "a/b//c",
    "..",
    ".",
    "~",
    "~..",
    "~long.x",
    "%2F%00",
    "a?b#c&d=e;f+g h",
    "back\\slash",
    "nul\x00and\x1b[31mescape\r\n\tend",
    "\u202eright to left\u2066",
    "שלום עולם",
    "é e\u0301 👩‍👩‍👧 \U0001f9ea",
    "{{ 7 * 7 }} {% raw %} ${7*7}",
    "k" * 10_000,
    "ü" * 10_000,
    "k" * 9_999 + "j",
    " leading and trailing ",
    "\ufeff",
    " ",
    "/",
    "//",
    "objects/schema",
]


class Odd(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    number: Field[int | None] = Field(default=None)
    ratio: Field[float | None] = Field(default=None)
    raw: Field[bytes | None] = Field(default=None)
    nested: Field[dict[str, Any]] = Field(default_factory=dict)


class Near(Relation[Odd, Odd]):
    nth: Field[str] = Field(instance_key=True)
    note: Field[str]


def fill_odd(uri: str) -> None:
    initialize_storage(uri)
    with Session(uri) as session:
        session.ensure(
            Odd(
                id=key,
                name=f"{SCRIPT}{key}",
                number=2**63 - 1,
                ratio=1e308,
                raw=bytes(range(256)),
                nested={SCRIPT: [SCRIPT, -(2**62), {"deep": "\u202e"}]},
            )
            for key in KEYS
        )
        session.ensure(
            Near(left_key=left, right_key=right, nth=right, note=SCRIPT)
            for left, right in pairwise(KEYS)
        )
        session.add_commit_meta(SCRIPT, SCRIPT)


@pytest.fixture(scope="module", params=["directory", "sqlite"])
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("odd")
    uri = f"sqlite:///{folder}/odd.db" if request.param == "sqlite" else f"file://{folder}/odd"
    fill_odd(uri)
    for browse in browsing():
        yield browse(uri)


def harmless(html: str) -> None:
    html = re.sub(r'<input type="hidden"[^>]*>', "", html)  # is sent back as it came
    body = html.partition("<body>")[2]
    assert "<script" not in body
    assert "<img src=x" not in body
    assert "\u202e" not in html
    assert "\x00" not in html
    assert "\x1b" not in html


def test_a_key_of_blanks_can_be_seen() -> None:
    assert visible(" \n") == '<span class="esc">\\x20</span><span class="esc">\\x0a</span>'
    assert title(" \u3000") == r"\x20\u3000"
    assert visible("a b\n") == "a b\n"


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
def test_every_key_has_an_address_that_leads_back(odd: PageClient, key: str) -> None:
    path = object_path("Odd", (key,))
    assert len(path) < LONGEST_SEGMENT + 200

    shown = odd.document(path)

    assert shown["identity"] == [key]
    assert shown["url"] == path
    assert shown["fields"]["number"] == 2**63 - 1
    assert shown["fields"]["nested"][SCRIPT][1] == -(2**62)
    for group in shown["relations"]:
        for other in group["related"]:
            assert odd.document(other["url"])["identity"] == [other["key"]]
            relation = odd.document(other["relation_url"])
            assert key in relation["identity"]
        assert odd.document(group["all_url"])["objects"]
    harmless(odd.get(path).html)


def test_tables_and_commits_show_them_as_text(odd: PageClient) -> None:
    identities: list[str] = []
    url: str | None = "/types/Odd?limit=4"
    while url is not None:
        answer = odd.document(url)
        identities += [row["identity"][0] for row in answer["objects"]]
        harmless(odd.get(url).html)
        url = answer["next_url"]
    assert identities == sorted(KEYS)
    url = "/types/Near?limit=5"
    count = 0
    while url is not None:
        answer = odd.document(url)
        count += len(answer["objects"])
        harmless(odd.get(url).html)
        url = answer["next_url"]
    assert count == len(KEYS) - 1
    for path in ("/", "/commits", "/commits/1", "/health", "/types/Near/schema"):
        harmless(odd.get(path).html)
    assert "\\u202e" in odd.get(object_path("Odd", ("\u202eright to left\u2066",))).text
    assert "10,000 characters" in odd.shown("/types/Odd")


def test_a_page_of_a_commit_goes_on_after_any_key(odd: PageClient) -> None:
    seen = []
    url: str | None = "/commits/1?type=Odd"
    while url is not None:
        (diff,) = odd.document(url)["diffs"]
        seen += [row["identity"][0] for row in diff["rows"]]
        url = f"/commits/1?type=Odd&after={diff['after']}" if diff["after"] else None
    assert sorted(seen) == sorted(KEYS)


@pytest.mark.parametrize(
    "path",
    [
        f"/types/{SCRIPT}",
        f"/types/Odd/objects/{SCRIPT}x",
        f"/commits/{SCRIPT}",
        f"/types/Odd?as_of={SCRIPT}",
        f"/types/Odd?filter={SCRIPT} == 1",
        f"/types/Odd?prefix={SCRIPT}",
        f"/events/{SCRIPT}",
        f"/{SCRIPT}",
        "/types/Odd?filter=name == \u202e",
        "/types/Odd?after=\x00",
    ],
)
def test_what_is_asked_for_is_text_as_well(odd: PageClient, path: str) -> None:
    answer = odd.get(path)
    assert answer.status in (200, 400, 404)
    harmless(answer.html)


def test_parts_of_addresses() -> None:
    for key in KEYS:
        if len(key) < 1000:
            assert parse_segment(segment(key)) == key
            assert parse_identity(identity_path((key,)), "entity") == (key,)
        assert parse_identity(identity_path((key, "x", "")), "relation")[1:] == ("x", "")
        assert "/" not in segment(key)
    # What others have encoded, with more or less care, means the same.
    assert parse_identity("a/b", "entity") == ("a/b",)
    assert parse_identity("a%2Fb", "entity") == ("a/b",)
    assert parse_segment("~a") == "~a"
    with pytest.raises(ValueError, match="left key"):
        parse_identity("a", "relation")
    with pytest.raises(UnicodeDecodeError):
        parse_segment("%ff")


def test_templates_escape_by_themselves() -> None:
    """Nothing on a page is marked as safe but by `values`, which escapes."""
    import storage_engine.explore as package

    folder = Path(package.__file__).parent
    for template in (folder / "templates").glob("*.html"):
        text = template.read_text()
        assert "|safe" not in text
        assert "<script" not in text
        assert " style=" not in text
        assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in (folder / "static" / "style.css").read_text()
