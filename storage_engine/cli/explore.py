"""`onto explore`: a page to look at the ontology in a browser."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import typer

from storage_engine.cli.arguments import Invocation
from storage_engine.commitlog.layout import MAIN
from storage_engine.errors import ConfigurationError, UninitializedStorageError

if TYPE_CHECKING:
    from storage_engine.model.expressions import Filter
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository import Repository

HOST, PORT = "127.0.0.1", 8686
TOKEN_VARIABLE = "ONTOLOGIA_EXPLORE_TOKEN"  # noqa: S105 - the name of a variable
NEEDED = ("jinja2", "starlette", "uvicorn")


def explore(
    invocation: Invocation,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="HOST", help="Where to listen; other than loopback needs --token."
        ),
    ] = HOST,
    port: Annotated[
        int,
        typer.Option("--port", metavar="N", min=0, max=65535, help="Its port; 0 takes a free one."),
    ] = PORT,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            help=f"What every request must bring (env {TOKEN_VARIABLE}).",
        ),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser of this machine.")
    ] = False,
) -> None:
    """Serve a read-only page of the ontology: types, objects, history, events, health."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"`onto explore` needs {', '.join(missing)}: pip install 'ontologia[explore]'"
        )
    from storage_engine.explore.server import serve
    from storage_engine.explore.view import Storage
    from storage_engine.runtime.branches import branches_of

    target = invocation.target()
    if target.sqlite_path is not None and not Path(target.sqlite_path).expanduser().exists():
        raise UninitializedStorageError(target.uri)

    branch = invocation.settings.branch
    begin = {"branch": branch} if branch not in (None, MAIN) else {}

    def ready(url: str) -> None:
        opened = f"{url}?{urlencode({**begin, 'token': secret})}" if secret else ""
        url = f"{url}?{urlencode(begin)}" if begin else url
        if invocation.output.json:
            invocation.output.document({"url": url, "storage": target.uri})
        else:
            invocation.output.line(f"{target.uri} is shown at {url} (Ctrl-C ends it)")
        sys.stdout.flush()  # whoever waits for the address may read from a pipe
        if open_browser:
            webbrowser.open(opened or url)

    secret = token or invocation.environ.get(TOKEN_VARIABLE) or None
    with _temporary_files() as scratch, invocation.repository(on_main=True) as repository:
        if begin:
            branches_of(repository).head(begin["branch"])
        # What is wrong with the storage is told here, not on every page, and DuckDB is ready.
        list(repository.executor().sql("SELECT 1").batches)
        storage = Storage(repository, invocation.config(), read_filters, invocation.models())
        done = serve(storage, host=host, port=port, token=secret, on_ready=ready)
        if done:
            storage.close()
        else:
            # Deep inside DuckDB or SQLite somebody still reads: nothing is lost with the process.
            sys.stdout.flush()
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(0)


@contextmanager
def _temporary_files() -> Iterator[str]:
    """A folder that all of them are in."""
    before = tempfile.tempdir
    scratch = tempfile.mkdtemp(prefix="onto-")
    try:
        tempfile.tempdir = scratch
        yield scratch
    finally:
        tempfile.tempdir = before
        shutil.rmtree(scratch, ignore_errors=True)


def read_filters(
    repository: Repository, spec: TypeSpec, filters: Sequence[Sequence[str]]
) -> Filter | None:
    """Filters as `onto query` takes them."""
    from storage_engine.cli.query_terms import Types, condition

    types = Types({}, repository.type_refs, repository.stored_types)
    return condition(types, spec, [json.dumps(list(terms)) for terms in filters])
