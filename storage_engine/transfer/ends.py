"""The two ends of a copy: opened, and the target refused where it is not the copy's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from storage_engine.commitlog.layout import MAIN
from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    ConfigurationError,
    CopyRefusedError,
    UninitializedStorageError,
)
from storage_engine.events.carried import CarriedEvent
from storage_engine.events.protocol import EventStore, open_event_store
from storage_engine.objectstore.open import expanded
from storage_engine.repository.open import (
    MEMORY,
    Location,
    initialize_storage,
    open_repository,
    target_of,
)
from storage_engine.repository.protocol import Repository
from storage_engine.wording import counted


def locate(
    source: str | Path | Location, target: str | Path | Location
) -> tuple[Location, Location]:
    """ConfigurationError when there is nothing to copy, or nowhere to copy it to."""
    places = [p if isinstance(p, Location) else target_of(p) for p in (source, target)]
    for place, what in zip(places, ("source", "target"), strict=True):
        if place.sqlite_path == MEMORY:
            raise ConfigurationError(
                f"the {what} of a copy cannot be in memory, where it is only this program's: name "
                "a file, a directory or a bucket"
            )
    begin, end = map(_place, places)
    if begin == end:
        raise ConfigurationError(
            f"{places[0].uri} cannot be copied into itself: name another target"
        )
    if end.startswith(f"{begin}/"):
        raise ConfigurationError(
            f"{places[0].uri} cannot be copied into {places[1].uri}, which is among its own "
            "objects: name a target beside it"
        )
    return places[0], places[1]


def is_inside(path: Path, uri: str) -> bool:
    """Whether a local path is, or is below, what a storage keeps its objects or rows in."""
    here, place = str(path.resolve()), _place(target_of(uri))
    return here == place or here.startswith(f"{place}/")


def _place(location: Location) -> str:
    if location.sqlite_path is not None:
        return str(expanded(location.sqlite_path).resolve())
    uri = location.uri
    if "://" in uri and not uri.startswith("file://"):
        return uri.rstrip("/")
    return str(expanded(uri.removeprefix("file://")).resolve())


@contextmanager
def opened_source(
    location: Location, config: OntologiaConfig, branch: str | None = None
) -> Iterator[Repository]:
    path = location.sqlite_path
    absent = UninitializedStorageError(
        location.uri, "there is nothing to copy or compare; is the name right?"
    )
    if path is not None and not expanded(path).exists():
        raise absent
    try:
        repository = open_repository(location, config, branch=branch)
    except UninitializedStorageError:
        raise absent from None
    with _closing(repository):
        yield repository


@contextmanager
def opened_target(location: Location, config: OntologiaConfig) -> Iterator[Repository | None]:
    """None as long as there is no storage."""
    path = location.sqlite_path
    if path is not None and not expanded(path).exists():
        yield None
        return
    try:
        repository = open_repository(location, config)
    except UninitializedStorageError:
        yield None
        return
    with _closing(repository):
        yield repository


def make_target(location: Location, engine_version: str, config: OntologiaConfig) -> None:
    initialize_storage(location, engine_version, config)


@contextmanager
def _closing(repository: Repository) -> Iterator[Repository]:
    try:
        yield repository
    finally:
        repository.close()


def bus_of(repository: Repository) -> EventStore:
    """Nothing is claimed there, so that settings do not matter."""
    return open_event_store(repository, OntologiaConfig())


def events_of(repository: Repository) -> Iterable[CarriedEvent]:
    """What goes along of the bus: with main, as a branch has sent nothing yet."""
    return bus_of(repository).carried() if repository.branch == MAIN else ()


def check_target(source: Repository, target: Repository, engine_version: str | None) -> int:
    """The commit up to which the target is a copy of the source. CopyRefusedError when it is, or
    has, something else."""
    if engine_version is not None and target.engine_version != engine_version:
        raise _refused(
            source,
            target,
            f"it is kept by engine {target.engine_version} and not {engine_version}: leave out "
            "the engine version, or name another target",
        )
    head = target.head_commit_id()
    identity = source.history.identity()
    if identity and target.history.identity() == identity:
        raise _refused(
            source, target, "both are the same log: its files were copied, or it is the same place"
        )
    if head == 0:
        _check_bus(source, target)
        return 0
    if target.history.origin() != identity:
        raise _refused(
            source,
            target,
            f"it is not empty: its head is commit {head}, which was not copied from there. Name "
            "an empty target, or erase this one with `onto init --force`",
        )
    if head > source.head_commit_id():
        raise _refused(
            source,
            target,
            f"it has {counted(head, 'commit')} and the source {source.head_commit_id()}: the "
            "source was put back to an older state",
        )
    (ours,) = source.history.commits(head - 1, head)
    (theirs,) = target.history.commits(head - 1, head)
    if ours.facts() != theirs.facts():
        raise _refused(
            source, target, f"commit {head} is another one there: the two have gone apart"
        )
    return head


def _check_bus(source: Repository, target: Repository) -> None:
    """Events may be there without a commit."""
    names = {event.name for event in events_of(source)}
    others = [event.name for event in bus_of(target).carried() if event.name not in names]
    if others:
        raise _refused(
            source,
            target,
            f"it is not empty: it has {counted(len(others), 'event')} of its own, "
            f"such as {others[0][1]}",
        )


def _refused(source: Repository, target: Repository, why: str) -> CopyRefusedError:
    return CopyRefusedError(
        f"{source.uri} is not copied into {target.uri}: {why}",
        source=source.uri,
        target=target.uri,
    )
