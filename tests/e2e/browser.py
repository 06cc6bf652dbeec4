"""A headless Chromium that looks at Dagster's UI, and keeps pictures for the docs where asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
UPDATE = os.environ.get("UPDATE_SCREENSHOTS") == "1"
WIDTH = 1600
_PATIENCE_MS = 90_000


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


def sees(page: Page, *texts: str) -> None:
    for text in texts:
        page.get_by_text(text, exact=False).first.wait_for(state="visible")


def sees_all(page: Page, text: str, count: int) -> None:
    """So many times, at last."""
    wanted = page.get_by_text(text, exact=True)
    wanted.nth(count - 1).wait_for(state="visible")
    assert wanted.count() == count


def sees_no(page: Page, *texts: str) -> None:
    """None of them, once everything has loaded."""
    for text in texts:
        page.get_by_text(text, exact=False).first.wait_for(state="hidden")


def keep(page: Page, name: str, *, height: int = 1300) -> None:
    """Where asked (UPDATE_SCREENSHOTS=1), a picture for the docs."""
    from playwright.sync_api import FloatRect

    if UPDATE:
        IMAGES.mkdir(parents=True, exist_ok=True)
        page.wait_for_timeout(2_000)  # until nothing moves any more
        shown = FloatRect(x=0, y=0, width=WIDTH, height=height)
        page.screenshot(path=IMAGES / f"{name}.png", clip=shown)
