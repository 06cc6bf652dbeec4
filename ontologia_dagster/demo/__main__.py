"""`python -m ontologia_dagster.demo run` and `ui`: what `make run`, `make run-s3`, `make ui` do."""

from ontologia_dagster.demo.program import main

if __name__ == "__main__":
    raise SystemExit(main())
