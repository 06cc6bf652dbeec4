"""The demo's command line: run all of it, or open it in Dagster's UI."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from ontologia_dagster.demo.instance import DEMO_STORAGE_VARIABLE, STORAGE, choose_home, home
from storage_engine.errors import ConfigurationError, OntologiaError

T = TypeVar("T")

MISMATCH = 1
FAILED = 5
STOPPED = 130

_BUCKET = "flights"
_KEY = "ontologia-demo"
_READY = "ready"
_START_S = 240.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ontologia_dagster.demo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "run the demo once and compare what came of it with its source"),
        ("ui", "open the demo in Dagster's UI"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--s3", action="store_true", help="on a local S3 server, started for this command"
        )
        if name == "ui":
            command.add_argument("--port", type=int, default=3000)
    given = parser.parse_args(arguments)
    console = Console(highlight=False)
    try:
        with ExitStack() as running:
            choose_home(local_s3=given.s3)
            if given.s3:
                running.enter_context(_on_local_s3(console))
            if given.command == "ui":
                return ui(console, given.port, s3=given.s3)
            return run(console, s3=given.s3)
    except OntologiaError as error:
        console.print(f"[red]{type(error).__name__}[/red]: {error}", soft_wrap=True)
        return FAILED
    except KeyboardInterrupt:
        return STOPPED


def run(console: Console, *, s3: bool) -> int:
    """0 when every figure is as the source says."""
    import dagster as dg

    from ontologia_dagster.demo.definitions import demo_resources
    from ontologia_dagster.demo.expected import expected
    from ontologia_dagster.demo.instance import (
        RUN,
        end_dead_runs,
        hold,
        open_instance,
        prepare_instance,
    )
    from ontologia_dagster.demo.narrator import Narrator
    from ontologia_dagster.demo.run import Demo, MeteredOntology
    from ontologia_dagster.demo.summary import figures, show, verdict

    for category in (dg.BetaWarning, dg.PreviewWarning):
        warnings.filterwarnings("ignore", category=category)
    logging.getLogger("storage_engine").addHandler(logging.NullHandler())  # the summary tells
    narrator = Narrator(console)
    resources = demo_resources()
    ontology, spark = MeteredOntology.of(resources[STORAGE]), resources["spark"]
    console.print(f"A year of flights from New York, into {ontology.storage_uri}", soft_wrap=True)
    source = expected()
    place = prepare_instance()
    try:
        with hold(place, RUN), open_instance(place) as instance:
            if ended := end_dead_runs(instance, place, RUN):
                console.print(f"{ended} runs of an earlier process were not ended: they are now.")
            outcome = _apart(Demo(instance, ontology, spark, narrator).run)
    except KeyboardInterrupt:
        console.print("\nStopped. Run it again: it goes on from what is stored.")
        return STOPPED
    except (dg.Failure, dg.DagsterError) as error:
        console.print(f"\n[red]A run failed:[/red] {error}", soft_wrap=True)
        console.print("[bold]make ui[/bold] shows it with its log, under Runs.")
        return FAILED
    compared = figures(ontology, outcome, source)
    show(console, ontology, outcome, compared, narrator.elapsed)
    if not verdict(console, compared):
        return MISMATCH
    console.print(f"\nSee it in Dagster: [bold]make {'ui-s3' if s3 else 'ui'}[/bold]")
    return 0


def _apart(work: Callable[[], T]) -> T:
    """Do it in another thread, so that Ctrl-C ends the program: in the main thread Dagster makes
    it the failure of one step, and tries that again."""
    done: Future[T] = Future()

    def do() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            done.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return done.result()


def ui(console: Console, port: int, *, s3: bool) -> int:
    """Dagster's webserver and daemon on the instance and storage of the demo, until Ctrl-C."""
    from ontologia_dagster.demo.definitions import demo_resources
    from ontologia_dagster.demo.instance import (
        UI,
        end_dead_runs,
        hold,
        open_instance,
        prepare_instance,
    )

    place = prepare_instance()
    ontology = demo_resources()[STORAGE]
    with hold(place, UI):
        with open_instance(place) as instance:
            end_dead_runs(instance, place, UI)
        with ontology.repository() as repository:
            empty = repository.head_commit_id() == 0
        if empty:
            console.print(
                f"Nothing is in {ontology.storage_uri} yet: [bold]make {'run-s3' if s3 else 'run'}"
                "[/bold] fills it, or materialise flight_data in the UI.",
                soft_wrap=True,
            )
        return _dagster_dev(port, stay=s3)


def _workspace() -> Path:
    """In a checkout that of all its locations; where the package is installed, the demo alone."""
    of_checkout = Path(__file__).parents[2] / "workspace.yaml"
    return of_checkout if of_checkout.is_file() else Path(__file__).with_name("workspace.yaml")


def _dagster_dev(port: int, *, stay: bool) -> int:
    command = [
        str(Path(sys.executable).with_name("dagster")),
        "dev",
        "--workspace",
        str(_workspace()),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    # Dagster warns of parts of itself that are new or old, in every process, at every start.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    if not stay:
        os.execv(command[0], command)  # noqa: S606 - so that signals reach it, whoever sends them
    started = subprocess.Popen(command)
    try:
        return started.wait()
    except KeyboardInterrupt:
        return started.wait()  # at a terminal it has had the signal too


@contextmanager
def _on_local_s3(console: Console) -> Iterator[None]:
    """A server with its data under the demo's folder; the storage is a bucket on it."""
    from dagster_aws.s3 import S3Resource

    from ontologia_dagster.demo.instance import SERVER, hold
    from ontologia_dagster.demo.local_s3 import local_s3

    folder = home() / "seaweedfs"
    folder.mkdir(parents=True, exist_ok=True)
    # Two servers on the same files would spoil them: run-s3 and ui-s3 take turns.
    with hold(folder, SERVER), local_s3(folder, _KEY, _KEY) as server:
        console.print(f"SeaweedFS at {server.endpoint}, data in {folder}", soft_wrap=True)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            os.environ.pop(name, None)  # they belong to another account
        os.environ |= {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": server.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_S3_FORCE_PATH_STYLE": "true",
            DEMO_STORAGE_VARIABLE: f"s3://{_BUCKET}/demo",
        }
        client = S3Resource(
            endpoint_url=server.endpoint,
            region_name="us-east-1",
            aws_access_key_id=_KEY,
            aws_secret_access_key=_KEY,
        ).get_client()
        deadline = time.monotonic() + _START_S
        while True:
            try:
                with suppress(client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket=_BUCKET)
                # It knows of buckets before it can read what a server before it has stored.
                with suppress(client.exceptions.NoSuchKey):
                    client.get_object(Bucket=_BUCKET, Key=_READY)["Body"].read()
                client.put_object(Bucket=_BUCKET, Key=_READY, Body=b"ready")
                break
            except Exception as error:
                if server.process.poll() is not None or time.monotonic() > deadline:
                    raise ConfigurationError(
                        f"the local S3 server did not start ({error}):\n{server.said()}"
                    ) from error
                time.sleep(0.3)
        yield
