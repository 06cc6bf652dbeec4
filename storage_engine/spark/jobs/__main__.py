"""`python -m storage_engine.spark.jobs ingest ...`, and the file to give to spark-submit.

The programs of a checkout's `jobs/`, for installations that have no checkout.
"""

import sys
from importlib import import_module
from pathlib import Path

PROGRAMS = ("ingest", "stream", "compact")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in PROGRAMS:
        usage = f"usage: python -m storage_engine.spark.jobs {{{','.join(PROGRAMS)}}} ..."
        wanted = f"no program {argv[0]!r}\n" if argv and argv[0] not in ("-h", "--help") else ""
        sys.stderr.write(f"{wanted}{usage}\n")
        return 0 if argv and not wanted else 2
    program = import_module(f"storage_engine.spark.jobs.{argv[0]}")
    sys.argv[0] = f"jobs {argv[0]}"
    code: int = program.main(argv[1:])
    return code


if __name__ == "__main__":
    here = str(Path(__file__).parent)
    # Started as a file, Python looks for modules in this folder first: a user's module may have the
    # name of one of ours.
    sys.path[:] = [each for each in sys.path if each != here]
    sys.exit(main(sys.argv[1:]))
