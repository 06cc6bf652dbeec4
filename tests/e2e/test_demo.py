"""The demo on a local S3 server, on a part of its source, as a user starts it: killed while it
ingests, then run again to its end."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ontologia_dagster.demo.expected import expected
from ontologia_dagster.demo.instance import open_instance
from ontologia_dagster.demo.summary import Figure, verdict
from tests.e2e.part_of_source import write_part
from tests.e2e.platform import dagster_knows_all_of_it

_KILLED_AT = "✓ airport"  # the next type is being written then


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, with a part of the source."""
    monkeypatch.setenv("ONTOLOGIA_DEMO_SOURCE", str(write_part(tmp_path / "source")))
    monkeypatch.setenv("ONTOLOGIA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "150")
    for name in (
        "ONTOLOGIA_STORAGE_URI",
        "ONTOLOGIA_DEMO_STORAGE_URI",
        "ONTOLOGIA_ENV",
        "DAGSTER_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def start_demo() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "ontologia_dagster.demo", "run", "--s3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.spark
@pytest.mark.s3
@pytest.mark.timeout(900)
def test_a_killed_demo_on_s3_goes_on_to_the_figures_of_its_source(home: Path) -> None:
    with start_demo() as killed:
        assert killed.stdout is not None
        said = ""
        for line in killed.stdout:
            said += line
            if _KILLED_AT in line:
                killed.kill()
                break
        assert _KILLED_AT in said, said
    with start_demo() as again:
        said, _ = again.communicate(timeout=500)

    assert again.returncode == 0, said
    assert "✗" not in said.split("Found, beside what the source says")[1]
    source = expected()
    assert f"{source.flights_to_unknown_airports:,} flights go to" in said
    assert f"go to {source.unknown_planes:,} planes that are not there" in said
    assert "1 runs of an earlier process were not ended" in said
    assert "✗ dead letter" in said
    assert "1 sent again to demo.file_notice" in said
    assert "make ui-s3" in said
    # Nothing of it in the home of the other storage, that of `make run`.
    assert sorted(one.name for one in home.iterdir()) == ["s3"]
    with open_instance(home / "s3" / "dagster") as instance:
        dagster_knows_all_of_it(instance, source)


def test_a_wrong_figure_is_named() -> None:
    console = Console(record=True, width=100, file=io.StringIO())

    assert not verdict(console, [Figure("Airline", 15, 16), Figure("Airport", 4, 4)])

    said = console.export_text()
    assert "1 figures are not what the source says" in said
    assert "Airline: found 15, the source has 16" in said
    assert "Airport" not in said
