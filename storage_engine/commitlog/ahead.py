"""What the writer before us is about to commit, looked for while we wait for the lock.

Its manifest is in the store before head names it, under a name that its token tells. Who is next
can draft on that and upload, so that of its turn nothing is left but the swap of head. Nothing is
taken for granted: the swap comes only when head is exactly what was foreseen, written by nobody
since (`matches`); otherwise all of it is drafted again. That head is as it was swung also tells
that nobody has fenced off what was uploaded meanwhile, which collecting garbage does by rewriting
head.
"""

from __future__ import annotations

from dataclasses import replace

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.records import Head, Manifest, sha256
from storage_engine.errors import OntologiaError
from storage_engine.objectstore.protocol import ObjectNotFound

_MISSES = 2  # then head is looked at: whoever holds the lock makes no such commit


class Ahead:
    """The looks of one wait. `version` is what was found: a head that stands, or a foreseen one."""

    def __init__(self, chain: Chain, *, foresee: bool) -> None:
        """`foresee`: whether what is to be committed can be drafted again, at any time."""
        self._chain = chain
        self._foresee = foresee
        self._missed: tuple[str, int] = ("", 0)
        self.version: HeadVersion | None = None

    def __call__(self, commit_id: int, token: str, *, holds: bool) -> bool:
        """Whether there is something to build on: what the one with this token makes of head at
        `commit_id`. It may be the next itself (not `holds`)."""
        whose, misses = self._missed
        misses = misses if whose == token else 0
        version = self._chain.known_head()
        if self._foresee and version is not None and misses < _MISSES:
            self.version = self._foreseen(version.head, commit_id + 1, token)
            if self.version is None and holds:
                self._missed = token, misses + 1
        elif holds:
            version = self._chain.read_head()
            self.version = version if version.head.commit_id > commit_id else None
        return self.version is not None

    def _foreseen(self, ours: Head, commit_id: int, token: str) -> HeadVersion | None:
        chain = self._chain
        attempt = layout.on_chain(layout.commit_attempt_of(token), chain.incarnation)
        path = layout.manifest(commit_id, attempt)
        try:
            data = chain.store.bulk.get(path).data
            manifest = Manifest.parse(data, key=path)
        except (ObjectNotFound, OntologiaError):
            return None  # also where the store does not answer: it was only to be faster
        if manifest.commit_id != commit_id or manifest.log_id != ours.log_id:
            return None
        digest = sha256(data)
        chain.note_manifest(path, manifest, digest, len(data))
        chain.note_foreseen(path)
        head = replace(
            ours,
            commit_id=commit_id,
            manifest_path=path,
            updated_at=manifest.created_at,
            runtime_id=manifest.runtime_id,
            write_id=manifest.write_id,
            commit_sha256=digest,
            checkpoint=manifest.checkpoint,
            marks={},
        )
        return HeadVersion(head, f"foreseen {digest}", foreseen=True)


def matches(foreseen: Head, head: Head) -> bool:
    """Whether head is what was foreseen. When and by whom it was written, a manifest need not
    tell as head does."""
    return foreseen == replace(head, updated_at=foreseen.updated_at, runtime_id=foreseen.runtime_id)
