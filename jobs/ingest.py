"""Ingestion: read a source with Spark, map it to a type, publish what is new or changed.

    spark-submit jobs/ingest.py --storage-uri s3://bucket/shop --models shop.models \
        --type Customer --source 's3a://landing/customers/*.parquet'

`--help` tells all options, docs/spark.md explains them. From Python: `ingest(spark, order)`.
Nothing is published unless everything went well; the exit code says what went wrong.
"""

import sys

from storage_engine.spark.jobs.ingest import main

if __name__ == "__main__":
    sys.exit(main())
