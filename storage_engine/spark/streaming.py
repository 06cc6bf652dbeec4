"""Streams into an ontology with `foreachBatch`: each batch of a query is published once.

    query = df.writeStream.foreachBatch(batch_writer(Customer, uri, order_by="updated_at"))

A batch that runs again, after a failure or a restart from the checkpoint, finds its unit of work
(query id, batch id) in the log and publishes nothing. `writeStream.format("ontologia")` does the
same with options as texts (`storage_engine.spark.datasource`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError
from storage_engine.runtime.session import Session
from storage_engine.spark.jobs import is_connect
from storage_engine.spark.opening import find_type
from storage_engine.spark.results import WriteResult
from storage_engine.spark.writer import write_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY = "sql.streaming.queryId"


def batch_writer(
    type: Any,
    storage: Session | str,
    *,
    app_id: str | None = None,
    config: OntologiaConfig | None = None,
    on_result: Callable[[WriteResult], None] | None = None,
    **options: Any,
) -> BatchWriter:
    """A function for `foreachBatch` that writes each micro-batch as one commit.

    type:       a declared class, a TypeSpec, or the name of a stored type
    storage:    a Session, or a storage URI (the only way with Spark Connect)
    app_id:     put before the query's id in the unit of work. With Spark Connect, which does not
                tell a batch its query, it is the whole name: use another with a new checkpoint
    on_result:  called with the WriteResult of each batch
    options:    those of `write_type`, but for `idempotency`
    """
    if "idempotency" in options:
        raise ConfigurationError(
            "batch_writer: the batch itself is the unit of work; leave idempotency out"
        )
    return BatchWriter(type, storage, app_id, config, on_result, options)


@dataclass(frozen=True)
class BatchWriter:
    """What `batch_writer` makes."""

    type: Any
    storage: Session | str
    app_id: str | None = None
    config: OntologiaConfig | None = None
    on_result: Callable[[WriteResult], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        unit = (self._name_of(df), batch_id)
        if isinstance(self.storage, Session):
            self._write(df, self.storage, unit)
            return
        with Session(self.storage, config=self.config) as session:
            self._write(df, session, unit)

    def __getstate__(self) -> dict[str, Any]:
        """Spark Connect sends the function to its server."""
        if isinstance(self.storage, Session):
            raise ConfigurationError(
                "batch_writer: an open Session cannot be sent to a Spark Connect server; give the "
                "storage's URI"
            )
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def _write(self, df: DataFrame, session: Session, unit: tuple[str, int]) -> None:
        spec = self.type
        if isinstance(spec, str):
            spec = find_type(session.repository, spec)
        result = write_type(df, spec, session, idempotency=unit, **self.options)
        if self.on_result is not None:
            self.on_result(result)

    def _name_of(self, df: DataFrame) -> str:
        """The same at every restart from one checkpoint, and another for another checkpoint."""
        if is_connect(df.sparkSession):
            if self.app_id is None:
                raise ConfigurationError(
                    "batch_writer: Spark Connect does not tell a batch the id of its query; name "
                    "the query by app_id, and give it a new name with each new checkpoint"
                )
            return self.app_id
        query_id = df.sparkSession.sparkContext.getLocalProperty(_QUERY)
        if query_id is None:
            raise ConfigurationError("batch_writer: this is for foreachBatch of a streaming query")
        return f"{self.app_id}/{query_id}" if self.app_id else query_id
