"""A headless Chromium that looks at Dagster's UI, and keeps pictures for the docs where asked."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
# 1: with the whole source of the demo; part: with that of the test, which is quicker.
UPDATE = os.environ.get("UPDATE_SCREENSHOTS", "")
WHOLE = UPDATE == "1"
WIDTH = 1600
GRAPH_WIDTH, GRAPH_HEIGHT = 3000, 3300
_PATIENCE_MS = 240_000  # of a machine with much else to do


@contextmanager
def browser() -> Iterator[Page | None]:
    """Its page; None where there is no Chromium."""
    if CHROMIUM is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        # High enough for the whole graph: what is out of sight is not on the page.
        page = started.new_page(viewport={"width": WIDTH, "height": 1900}, device_scale_factor=0.6)
        page.set_default_timeout(_PATIENCE_MS)
        yield page
        started.close()


def sees(page: Page, *texts: str, any_of: bool = False) -> None:
    """All of them, or one of them, wherever it can be seen."""
    from playwright.sync_api import TimeoutError as TooLate

    for wanted in ["|".join(re.escape(text) for text in texts)] if any_of else texts:
        named = re.compile(wanted) if any_of else wanted
        shown = page.get_by_text(named, exact=False).locator("visible=true").first
        try:
            shown.wait_for(state="visible")
        except TooLate as error:
            raise AssertionError(
                f"{wanted!r} is not seen at {page.url}:\n{page.inner_text('body')[:3000]}"
            ) from error


def sees_all(page: Page, text: str, count: int) -> None:
    """So many times, at last."""
    wanted = page.get_by_text(text, exact=True)
    wanted.nth(count - 1).wait_for(state="visible")
    seen = wanted.count()
    assert seen == count, f"{text!r} is seen {seen} times, not {count}"


def sees_no(page: Page, *texts: str) -> None:
    """None of them, once everything has loaded."""
    for text in texts:
        page.get_by_text(text, exact=False).first.wait_for(state="hidden")


@contextmanager
def wide(page: Page) -> Iterator[None]:
    """For a graph: nodes that do not fit show their names alone."""
    page.set_viewport_size({"width": GRAPH_WIDTH, "height": GRAPH_HEIGHT})
    yield
    page.set_viewport_size({"width": WIDTH, "height": 1900})


def keep(page: Page, name: str, *, height: int = 1300) -> None:
    """Where asked (UPDATE_SCREENSHOTS=1), a picture for the docs."""
    from playwright.sync_api import FloatRect

    if UPDATE:
        IMAGES.mkdir(parents=True, exist_ok=True)
        page.wait_for_timeout(2_000)  # until nothing moves any more
        width = (page.viewport_size or {"width": WIDTH})["width"]
        shown = FloatRect(x=0, y=0, width=width, height=height)
        page.screenshot(path=IMAGES / f"{name}.png", clip=shown)
