"""Figures of an opened storage: what this process did to it, and what shape it is in.

Counters belong to the process (commits of the session, requests of the opened storage); gauges
are the storage's, read from the log at the moment of asking. `prometheus` gives the text format
that scrapers read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from storage_engine.commitlog import state
from storage_engine.commitlog.records import Entry, Head, TypeRef
from storage_engine.index.record import IndexVersion
from storage_engine.index.resolve import belongs
from storage_engine.repository.object.commit_history import identities
from storage_engine.repository.protocol import CommitCounters, Repository
from storage_engine.repository.protocol import labels as type_labels

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository


_NOT_REQUESTS = ("total", "bytes_read", "bytes_written")


@dataclass(frozen=True, slots=True)
class TypeMetrics:
    """One type of an object storage, as of head.

    `latest_files` and `latest_rows` are what a latest read of everything has to open and look at;
    `read_amplification` is those rows per identity, where the log tells how many there are.
    """

    kind: str
    type_name: str
    entries: int
    snapshots: int
    files: int
    rows: int
    bytes: int
    index_lag: int
    latest_files: int
    latest_rows: int
    identities: int | None

    @property
    def read_amplification(self) -> float | None:
        return self.latest_rows / self.identities if self.identities else None

    def as_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**own, "read_amplification": self.read_amplification}


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot of all figures."""

    uri: str
    backend: str
    engine_version: str
    head_commit_id: int
    session: Mapping[str, int | float]
    requests: Mapping[str, int] = field(default_factory=dict)  # by kind
    bytes_read: int = 0
    bytes_written: int = 0
    cache: Mapping[str, int] = field(default_factory=dict)
    types: tuple[TypeMetrics, ...] = ()
    index_warnings: tuple[str, ...] = ()  # for people: `index_lag` of a type is the figure

    def as_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "backend": self.backend,
            "engine_version": self.engine_version,
            "head_commit_id": self.head_commit_id,
            "session": dict(self.session),
            "requests": dict(self.requests),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "cache": dict(self.cache),
            "types": [figures.as_dict() for figures in self.types],
        }

    def prometheus(self) -> str:
        """The text exposition format, one family after the other."""
        return "\n".join(_lines(self)) + "\n"


def collect(repository: Repository, counters: CommitCounters | None = None) -> Metrics:
    """Ask the storage: head, and on object stores the log and each type's index."""
    session = (counters or CommitCounters()).as_dict()
    head = repository.head_commit_id()
    objects = repository.objects
    if objects is None:
        return Metrics(repository.uri, repository.backend, repository.engine_version, head, session)
    types, warnings = _types(objects)
    meter = repository.requests()
    return Metrics(
        uri=repository.uri,
        backend=repository.backend,
        engine_version=repository.engine_version,
        head_commit_id=head,
        session=session,
        requests={k: v for k, v in sorted(meter.items()) if k not in _NOT_REQUESTS},
        bytes_read=meter["bytes_read"],
        bytes_written=meter["bytes_written"],
        cache=dict(objects.cache.stats()) if objects.cache is not None else {},
        types=types,
        index_warnings=warnings,
    )


def index_lags(repository: Repository) -> dict[str, int]:
    """By type, of how many commits its index does not know; from head and the indices alone."""
    objects = repository.objects
    if objects is None:
        return {}
    head = objects.chain.read_head().head
    lags = _lags(objects, head, objects.read_indices(head))
    return dict(zip(type_labels(list(lags)), lags.values(), strict=True))


def _lags(
    repository: ObjectRepository, head: Head, indices: Mapping[TypeRef, IndexVersion]
) -> dict[TypeRef, int]:
    heads = repository.chain.type_heads_at(head)
    newest = head.commit_id if repository.engine_version == "v1" else 0
    lags = {}
    for ref, version in indices.items():
        index = version.value
        needed = 0 if heads[ref].empty else newest or heads[ref].commit_id
        foreign = index.entries and not belongs(repository.chain, index, head)
        # Of another history nobody believes anything.
        lags[ref] = needed if foreign else max(0, needed - index.max_indexed_commit)
    return lags


def _types(repository: ObjectRepository) -> tuple[tuple[TypeMetrics, ...], tuple[str, ...]]:
    """The figures of each type, and what is wrong with its index: every index is read once."""
    head = repository.chain.read_head().head
    if head.commit_id == 0:
        return (), ()
    entries = state.current_checkpoint(repository.chain, head).entries
    indices = repository.read_indices(head)
    figures = tuple(
        _type(*ref, entries.get(ref, ()), lag, head.commit_id)
        for ref, lag in _lags(repository, head, indices).items()
    )
    return figures, tuple(repository.index_warnings(head, indices))


def _type(kind: str, name: str, entries: Sequence[Entry], lag: int, upto: int) -> TypeMetrics:
    files = [file for entry in entries for file in entry.files]
    latest = [file for entry in entries for file in entry.newest_files(upto)]
    return TypeMetrics(
        kind=kind,
        type_name=name,
        entries=len(entries),
        snapshots=sum(e.is_snapshot for e in entries),
        files=len(files),
        rows=sum(max(0, f.row_count) for f in files),
        bytes=sum(f.bytes for f in files),
        index_lag=lag,
        latest_files=len(latest),
        latest_rows=sum(max(0, f.row_count) for f in latest),
        identities=identities(entries),
    )


# -- Prometheus -----------------------------------------------------------------------------------


def _lines(metrics: Metrics) -> Iterator[str]:
    storage = {"storage": metrics.uri}
    session = metrics.session
    totals = [
        ("commits_total", "Commits that this session published.", session["commits"]),
        ("commits_empty_total", "Commits that had nothing to write.", session["empty"]),
        ("commits_failed_total", "Commits that raised an error.", session["failed"]),
        ("commit_attempts_total", "Swaps of head that were tried.", session["attempts"]),
        (
            "lock_wait_seconds_total",
            "Time spent waiting for the write lock.",
            session["lock_wait_ms"] / 1000,
        ),
        ("rows_inserted_total", "Rows of new identities.", session["rows_inserted"]),
        ("rows_updated_total", "New versions of known identities.", session["rows_updated"]),
        ("bytes_read_total", "Bytes read from the store.", metrics.bytes_read),
        ("bytes_written_total", "Bytes written to the store.", metrics.bytes_written),
    ]
    for name, help_text, value in totals:
        yield from _family(name, "counter", help_text, [(storage, value)])
    by_kind = [({**storage, "kind": kind}, n) for kind, n in metrics.requests.items()]
    yield from _family("requests_total", "counter", "Requests to the store.", by_kind)
    for name, value in metrics.cache.items():
        help_text = f"Of the cache of immutable objects: {name.replace('_', ' ')}."
        yield from _family(f"cache_{name}_total", "counter", help_text, [(storage, value)])
    head = [(storage, metrics.head_commit_id)]
    yield from _family("head_commit_id", "gauge", "The latest commit.", head)
    for name, help_text in _GAUGES.items():
        samples = [
            ({**storage, "kind": figures.kind, "type": figures.type_name}, getattr(figures, name))
            for figures in metrics.types
        ]
        stated = [(labels, value) for labels, value in samples if value is not None]
        yield from _family(f"type_{name}", "gauge", help_text, stated)


_GAUGES = {
    "files": "Data files of a type.",
    "entries": "Runs of commits that its files hold.",
    "snapshots": "Of these, made by compaction.",
    "rows": "Rows of all versions.",
    "bytes": "Bytes of its data files.",
    "identities": "Identities, where the log tells.",
    "index_lag": "Commits that its index is behind.",
    "latest_files": "Files that a latest read opens.",
    "read_amplification": "Rows that a latest read looks at, per identity.",
}


def _family(
    name: str,
    kind: str,
    help_text: str,
    samples: Sequence[tuple[Mapping[str, str], int | float]],
) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP ontologia_{name} {help_text}"
    yield f"# TYPE ontologia_{name} {kind}"
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"ontologia_{name}{{{inside}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
