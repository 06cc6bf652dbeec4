"""The object-store engines: rows in Parquet files, named by the commit log."""
