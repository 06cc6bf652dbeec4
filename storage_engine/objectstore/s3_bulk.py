"""Many small S3 requests at once, through obstore: a tenth of boto3's processor time for each.

Same store, same promises: a conditional write is sent once, and what is not clearly answered is
OutcomeUnknown. Where obstore fails a request that may be repeated, boto3 repeats it, and says
what is wrong. Listings and deletes go to boto3 at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.parallel import Parallel
from storage_engine.objectstore.protocol import (
    Caching,
    ConditionalConflict,
    ObjectInfo,
    ObjectNotFound,
    OutcomeUnknown,
    PreconditionFailed,
    StoredObject,
    check_key,
)
from storage_engine.process import renew_after_fork

if TYPE_CHECKING:
    from obstore.store import ClientConfig
    from obstore.store import S3Store as Obstore

    from storage_engine.objectstore.s3 import S3Store

BULK_WORKERS = 128  # threads; each waits outside the interpreter
_CREDENTIALS_FOR = timedelta(minutes=10)


class S3Bulk:
    """A second way to the objects of an S3Store. Made, kept and closed by it."""

    kind = "s3"
    timers = True
    caching: Caching = "always"

    def __init__(self, store: S3Store) -> None:
        self._plain = store
        self.uri = store.uri
        self.facts = store.facts
        self.server = store.server
        self.meter = store.meter
        self.parallel = Parallel(BULK_WORKERS)
        self._root = f"{store.prefix}/" if store.prefix else ""
        self._guard = threading.Lock()
        self._client: Obstore | None = None
        self._usable = not (_behind_proxy(store) or _runtime.inherited)

    # -- through obstore ----------------------------------------------------------------------

    def get(self, key: str) -> StoredObject:
        name = self._name(key)
        if name is None:
            return self._plain.get(key)
        import obstore
        from obstore.exceptions import BaseError, NotFoundError

        self.meter.count("GET")
        try:
            response = obstore.get(self._connected(), name)
            data, etag = bytes(response.bytes()), response.meta["e_tag"]
        except (NotFoundError, FileNotFoundError):
            raise ObjectNotFound(key) from None
        except BaseError:
            return self._plain.get(key)
        if etag is None:
            return self._plain.get(key)
        self.meter.add_bytes(read=len(data))
        return StoredObject(data, etag)

    def get_range(self, key: str, start: int, size: int) -> bytes:
        name = self._name(key)
        if name is None or size <= 0:
            return self._plain.get_range(key, start, size)
        import obstore
        from obstore.exceptions import BaseError, NotFoundError

        self.meter.count("GET")
        try:
            data = bytes(obstore.get_range(self._connected(), name, start=start, length=size))
        except (NotFoundError, FileNotFoundError):
            raise ObjectNotFound(key) from None
        except BaseError:
            return self._plain.get_range(key, start, size)
        self.meter.add_bytes(read=len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        name = self._name(key)
        if name is None:
            self._plain.put(key, data)
            return
        import obstore
        from obstore.exceptions import BaseError

        self.meter.count("PUT")
        try:
            obstore.put(self._connected(), name, data, use_multipart=False)
        except BaseError:
            self._plain.put(key, data)
            return
        self.meter.add_bytes(written=len(data))

    def put_if_absent(self, key: str, data: bytes, *, write_id: str) -> str:
        name = self._name(key)
        if name is None:
            return self._plain.put_if_absent(key, data, write_id=write_id)
        return self._put_if("put_if_absent", key, name, data, write_id, "create")

    def put_if_match(self, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        name = self._name(key)
        if name is None:
            return self._plain.put_if_match(key, data, etag, write_id=write_id)
        return self._put_if("put_if_match", key, name, data, write_id, {"e_tag": etag})

    def _put_if(
        self, operation: str, key: str, name: str, data: bytes, write_id: str, mode: Any
    ) -> str:
        import obstore
        from obstore import exceptions as known

        self.meter.count("PUT_IF", written=len(data))
        try:
            result = obstore.put(
                self._connected(),
                name,
                data,
                attributes={"write-id": quote(write_id)},
                mode=mode,
                use_multipart=False,
            )
        except (known.AlreadyExistsError, known.PreconditionError, FileExistsError) as error:
            raise PreconditionFailed(f"{operation} {key}: {_first_line(error)}") from error
        except (known.NotFoundError, FileNotFoundError) as error:
            signal = PreconditionFailed if operation == "put_if_match" else ConditionalConflict
            raise signal(f"{operation} {key}: {_first_line(error)}") from error
        except (known.PermissionDeniedError, known.UnauthenticatedError) as error:
            raise StorageBackendError(
                f"{operation} {key} in {self.uri}: access was denied ({_first_line(error)}): check "
                "the credentials, and allow s3:PutObject on the prefix",
                bucket=self._plain.bucket,
                prefix=self._plain.prefix,
                operation=operation,
                key=key,
            ) from error
        except known.InvalidPathError as error:
            raise ValueError(f"{key} is no key for obstore: {_first_line(error)}") from error
        except known.BaseError as error:
            raise OutcomeUnknown(f"{operation} {key}: {_first_line(error)}") from error
        etag = result["e_tag"]
        if etag is None:
            raise OutcomeUnknown(f"{operation} {key}: the server named no ETag")
        return etag

    def _name(self, key: str) -> str | None:
        check_key(key)
        return self._root + key if self._usable else None

    def _connected(self) -> Obstore:
        with self._guard:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Obstore:
        from obstore.store import S3Store as Obstore

        _runtime.used = True
        settings = self._plain.settings
        seconds = timedelta(seconds=settings.timeout_s)
        options: ClientConfig = {
            "allow_http": True,  # S3Settings has seen to it that this is wanted
            "timeout": seconds,
            "connect_timeout": min(seconds, timedelta(seconds=5)),
            "user_agent": "ontologia",
        }
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            options["root_certificate"] = Path(bundle).read_bytes()
        where: dict[str, Any] = {"region": self._plain.region}
        if settings.endpoint is not None:
            where["endpoint"] = settings.endpoint
        return Obstore(
            self._plain.bucket,
            **where,
            virtual_hosted_style_request=not settings.path_style,
            client_options=options,
            retry_config={"max_retries": 0},
            credential_provider=self._credentials(),
        )

    def _credentials(self) -> Callable[[], Any]:
        """Those of boto3's chain, asked for again before they can have expired."""

        def provide() -> dict[str, Any]:
            credentials = self._plain.credentials()
            if credentials is None:
                raise StorageBackendError(
                    f"no AWS credentials for {self.uri}: set AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY, or run where a role is given",
                    operation="credentials",
                )
            return {
                "access_key_id": credentials.access_key,
                "secret_access_key": credentials.secret_key,
                "token": credentials.token,
                "expires_at": datetime.now(UTC) + _CREDENTIALS_FOR,
            }

        return provide

    # -- through boto3 ------------------------------------------------------------------------

    def get_if_changed(self, key: str, etag: str) -> StoredObject | None:
        return self._plain.get_if_changed(key, etag)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._plain.list(prefix, start_after=start_after)

    def put_file(self, key: str, path: Path) -> None:
        self._plain.put_file(key, path)

    def delete_if_match(self, key: str, etag: str) -> None:
        self._plain.delete_if_match(key, etag)

    def delete_many(self, keys: Sequence[str]) -> None:
        self._plain.delete_many(keys)

    def now(self) -> datetime:
        return self._plain.now()

    def sleep(self, seconds: float) -> None:
        self._plain.sleep(seconds)

    def local_path(self, key: str) -> Path | None:
        return self._plain.local_path(key)

    def duckdb_url(self, key: str) -> str:
        return self._plain.duckdb_url(key)

    def duckdb_secret(self) -> dict[str, str]:
        return self._plain.duckdb_secret()

    @property
    def bulk(self) -> S3Bulk:
        return self

    def close(self) -> None:
        self.parallel.close()


class _Runtime:
    """obstore's threads, of which a process has one set: a fork has none, and cannot make any."""

    def __init__(self) -> None:
        self.used = self.inherited = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        self.inherited = self.used or self.inherited


_runtime = _Runtime()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _behind_proxy(store: S3Store) -> bool:
    """obstore would ask the environment's proxy for this machine's own loopback."""
    if store.settings.endpoint is None:
        return False
    parts = urlsplit(store.settings.endpoint)
    wanted = getproxies().get(parts.scheme) is not None
    return store.settings.is_loopback and wanted and not proxy_bypass(parts.hostname or "")
