"""The page in a real browser: a person's way through it, on a screen and on a phone, and values
that try to be more than text. With UPDATE_SCREENSHOTS=1 it takes the docs' pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.browser import CHROMIUM, IMAGES, UPDATE, browser
from tests.explore import airports
from tests.explore.client import serving
from tests.explore.test_branches import fork
from tests.explore.test_hostile import KEYS, SCRIPT, fill_odd

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@contextmanager
def window(opened: Page, **options: Any) -> Iterator[Page]:
    """A window of the browser, in which nothing may go wrong unseen."""
    chromium = opened.context.browser
    assert chromium is not None
    page = chromium.new_page(**options)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.on(
        "request",
        lambda request: problems.append(request.url) if "127.0.0.1" not in request.url else None,
    )
    yield page
    assert [problem for problem in problems if "404" not in problem] == []
    page.close()


def keep(page: Page, name: str) -> None:
    if UPDATE:
        IMAGES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=IMAGES / f"explore-{name}.png", full_page=True)


@pytest.fixture(scope="module")
def opened() -> Iterator[Page]:
    with browser() as page:
        assert page is not None
        yield page


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_a_person_goes_from_a_type_to_the_diff_of_a_commit(
    air: str, opened: Page, tmp_path: Path
) -> None:
    with serving("--storage-uri", air, cwd=tmp_path) as (_, url):
        with window(opened, viewport={"width": 1240, "height": 800}) as page:
            page.goto(url)
            keep(page, "types")
            page.get_by_role("link", name="Airport", exact=True).first.click()
            page.get_by_role("heading", name="Airport").wait_for()
            # Filter in the form; the address can be shared.
            page.get_by_label("Field").fill("altitude_ft")
            page.get_by_label("Operator").select_option("is at most")
            page.get_by_label("Value").fill("14")
            page.get_by_role("button", name="Filter").click()
            page.get_by_text("altitude_ft <= 14", exact=True).wait_for()
            assert page.locator("tbody tr").count() == 4
            assert "filter=altitude_ft" in page.url
            keep(page, "table")
            page.get_by_role("link", name="JFK", exact=True).click()
            page.get_by_role("heading", name="John F Kennedy Intl").wait_for()
            keep(page, "object")
            # Along the picture, to a related object.
            page.locator("svg a", has_text="Daniel K. Inouye Intl").click()
            page.get_by_role("heading", name="Daniel K. Inouye Intl").wait_for()
            assert page.url.endswith("/types/Airport/objects/HNL")
            # To the commit that changed it, and what that changed.
            page.locator("#timeline ~ ol a", has_text="commit 4").first.click()
            page.get_by_role("heading", name="Commit 4").wait_for()
            assert page.locator("del", has_text="Honolulu Intl").is_visible()
            assert page.locator("ins", has_text="Daniel K. Inouye Intl").is_visible()
            keep(page, "commit")
            page.get_by_role("link", name="Everything as of here").click()
            page.get_by_text("1 commit before the latest").wait_for()
            for name in ("Commits", "Events", "Health"):
                page.get_by_role("navigation").get_by_role("link", name=name).click()
                page.get_by_role("heading", name=name, exact=True).wait_for()
            keep(page, "health")
            page.goto(f"{url}types/Airprt")
            page.get_by_text("did you mean").wait_for()
            # With the keyboard alone: the first stop leads past the navigation.
            page.goto(url)
            page.keyboard.press("Tab")
            page.keyboard.press("Enter")
            assert page.evaluate("document.activeElement.id") == "main"
        _on_a_phone(opened, url)


def _on_a_phone(opened: Page, url: str) -> None:
    phone = {"width": 390, "height": 844}
    with window(opened, viewport=phone, color_scheme="dark", device_scale_factor=2) as page:
        for path in ("", "types/Airport", "types/Airport/objects/JFK", "commits", "commits/4"):
            page.goto(url + path)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= phone["width"], f"{path}: wide tables scroll by themselves"
            pages = page.locator("header nav")
            assert pages.evaluate("nav => nav.scrollWidth <= nav.clientWidth"), "all can be seen"
            heights = pages.locator("a").evaluate_all("links => links.map(a => a.offsetHeight)")
            assert max(heights) < 45, "no word is broken"
        page.goto(f"{url}types/Airport/objects/JFK")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 29)"
        if UPDATE:
            page.screenshot(path=IMAGES / "explore-phone.png")


def test_a_person_looks_at_a_branch_and_tries_its_merge(opened: Page, tmp_path: Path) -> None:
    uri = airports.uri_in(tmp_path, "directory")
    airports.fill(uri)
    fork(uri, **{"owner": "ada", "code": "ANC"} if UPDATE else {})
    with serving("--storage-uri", uri, cwd=tmp_path) as (_, url):
        with window(opened, viewport={"width": 1240, "height": 800}) as page:
            page.goto(f"{url}types/Airport/objects/LAX")
            page.get_by_role("heading", name="LAX of main").wait_for()
            # The same object on a branch: the address can be shared.
            page.get_by_role("link", name="branch main").click()
            page.get_by_role("heading", name="Branches").wait_for()
            keep(page, "branches")
            page.get_by_role("link", name="fix/prices", exact=True).click()
            page.get_by_role("heading", name="LAX of the branch").wait_for()
            assert page.url.endswith("/types/Airport/objects/LAX?branch=fix%2Fprices")
            # What it changes, and what a merge would come to.
            page.get_by_role("link", name="What it changes").click()
            assert page.locator("del", has_text="LAX of main").is_visible()
            assert page.locator("ins", has_text="LAX of the branch").is_visible()
            assert page.get_by_text("changed on both sides").is_visible()
            keep(page, "branch-diff")
            page.get_by_role("link", name="Merge", exact=True).click()
            page.get_by_text("1 conflict: merging would be refused").wait_for()
            keep(page, "branch-merge")
            page.get_by_role("link", name="take the branch's").click()
            page.get_by_text("This can be merged into main").wait_for()
            assert "owned" not in page.title()
            page.get_by_role("link", name="Back to main").click()
            assert page.locator(".banner").count() == 0
        phone = {"width": 390, "height": 844}
        with window(opened, viewport=phone) as page:
            for path in ("branches", "branches/fix%2Fprices/diff", "branches/fix%2Fprices/merge"):
                page.goto(url + path + "?branch=fix/prices")
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= phone["width"], path


def test_hostile_values_are_text_in_a_browser(opened: Page, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/odd"
    fill_odd(uri)
    wide = {"width": 1240, "height": 800}
    with serving("--storage-uri", uri, cwd=tmp_path) as (_, url):  # noqa: SIM117
        with window(opened, viewport=wide) as page:
            for number, key in enumerate(sorted(KEYS)):
                if len(key) < 200 and key not in (SCRIPT, "..", ".", "//") and "\x00" not in key:
                    continue
                page.goto(f"{url}types/Odd?limit={number + 1}")
                page.locator("tbody tr").nth(number).locator("th a").click()
                page.locator("#timeline").wait_for()
                assert page.title() == "Odd · Ontologia"
                answer = page.request.get(f"{page.url}?format=json").json()
                assert answer["identity"] == [key]
            for path in ("commits/1", "types/Near", "health"):
                page.goto(url + path)
                assert "owned" not in page.title()
