"""An HTTP/1.1 proxy on loopback that makes an S3 server on loopback as slow as a remote one.

It passes bytes on as they are, both ways, Host header included (signatures cover it, and clients
sign for the proxy's own address), holds back the first byte of each answer by the latency of the
request's kind, and counts requests and body bytes by kind. The latency comes on top of the
server's own time; opening a connection costs nothing extra, and bandwidth is not limited.

Told so (`Faults`), it also fails: a request that is refused (503, the server never sees it), one
that the server carries out and whose answer is lost (the connection closes) or replaced by a 503,
and one whose answer comes late. Which request it hits is drawn from a seed.

    with latency_proxy(server.endpoint) as proxy:  # a process of its own
        ...  # clients talk to proxy.endpoint
        print(proxy.counts().requests)

    python -m benchmarks.latency_proxy --upstream http://127.0.0.1:8333 --port 9000
    curl http://127.0.0.1:9000/-/counts            # no bucket can be named "-"
    curl -X DELETE http://127.0.0.1:9000/-/counts  # the same, and counting starts anew
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TextIO
from urllib.parse import parse_qs, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

#: Added to each request, in milliseconds: medians of S3 in one region, small objects.
LATENCY_MS: dict[str, float] = {
    "GET": 27,
    "HEAD": 27,
    "LIST": 24,
    "PUT": 60,
    "PUT_IF": 61,
    "POST": 60,  # starts and ends of multipart uploads
    "DELETE": 30,
    "DELETE_IF": 30,
}
_CONTROL = "/-/counts"
_BUFFER = 1 << 20
_SMALL = 64 << 10  # a body that is passed on in one piece
_UNAVAILABLE = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: 41\r\n\r\n<Error><Code>SlowDown</Code></Error>     "
)
_BROKEN = (ConnectionError, asyncio.IncompleteReadError, TimeoutError)


@dataclass(frozen=True)
class Faults:
    """How likely each is, for every request."""

    refused: float = 0.0  # 503 instead of the request
    disowned: float = 0.0  # 503 instead of the answer: the request was carried out
    lost: float = 0.0  # the connection closes instead of the answer
    slow: float = 0.0  # the answer waits for up to `slow_ms` more
    slow_ms: float = 0.0
    seed: int = 0


@dataclass
class Counts:
    """By kind of request: how many came, and the bytes of bodies sent up and received back; by
    name of fault, how many there were."""

    requests: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.requests.total()


@dataclass(frozen=True)
class LatencyProxy:
    """A running proxy, as its users see it."""

    endpoint: str
    pid: int

    def counts(self) -> Counts:
        return self._ask("GET")

    def reset(self) -> Counts:
        """What was counted so far; counting starts anew."""
        return self._ask("DELETE")

    def _ask(self, method: str) -> Counts:
        request = Request(self.endpoint + _CONTROL, method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=30) as answer:
            raw = json.load(answer)
        return Counts(**{f.name: Counter(raw[f.name]) for f in fields(Counts)})


@contextmanager
def latency_proxy(
    upstream: str,
    latency_ms: Mapping[str, float] | None = None,
    log: Path | None = None,
    faults: Faults | None = None,
) -> Iterator[LatencyProxy]:
    """Run a proxy in a process of its own; it ends with the context, or with this process."""
    command = [sys.executable, "-m", "benchmarks.latency_proxy", "--with-parent"]
    command += ["--upstream", upstream, "--latency", json.dumps(dict(latency_ms or {}))]
    command += ["--faults", json.dumps(asdict(faults or Faults()))]
    if log is not None:
        command += ["--log", str(log)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parent.parent,
        text=True,
        start_new_session=True,  # Ctrl-C is for us, who still need it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the latency proxy did not start (exit code {process.wait()})")
        yield LatencyProxy(line.strip(), process.pid)
    finally:
        process.stdin.close()
        process.wait(timeout=10)
        process.stdout.close()


@dataclass(frozen=True)
class Head:
    """Everything up to the empty line, as it came, and what of it matters here."""

    raw: bytes
    first: tuple[str, str, str]
    headers: Mapping[str, str]

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> Head | None:
        """None where the other side closed the connection instead of saying more."""
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        one, two, *rest = first.split(" ", 2)
        return cls(raw, (one, two, rest[0] if rest else ""), headers)

    @property
    def status(self) -> int:
        return int(self.first[1])

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def closes(self) -> bool:
        version = next(part for part in self.first if part.startswith("HTTP/"))
        default = "keep-alive" if version == "HTTP/1.1" else "close"
        return "close" in self.headers.get("connection", default).lower()

    def closing(self) -> bytes:
        """The same, saying that the connection ends with it."""
        return self.raw if self.closes else self.raw[:-2] + b"Connection: close\r\n\r\n"


def kind_of(request: Head) -> str:
    """The kind under which a request is delayed and counted."""
    method, target, _ = request.first
    if method in {"GET", "POST"}:
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        if method == "POST" and "delete" in query:
            return "DELETE"
        if method == "GET" and ("list-type" in query or "/" not in parts.path.strip("/")):
            return "LIST"
    conditional = "if-match" in request.headers or "if-none-match" in request.headers
    if conditional and method in {"PUT", "DELETE", "POST"}:
        # A multipart upload is made conditional by the POST that completes it.
        return "PUT_IF" if method != "DELETE" else "DELETE_IF"
    return method


class Proxy:
    """One upstream, one latency table. Each client connection has an upstream one of its own."""

    def __init__(
        self,
        upstream: str,
        latency_ms: Mapping[str, float],
        log: TextIO | None = None,
        faults: Faults | None = None,
    ) -> None:
        parts = urlsplit(upstream)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"the upstream must be http://HOST[:PORT], not {upstream!r}")
        if unknown := set(latency_ms) - set(LATENCY_MS):
            raise ValueError(f"no such kinds: {sorted(unknown)} (known: {', '.join(LATENCY_MS)})")
        self._address = (parts.hostname, parts.port or 80)
        self._delay = {k: ms / 1000 for k, ms in {**LATENCY_MS, **latency_ms}.items()}
        self._log = log
        self._faults = faults or Faults()
        self._random = random.Random(self._faults.seed)
        self.counts = Counts()

    def _drawn(self, *, whole: bool) -> str:
        """The fault that this request meets, "" for none. One whose body is on its way (not
        `whole`) cannot be refused."""
        chances = self._faults
        drawn = self._random.random()
        for name in ("refused", "disowned", "lost", "slow"):
            chance = getattr(chances, name)
            if drawn < chance:
                if name == "refused" and not whole:
                    return ""
                self.counts.faults[name] += 1
                return name
            drawn -= chance
        return ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All requests of one client connection, one after the other."""
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while (request := await Head.read(reader)) is not None:
                if request.first[1].startswith(_CONTROL):
                    self._tell(request, writer)
                    continue
                if upstream is None or upstream[0].at_eof():
                    if upstream is not None:
                        upstream[1].close()
                    upstream = await asyncio.open_connection(*self._address, limit=_BUFFER)
                if not await self._exchange(request, reader, writer, *upstream):
                    break
        except _BROKEN:
            pass  # one side went away: the other must see a broken connection too
        except asyncio.CancelledError:
            pass  # the proxy ends, and with it this task, which is nobody's to await
        finally:
            writer.close()
            if upstream is not None:
                upstream[1].close()

    async def _exchange(
        self,
        request: Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream_reader: asyncio.StreamReader,
        upstream_writer: asyncio.StreamWriter,
    ) -> bool:
        """Pass one request up and its answer down. False: the connections end with it."""
        started = time.monotonic()
        kind = kind_of(request)
        self.counts.requests[kind] += 1
        waits = "100-continue" in request.headers.get("expect", "").lower()
        length = int(request.headers.get("content-length", "0"))
        body: asyncio.Future[None] | None = None
        streamed = waits or request.chunked or length > _SMALL
        data = b"" if streamed else await reader.readexactly(length)
        # A client that waits to be told to send its body can be refused before, as servers do.
        fault = self._drawn(whole=waits or not streamed)
        if fault == "refused":
            writer.write(_UNAVAILABLE)
            return False
        if streamed:
            upstream_writer.write(request.raw)
            body = asyncio.ensure_future(self._send_body(request, kind, reader, upstream_writer))
        else:  # the way of most: no task, one write
            upstream_writer.write(request.raw + data)
            self.counts.sent[kind] += length
        try:
            answer = await Head.read(upstream_reader)
            while answer is not None and answer.status < 200:
                waits = False
                writer.write(answer.raw)
                answer = await Head.read(upstream_reader)
            if answer is None:
                return False
            await asyncio.sleep(self._delay.get(kind, 0.0))
            if fault == "slow":
                await asyncio.sleep(self._random.random() * self._faults.slow_ms / 1000)
            elif fault == "lost":
                return False
            elif fault == "disowned":
                writer.write(_UNAVAILABLE)
                return False
            # Refused before the client was told to send the body: it will not send it.
            refused = waits and body is not None and not body.done()
            head = answer.closing() if refused else answer.raw
            keeps = await self._receive_body(request, answer, head, kind, upstream_reader, writer)
            if refused:
                return False
            if body is not None:
                await body
        finally:
            if body is not None:
                body.cancel()
                with suppress(asyncio.CancelledError, *_BROKEN):
                    await body
        if self._log is not None:
            line = [started, time.monotonic(), kind, answer.status, request.first[1]]
            self._log.write(json.dumps(line) + "\n")
        return keeps and not request.closes

    async def _send_body(
        self,
        request: Head,
        kind: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            if request.chunked:
                await _copy_chunked(reader, writer, self.counts.sent, kind)
            elif length := int(request.headers.get("content-length", "0")):
                await _copy(reader, writer, length, self.counts.sent, kind)
        except asyncio.IncompleteReadError:
            writer.close()  # the client is gone; the server would wait for the rest
            raise

    async def _receive_body(
        self,
        request: Head,
        answer: Head,
        head: bytes,
        kind: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """The whole answer. False where the end of the body is the end of the connection."""
        bodiless = request.first[0] == "HEAD" or answer.status in {204, 304}
        length = 0 if bodiless else int(answer.headers.get("content-length", _SMALL + 1))
        if length <= _SMALL and not answer.chunked:
            data = await reader.readexactly(length)
            self.counts.received[kind] += length  # first: who has the answer finds it counted
            writer.write(head + data)
            await writer.drain()
            return not answer.closes
        writer.write(head)
        if bodiless:
            await writer.drain()
        elif answer.chunked:
            await _copy_chunked(reader, writer, self.counts.received, kind)
        elif "content-length" in answer.headers:
            await _copy(reader, writer, length, self.counts.received, kind)
        else:
            while data := await reader.read(_BUFFER):
                self.counts.received[kind] += len(data)
                writer.write(data)
                await writer.drain()
            return False
        return not answer.closes

    def _tell(self, request: Head, writer: asyncio.StreamWriter) -> None:
        text = json.dumps(vars(self.counts) | {"total": self.counts.total})
        if request.first[0] == "DELETE":
            self.counts = Counts()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
        writer.write(f"{head}\r\n\r\n{text}".encode())


async def _copy(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    length: int,
    counter: Counter[str],
    kind: str,
) -> None:
    while length:
        data = await reader.read(min(length, _BUFFER))
        if not data:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(data)
        counter[kind] += len(data)  # first: who has the answer finds it counted
        writer.write(data)
        await writer.drain()


async def _copy_chunked(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counter: Counter[str], kind: str
) -> None:
    while True:
        line = await reader.readuntil(b"\r\n")
        writer.write(line)
        size = int(line.split(b";", 1)[0], 16)
        if size == 0:
            break
        await _copy(reader, writer, size, counter, kind)
        writer.write(await reader.readexactly(2))
    while line != b"\r\n":  # trailers, and the empty line that ends them
        line = await reader.readuntil(b"\r\n")
        writer.write(line)
    await writer.drain()


async def _run(options: argparse.Namespace) -> None:
    with open(options.log, "w", buffering=1) if options.log else nullcontext() as log:
        faults = Faults(**json.loads(options.faults))
        proxy = Proxy(options.upstream, json.loads(options.latency), log, faults)
        server = await asyncio.start_server(
            proxy.serve, "127.0.0.1", options.port, limit=_BUFFER, backlog=1024
        )
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        loop = asyncio.get_running_loop()
        end = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end.set)
        if options.with_parent:
            loop.add_reader(sys.stdin.fileno(), end.set)  # nobody writes there: it was closed
        await end.wait()
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency_proxy")
    parser.add_argument("--upstream", required=True, help="the S3 server, http://HOST:PORT")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; default: any free one")
    parser.add_argument(
        "--latency", default="{}", help='milliseconds by kind, such as {"GET": 5}; over the default'
    )
    parser.add_argument("--faults", default="{}", help='chances, such as {"lost": 0.01, "seed": 7}')
    parser.add_argument("--log", help="a file: [start, end, kind, status, target] of each request")
    parser.add_argument("--with-parent", action="store_true", help="end when stdin is closed")
    options = parser.parse_args()
    try:
        asyncio.run(_run(options))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
