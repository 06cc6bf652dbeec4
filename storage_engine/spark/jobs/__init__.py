"""The programs that Spark runs: ingestion, streams, compaction (a checkout's `jobs/`)."""
