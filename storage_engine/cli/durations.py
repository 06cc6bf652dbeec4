"""Spans of time as an option's value."""

from __future__ import annotations

from datetime import timedelta

import typer

from storage_engine.durations import duration


def parse_duration(text: str) -> timedelta:
    try:
        return duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
