"""What every workload uses: a server, child processes that are timed, a table, a JSON file."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, S3Server, run_seaweedfs

QUICK = os.environ.get("QUICK", "") not in ("", "0")
"""Everything once and small, to see that it works: these figures are no measurements."""

_HERE = Path(__file__).parent
RESULTS = _HERE.parent / "build" / "benchmarks" if QUICK else _HERE / "results"


def sized(full: int, quick: int, setting: str | None = None) -> int:
    """How much of something: as the environment's `setting` says, else by whether it is `QUICK`."""
    given = os.environ.get(setting) if setting is not None else None
    return int(given) if given is not None else quick if QUICK else full


@dataclass(frozen=True)
class Measured:
    """One step: the median of its runs, the most memory its process had, and what it returned."""

    name: str
    seconds: float
    runs: Sequence[float]
    peak_mib: int
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """The figures of one workload. `verdicts` compare them with what was promised."""

    workload: str
    steps: list[Measured] = field(default_factory=list)
    verdicts: dict[str, str] = field(default_factory=dict)

    def seconds(self, name: str) -> float:
        return next(step.seconds for step in self.steps if step.name == name)

    def print(self) -> None:
        table = Table("step", "seconds", "peak MiB", "facts", title=self.workload)
        for step in self.steps:
            facts = ", ".join(f"{k} {v}" for k, v in step.facts.items())
            table.add_row(step.name, f"{step.seconds:.3f}", str(step.peak_mib), facts)
        console = Console()
        console.print(table)
        for what, verdict in self.verdicts.items():
            console.print(f"  {what}: {verdict}")

    def save(self) -> None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        payload = {
            "workload": self.workload,
            "machine": machine(),
            "steps": [asdict(step) for step in self.steps],
            "verdicts": self.verdicts,
        }
        path = RESULTS / f"{self.workload}.json"
        path.write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures depend on: cores, load, and the versions of what is compared."""
    versions = {}
    packages = ("duckdb", "pyarrow", "deltalake", "pylance", "pyiceberg", "pyspark")
    for package in (*packages, "duckdb-extension-ducklake"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "taken": datetime.now(UTC).date().isoformat(),
        "versions": versions,
    }


def measure(
    name: str, step: Callable[..., dict[str, Any]], *arguments: Any, runs: int = 1
) -> Measured:
    """Run `step` in child processes of its own, so that memory is its own too.

    A step times itself under the key "seconds" (imports and preparation are not what is measured).
    """
    outcomes = [_in_child(step, arguments) for _ in range(runs)]
    seconds = [outcome.pop("seconds") for outcome, _ in outcomes]
    return Measured(
        name,
        statistics.median(seconds),
        [round(s, 4) for s in seconds],
        max(peak for _, peak in outcomes),
        outcomes[-1][0],
    )


def _in_child(step: Callable[..., dict[str, Any]], arguments: Sequence[Any]) -> Any:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(sender, step, arguments))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"{step.__name__} failed, see above") from None
    finally:
        child.join()


def _run(sender: Any, step: Callable[..., dict[str, Any]], arguments: Sequence[Any]) -> None:
    outcome = step(*arguments)
    sender.send((outcome, peak_mib()))


def processor_seconds(pid: int | None) -> float:
    """What another process has used so far; nan where that cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return math.nan
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def peak_mib() -> int:
    """Of this process alone: `ru_maxrss` begins with what the parent had."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) // 1024


@contextmanager
def timed(outcome: dict[str, Any]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    outcome["seconds"] = time.perf_counter() - started


@contextmanager
def seaweedfs() -> Iterator[tuple[S3Server, str]]:
    """A SeaweedFS on loopback and a bucket in it; credentials in the environment."""
    os.environ.update(
        AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_REGION=REGION
    )
    with tempfile.TemporaryDirectory() as folder, run_seaweedfs(Path(folder)) as server:
        yield server, server.make_bucket()
