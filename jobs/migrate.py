"""Migration: the classes of a module become the schema of a storage, by Spark where there is much.

    spark-submit --py-files shop.zip jobs/migrate.py --storage-uri s3://bucket/shop \\
        --models shop.models --upgraders shop.upgraders --apply --token 41-0123456789abcdef

Types below `--spark-above` are rewritten by the driver, and Spark is started for larger ones only.
Without `--apply` it is shown what would be done, with the token for `--apply`.
"""

import sys

from storage_engine.spark.jobs.migrate import main

if __name__ == "__main__":
    sys.exit(main())
