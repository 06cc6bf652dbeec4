"""Where objects live. Every key of a storage is made and taken apart here and nowhere else.

`PREFIXES` is the one table of what lies where: garbage collection and verification go by it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

COMMITS = "commits/"
SNAPSHOTS = "snapshots/"
STAGED = "staged/"
CHECKPOINTS = "meta/checkpoints/"
PAGES = "meta/commit_pages/"
ATTEMPTS = "meta/attempts/"
LEASES = "meta/compaction/"
LOCKS = "meta/locks/"
LINES = "meta/lines/"
INDICES = "meta/indices/"
SCHEMA = "meta/schema/"
TAGS = "meta/tags/"
BRANCHES = "meta/branches/"
QUARANTINE = "quarantine/"
EVENTS = "events/"
CLAIMS = "claims/"
DEAD_LETTERS = "dead_letters/"
SESSIONS = "sessions/"

MAIN = "main"  # the branch that every storage has
HEAD = "meta/head.json"
LOCK = f"{LOCKS}ontology_write.json"
ENGINE = "meta/engine.json"
TYPES = f"{SCHEMA}types.json"
REGISTRY = f"{SCHEMA}registry.json"
DROPPED = f"{SCHEMA}dropped.json"
LAYOUT_CATALOG = "meta/type_layout_catalog.json"


@dataclass(frozen=True, slots=True)
class Prefix:
    """Objects whose keys begin alike.

    `rows`: data files of the log. `collected`: what garbage collection judges them by, what can
    be reached from head or how long their writer has been silent; None: it leaves them alone.
    """

    path: str
    rows: bool = False
    collected: Literal["reach", "silence"] | None = None


PREFIXES = (
    Prefix(COMMITS, rows=True, collected="reach"),
    Prefix(SNAPSHOTS, rows=True, collected="reach"),
    Prefix(STAGED, rows=True, collected="reach"),
    Prefix(CHECKPOINTS, collected="reach"),
    Prefix(PAGES),  # as long as the chain whose commits they list
    Prefix(ATTEMPTS, collected="silence"),
    Prefix(LEASES, collected="silence"),
    Prefix(LINES, collected="silence"),
    Prefix(INDICES),
    Prefix(SCHEMA),
    Prefix(TAGS),
    Prefix(BRANCHES),
    Prefix(QUARANTINE),
    Prefix(EVENTS),
    Prefix(CLAIMS),
    Prefix(DEAD_LETTERS),
    Prefix(SESSIONS),
)
DATA_PREFIXES = tuple(prefix.path for prefix in PREFIXES if prefix.rows)
REACHED_PREFIXES = tuple(p.path for p in PREFIXES if p.collected == "reach")

FOLDERS = {"entity": "entities", "relation": "relations"}
_KINDS = {folder: kind for kind, folder in FOLDERS.items()}

_MANIFEST = "/manifest.json"
_COMMIT = re.compile(rf"{COMMITS}(\d+)-([^/]+)")
_BUCKET = re.compile(rf"{COMMITS}\d+-[^/]+/type_heads/\d+\.json")
_SNAPSHOT = re.compile(
    # Attempts of earlier versions have eight characters.
    rf"{SNAPSHOTS}(entities|relations)/(.+?)-\d+-\d+(?:-([0-9a-f]{{32}}|[0-9a-f]{{8}}))?[./]",
)

_INCARNATION = re.compile(r"[0-9a-f]{32}")
_BRANCH = re.compile(rf"{BRANCHES}([^/]+)/(?:([0-9a-f]{{32}})/.+|head\.json)")

_TICKET = re.compile(
    r"(\d{8}T\d{6}\.\d{6})_(\d{8}T\d{6}\.\d{6})_([0-9a-f]{32})"
    r"_(0|[0-9a-f]{16})-(\d{1,10})-(\d{1,20})_([^/]*)\.json"
)
_OWNER_CHARACTERS = 48
_EVENT = re.compile(rf"{EVENTS}[^/]+/\d{{4}}-\d\d-\d\dT[^_/]+_([^/]+)\.json")  # {time}_{id}.json


def new_id() -> str:
    """Of what is staged before there is a commit: it must be unique in the storage for ever."""
    return secrets.token_hex(16)


def new_commit_attempt() -> str:
    """Of an attempt at one commit, whose id is in the key as well."""
    return secrets.token_hex(4)


def commit_attempt_of(token: str) -> str:
    """Of the first attempt of who holds the lock under a token, where others may wait: who is next
    finds its manifest by that, and builds on it before head names it."""
    return token[:8]


def is_incarnation(text: str) -> bool:
    """Whether this can name a branch for ever: 128 bits."""
    return _INCARNATION.fullmatch(text) is not None


def on_chain(attempt: str, incarnation: str) -> str:
    """An attempt that is meant for a branch names it, so that it is judged by that head."""
    return f"{attempt}.{incarnation}" if incarnation else attempt


def attempt_incarnation(attempt: str) -> str:
    """The branch that an attempt is meant for; empty: main, or one whose writer did not say."""
    name, _, incarnation = attempt.partition(".")
    return incarnation if name and _INCARNATION.fullmatch(incarnation) else ""


def new_write_id() -> str:
    """Unique per write, so that no two versions of an object have equal bytes (and ETags)."""
    return secrets.token_hex(16)


# -- commits --------------------------------------------------------------------------------------


class CommitAttempt(NamedTuple):
    """The attempt at a commit that an object belongs to."""

    commit_id: int
    prefix: str  # as `attempt_prefix` makes it
    incarnation: str = ""  # of the branch that it was meant for; empty: main


def attempt_prefix(commit_id: int, attempt: str) -> str:
    return f"{COMMITS}{commit_id}-{attempt}"


def commit_attempt(key: str) -> CommitAttempt | None:
    """Of an object under `commits/`; None when it is not ours."""
    match = _COMMIT.match(key)
    if match is None:
        return None
    return CommitAttempt(int(match[1]), match[0], attempt_incarnation(match[2]))


def manifest(commit_id: int, attempt: str) -> str:
    return f"{attempt_prefix(commit_id, attempt)}{_MANIFEST}"


def is_manifest(key: str) -> bool:
    return key.endswith(_MANIFEST)


def is_history(key: str) -> bool:
    """Whether an object under `commits/` stays as long as the chain: all but data files."""
    return is_manifest(key) or _BUCKET.fullmatch(key) is not None


def manifest_prefix(key: str) -> str:
    """The `attempt_prefix` of a manifest."""
    return key.removesuffix(_MANIFEST)


def type_head_bucket(commit_id: int, attempt: str, number: int) -> str:
    """Heads of some types, as of a commit: part of its manifest. `number` is that of the first
    bucket in it."""
    return f"{attempt_prefix(commit_id, attempt)}/type_heads/{number:03d}.json"


def data_file(
    prefix: str,
    kind: str,
    name: str,
    engine_version: str,
    schema_version_id: int,
    part: int | None,
) -> str:
    """`part` is None when the type has one file in this commit (the seeds' key)."""
    stem = f"{prefix}/{FOLDERS[kind]}/{name}"
    if engine_version == "v2":
        stem = f"{stem}/v{schema_version_id}"
    return _parquet(stem, part)


def data_file_type(key: str) -> tuple[str, str] | None:
    """The kind and the type name of a data file, from `.../entities/Customer...`."""
    for folder, kind in _KINDS.items():
        _, there, rest = key.partition(f"/{folder}/")
        if there:
            return kind, rest.split("/")[0].removesuffix(".parquet")
    return None


def staged_prefix(attempt: str) -> str:
    return f"{STAGED}{attempt}"


def staged_part(attempt: str, kind: str, name: str, version: int, label: str) -> str:
    """A part that somebody other than the driver stages: `label` is unique in the attempt."""
    return f"{staged_prefix(attempt)}/{FOLDERS[kind]}/{name}/v{version}/part-{label}.parquet"


STAGED_PART_URL = (
    rf"/{STAGED}([^/]+)/[^/]+/[^/]+/[^/]+/[^/]+$"  # a pattern: its group is the attempt
)


def staged_attempt(key: str) -> str:
    """The attempt that staged a part."""
    return key.removeprefix(STAGED).partition("/")[0]


def checkpoint(commit_id: int, attempt: str) -> str:
    return f"{CHECKPOINTS}{commit_id}-{attempt}.json"


def checkpoint_commit(key: str) -> int:
    """The commit of a checkpoint; -1 when the object is not ours."""
    number = key.removeprefix(CHECKPOINTS).partition("-")[0]
    return int(number) if number.isdecimal() else -1


def checkpoint_incarnation(key: str) -> str:
    """The branch whose writer made a checkpoint; empty: main."""
    return attempt_incarnation(key.removesuffix(".json").partition("-")[2])


def commit_page(sha256: str) -> str:
    """Points of a run of commits, named by its content."""
    return f"{PAGES}{sha256}.json"


def attempt_heartbeat(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}.json"


def heartbeat_attempt(key: str) -> str:
    return key.removeprefix(ATTEMPTS).removesuffix(".json")


# -- snapshots ------------------------------------------------------------------------------------


class SnapshotKey(NamedTuple):
    """What the key of a snapshot's file tells; v1 names no attempt."""

    kind: str
    type_name: str
    attempt: str | None


def snapshot(kind: str, name: str, low: int, high: int) -> str:
    """The one file of a snapshot of commits `low` to `high` (v1)."""
    return f"{_snapshot_stem(kind, name, low, high)}.parquet"


def snapshot_folder(kind: str, name: str, low: int, high: int, attempt: str) -> str:
    """Where an attempt puts the files of its snapshot (v2)."""
    return f"{_snapshot_stem(kind, name, low, high)}-{attempt}"


def snapshot_part(folder: str, role: str, part: int | str | None) -> str:
    """A file of a snapshot's folder: the only one of its role, one of several by number, or by a
    label that is unique in the attempt."""
    return _parquet(f"{folder}/{role}", part)


def snapshot_of(key: str) -> SnapshotKey | None:
    """None when the object is not ours."""
    match = _SNAPSHOT.match(key)
    return SnapshotKey(_KINDS[match[1]], match[2], match[3]) if match is not None else None


def with_attempt(key: str, attempt: str) -> str:
    """Another key for a Parquet file whose own is taken."""
    return f"{key.removesuffix('.parquet')}-{attempt}.parquet"


def compaction_lease(kind: str, name: str) -> str:
    return f"{LEASES}{FOLDERS[kind]}/{name}.json"


# -- the line before a lock -----------------------------------------------------------------------


class Ticket(NamedTuple):
    """Who waits for a lock, as the name of its ticket tells: since when, until when at the
    longest, under which token it is to be served, and which process of which machine it is.
    `pid` is 0 where that is not known."""

    since: datetime
    until: datetime
    token: str
    machine: str
    pid: int
    started: int
    owner: str


def line_of(lock: str) -> str | None:
    """What tickets at a lock begin with; None where nobody waits in line. Those at the lock of a
    branch are with all others, so that they are collected like them."""
    branch = branch_of(lock)
    if branch is not None:
        return f"{LINES}{branch.incarnation}/"
    if not lock.startswith(LOCKS):
        return None
    return f"{LINES}{lock.removeprefix(LOCKS).removesuffix('.json')}/"


def ticket(line: str, ticket: Ticket) -> str:
    """They sort by time. The owner's name is cut: it is for people."""
    since, until = (f"{m.astimezone(UTC):%Y%m%dT%H%M%S.%f}" for m in (ticket.since, ticket.until))
    process = f"{ticket.machine or 0}-{ticket.pid}-{ticket.started}"
    owner = quote(ticket.owner, safe="")[:_OWNER_CHARACTERS]
    return f"{line}{since}_{until}_{ticket.token}_{process}_{owner}.json"


def parse_ticket(key: str, *, prefix: str) -> Ticket | None:
    """None when it is no ticket of this line."""
    match = _TICKET.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
    if match is None:
        return None
    try:
        since, until = (
            datetime.strptime(match[n], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC) for n in (1, 2)
        )
    except ValueError:
        return None
    machine = match[4] if match[4] != "0" else ""
    return Ticket(since, until, match[3], machine, int(match[5]), int(match[6]), unquote(match[7]))


def _snapshot_stem(kind: str, name: str, low: int, high: int) -> str:
    return f"{SNAPSHOTS}{FOLDERS[kind]}/{name}-{low}-{high}"


def _parquet(stem: str, part: int | str | None) -> str:
    if part is None:
        return f"{stem}.parquet"
    label = f"{part:05d}" if isinstance(part, int) else part
    return f"{stem}/part-{label}.parquet"


# -- what is kept beside the log ------------------------------------------------------------------


def index(kind: str, name: str, under: str = INDICES) -> str:
    """`under`: the indices of main, or of a branch."""
    return f"{under}{FOLDERS[kind]}/{name}.json"


def index_type(key: str) -> tuple[str, str]:
    """The kind and the type name of an index by its key."""
    folder, name = key.rsplit("/", 2)[1:]
    return _KINDS[folder], name.removesuffix(".json")


def index_folders(under: str = INDICES) -> tuple[str, ...]:
    return tuple(f"{under}{folder}/" for folder in FOLDERS.values())


class BranchKey(NamedTuple):
    """What the key of an object under `meta/branches/` tells; a head names no incarnation."""

    name: str
    incarnation: str


def branch_head(name: str) -> str:
    return f"{BRANCHES}{segment(name)}/head.json"


def branch_folder(name: str, incarnation: str) -> str:
    """What a branch has besides its head; one of the same name that is made later has another."""
    return f"{BRANCHES}{segment(name)}/{incarnation}/"


def branch_lock(name: str, incarnation: str) -> str:
    return f"{branch_folder(name, incarnation)}lock.json"


def branch_indices(name: str, incarnation: str) -> str:
    return f"{branch_folder(name, incarnation)}indices/"


def branch_of(key: str) -> BranchKey | None:
    """None when the object is not ours."""
    match = _BRANCH.fullmatch(key)
    return BranchKey(unquote(match[1]), match[2] or "") if match is not None else None


def schema_versions(kind: str, name: str) -> str:
    return f"{SCHEMA}versions/{FOLDERS[kind]}/{name}.json"


def tag(name: str) -> str:
    return f"{TAGS}{name}.json"


def tag_name(key: str) -> str:
    return key.removeprefix(TAGS).removesuffix(".json")


def quarantine(kind: str, name: str, attempt: str) -> str:
    """What the keys of rows begin with that one write has set aside."""
    return f"{QUARANTINE}{FOLDERS[kind]}/{name}/{attempt}/"


def probe() -> str:
    """An object to try conditional writes on."""
    return f"meta/probe-{secrets.token_hex(16)}"


# -- the event bus --------------------------------------------------------------------------------


def segment(name: str) -> str:
    """Any text as one part of a key. Names that begin with `_` stay free for our own objects."""
    quoted = quote(name, safe="")
    return f"%{ord(quoted[0]):02X}{quoted[1:]}" if quoted[:1] in {".", "_"} else quoted


def events(namespace: str) -> str:
    return f"{EVENTS}{namespace}/"


def event_time(moment: datetime) -> str:
    """A time as event keys begin with it: they sort by time."""
    text = moment.astimezone(UTC).isoformat(timespec="microseconds")
    return text.replace(":", "-")


def event_moment(key: str) -> datetime | None:
    """The time in an event's key; None when another implementation wrote something else there."""
    date, _, time = key.rpartition("/")[2].partition("_")[0].partition("T")
    try:
        return datetime.fromisoformat(f"{date}T{time.replace('-', ':')}").astimezone(UTC)
    except ValueError:
        return None


def event(namespace: str, moment: datetime, event_id: str) -> str:
    return f"{events(namespace)}{event_time(moment)}_{segment(event_id)}.json"


def event_name(key: str) -> str | None:
    """The quoted id in an event's key: enough to tell events apart. None when it is no such key."""
    match = _EVENT.fullmatch(key)
    return match[1] if match is not None else None


def is_event(key: str) -> bool:
    """Whether an object under `events/` is one, by its key."""
    return event_name(key) is not None


def is_beside_events(key: str) -> bool:
    """Whether an object under `events/` is one of our own beside them, which sort after them."""
    parts = key.split("/", 2)
    return len(parts) == 3 and parts[2].startswith("_")


def namespace_of(key: str) -> str | None:
    """Of any object of the bus; None when it lies in no namespace."""
    parts = key.split("/", 2)
    return parts[1] if len(parts) == 3 else None


def claims(namespace: str, event_id: str | None = None) -> str:
    """Of a namespace, or of one event in it."""
    return f"{CLAIMS}{namespace}/" + (f"{segment(event_id)}/" if event_id is not None else "")


def claim(namespace: str, event_id: str, handler_id: str) -> str:
    return f"{claims(namespace, event_id)}{segment(handler_id)}.json"


def claim_event(key: str) -> str:
    """The `event_name` of the event that a claim is on."""
    return key.split("/")[2]


def dead_letters(namespace: str) -> str:
    return f"{DEAD_LETTERS}{namespace}/"


def dead_letter(namespace: str, event_id: str, handler_id: str) -> str:
    return f"{dead_letters(namespace)}{segment(event_id)}/{segment(handler_id)}.json"


def is_dead_letter_of(key: str, handler_id: str) -> bool:
    return key.endswith(f"/{segment(handler_id)}.json")


def event_sessions(namespace: str) -> str:
    return f"{SESSIONS}{namespace}/"


def event_session(namespace: str, session_id: str) -> str:
    return f"{event_sessions(namespace)}{segment(session_id)}.json"


def last_segment(key: str) -> str:
    """What `segment` was given for the last part of an object's key."""
    return unquote(key.rpartition("/")[2].removesuffix(".json"))


def projected(namespace: str) -> str:
    """Up to which commit the outbox has been projected. Sorts after every event."""
    return f"{events(namespace)}_projected.json"


def positions(namespace: str) -> str:
    return f"{events(namespace)}_positions/"


def position(namespace: str, handler_id: str) -> str:
    """How far a handler has come. Sorts after every event."""
    return f"{positions(namespace)}{segment(handler_id)}.json"
