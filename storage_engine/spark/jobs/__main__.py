"""`python -m storage_engine.spark.jobs ingest ...`, and the file to give to spark-submit.

The programs of a checkout's `jobs/`, for installations that have no checkout.
"""

import difflib
import sys
from importlib import import_module
from pathlib import Path

NAME = "python -m storage_engine.spark.jobs"
PROGRAMS = ("ingest", "stream", "compact", "merge", "migrate")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in PROGRAMS:
        asked_for_help = bool(argv) and argv[0] in ("-h", "--help")
        if argv and not asked_for_help:
            near = difflib.get_close_matches(argv[0], PROGRAMS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            sys.stderr.write(f"no program {argv[0]!r}{hint}\n")
        sys.stderr.write(f"usage: {NAME} {{{','.join(PROGRAMS)}}} ...\n")
        return 0 if asked_for_help else 2
    program = import_module(f"storage_engine.spark.jobs.{argv[0]}")
    sys.argv[0] = f"{NAME} {argv[0]}"
    code: int = program.main(argv[1:])
    return code


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    # Started as a file, Python looks for modules in this folder first: a user's module may have the
    # name of one of ours.
    sys.path[:] = [each for each in sys.path if not each or Path(each).resolve() != here]
    sys.exit(main(sys.argv[1:]))
