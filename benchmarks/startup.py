"""How long a person waits before anything happens: `onto --help`, and `import storage_engine`.

Each is a process of its own, started `TIMES` times. The figure is the fastest, since a machine that
others use can only add to it; beside it stands the processor time of the middle one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Measured, Report

TIMES = 7
PROMISED_S = {"onto --help": 0.3, "import storage_engine": 0.25}
_ROOT = Path(__file__).resolve().parent.parent
_PROCESSES = {
    "python": ["-c", "pass"],
    "import storage_engine": ["-c", "import storage_engine"],
    "onto --help": ["-m", "storage_engine.cli.main", "--help"],
    "onto info --help": ["-m", "storage_engine.cli.main", "info", "--help"],
    "onto --version": ["-m", "storage_engine.cli.main", "--version"],
}


def run() -> Report:
    report = Report("startup")
    for name, arguments in _PROCESSES.items():
        report.steps.append(_started(name, arguments))
    for name, promised in PROMISED_S.items():
        seconds = report.seconds(name)
        verdict = f"{seconds:.3f} s{'' if seconds < promised else ' (NO)'}"
        report.verdicts[f"{name} under {promised} s"] = verdict
    return report


def _started(name: str, arguments: list[str]) -> Measured:
    seconds, processor = [], []
    for _ in range(TIMES):
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, cwd=_ROOT
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds.append(time.perf_counter() - begun)
        if process.returncode is None:
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{name} failed, see above")
        processor.append(used.ru_utime + used.ru_stime)
    facts = {
        "median": round(statistics.median(seconds), 3),
        "processor seconds": round(statistics.median(processor), 3),
        "load": round(os.getloadavg()[0], 1),
    }
    return Measured(name, min(seconds), [round(s, 4) for s in seconds], 0, facts)
