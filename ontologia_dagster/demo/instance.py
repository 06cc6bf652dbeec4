"""The Dagster instance that `make run` and `make ui` share, in a folder that is made for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from ontologia_dagster.declaration import EVENTS_POOL, INGEST_POOL, MAINTENANCE_POOL
from ontologia_dagster.demo.places import dagster_home

POOL_LIMITS: Mapping[str, int] = {INGEST_POOL: 1, MAINTENANCE_POOL: 1, EVENTS_POOL: 1}

SETTINGS: Mapping[str, Any] = {
    "telemetry": {"enabled": False},
    "nux": {"enabled": False},  # no letter box in front of the first page
    # One run with Spark fills a small machine; others wait their turn instead of failing.
    "concurrency": {
        "runs": {"max_concurrent_runs": 2},
        "pools": {"granularity": "op", "default_limit": 1},
    },
    # A run whose process died is marked as failed, so that the next can begin.
    "run_monitoring": {
        "enabled": True,
        "start_timeout_seconds": 180,
        "max_runtime_seconds": 7200,
        "poll_interval_seconds": 30,
    },
    "retention": {"sensor": {"purge_after_days": {"skipped": 7, "success": 30}}},
}


def prepare_instance(home: Path | None = None) -> Path:
    """Make the folder ready; settings that someone changed there are kept."""
    home = home or dagster_home()
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "dagster.yaml"
    if not settings.exists():
        text = yaml.safe_dump(dict(SETTINGS), sort_keys=False)
        settings.write_text(f"# Written by Ontologia's demo; yours to change.\n{text}")
    return home


def open_instance(home: Path | None = None) -> dg.DagsterInstance:
    """The instance, with the limits of its pools set. DAGSTER_HOME names it from here on."""
    home = prepare_instance(home)
    os.environ["DAGSTER_HOME"] = str(home)
    instance = dg.DagsterInstance.from_config(str(home))
    for pool, limit in POOL_LIMITS.items():
        if instance.event_log_storage.supports_global_concurrency_limits:
            instance.event_log_storage.set_concurrency_slots(pool, limit)
    return instance
