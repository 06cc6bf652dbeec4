"""How files are compressed: small ones by what costs least to open, others by what is smallest."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine import Entity, Field
from storage_engine.model import spec_of
from storage_engine.model.arrow import row_schema
from storage_engine.repository.object.write.parquet import encode_bytes, stored_table


class Sample(Entity):
    id: Field[str] = Field(primary_key=True)
    note: Field[str]


@pytest.mark.parametrize(
    ("rows", "codec"), [(3, "UNCOMPRESSED"), (100, "SNAPPY"), (20_000, "ZSTD")]
)
def test_a_file_is_compressed_by_its_size(rows: int, codec: str) -> None:
    spec = spec_of(Sample)
    ids = [f"sample-{n:06d}" for n in range(rows)]
    values = {"entity_key": ids, "id": ids, "note": ["the same"] * rows}
    schema = row_schema(spec)
    table = pa.table({name: values[name] for name in schema.names}, schema=schema)
    stored = stored_table(spec, table, engine_version="v2", schema_version_id=1, commit_id=7)
    part = encode_bytes(spec, stored)
    assert isinstance(part.content, bytes)
    metadata = pq.ParquetFile(pa.BufferReader(part.content)).metadata
    group = metadata.row_group(0)
    assert {group.column(n).compression for n in range(metadata.num_columns)} == {codec}
