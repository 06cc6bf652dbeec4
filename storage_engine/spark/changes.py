"""The change feed of a type as a stream: each change once, with its commit and operation.

Offsets are commit ids. A batch covers whole commits, and Spark's checkpoint says which were read,
so a query that is stopped or killed goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)

from storage_engine.errors import ConfigurationError, IntegrityError
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.open import open_repository
from storage_engine.spark.datasource import Asked, partitions_of, read_share

Offset = Mapping[str, Any]  # {"commit_id": 41, "log_id": "..."}


class ChangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows the commits that change one type."""

    def __init__(self, asked: Asked) -> None:
        options = asked.options
        if not options.changes:
            raise ConfigurationError(
                "data source ontologia: a stream reads the change feed; add "
                '.option("changes", "true"), which adds the columns commit_id and operation'
            )
        if options.as_of is not None:
            raise ConfigurationError(
                "data source ontologia: a stream has no end, so it takes no as_of; "
                "since says where it begins"
            )
        self._asked = asked
        self._opened: ObjectRepository | None = None
        self._last: int | None = None  # the end of a query that reads what is there now

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        return self._offset(self._asked.options.since or 0)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The commit that last changed the type, or an earlier one within the limit."""
        self._check_log(start)  # or commits of another log would pass for read
        begin = int(start["commit_id"])
        end = self._repository().type_head(self._asked.spec) if self._last is None else self._last
        if isinstance(limit, ReadMaxFiles):
            end = min(end, begin + limit.max_files)
        return self._offset(max(begin, end))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's
        most = self._asked.options.max_commits
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        self._last = self._repository().type_head(self._asked.spec)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        self._check_log(start)
        self._check_log(end)
        since, upto = int(start["commit_id"]), int(end["commit_id"])
        if since >= upto:
            return partitions_of(())
        found = self._repository().executor().plan_changes(self._asked.spec, since=since, upto=upto)
        return partitions_of(found)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_share(self._asked, partition)

    def _repository(self) -> ObjectRepository:
        """One for the life of the query, in the process that plans its batches."""
        if self._opened is None:
            place = self._asked.options.place
            found = open_repository(place.uri, place.settings)
            assert isinstance(found, ObjectRepository)
            self._opened = found
        return self._opened

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _offset(self, commit_id: int) -> dict[str, Any]:
        return {"commit_id": commit_id, "log_id": self._log_id()}

    def _log_id(self) -> str:
        return self._repository().chain.read_head().head.log_id

    def _check_log(self, offset: Offset) -> None:
        if offset["log_id"] != self._log_id():
            raise IntegrityError(
                f"{self._asked.options.place.uri} was erased and begun anew since this query read "
                "from it: its commit ids mean other commits now; start the query with a new "
                "checkpoint"
            )
