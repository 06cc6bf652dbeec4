"""Reading an object store: plan which files to open, compose one DuckDB statement, stream."""
