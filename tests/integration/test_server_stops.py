"""The S3 server freezes, dies and comes back while a session commits.

What the session hears are errors of ours; what was acknowledged is there; what was not is there
whole or not at all; and the same session goes on once the server does.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from storage_engine.errors import CommitStateUnknownError, OntologiaError
from storage_engine.repository import Repository, initialize_storage
from tests.engines import CUSTOMER, Storage, customer, put
from tests.servers import S3Server, free_ports, run_seaweedfs

pytestmark = pytest.mark.s3

PATIENCE_S = 60.0
OUTAGE_S = 2.5


class Server:
    """A SeaweedFS of this test alone, on fixed ports, so that it can come back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = free_ports(8)
        self._running = ExitStack()
        self.start()

    def start(self) -> None:
        self.now: S3Server = self._running.enter_context(run_seaweedfs(self._folder, self._ports))

    def kill(self) -> None:
        self._running.close()

    def freeze(self, seconds: float) -> None:
        pid = self.now.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def restart(self, seconds: float) -> None:
        self.kill()
        time.sleep(seconds)
        self.start()


@pytest.fixture
def server(aws_environment: None) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="weed-", ignore_cleanup_errors=True) as folder:
        made = Server(Path(folder))
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture
def storage(server: Server) -> Storage:
    config = server.now.config()
    settings = {
        "s3_endpoint_url": config.s3_endpoint_url,
        "s3_region": config.s3_region,
        "s3_request_timeout_s": 1.0,
        "s3_lease_ttl_ms": 3_000,
        "s3_lock_timeout_ms": 30_000,
    }
    made = Storage(f"s3://{server.now.make_bucket()}/stops", "s3", "v2", settings)
    initialize_storage(made.uri, "v2", made.config())
    return made


class Series:
    """Commits one customer after the other, noting what became of each."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.acknowledged: dict[str, int] = {}
        self.failed: dict[str, Exception] = {}

    def commit_next(self) -> bool:
        key = f"c{len(self.acknowledged) + len(self.failed):04}"
        try:
            self.acknowledged[key] = put(self._repository, customer(key)).commit_id
        except OntologiaError as error:
            self.failed[key] = error
            return False
        return True

    def commit_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"no progress: {list(self.failed.values())[-3:]}"
            if not self.commit_next():
                time.sleep(0.1)


@pytest.mark.parametrize("outage", ["freeze", "restart"])
def test_rfc0004_03_server_goes_away_during_commits(
    server: Server, storage: Storage, outage: str
) -> None:
    repository = storage.open()
    series = Series(repository)
    series.commit_until(lambda: len(series.acknowledged) == 3)
    away = threading.Thread(target=getattr(server, outage), args=(OUTAGE_S,))
    away.start()
    series.commit_until(lambda: not away.is_alive())
    away.join()
    back_at = len(series.acknowledged)
    series.commit_until(lambda: len(series.acknowledged) >= back_at + 3)
    repository.flush()

    assert_nothing_lost(repository, series)
    repository.close()
    fresh = storage.open()
    assert_nothing_lost(fresh, series)
    fresh.close()
    kinds = sorted({type(error).__name__ for error in series.failed.values()})
    print(
        f"\n{outage}: {len(series.acknowledged)} acknowledged, {len(series.failed)} failed {kinds}"
    )


def assert_nothing_lost(repository: Repository, series: Series) -> None:
    found = {row["entity_key"]: row["commit_id"] for row in repository.read(CUSTOMER).to_pylist()}
    lost = {key: at for key, at in series.acknowledged.items() if found.get(key) != at}
    assert not lost, "acknowledged and not there"
    unsaid = {key for key in found if key not in series.acknowledged}
    unknown = {k for k, e in series.failed.items() if isinstance(e, CommitStateUnknownError)}
    assert unsaid <= unknown, "there, though the session was told that it failed"
    head = repository.head_commit_id()
    assert sorted(found.values()) == list(range(1, head + 1)), "ids have gaps"
    assert [record.id for record in repository.list_commits(1000)] == list(range(head, 0, -1))
