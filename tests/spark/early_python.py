"""The Python of a Spark server in tests: it answers the JVM first and imports PySpark after.

A Connect server gives the process of `foreachBatch` ten seconds to connect and ten to say the
secret, which no setting changes, and PySpark does so when it has imported all that it needs: on a
machine that is busy with other tests that takes longer. So both are done at once, and PySpark
gets the connection when it comes to that.

    python tests/spark/early_python.py -m some.module
"""

from __future__ import annotations

import os
import runpy
import socket
import struct
import sys
from typing import Any


def connect_now(port: int, secret: bytes) -> None:
    early = socket.create_connection(("127.0.0.1", port))
    early.sendall(struct.pack("!i", len(secret)) + secret)
    plain = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if address[1] != port or early.fileno() < 0:
            plain(self, address)
            return
        timeout = self.gettimeout()
        os.dup2(early.fileno(), self.fileno())
        self.settimeout(timeout)
        early.close()
        setattr(sys.modules["pyspark.util"], "_do_server_auth", read_answer)  # noqa: B010

    setattr(socket.socket, "connect", connect)  # noqa: B010 - mypy lets nobody assign it


def read_answer(connection: Any, _secret: str) -> None:
    """The secret has been said; the JVM's answer waits to be read."""
    (length,) = struct.unpack("!i", connection.read(4))
    answer = connection.read(length)
    if answer != b"ok":
        raise RuntimeError(f"Spark refused the worker: {answer!r}")


if __name__ == "__main__":
    if "PYTHON_WORKER_FACTORY_PORT" in os.environ:
        secret = os.environ["PYTHON_WORKER_FACTORY_SECRET"].encode()
        connect_now(int(os.environ["PYTHON_WORKER_FACTORY_PORT"]), secret)
    if sys.argv[1:2] == ["-m"]:
        sys.argv = sys.argv[2:]
        sys.path[0] = os.getcwd()  # as `python -m` has it
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
