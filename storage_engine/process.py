"""This process: who it is, whether another one still lives, and what must not cross a fork.

A fork copies memory, and neither threads nor what others hold: locks stay locked, pools have no
threads, connections are shared with the parent. So what an opened object storage is made of belongs
to the process that made it (`Owner`), and refuses to work in another; what can go on in a child has
its locks made anew (`renew_after_fork`).

Where even that is not enough, a fork waits (`unforked`): for short pieces of work after which
nothing is left that a child could trip over, and for imports of other threads, whose locks a child
would wait for without end. It waits for so long and no longer; what it cuts in two then must
refuse to work in the child.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from storage_engine.errors import PROCESS_FACTS, ForkedSessionError

FORK_WAIT_S = 5.0  # for what other threads are in the middle of
_POLL_S = 0.001
_LOADED_LATE = {"storage_engine", "pyarrow", "duckdb", "boto3", "botocore", "obstore"}
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
    _note(_renewed, thing)


def leave_to_parent(thing: object) -> None:
    """Never destroy this object here: it would wait for threads that only the parent has."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def at_end_of_child(end: Callable[[], None]) -> None:
    """Call `end`, once, when this process comes to its end as a child that `multiprocessing` has
    forked: that runs no exit handlers, and leaves threads where they are. From Python 3.13 on it
    ends pools of threads before it runs finalizers, which is too late for what needs them."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _ended_by.get(end) != os.getpid():
        _ended_by[end] = os.getpid()
        if sys.version_info >= (3, 13):
            # What `concurrent.futures` ends its own pools by: the latest to register comes first.
            with suppress(RuntimeError):  # it is on its way out already: pools are at their end
                threading._register_atexit(end)  # type: ignore[attr-defined]
        else:
            util.Finalize(None, end, exitpriority=10)


class Releasable(Protocol):
    def before_fork(self) -> None:
        """Called in the parent, with nobody inside `unforked` if that can be had: let go of what
        must not come to a child."""


def settle_before_fork(thing: Releasable) -> None:
    """Call its `before_fork` before every fork, as long as somebody has it."""
    _note(_settled, thing)


def _note(noted: dict[int, weakref.ref[Any]], thing: object) -> None:
    key = id(thing)
    noted[key] = weakref.ref(thing, lambda _: noted.pop(key, None))


def _alive(noted: dict[int, weakref.ref[Any]]) -> list[Any]:
    """One step for other threads, so that they may note and drop things meanwhile."""
    return [thing for ref in list(noted.values()) if (thing := ref()) is not None]


class _Inside:
    """One piece of work that a fork waits for. Gone with the frame that holds it, at the latest."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()


@contextmanager
def unforked() -> Iterator[None]:
    """Let a fork by another thread wait until this is done. May be nested. Takes no lock: Ctrl-C
    may come at any instruction."""
    inside = _Inside()
    try:
        nested = any(other.thread == inside.thread for other in _alive(_inside))
        while True:
            _note(_inside, inside)
            # Noted before looking, as a fork says that it comes before it looks.
            if nested or _fork.thread in (None, inside.thread):
                break
            _inside.pop(id(inside))
            time.sleep(_POLL_S)
        yield
    finally:
        _inside.pop(id(inside), None)


class _Fork:
    """The fork that is about to happen. One at a time, as another thread's would copy its wait."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.thread: int | None = None

    def before(self) -> None:
        self.turn.acquire()
        self.thread = threading.get_ident()
        deadline = time.monotonic() + FORK_WAIT_S
        while (self._others_inside() or self._others_import()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for thing in _alive(_settled):
            thing.before_fork()

    def after_in_parent(self) -> None:
        self.thread = None
        with suppress(RuntimeError):  # Ctrl-C kept us from taking it
            self.turn.release()

    def after_in_child(self) -> None:
        self.turn = threading.RLock()
        self.thread = None
        _inside.clear()
        for thing in _alive(_renewed):
            thing.after_fork()

    @staticmethod
    def _others_inside() -> bool:
        return any(inside.thread != threading.get_ident() for inside in _alive(_inside))

    @staticmethod
    def _others_import() -> bool:
        """Whether another thread is in the middle of an import of ours. In a child Python makes
        its one lock of all imports anew, but not those of modules, which it keeps here."""
        locks = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", None)
        for name, ref in list(locks.items()) if isinstance(locks, dict) else []:
            if name.partition(".")[0] in _LOADED_LATE:
                owner = getattr(ref(), "owner", None)
                if owner is not None and owner != threading.get_ident():
                    return True
        return False


_renewed: dict[int, weakref.ref[Any]] = {}
_settled: dict[int, weakref.ref[Any]] = {}
_inside: dict[int, weakref.ref[Any]] = {}
_ended_by: dict[Callable[[], None], int] = {}
_fork = _Fork()
os.register_at_fork(
    before=_fork.before,
    after_in_parent=_fork.after_in_parent,
    after_in_child=_fork.after_in_child,
)
