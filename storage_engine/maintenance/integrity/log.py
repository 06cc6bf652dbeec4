"""The log itself: the chain unbroken and acyclic, checkpoints and tags in agreement with it.

Everything is read from the store anew, nothing that an opened repository remembers is believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import (
    Checkpoint,
    CheckpointRef,
    CommitFile,
    Entry,
    Head,
    Manifest,
    ManifestLink,
    TypeHead,
    TypeRef,
    entry_of,
    sha256,
)
from storage_engine.commitlog.tags import Tag
from storage_engine.errors import IntegrityError
from storage_engine.maintenance.integrity.report import IntegrityReport, Progress
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore

_BATCH = 256


@dataclass(slots=True)
class Log:
    """The chain as far as it could be followed, oldest first, and what it comes to."""

    head: Head
    commits: list[tuple[str, Manifest]] = field(default_factory=list)
    complete: bool = False
    checkpoint: Checkpoint | None = None
    tags: list[Tag] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)  # of the manifests, by path

    def entries(self) -> dict[TypeRef, list[Entry]]:
        """The state as of head: the checkpoint, if it can be read, and the commits since."""
        by_type: dict[TypeRef, list[Entry]] = {}
        floor = 0
        if self.checkpoint is not None:
            floor = self.checkpoint.commit_id
            by_type = {ref: list(entries) for ref, entries in self.checkpoint.entries.items()}
        for _, manifest in self.commits:
            if manifest.commit_id > floor:
                for ref in manifest.touched():
                    entry = entry_of(manifest, ref)
                    assert entry is not None
                    by_type.setdefault(ref, []).append(entry)
        return by_type

    def schemas(self, upto: int | None = None) -> dict[tuple[str, str, int], Mapping[str, Any]]:
        """Registered schemas by kind, name and version."""
        return {
            (r["kind"], r["type_name"], r["schema_version_id"]): r["schema"]
            for _, manifest in self.commits
            if upto is None or manifest.commit_id <= upto
            for r in manifest.schema.get("registered", ())
        }

    def dropped(self) -> set[TypeRef]:
        """The types that have ended."""
        ended: set[TypeRef] = set()
        for _, manifest in self.commits:
            ended -= {(r["kind"], r["type_name"]) for r in manifest.schema.get("registered", ())}
            ended |= {(d["kind"], d["type_name"]) for d in manifest.schema.get("dropped", ())}
        return ended

    def specs(self) -> dict[tuple[str, str, int], TypeSpec]:
        """The registered schemas that say what a type is."""
        return {
            version: spec
            for version, stored in self.schemas().items()
            if (spec := _spec(stored)) is not None
        }


def _spec(stored: Mapping[str, Any]) -> TypeSpec | None:
    try:
        spec = TypeSpec.from_schema_dict(stored)
        row_schema(spec)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return spec


def _purged(manifest: Manifest) -> list[TypeRef]:
    """The types whose rows a commit has given up."""
    drops = manifest.schema.get("dropped", ())
    return [(drop["kind"], drop["type_name"]) for drop in drops if drop.get("purge")]


class LogCheck:
    """Reads and checks one log."""

    def __init__(
        self,
        store: ObjectStore,
        report: IntegrityReport,
        progress: Progress,
        *,
        head_key: str = layout.HEAD,
        inherited: Log | None = None,
    ) -> None:
        """`inherited`: a log that was checked, whose commits need not be looked at again."""
        self._head_key = head_key
        self._inherited = inherited
        self._store = store
        self._report = report
        self._progress = progress
        self._manifests: dict[str, bytes | None] = {}
        self._chain_anew = Chain(store, store.parallel)

    def run(self) -> Log | None:
        """None when there is no head to start from."""
        try:
            head = Head.parse(self._store.get(self._head_key).data, key=self._head_key)
        except IntegrityError as error:
            self._report.note("chain", "unreadable_head", str(error), key=self._head_key)
            return None
        self._report.head_commit_id = head.commit_id
        log = Log(head)
        self._walk(log)
        self._check_links(log)
        self._check_type_heads(log)
        self._check_schemas(log)
        self._check_checkpoints(log)
        self._check_tags(log)
        return log

    def _check_type_heads(self, log: Log) -> None:
        """Buckets of type heads that any manifest names, each once: reads of the past go by them.
        Those of head were looked at before."""
        seen: set[str] = set()
        for path, manifest in reversed(log.commits):
            table = manifest.type_head_buckets
            named = {ref.path: ref for ref in table.buckets if ref} if table is not None else {}
            fresh = [ref for key, ref in named.items() if key not in seen]
            seen |= named.keys()
            if manifest.commit_id == log.head.commit_id:
                continue
            try:
                self._chain_anew.load_buckets(fresh)
            except (IntegrityError, ObjectNotFound) as error:
                self._chain("unreadable_type_heads", str(error), path, manifest.commit_id)

    def _check_schemas(self, log: Log) -> None:
        for path, manifest in log.commits:
            for record in manifest.schema.get("registered", ()):
                if _spec(record["schema"]) is None:
                    message = f"what is registered of {record['type_name']} is no schema"
                    self._chain("unreadable_schema", message, path, manifest.commit_id)

    # -- chain --------------------------------------------------------------------------------

    def _walk(self, log: Log) -> None:
        by_commit = self._listed() if self._inherited is None else {}
        head, path, expected = log.head, log.head.manifest_path, log.head.commit_id
        seen: set[str] = set()
        child: Manifest | None = None
        while path is not None:
            if self._inherited is not None and path in self._inherited.hashes:
                self._join(log, path, child, expected)
                return
            if path in seen:
                self._chain("cycle", f"commit {expected + 1} leads back to {path}", path)
                return
            seen.add(path)
            data = self._load(path, expected, by_commit)
            if data is None:
                named = f"commit {child.commit_id}" if child is not None else "head"
                self._chain("missing_manifest", f"{named} names it", path, expected)
                return
            try:
                manifest = Manifest.parse(data, key=path)
            except IntegrityError as error:
                self._chain("unreadable_manifest", str(error), path, expected)
                return
            log.hashes[path] = sha256(data)
            self._check_manifest(log, path, manifest, child, expected)
            log.commits.append((path, manifest))
            self._report.checked["commits"] += 1
            if len(log.commits) % 100 == 0:
                self._progress("commits", len(log.commits), head.commit_id)
            child, path, expected = manifest, manifest.parent_manifest_path, expected - 1
        log.commits.reverse()
        if expected != 0:
            self._chain("broken_chain", f"ends at commit {expected + 1} instead of 1", None)
        log.complete = expected == 0

    def _join(self, log: Log, path: str, child: Manifest | None, expected: int) -> None:
        """Go on with commits that were checked as another log's."""
        assert self._inherited is not None
        below = [(p, m) for p, m in self._inherited.commits if m.commit_id <= expected]
        log.hashes |= {p: self._inherited.hashes[p] for p, _ in below}
        named = log.head.commit_sha256 if child is None else child.parent_sha256
        if named and named != log.hashes[path]:
            self._chain("hash_mismatch", "a branch names another content", path, expected)
        log.commits = [*below, *reversed(log.commits)]
        log.complete = self._inherited.complete

    def _check_manifest(
        self,
        log: Log,
        path: str,
        manifest: Manifest,
        child: Manifest | None,
        expected: int,
    ) -> None:
        named = log.head.commit_sha256 if child is None else child.parent_sha256
        if named and named != log.hashes[path]:
            who = "head" if child is None else f"commit {child.commit_id}"
            self._chain("hash_mismatch", f"{who} names another content", path, expected)
        if manifest.commit_id != expected:
            message = f"says commit {manifest.commit_id}, its place is {expected}"
            self._chain("wrong_commit_id", message, path, expected)
        parent = expected - 1 if expected > 1 else None
        if manifest.parent_commit_id != parent:
            message = f"names parent {manifest.parent_commit_id}, should be {parent}"
            self._chain("wrong_parent", message, path, expected)
        if child is not None and child.created_at < manifest.created_at:
            self._chain("time_goes_back", f"commit {expected + 1} is older", path, expected)
        if manifest.log_id and log.head.log_id and manifest.log_id != log.head.log_id:
            self._chain("other_log", "belongs to a log that was erased", path, expected)

    def _check_links(self, log: Log) -> None:
        """Skip pointers, the previous commit of each file's type, and the type heads of head."""
        paths = {manifest.commit_id: path for path, manifest in log.commits}
        touched: dict[TypeRef, int] = {}
        files: dict[str, int] = {}
        for path, manifest in log.commits:
            number = manifest.commit_id
            for pointer in manifest.skip:
                path_there = paths.get(pointer.commit_id)
                if path_there != pointer.path and (path_there is not None or log.complete):
                    message = f"skips to {pointer.path} for commit {pointer.commit_id}"
                    self._chain("wrong_skip", message, path, number)
            self._check_hashes(log, path, manifest)
            for file in manifest.files:
                before = touched.get(file.ref)
                named = file.previous.commit_id if file.previous is not None else None
                if log.complete and manifest.format and named != before:
                    message = f"{file.type_name} was last touched by {before}, it says {named}"
                    self._chain("wrong_previous", message, path, number)
                if file.path in files:
                    message = f"{file.path} is also a file of commit {files[file.path]}"
                    self._chain("file_twice", message, path, number)
                files[file.path] = number
            touched |= dict.fromkeys(manifest.touched(), number)
            for ref in _purged(manifest):
                touched.pop(ref, None)
        if log.commits and log.complete:
            path, newest = log.commits[-1]
            for ref, top in self._type_heads(path, newest).items():
                if touched.get(ref) != (None if top.empty else top.commit_id):
                    message = (
                        f"{ref[1]} was last touched by {touched.get(ref)}, not {top.commit_id}"
                    )
                    self._chain("wrong_type_head", message, path, newest.commit_id)

    def _check_hashes(self, log: Log, path: str, manifest: Manifest) -> None:
        """What a manifest says of older ones, other than its parent."""
        older = [*manifest.skip]
        older += [
            ManifestLink(p.commit_id, p.manifest_path, p.manifest_sha256)
            for file in manifest.files
            if (p := file.previous) is not None
        ]
        for link in older:
            actual = log.hashes.get(link.path)
            if link.sha256 and actual is not None and link.sha256 != actual:
                message = f"names another content of commit {link.commit_id}"
                self._chain("hash_mismatch", message, path, manifest.commit_id)

    def _type_heads(self, path: str, manifest: Manifest) -> Mapping[TypeRef, TypeHead]:
        try:
            return dict(self._chain_anew.type_heads(manifest) or {})
        except IntegrityError as error:
            self._chain("unreadable_type_heads", str(error), path, manifest.commit_id)
            return {}

    def _listed(self) -> dict[int, list[str]]:
        """Manifests by commit, to fetch many at once: the chain decides which of them count."""
        manifests: dict[int, list[str]] = {}
        for info in self._store.list(layout.COMMITS):
            attempt = layout.commit_attempt(info.key) if layout.is_manifest(info.key) else None
            if attempt is not None:
                manifests.setdefault(attempt.commit_id, []).append(info.key)
        return manifests

    def _load(self, path: str, at: int, by_commit: Mapping[int, Sequence[str]]) -> bytes | None:
        if path not in self._manifests:
            self._manifests.clear()
            ahead = [k for n in range(at, max(at - _BATCH, 0), -1) for k in by_commit.get(n, ())]
            keys = list(dict.fromkeys([path, *ahead]))
            fetched = self._store.parallel.map(self._get, keys)
            self._manifests = dict(zip(keys, fetched, strict=True))
        return self._manifests[path]

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key).data
        except ObjectNotFound:
            return None

    def _chain(
        self, reason: str, message: str, key: str | None, commit_id: int | None = None
    ) -> None:
        self._report.note("chain", reason, message, key=key, commit_id=commit_id)

    # -- checkpoints --------------------------------------------------------------------------

    def _check_checkpoints(self, log: Log) -> None:
        """Head's must be there and right. Older ones may have been collected; those that are
        there must have the content that was published."""
        ref = log.head.checkpoint
        if ref is not None:
            log.checkpoint = self._checkpoint(ref, required=True)
            if log.checkpoint is not None:
                self._compare(log, ref, log.checkpoint)
        older = {m.checkpoint for _, m in log.commits if m.checkpoint is not None}
        for other in sorted(older - {ref}, key=lambda r: r.commit_id):
            self._checkpoint(other, required=False)

    def _checkpoint(self, ref: CheckpointRef, *, required: bool) -> Checkpoint | None:
        data = self._get(ref.path)
        if data is None:
            if required:
                self._checkpoints("missing_checkpoint", "head or a tag names it", ref)
            return None
        self._report.checked["checkpoints"] += 1
        if sha256(data) != ref.sha256:
            self._checkpoints("hash_mismatch", "has other content than was published", ref)
            return None
        try:
            return Checkpoint.parse(data, key=ref.path)
        except IntegrityError as error:
            self._checkpoints("unreadable_checkpoint", str(error), ref)
            return None

    def _compare(self, log: Log, ref: CheckpointRef, checkpoint: Checkpoint) -> None:
        """A checkpoint against the manifests that it stands for."""
        if not log.complete:
            return
        covered = [(p, m) for p, m in log.commits if m.commit_id <= checkpoint.commit_id]
        points = [(m.commit_id, m.created_at, p) for p, m in covered]
        try:
            listed = self._chain_anew.commit_points(checkpoint)
        except IntegrityError as error:
            self._checkpoints("unreadable_page", str(error), ref)
            return
        for point in listed:
            actual = log.hashes.get(point.manifest_path)
            if point.manifest_sha256 and actual is not None and point.manifest_sha256 != actual:
                message = f"names another content of commit {point.commit_id}"
                self._checkpoints("hash_mismatch", message, ref)
        places = [(p.commit_id, p.created_at, p.manifest_path) for p in listed]
        if checkpoint.commit_id != ref.commit_id or places != points:
            self._checkpoints("wrong_commits", "lists other commits than the chain has", ref)
        files: dict[TypeRef, dict[int, tuple[CommitFile, ...]]] = {}
        for _, manifest in covered:
            for kind in manifest.touched():
                files.setdefault(kind, {})[manifest.commit_id] = manifest.files_of(kind)
            for kind in _purged(manifest):
                files.pop(kind, None)
        for kind in sorted({*files, *(r for r, e in checkpoint.entries.items() if e)}):
            self._compare_type(ref, kind, checkpoint.entries.get(kind, ()), files.get(kind, {}))
        recorded = {
            (*kind, v): s["schema"]
            for kind, vs in checkpoint.schemas.items()
            for v, s in vs.items()
        }
        if recorded != log.schemas(checkpoint.commit_id):
            self._checkpoints("wrong_schemas", "has other schemas than were registered", ref)

    def _compare_type(
        self,
        ref: CheckpointRef,
        kind: TypeRef,
        entries: Sequence[Entry],
        files: Mapping[int, tuple[CommitFile, ...]],
    ) -> None:
        left = dict(files)
        for entry in entries:
            inside = [n for n in left if entry.contains(n)]
            replaced = [file for n in inside for file in left.pop(n)]
            span = f"{kind[1]} {entry.min_commit_id}-{entry.max_commit_id}"
            if entry.files[0].upto is not None and replaced:
                continue  # of a snapshot that reaches further than a branch's base
            if not replaced:
                message = f"{span} covers no commit of the type, or one that is covered already"
                self._checkpoints("wrong_entry", message, ref, kind[1])
            elif entry.is_single:
                if _paths(entry.files) != _paths(replaced):
                    message = f"{span} names other files than the manifest"
                    self._checkpoints("wrong_entry", message, ref, kind[1])
            elif _rows(replaced) is not None and _rows(entry.files) != _rows(replaced):
                message = f"{span} has {_rows(entry.files)} rows, the commits {_rows(replaced)}"
                self._checkpoints("rows_differ", message, ref, kind[1])
        for number in sorted(left):
            message = f"{kind[1]}: commit {number} is in no entry"
            self._checkpoints("missing_entry", message, ref, kind[1])

    def _checkpoints(
        self, reason: str, message: str, ref: CheckpointRef, type_name: str | None = None
    ) -> None:
        self._report.note("checkpoint", reason, message, key=ref.path, type_name=type_name)

    # -- tags ---------------------------------------------------------------------------------

    def _check_tags(self, log: Log) -> None:
        paths = {manifest.commit_id: path for path, manifest in log.commits}
        for info in self._store.list(layout.TAGS):
            data = self._get(info.key)
            try:
                tag = Tag.parse(data, key=info.key) if data is not None else None
            except IntegrityError as error:
                self._report.note("tag", "unreadable_tag", str(error), key=info.key)
                continue
            if tag is None or (tag.log_id and log.head.log_id and tag.log_id != log.head.log_id):
                continue
            if tag.incarnation != log.head.incarnation:
                continue  # of another branch
            self._report.checked["tags"] += 1
            log.tags.append(tag)
            if paths.get(tag.commit_id) != tag.manifest_path and log.complete:
                message = f"commit {tag.commit_id} is not {tag.manifest_path}"
                self._report.note("tag", "wrong_commit", message, key=info.key)
            if tag.checkpoint is not None:
                checkpoint = self._checkpoint(tag.checkpoint, required=True)
                if checkpoint is not None and tag.checkpoint != log.head.checkpoint:
                    self._compare(log, tag.checkpoint, checkpoint)


def _paths(files: Iterable[CommitFile]) -> list[str]:
    return sorted(file.path for file in files)


def _rows(files: Iterable[CommitFile]) -> int | None:
    counts = [file.row_count for file in files]
    return sum(counts) if all(count >= 0 for count in counts) else None
