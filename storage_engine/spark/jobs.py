"""Spark jobs of one write: named, watched, and cancelled when the write cannot be published."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from storage_engine.spark.results import Stage, WriteProgress

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5

Progress = Callable[[WriteProgress], None]


def is_connect(spark: SparkSession) -> bool:
    """Whether the session talks to a Spark Connect server: there is no SparkContext then."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


class Cancelled(Exception):
    """The write was cancelled between two of its jobs; whoever cancelled it says why."""


class Jobs:
    """Runs the Spark actions of one write under one tag."""

    def __init__(self, spark: SparkSession, name: str, progress: Progress | None) -> None:
        self._spark = spark
        self._tag = f"ontologia-{name}"
        self._progress = progress
        self._connect = is_connect(spark)
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop what runs and let nothing more begin. Safe to call from any thread."""
        self._cancelled.set()
        try:
            if self._connect:
                self._spark.interruptTag(self._tag)
            else:
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
        except Exception as error:  # noqa: BLE001 - Spark may be gone, and the write ends anyway
            log.warning("jobs of %s could not be cancelled: %s", self._tag, error)

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @contextmanager
    def running(self, stage: Stage, description: str) -> Iterator[None]:
        """Spark actions in this block belong to the write; leaving by an error cancels them."""
        if self.cancelled:
            raise Cancelled(f"{description}: the write was cancelled")
        self._add_tag()
        self.tell(stage, 0, 0)
        done = threading.Event()
        watcher = None
        if self._progress is not None and not self._connect:
            watcher = threading.Thread(
                target=self._watch, args=(stage, done), name="onto-spark-progress", daemon=True
            )
            watcher.start()
        if not self._connect:
            self._spark.sparkContext.setJobDescription(description)
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        finally:
            done.set()
            if watcher is not None:
                watcher.join()
            if not self._connect:
                self._spark.sparkContext.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
            self._remove_tag()

    def tell(self, stage: Stage, done: int, total: int) -> None:
        if self._progress is None:
            return
        try:
            self._progress(WriteProgress(stage, done, total))
        except Exception:  # a write must not fail for want of being watched
            log.exception("the progress callback of a write failed; it is not called again")
            self._progress = None

    def _watch(self, stage: Stage, done: threading.Event) -> None:
        while not done.wait(_LOOK_EVERY_S):
            try:
                finished, total = self._tasks()
            except Exception as error:  # noqa: BLE001 - figures to look at, no more
                log.debug("no progress of %s: %s", self._tag, error)
                return
            self.tell(stage, finished, total)

    def _tasks(self) -> tuple[int, int]:
        """Tasks done and known of, over the write's jobs so far."""
        context: Any = self._spark.sparkContext
        tracker = context.statusTracker()
        finished = total = 0
        for job_id in context._jsc.sc().statusTracker().getJobIdsForTag(self._tag):
            job = tracker.getJobInfo(job_id)
            for stage_id in job.stageIds if job is not None else ():
                info = tracker.getStageInfo(stage_id)
                if info is not None:
                    finished += info.numCompletedTasks
                    total += info.numTasks
        return finished, total

    def _add_tag(self) -> None:
        if self._connect:
            self._spark.addTag(self._tag)
        else:
            self._spark.sparkContext.addJobTag(self._tag)

    def _remove_tag(self) -> None:
        if self._connect:
            self._spark.removeTag(self._tag)
        else:
            self._spark.sparkContext.removeJobTag(self._tag)
