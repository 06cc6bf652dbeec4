"""A tiny S3 on loopback that answers as told: errors, silence, closed connections, lies."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    key: str
    headers: dict[str, str]
    body: bytes


@dataclass
class FakeS3:
    """`answer` decides per request: a (status, code) to fail with, "hang", "close", or None."""

    endpoint: str = ""
    requests: list[Seen] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    answer: Callable[[Seen], tuple[int, str] | str | None] = lambda seen: None
    ignores: set[str] = field(default_factory=set)
    date: str | None = None
    released: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        """Forget what other tests did, and let go of what they left hanging."""
        self.released.set()
        self.released = threading.Event()
        self.requests, self.objects, self.ignores, self.date = [], {}, set(), None
        self.answer = lambda seen: None

    def etag(self, key: str) -> str:
        return f'"{hashlib.md5(self.objects[key]).hexdigest()}"'

    def condition_fails(self, seen: Seen) -> bool:
        """Conditions as S3 judges them, but for those that this server ignores."""
        exists = seen.key in self.objects
        if "if-none-match" in seen.headers and "create" not in self.ignores:
            return exists
        ignored = "replace" if seen.method == "PUT" else "delete"
        if "if-match" in seen.headers and ignored not in self.ignores:
            return not exists or seen.headers["if-match"].strip('"') != self.etag(seen.key).strip(
                '"'
            )
        return False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeS3

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = unquote(urlsplit(self.path).path).split("/", 2)[-1]
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(self.command, key, headers, body)
        self.fake.requests.append(seen)
        told = self.fake.answer(seen)
        if told == "hang":
            self.fake.released.wait(240)
            self.close_connection = True
        elif told == "close":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif told == "truncate":
            self.send_response(200)
            self.send_header("ETag", '"0"')
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
        elif isinstance(told, tuple):
            self._fail(*told)
        elif "delete" in urlsplit(self.path).query.split("&"):
            self._reply(200, b"<DeleteResult></DeleteResult>")
        elif self.command == "GET" and key not in self.fake.objects:
            self._fail(404, "NoSuchKey")
        elif self.command != "GET" and self.fake.condition_fails(seen):
            self._fail(412, "PreconditionFailed")
        elif self.command == "PUT":
            self.fake.objects[key] = body
            self._reply(200, b"", ETag=self.fake.etag(key))
        elif self.command == "DELETE":
            self.fake.objects.pop(key, None)
            self._reply(204, b"")
        else:
            self._reply(200, self.fake.objects[key], ETag=self.fake.etag(key))

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def date_time_string(self, timestamp: float | None = None) -> str:
        return self.fake.date or super().date_time_string(timestamp)

    def _fail(self, status: int, code: str) -> None:
        xml = f"<Error><Code>{code}</Code><Message>told to</Message></Error>"
        self._reply(status, xml.encode())

    def _reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def run_fake_s3() -> Iterator[FakeS3]:
    fake = FakeS3()
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    fake.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
