"""This process: who it is, whether another one still lives, and what must not cross a fork.

A fork copies memory, and neither threads nor what others hold: locks stay locked, pools have no
threads, connections are shared with the parent. So what an opened object storage is made of belongs
to the process that made it (`Owner`), and refuses to work in another; what can go on in a child has
its locks made anew (`renew_after_fork`).
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from storage_engine.errors import PROCESS_FACTS, ForkedSessionError

_PROC = Path("/proc")


def identity() -> dict[str, Any]:
    """Host and pid; on Linux also `PROCESS_FACTS`, which make them unique in time and among
    containers."""
    facts: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    try:
        if os.readlink(_PROC / "self") != str(os.getpid()):
            return facts  # a /proc of another pid namespace: its processes are not those we know
        facts["boot_id"] = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        facts["pid_namespace"] = os.stat(_PROC / "self/ns/pid").st_ino
        facts["pid_started"] = _started(os.getpid())
    except (OSError, ValueError):
        return {name: facts[name] for name in facts if name not in PROCESS_FACTS}
    return facts


def is_gone(holder: Mapping[str, Any]) -> bool:
    """Whether the process that wrote this `identity` has certainly ended: it was of this machine
    and this pid namespace, and its pid is nobody's or another's."""
    ours = identity()
    same_machine = ("host", "boot_id", "pid_namespace")
    if any(name not in ours or holder.get(name) != ours[name] for name in same_machine):
        return False
    pid, started = holder.get("pid"), holder.get("pid_started")
    if type(pid) is not int or type(started) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it is there, and not ours to signal; or no pid of this machine
    try:
        return _started(pid) != started
    except (OSError, ValueError):
        return False  # hidden from us, or gone just now: the next look tells


def _started(pid: int) -> int:
    """Clock ticks from the boot to the process's start; 0 for one that has ended and is not yet
    collected by its parent. The name in the second field may have blanks and brackets."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    state, started = fields[0], int(fields[19])
    return 0 if state in "ZX" else started


class Owner:
    """The process to which something belongs."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of the process that it belongs to."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Refuse to go on in a fork. Cheap, and takes no lock: call it before one is taken."""
        if os.getpid() != self._pid:
            raise ForkedSessionError(self._what)


class Renewable(Protocol):
    def after_fork(self) -> None:
        """Called in a child: make locks anew, and let go of what is the parent's."""


def renew_after_fork(thing: Renewable) -> None:
    """Call its `after_fork` in every child, as long as somebody has it."""
    _renewed.add(thing)


def leave_to_parent(thing: object) -> None:
    """Never destroy this object here: it would wait for threads that only the parent has."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def at_end_of_child(end: Callable[[], None]) -> None:
    """Call `end`, once, when this process comes to its end as a child that `multiprocessing` has
    forked: that runs no exit handlers, and leaves threads where they are."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _ended_by.get(end) != os.getpid():
        _ended_by[end] = os.getpid()
        util.Finalize(None, end, exitpriority=10)


def _after_fork() -> None:
    for thing in list(_renewed):
        thing.after_fork()


_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_ended_by: dict[Callable[[], None], int] = {}
os.register_at_fork(after_in_child=_after_fork)
