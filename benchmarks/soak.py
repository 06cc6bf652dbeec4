"""Everything at once, for minutes, under faults: `python -m benchmarks.soak --minutes 10`.

Writers, bulk writers, a compactor, garbage collection, index repair, a tagger, a restorer, event
workers and readers (`soak_roles`) work as processes of their own on one storage on SeaweedFS,
behind a proxy that refuses requests, loses and delays answers. Meanwhile processes are killed
(SIGKILL, and started again) and stopped for a while (SIGSTOP), some for longer than their lease.

At the end every acknowledged unit of work must be in the log exactly once, commit ids must have no
gaps, every acknowledged event must have been handled exactly once, tags must name what they named,
readers must not have seen half a commit, and `verify --deep` must find nothing. Exit code 1
otherwise. The same seed draws the same faults; what meets what is up to the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import soak_roles
from benchmarks.harness import Measured, Report, seaweedfs
from benchmarks.latency_proxy import LATENCY_MS, Faults, latency_proxy
from benchmarks.soak_roles import Bulk, Entry, Handled, Mirror, Place, note, read_journal
from storage_engine import Entity, OntologiaConfig, Session, initialize_storage
from storage_engine.events.protocol import open_event_store
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import spec_of
from storage_engine.repository import ReadWindow
from tests.servers import REGION

CAST = {
    "writer": 4,
    "bulk": 1,
    "compactor": 1,
    "gc": 1,
    "repairer": 1,
    "tagger": 1,
    "restorer": 1,
    "worker": 2,
    "reader": 1,
}
LATENCY = dict.fromkeys(LATENCY_MS, 3.0)
END_S = 90.0  # for roles to finish what they do; then they are killed
PRELOAD = ["benchmarks.soak_roles", "pandas", "pyarrow.compute", "pyarrow.parquet", "duckdb"]


@dataclass
class Chaos:
    """What is done to the processes, and how often."""

    every_s: float = 3.0
    kill: float = 0.5  # otherwise it is stopped
    stop_s: tuple[float, float] = (0.1, 12.0)  # most are short; the lease is 6 s
    done: Counter[str] = field(default_factory=Counter)


class Cast:
    """The processes, each known by its name."""

    def __init__(self, place: Place, counts: Mapping[str, int]) -> None:
        self._place = place
        self._kinds = {f"{kind}-{n}": kind for kind, count in counts.items() for n in range(count)}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._processes: dict[str, Any] = {}
        self._starts: Counter[str] = Counter()
        self._stopped: dict[str, float] = {}  # until when
        self.crashed: list[str] = []

    def start(self, name: str) -> None:
        arguments = (self._kinds[name], name, self._place, self._starts[name])
        process = self._context.Process(target=soak_roles.main, args=arguments, name=name)
        process.start()
        self._starts[name] += 1
        self._processes[name] = process

    def start_all(self) -> None:
        for name in self._kinds:
            self.start(name)

    def disturb(self, chaos: Chaos, drawn: random.Random) -> None:
        name = drawn.choice(sorted(self._kinds))
        if name in self._stopped:
            return
        if drawn.random() < chaos.kill:
            self._signal(name, signal.SIGKILL)
            self._processes[name].join()
            self.start(name)
            chaos.done["killed"] += 1
            chaos.done[f"killed {self._kinds[name]}"] += 1
        else:
            least, most = chaos.stop_s
            seconds = least + (most - least) * drawn.random() ** 3
            self._signal(name, signal.SIGSTOP)
            self._stopped[name] = time.monotonic() + seconds
            chaos.done["stopped"] += 1

    def look_after(self) -> None:
        """Let those go on whose pause is over; start those again that have ended by themselves."""
        now = time.monotonic()
        for name in [n for n, until in self._stopped.items() if until <= now]:
            del self._stopped[name]
            self._signal(name, signal.SIGCONT)
        for name, process in list(self._processes.items()):
            if process.exitcode is not None:
                self.crashed.append(f"{name}: exit code {process.exitcode}")
                self.start(name)

    def end(self, patience_s: float) -> int:
        """Wait for all of them; how many had to be killed."""
        for name in list(self._stopped):
            self._signal(name, signal.SIGCONT)
        self._stopped.clear()
        deadline = time.monotonic() + patience_s
        for process in self._processes.values():
            process.join(max(deadline - time.monotonic(), 0))
        late = [name for name, p in self._processes.items() if p.exitcode is None]
        self.kill()
        for name, process in self._processes.items():
            if process.exitcode not in (0, -signal.SIGKILL):
                self.crashed.append(f"{name}: exit code {process.exitcode}")
        return len(late)

    def kill(self) -> None:
        for name, process in self._processes.items():
            if process.exitcode is None:
                self._signal(name, signal.SIGCONT)
                self._signal(name, signal.SIGKILL)
                process.join(10)

    def _signal(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._processes[name].pid, number)


def soak(
    seconds: float,
    *,
    seed: int = 1,
    counts: Mapping[str, int] | None = None,
    chaos: Chaos | None = None,
    faults: Faults | None = None,
    grace_s: float = 45.0,
    keep: Path | None = None,
    least: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what went wrong. `keep`: a folder for the journals; `least`: so many units
    of work are waited for, up to ten times as long, on a machine that has other things to do."""
    chaos = chaos or Chaos()
    faults = faults or Faults(
        refused=0.01, disowned=0.004, lost=0.01, slow=0.01, slow_ms=1500, seed=seed
    )
    drawn = random.Random(seed)
    with _folder(keep) as folder, seaweedfs() as (server, bucket):
        uri = f"s3://{bucket}/soak"
        initialize_storage(uri, config=server.config())
        with latency_proxy(server.endpoint, LATENCY, faults=faults) as proxy:
            place = Place(uri, proxy.endpoint, REGION, str(folder), seed, grace_s)
            cast = Cast(place, counts or CAST)
            started = time.monotonic()
            try:
                cast.start_all()
                next_blow = started + 2 * chaos.every_s
                while (now := time.monotonic()) < started + seconds or (
                    now < started + 10 * seconds and _units(folder) < least
                ):
                    if now >= next_blow:
                        cast.disturb(chaos, drawn)
                        next_blow = now + drawn.uniform(0.5, 1.5) * chaos.every_s
                    cast.look_after()
                    time.sleep(0.02)
                place.stop.touch()
                late = cast.end(END_S)
            finally:
                cast.kill()
            took = time.monotonic() - started
            requests = proxy.counts()
        config = place.config("accounts", s3_endpoint_url=server.endpoint)
        accounts = Accounts(uri, config, folder)
        accounts.settle_events()
        accounts.check()
        problems = [*accounts.problems, *cast.crashed]
        figures = {
            **accounts.figures,
            **chaos.done,
            "killed at the end": late,
            "requests": requests.total,
            **{f"faults: {name}": count for name, count in sorted(requests.faults.items())},
            "seconds": round(took, 1),
            "seed": seed,
        }
        return figures, problems


class Accounts:
    """Compares what was acknowledged with what is stored, without faults."""

    def __init__(self, uri: str, config: OntologiaConfig, folder: Path) -> None:
        self._folder = folder
        self._config = config
        self._session = Session(uri, config=config)
        self.problems: list[str] = []
        self.figures: dict[str, Any] = {}

    def _lines(self, *kinds: str) -> list[dict[str, Any]]:
        return [
            {**line, "who": path.stem}
            for path in sorted(self._folder.glob("*.jsonl"))
            for line in read_journal(path, *kinds)
        ]

    def _wrong(self, what: str) -> None:
        self.problems.append(what)

    def settle_events(self, patience_s: float = 60.0) -> None:
        """Handle what is left: leases of dead workers run out first."""
        due = self._acknowledged_events()
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            self._session.drain([note])
            if due <= {row["id"] for row in self._history(Handled)}:
                return
            time.sleep(0.5)

    def _acknowledged_events(self) -> set[str]:
        emitted = {line["key"] for line in self._lines("emitted")}
        return emitted | {line["event"] for line in self._lines("commit") if line["event"]}

    def _history(self, cls: type[Entity]) -> list[dict[str, Any]]:
        rows = self._session.repository.read(spec_of(cls), ReadWindow(history=True))
        return list(rows.to_pylist())

    def check(self) -> None:
        with self._session:
            self._check_commits()
            self._check_rows()
            self._check_events()
            self._check_tags()
            for line in self._lines("violation"):
                self._wrong(f"{line['who']}: {line['what']}")
            for line in self._lines("crash"):
                self._wrong(f"{line['who']}: {line['trace']}")
            self._check_storage()
            self._session.discard()
        self._sum_up()

    def _check_commits(self) -> None:
        head = self._session.repository.head_commit_id()
        self.figures["commits"] = head
        commits = self._session.list_commits(head + 10)
        if [commit["id"] for commit in commits] != list(range(head, 0, -1)):
            self._wrong("commit ids have gaps")
        units: dict[str, list[int]] = {}
        for commit in commits:
            if "unit" in commit["metadata"]:
                units.setdefault(commit["metadata"]["unit"], []).append(commit["id"])
        for unit, ids in units.items():
            if len(ids) > 1:
                self._wrong(f"unit {unit} was published by commits {ids}")
        acknowledged = self._lines("commit", "bulk")
        for line in acknowledged:
            unit = f"{line['who']}/{line['unit']}"
            if units.get(unit) != [line["commit"]]:
                self._wrong(f"unit {unit}: acknowledged {line['commit']}, is {units.get(unit)}")
        self.figures["units acknowledged"] = len(acknowledged)
        self.figures["units published, not acknowledged"] = len(units) - len(acknowledged)

    def _check_rows(self) -> None:
        for cls in (Entry, Mirror):
            versions = Counter(row["id"] for row in self._history(cls))
            twice = [key for key, count in versions.items() if count > 1]
            wanted = {name for line in self._lines("commit") for name in line["rows"]}
            if twice or not wanted <= set(versions):
                lost = sorted(wanted - set(versions))[:5]
                self._wrong(f"{cls.__name__}: twice {twice[:5]}, lost {lost}")
            latest = self._session.query().entities(cls).count()
            if latest != len(versions):
                self._wrong(f"{cls.__name__}: {latest} latest rows, {len(versions)} in history")
        batches: dict[str, Counter[str]] = {}
        for row in self._history(Bulk):
            batches.setdefault(row["id"].rpartition("-")[0], Counter())[row["id"]] += 1
        acknowledged = {f"{line['who']}-{line['unit']}" for line in self._lines("bulk")}
        for batch in sorted({*batches, *acknowledged}):
            rows = batches.get(batch, Counter())
            if len(rows) != soak_roles.BULK_ROWS or max(rows.values()) > 1:
                self._wrong(f"bulk {batch}: {len(rows)} rows, {rows.total()} versions")

    def _check_events(self) -> None:
        runs = Counter(row["id"] for row in self._history(Handled))
        acknowledged = self._acknowledged_events()
        for key in sorted(acknowledged - set(runs)):
            self._wrong(f"event {key} was acknowledged and never handled")
        for key, count in sorted(runs.items()):
            if count > 1:
                self._wrong(f"event {key} was handled {count} times")
        bus = open_event_store(self._session.repository, self._config)
        for letter in bus.list_dead_letters("default", 10):
            self._wrong(f"event {letter.event_id} is a dead letter: {letter.last_error}")
        self.figures["events acknowledged"] = len(acknowledged)
        self.figures["events handled"] = len(runs)

    def _check_tags(self) -> None:
        stored = {tag.name: tag.commit_id for tag in self._session.repository.list_tags()}
        gone = {line["name"] for line in self._lines("untag")}
        for line in self._lines("tag"):
            if line["name"] not in gone and stored.get(line["name"]) != line["commit"]:
                self._wrong(
                    f"tag {line['name']}: is {stored.get(line['name'])}, was {line['commit']}"
                )
        self.figures["tags"] = len(stored)

    def _check_storage(self) -> None:
        repository = self._session.repository
        objects = repository.objects
        assert objects is not None
        report = verify_storage(repository, deep=True)
        for finding in report.findings:
            self._wrong(f"verify: {finding.area} {finding.reason}: {finding.message}")
        repair_indices(objects, apply=True)
        for wrong in verify_indices(objects).findings:
            self._wrong(f"index verify: {wrong.type_name} {wrong.reason}: {wrong.message}")

    def _sum_up(self) -> None:
        for name, kind in (("commit", "commit"), ("bulk commit", "bulk")):
            times = sorted(line["ms"] for line in self._lines(kind))
            if len(times) > 1:
                cuts = statistics.quantiles(times, n=20)
                self.figures[f"{name} p50 ms"] = round(statistics.median(times))
                self.figures[f"{name} p95 ms"] = round(cuts[18])
        done = self._lines("done")
        for figure in ("runs", "deleted", "repaired", "lost", "restored"):
            self.figures[figure] = sum(line.get(figure, 0) for line in done)
        self.figures["reads"] = sum(line["who"].startswith("reader") for line in done)
        errors = soak_roles.errors_in(self._folder)
        self.figures |= {f"errors: {name}": count for name, count in errors.most_common()}


def _units(folder: Path) -> int:
    """Acknowledged so far."""
    return sum(1 for path in folder.glob("*.jsonl") for _ in read_journal(path, "commit", "bulk"))


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="ontologia-soak-") as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--keep", type=Path, help="a folder in which the journals stay")
    parser.add_argument("--no-save", action="store_true", help="do not write results/soak.json")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    try:
        figures, problems = soak(options.minutes * 60, seed=options.seed, keep=options.keep)
    except KeyboardInterrupt:
        sys.exit(130)
    report = Report("soak")
    seconds = figures.pop("seconds")
    report.steps.append(Measured("soak", seconds, [seconds], 0, figures))
    report.verdicts["everything acknowledged is accounted for"] = "NO" if problems else "yes"
    report.print()
    for problem in problems:
        print(problem)
    if not options.no_save:
        report.save()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
