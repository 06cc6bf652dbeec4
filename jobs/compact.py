"""Compaction: many small files of types become few large ones, by Spark where there is much.

    spark-submit jobs/compact.py --storage-uri s3://bucket/shop --spark-above 4GB --apply

Runs of files below `--spark-above` are merged by DuckDB in the driver, and Spark is started for
larger ones only. Without `--apply` the plan is shown and nothing is changed. Reads stay the same
meanwhile and after; every merge is proven before it is published.
"""

import sys

from storage_engine.spark.jobs.compact import main

if __name__ == "__main__":
    sys.exit(main())
