"""A Postgres of its own for a peer whose catalog is in one: a new cluster behind a Unix socket.

Debian keeps its programs out of the path, and no server of Postgres runs as root.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DEBIAN = Path("/usr/lib/postgresql")
_USER = "postgres"


def programs() -> Path | None:
    """The folder with `initdb` and `pg_ctl`, of the newest version; None where there is none."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
    versions = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return versions[-1].parent if versions else None


@contextmanager
def postgres() -> Iterator[str | None]:
    """How to connect to a server that stands as long as this does; None without Postgres."""
    folder = programs()
    if folder is None:
        yield None
        return
    user = _USER if os.geteuid() == 0 else None
    # Not below a long path: the name of a socket has room for 107 bytes.
    with tempfile.TemporaryDirectory(prefix="onto-pg-") as base:
        if user is not None:
            account = pwd.getpwnam(user)
            os.chown(base, account.pw_uid, account.pw_gid)
        data = f"{base}/data"

        def run(program: str, *arguments: str) -> None:
            subprocess.run(
                [folder / program, *arguments],
                check=True,
                user=user,
                cwd=base,
                stdout=subprocess.DEVNULL,
            )

        run("initdb", "-D", data, "-A", "trust", "-U", _USER, "--no-sync")
        settings = f"-c listen_addresses='' -c unix_socket_directories='{base}'"
        run("pg_ctl", "-D", data, "-w", "-l", f"{base}/log", "-o", settings, "start")
        try:
            yield f"host={base} user={_USER} dbname=postgres"
        finally:
            run("pg_ctl", "-D", data, "-w", "-m", "fast", "stop")
