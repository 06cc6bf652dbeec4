"""`python -m ontologia_dagster.demo run` and `ui`: what `make run`, `make run-s3`, `make ui` do."""

import os
import sys

from ontologia_dagster.demo.program import STOPPED, main

if __name__ == "__main__":
    code = main()
    if code == STOPPED:
        sys.stdout.flush()
        os._exit(code)  # what was stopped is not waited for; the next run goes on from it
    raise SystemExit(code)
