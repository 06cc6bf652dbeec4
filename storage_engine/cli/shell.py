"""`onto shell`: a Python prompt on a storage, with a session and the declared types at hand."""

from __future__ import annotations

import code
import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from storage_engine.cli.arguments import Invocation
from storage_engine.cli.errors import GENERAL

if TYPE_CHECKING:
    from storage_engine import Session

_HISTORY_LINES = 1000


def shell(
    invocation: Invocation,
    run: Annotated[
        str | None,
        typer.Option(
            "--command", "-c", metavar="CODE", help="Run this and end, instead of asking."
        ),
    ] = None,
) -> None:
    """Open a Python prompt with a session and the declared types."""
    from storage_engine import Session

    classes = {
        spec.python_class: spec for spec in invocation.models().values() if spec.python_class
    }
    with Session(
        invocation.target().uri,
        branch=invocation.settings.branch,
        entity_types=[cls for cls, spec in classes.items() if spec.kind == "entity"],
        relation_types=[cls for cls, spec in classes.items() if spec.kind == "relation"],
        config=invocation.config(),
    ) as session:
        names = _names(session, list(classes))
        if run is None:
            if sys.stdin is None:
                raise typer.BadParameter("a prompt reads stdin, which is closed: say -c CODE")
            _ask(names, _banner(session, list(classes)))
        elif not _execute(run, names):
            raise typer.Exit(GENERAL)


def _names(session: Session, classes: list[type]) -> dict[str, Any]:
    """What can be typed without an import."""
    import storage_engine as library

    public = {name: getattr(library, name) for name in library.__all__}
    declared = {cls.__name__: cls for cls in classes}
    return {
        "__name__": "__console__",
        **public,
        **declared,
        "session": session,
        "query": session.query,
        "sql": session.sql,
    }


def _banner(session: Session, classes: list[type]) -> str:
    info = session.storage_info()
    lines = [f"{info['uri']}, head at commit {info['head_commit_id']}"]
    if classes:
        names = ", ".join(sorted(cls.__name__ for cls in classes))
        lines.append(f"Types: {names}. query().entities({sorted(c.__name__ for c in classes)[0]})")
    else:
        lines.append("Types are not declared: --models names the module that does.")
    lines.append("session, query() and sql('...') are there; Ctrl-D ends.")
    return "\n".join(lines)


def _execute(text: str, names: dict[str, Any]) -> bool:
    """Whether it went through. What it raises is the user's own: shown whole, without our part."""
    try:
        exec(compile(text, "<command>", "exec"), names)  # noqa: S102 - that is what it is for
    except Exception as error:  # noqa: BLE001 - shown to who wrote it
        within = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, within)
        return False
    return True


def _ask(names: dict[str, Any], banner: str) -> None:
    with contextlib.suppress(ImportError):  # not everywhere
        import readline
        import rlcompleter

        readline.set_completer(rlcompleter.Completer(names).complete)
        readline.parse_and_bind("tab: complete")
        readline.set_history_length(_HISTORY_LINES)
        kept = _history_file()
        with contextlib.suppress(OSError):
            if kept is not None:
                readline.read_history_file(kept)
        try:
            code.interact(banner=banner, local=names, exitmsg="")
        finally:
            with contextlib.suppress(OSError):
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    readline.write_history_file(kept)
        return
    code.interact(banner=banner, local=names, exitmsg="")


def _history_file() -> Path | None:
    """None for users without a home, as containers have them."""
    state = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(state or Path.home() / ".local" / "state", "ontologia", "shell_history")
    except RuntimeError:
        return None
