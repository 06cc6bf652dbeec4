"""The page as an ASGI application: one request in, one document out, as HTML or as JSON.

Handlers read in threads, a few at a time. Whatever goes wrong becomes a page that says so: 404 with
what there is, 503 when the storage does not answer. Programs ask the same addresses for JSON, by
`Accept: application/json` or `?format=json`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, parse_qsl

import anyio
from anyio.to_thread import run_sync
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from storage_engine import __version__
from storage_engine.errors import (
    LockContentionError,
    OntologiaError,
    StorageBackendError,
    UninitializedStorageError,
    UnknownBranchError,
)
from storage_engine.explore import values
from storage_engine.explore.access import METHODS, SECURITY_HEADERS, Access, Admission, Refusal
from storage_engine.explore.links import branch_path, commit_path, event_path, with_query
from storage_engine.explore.pages import Moved, Page, PageAddress, route
from storage_engine.explore.view import PageError, Storage, StorageView
from storage_engine.wording import counted, size

AT_ONCE = 8  # requests that read
MOST_PARAMETERS = 100
_TAGS = 100
_STATIC = {"style.css": "text/css; charset=utf-8", "icon.svg": "image/svg+xml"}
_GONE = (StorageBackendError, UninitializedStorageError, LockContentionError)

log = logging.getLogger(__name__)


class ExploreApp:
    """Answers for one storage."""

    def __init__(self, storage: Storage, access: Access) -> None:
        self._storage = storage
        self._access = access
        self._limiter: anyio.CapacityLimiter | None = None
        self._templates = _environment()
        self._reading = 0
        self._lock = threading.Lock()

    @property
    def is_reading(self) -> bool:
        """Whether some request still waits for the storage, though perhaps nobody for it."""
        return self._reading > 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        response = await self._answer(request)
        for name, value in SECURITY_HEADERS.items():
            response.headers[name] = value
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        raw = _raw_path(request.scope)
        query = request.scope.get("query_string", b"").decode("ascii", "replace")
        verdict = self._access.check(request.method, raw, query, request.headers)
        if isinstance(verdict, Admission):
            headers = {"location": verdict.location, "set-cookie": verdict.cookie}
            return Response(status_code=303, headers=headers)
        if isinstance(verdict, Refusal):
            refused = self._error(
                request, verdict.status, verdict.message, verdict.advice, shown=False
            )
            if verdict.status == 405:
                refused.headers["allow"] = ", ".join(METHODS)
            return refused
        segments = tuple(raw.split("/"))[1:]
        if segments[:1] == ("static",):
            return self._static(request, segments[1:])
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(AT_ONCE)
        read = partial(self._page, request, segments, query)
        return await run_sync(read, limiter=self._limiter, abandon_on_cancel=True)

    # --- pages ----------------------------------------------------------------------------------

    def _page(self, request: Request, segments: tuple[str, ...], query: str) -> Response:
        with self._counted():
            return self._answered(request, segments, query)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1

    def _answered(self, request: Request, segments: tuple[str, ...], query: str) -> Response:
        try:
            asked = PageAddress(segments, _parameters(query))
            with self._storage.on(asked.text("branch")) as storage:
                page = route(storage, asked)
                if isinstance(page, Moved):
                    return Response(status_code=303, headers={"location": page.location})
                return self._rendered(request, page, "/".join(["", *segments]), query)
        except PageError as error:
            return self._error(request, error.status, str(error), error.advice)
        except UnknownBranchError as error:
            return self._error(request, 404, str(error), "Which there are: see /branches.")
        except _GONE as error:
            advice = "Nothing is wrong with your address: try again when the storage is back."
            return self._error(request, 503, str(error), advice)
        except OntologiaError as error:
            advice = "`onto verify` and `onto doctor` tell more of the storage."
            return self._error(request, 500, str(error), advice)
        except Exception as error:
            log.exception("a page could not be made")
            message = f"unexpected {type(error).__name__}: {error}"
            advice = "This is a defect in ontologia: please report it with the traceback on stderr."
            return self._error(request, 500, message, advice)

    def _rendered(self, request: Request, page: Page, path: str, query: str) -> Response:
        if _wants_json(request):
            return _json_response(_document(page), page.status)
        return _html_response(self._html(page.template, page, path, query), page.status)

    def _error(
        self, request: Request, status: int, message: str, advice: str, *, shown: bool = True
    ) -> Response:
        """`shown`: whoever asks may know which storage this is."""
        message = values.title(" ".join(message.split()), 600)
        document = {"error": {"status": status, "message": message, "advice": advice}}
        if _wants_json(request):
            return _json_response(document, status)
        page = Page("error.html", f"{status}", document["error"], status=status)
        return _html_response(self._html("error.html", page, shown=shown), status)

    def _html(
        self, template: str, page: Page, path: str = "", query: str = "", *, shown: bool = True
    ) -> str:
        view = page.view
        now = datetime.now(UTC)
        branch = view.branch_name if view is not None else None

        def on_branch(url: str) -> str:
            """An address that keeps the branch which is looked at."""
            return _keeping(url, branch=branch)

        def url(url: str) -> str:
            """The same, at the commit which is looked at."""
            return _keeping(on_branch(url), as_of=view.as_of if view is not None else None)

        return self._templates.get_template(template).render(
            page=page,
            it=page.document,
            drawings=page.drawings,
            view=view,
            head_time=_head_time(view),
            storage_uri=self._storage.repository.uri if shown else "",
            tags=lambda: _tags(view),
            u=url,
            b=on_branch,
            branch_name=branch,
            has_branches=self._storage.branches is not None,
            switch_url=with_query("/branches", {"place": path}),
            main_url=_changed(query, branch=None, as_of=None, after=None),
            json_url=_changed(query, format="json"),
            latest_url=_changed(query, as_of=None),
            ago=lambda text: values.ago(_parsed_time(text), now),
        )

    # --- static files ---------------------------------------------------------------------------

    def _static(self, request: Request, segments: tuple[str, ...]) -> Response:
        name = segments[0] if len(segments) == 1 else ""
        if name not in _STATIC:
            return self._error(request, 404, "there is no such file", "")
        data, etag = static_file(name)
        headers = {"etag": etag, "cache-control": "public, max-age=31536000, immutable"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=_STATIC[name], headers=headers)


@lru_cache
def static_file(name: str) -> tuple[bytes, str]:
    data = (files("storage_engine.explore") / "static" / name).read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:20]}"'


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("storage_engine.explore"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cell": values.cell,
        "key": values.key_text,
        "label": values.key_label,
        "visible": values.visible,
        "title_text": values.title,
        "size": size,
        "clock": _clock,
    }
    environment.globals |= {
        "counted": counted,
        "branch_path": branch_path,
        "commit_path": commit_path,
        "event_path": event_path,
        "on_page": values.ON_PAGE,
        "version": __version__,
        "style_url": f"/static/style.css?v={static_file('style.css')[1][1:9]}",
        "with_query": with_query,
    }
    return environment


def _raw_path(scope: Mapping[str, Any]) -> str:
    """As it was sent: an encoded slash is part of a key."""
    raw = scope.get("raw_path") or str(scope["path"]).encode()
    return bytes(raw).decode("ascii", "replace").partition("?")[0]


def _parameters(query: str) -> Mapping[str, list[str]]:
    try:
        return parse_qs(
            query, keep_blank_values=True, errors="strict", max_num_fields=MOST_PARAMETERS
        )
    except ValueError:
        raise PageError("what stands after the question mark cannot be read") from None


def _wants_json(request: Request) -> bool:
    if "format=json" in request.scope.get("query_string", b"").decode("ascii", "replace").split(
        "&"
    ):
        return True
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted


def _document(page: Page) -> dict[str, Any]:
    if page.view is None:
        return page.document
    seen = {
        "head_commit_id": page.view.head,
        "commit_id": page.view.commit_id,
        "branch": page.view.repository.branch,
    }
    return {**page.document, "as_of": seen}


def _json_response(document: Mapping[str, Any], status: int) -> Response:
    data = json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    return Response(
        data, status, media_type="application/json", headers={"cache-control": "no-store"}
    )


def _html_response(html: str, status: int) -> Response:
    headers = {"cache-control": "no-store", "content-type": "text/html; charset=utf-8"}
    return Response(html.encode(), status, headers=headers)


def _keeping(url: str, **parameter: str | None) -> str:
    """An address with one parameter more, unless it has it."""
    ((name, value),) = parameter.items()
    if value is None or f"{name}=" in url.partition("?")[2]:
        return url
    return f"{url}{'&' if '?' in url else '?'}{with_query('', parameter)[1:]}"


def _changed(query: str, **parameters: str | None) -> str:
    """This page's address with other parameters."""
    kept = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] not in parameters]
    return with_query("", [*kept, *parameters.items()]) or "?"


def _tags(view: StorageView | None) -> list[str]:
    """To choose from."""
    return [tag.name for tag in view.repository.list_tags()[:_TAGS]] if view is not None else []


def _head_time(view: StorageView | None) -> str | None:
    record = view.storage.commit(view.head) if view is not None and view.head else None
    return None if record is None else record.created_at.isoformat()


def _parsed_time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _clock(text: str | None) -> Markup:
    """A time for people, in UTC; exactly on hover."""
    if text is None:
        return Markup("")
    moment = _parsed_time(text).astimezone(UTC)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        text, text, moment.strftime("%Y-%m-%d %H:%M:%S UTC")
    )
