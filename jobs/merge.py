"""Merge of a branch into its parent, or update from it, by Spark where much has changed.

    spark-submit jobs/merge.py --storage-uri s3://bucket/shop --source run/42 --apply

Types with fewer changed rows than `--spark-above` are compared by the driver, and Spark is started
for larger ones only. Without `--apply` it is shown what would come, and all conflicts.
"""

import sys

from storage_engine.spark.jobs.merge import main

if __name__ == "__main__":
    sys.exit(main())
