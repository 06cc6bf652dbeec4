"""Serves the page until it is told to stop."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import uvicorn

from storage_engine.errors import ConfigurationError
from storage_engine.explore.access import Access
from storage_engine.explore.app import ExploreApp
from storage_engine.explore.view import Storage

_LONGEST_REQUEST = 256 * 1024  # bytes of its first line and headers
_GRACE_S = 3  # for requests that are being answered when the server is told to stop


def serve(
    storage: Storage,
    *,
    host: str,
    port: int,
    token: str | None,
    on_ready: Callable[[str], None],
) -> bool:
    """Until SIGINT or SIGTERM. `on_ready` is told the address, when requests will be answered.

    Whether all that was begun has ended: a question that reads for minutes is not waited for.
    """
    Access(host, port, token)  # refuses before anything is bound
    with closing(_bound(host, port)) as listening:
        actual = listening.getsockname()[1]
        app = ExploreApp(storage, Access(host, actual, token))
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what goes wrong is on the page, or in our own log
            access_log=False,  # addresses have keys in them, and once a token
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_LONGEST_REQUEST,
            timeout_graceful_shutdown=_GRACE_S,
        )
        name = f"[{host}]" if ":" in host else host
        server = _Server(config)
        with server.capture_signals():  # whoever is told the address may stop it at once
            on_ready(f"http://{name}:{actual}/")
            server.run(sockets=[listening])
        return not app.is_reading


class _Server(uvicorn.Server):
    """Told to stop, it ends in order and returns: the storage is still to be closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are for the main thread
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"--host {host}: {error.strerror or error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
        return listening
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} of {host} is in use, perhaps by another `onto explore`: look there, "
                "or choose another with --port (0 takes any that is free)"
            ) from None
        raise ConfigurationError(
            f"cannot serve on port {port} of {host}: {error.strerror or error}"
        ) from None
