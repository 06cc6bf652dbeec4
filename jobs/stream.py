"""Streaming ingestion: the same order, over and over, for what arrives.

    spark-submit jobs/stream.py --order customers.yaml --checkpoint s3a://bucket/checkpoints/c \
        --trigger '1 minute'

Each micro-batch is one commit with exactly-once effect: a batch that runs again after a crash
finds itself in the log and publishes nothing. Keep the checkpoint; it is what says how far the
query has come. Spark follows the names of files; what is in them is opened batch by batch as any
source, so that drift is dealt with as `jobs/ingest.py` does.
"""

import sys

from storage_engine.spark.jobs.stream import main

if __name__ == "__main__":
    sys.exit(main())
