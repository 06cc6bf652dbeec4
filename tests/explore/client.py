"""The page without a network, asked as a server would ask it; and with one, as a process."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from storage_engine.explore.app import ExploreApp
from storage_engine.explore.view import Storage
from tests.cli.support import ROOT

PORT = 8686
_SAFE = "/?&=%:~.,;+@!$'()*[]-_#"  # what a browser leaves as it is


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def html(self) -> str:
        assert self.headers["content-type"] == "text/html; charset=utf-8"
        return self.body.decode()

    @property
    def text(self) -> str:
        """What is on the page: without its markup."""
        return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", self.html)))


class PageClient:
    """Sees one application."""

    def __init__(self, app: ExploreApp, storage: Storage) -> None:
        self._app = app
        self.storage = storage
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self._runner.close()

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        sent = {"host": f"127.0.0.1:{PORT}", "accept": "text/html", **headers}
        parts = urlsplit(quote(path, safe=_SAFE))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path.partition("?")[0],
            "raw_path": quote(path.partition("?")[0], safe=_SAFE).encode(),
            "query_string": parts.query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }
        return self._runner.run(self._ask(scope))

    async def _ask(self, scope: dict[str, Any]) -> Answer:
        messages: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        await self._app(scope, receive, send)
        begin = messages[0]
        headers = {name.decode(): value.decode() for name, value in begin["headers"]}
        return Answer(begin["status"], headers, b"".join(m.get("body", b"") for m in messages[1:]))

    def shown(self, path: str, status: int = 200) -> str:
        answer = self.get(path)
        assert answer.status == status, answer.text
        return answer.text

    def document(self, path: str, status: int = 200) -> Any:
        answer = self.get(path, accept="application/json")
        assert answer.status == status, answer.body
        return json.loads(answer.body)


@contextmanager
def serving(*args: str | Path, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program on a free port, and the address that it tells."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ONTOLOGIA_")}
    program = subprocess.Popen(
        [sys.executable, "-m", "storage_engine.cli.main", "explore", "--port", "0", "--json"]
        + [str(arg) for arg in args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert program.stdout is not None
        lines = list(iter(program.stdout.readline, "}\n"))  # a JSON document ends so
        assert lines[-1:] != [""], program.communicate()[1]
        yield program, json.loads("".join([*lines, "}"]))["url"]
    finally:
        if program.poll() is None:
            program.kill()
        program.communicate()
