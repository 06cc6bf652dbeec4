"""Programs that Spark runs: ingestion, streams, compaction, migration (a checkout's `jobs/`)."""
