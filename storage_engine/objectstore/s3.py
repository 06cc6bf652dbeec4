"""S3 and servers that speak its protocol, by boto3. The only module that imports it.

It promises that a conditional write is sent once and never repeated behind the caller's back (its
client has botocore's retries off), that every failure is told apart by what it proves (see
`s3_errors`), and that each request is counted once, as what it is, when it is sent.
"""

from __future__ import annotations

import gzip
import ipaddress
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from urllib.parse import quote, urlsplit

import boto3
import botocore.session
import orjson
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.loaders import JSONFileLoader, Loader
from pydantic import SecretStr

from storage_engine.config import MIB, OntologiaConfig, S3Credentials
from storage_engine.errors import ConfigurationError, StorageBackendError
from storage_engine.objectstore.metering import HopTrace, RequestMeter, current_trace, tracing
from storage_engine.objectstore.parallel import Parallel
from storage_engine.objectstore.protocol import (
    Caching,
    ObjectInfo,
    StoredObject,
    check_key,
    check_prefix,
    is_key,
)
from storage_engine.objectstore.s3_bulk import S3Bulk
from storage_engine.objectstore.s3_errors import FAILURES, Request, status_of, translate
from storage_engine.objectstore.s3_listing import in_byte_order, just_before, take_contents

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, ListObjectsV2RequestTypeDef

WORKERS = 32
PAGE = 1000
_ATTEMPTS = 3
_PART_BYTES = 16 * MIB
_UPLOAD_THREADS = 4
_SMALL_BODY_BYTES = 1 * MIB
_KINDS = {
    "GetObject": "GET",
    "HeadObject": "HEAD",
    "ListObjectsV2": "LIST",
    "DeleteObjects": "DELETE",
}
_CONDITIONAL_KINDS = {"PutObject": "PUT_IF", "DeleteObject": "DELETE_IF"}
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_TRUE = frozenset({"1", "true", "yes", "on"})
# Two clocks that nobody corrects part by about this much per second.
_DRIFT = 1e-4

# Reading the description of S3 takes botocore a while, so it is read once a process. A session is
# not shared, as it would hold on to credentials.
_loaders: list[Loader] = []
# What a session of ours makes clients of: S3, and where credentials come from.
_SERVICES = ("s3", "signin", "sso", "sso-oidc", "sts")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How to reach the server. `endpoint` None means AWS itself (or what ~/.aws/config says)."""

    endpoint: str | None
    region: str | None
    path_style: bool
    is_loopback: bool
    timeout_s: float

    @classmethod
    def resolve(
        cls, config: OntologiaConfig, environ: Mapping[str, str] = os.environ
    ) -> S3Settings:
        """The config wins over the environment; a plain http endpoint must be wanted."""
        source, endpoint = "s3_endpoint_url", config.s3_endpoint_url
        for variable in _ENDPOINT_VARIABLES:
            if not endpoint:
                source, endpoint = variable, environ.get(variable)
        loopback = False
        if endpoint:
            parts = urlsplit(endpoint)
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise ConfigurationError(
                    f"{source} is {endpoint!r}: expected a URL such as https://s3.example.com:9000"
                )
            loopback = _is_loopback(parts.hostname)
            explicit = source == "s3_endpoint_url" or _flag(environ, "AWS_ALLOW_HTTP")
            if parts.scheme == "http" and not (explicit or loopback):
                raise ConfigurationError(
                    f"{source} is {endpoint!r}, which sends data unencrypted: use https, or set "
                    "AWS_ALLOW_HTTP=true if that is wanted"
                )
        region = config.s3_region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        return cls(
            endpoint=endpoint or None,
            # A server that is not AWS needs some region for the signature, and ignores which.
            region=region or ("us-east-1" if endpoint else None),
            path_style=bool(endpoint) or _flag(environ, "AWS_S3_FORCE_PATH_STYLE"),
            is_loopback=loopback,
            timeout_s=config.s3_request_timeout_s,
        )


class ClockOffset:
    """How far the store's clock is ahead of the local one, as far as its answers tell."""

    def __init__(self) -> None:
        self._low = float("-inf")
        self._high = float("inf")
        self._at = 0.0
        self._lock = threading.Lock()

    def observe(self, sent: float, received: float, date: float) -> None:
        """Note an answer: local times of sending and receiving, and its Date, in whole seconds.

        The store read its clock somewhere between `sent` and `received`, and cut the fraction off.
        """
        low, high = date - received, date + 1 - sent
        if low > high:
            return  # The local clock was set back meanwhile: this answer tells nothing.
        with self._lock:
            widening = _DRIFT * max(0.0, received - self._at)
            self._at = received
            narrowed = max(low, self._low - widening), min(high, self._high + widening)
            # An empty intersection means that a clock was set: only the newest answer counts.
            self._low, self._high = narrowed if narrowed[0] <= narrowed[1] else (low, high)

    @property
    def seconds(self) -> float:
        """The offset: 0 as long as that is possible, else the middle of what is possible."""
        with self._lock:
            if self._low <= 0 <= self._high:
                return 0.0
            return (self._low + self._high) / 2


class _ObjectAddress(TypedDict):
    Bucket: str
    Key: str


class S3Store:
    """Objects of one bucket under one prefix."""

    kind = "s3"
    timers = True
    caching: Caching = "always"

    def __init__(self, bucket: str, prefix: str, config: OntologiaConfig) -> None:
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        self.uri = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self.facts = {"bucket": bucket, "prefix": self.prefix}
        self.settings = S3Settings.resolve(config)
        self.server = self.settings.endpoint or ""
        self.meter = RequestMeter()
        self.parallel = Parallel(WORKERS)
        self._root = f"{self.prefix}/" if self.prefix else ""
        self._offset = ClockOffset()
        self._connecting = threading.Lock()
        self._conditional_client: S3Client | None = None
        try:
            self._session = _new_session(self.settings.region, config.s3_credentials)
            # Repeating a read, or a write of a unique key, is harmless: botocore may.
            self._client = self._connect(_ATTEMPTS, {})
        except (BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"cannot set up S3 access to {self.uri}: {error}") from error
        self.bulk = S3Bulk(self)

    @property
    def _conditional(self) -> S3Client:
        """Repeating a conditional write turns "won" into "lost": botocore may not. Made for the
        first of them, as it takes as long as a few requests, and who only reads needs none."""
        with self._connecting:
            if self._conditional_client is None:
                self._conditional_client = self._connect(1, _CONDITIONAL_KINDS)
            return self._conditional_client

    def get(self, key: str) -> StoredObject:
        stored = self._get("get", key)
        assert stored is not None
        return stored

    def get_range(self, key: str, start: int, size: int) -> bytes:
        if size <= 0:
            return b""
        asked = {"Range": f"bytes={start}-{start + size - 1}"}
        stored = self._get("get_range", key, asked)
        return stored.data if stored is not None else b""

    def get_if_changed(self, key: str, etag: str) -> StoredObject | None:
        return self._get("get_if_changed", key, {"IfNoneMatch": etag})

    def _get(
        self, operation: str, key: str, extra: Mapping[str, str] | None = None
    ) -> StoredObject | None:
        """None where a condition does not hold, or a range begins after the end."""
        target: Any = {**self._target(key), **(extra or {})}
        for attempt in range(1, _ATTEMPTS + 1):
            with self._translated(operation, key):
                response: GetObjectOutputTypeDef
                try:
                    response = self._client.get_object(**target)
                except self._client.exceptions.ClientError as error:
                    if status_of(error) in (304, 416):
                        return None
                    raise
                try:
                    data = response["Body"].read()
                except FAILURES:
                    # botocore's retries end with the headers; the body may still break off.
                    if attempt == _ATTEMPTS:
                        raise
                    continue
                self.meter.add_bytes(read=len(data))
                return StoredObject(data, response["ETag"])
        raise AssertionError("the last attempt returns or raises")

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        if self.settings.endpoint is None:
            return self._list(prefix, start_after)
        # Not AWS: perhaps a server that lists by folders. What it gives is put in order, but it
        # leaves out objects of a folder `a` when asked to start after a name such as `a-1`.
        listed = self._list(prefix, just_before(start_after))
        return (info for info in in_byte_order(listed, prefix) if info.key > start_after)

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        request: ListObjectsV2RequestTypeDef = {
            "Bucket": self.bucket,
            "Prefix": self._root + prefix,
        }
        if start_after:
            request["StartAfter"] = self._root + start_after
        more = True
        while more:
            with self._translated("list", prefix):
                page = self._client.list_objects_v2(**request)
            contents = page.get("Contents", [])
            for item in contents:
                key = item["Key"].removeprefix(self._root)
                # Others may keep folder markers and the like there: no key of ours.
                if is_key(key):
                    yield ObjectInfo(key, item["Size"], item["LastModified"].astimezone(UTC))
            more = bool(page.get("IsTruncated")) and bool(contents)
            if more:
                request["StartAfter"] = contents[-1]["Key"]

    def put(self, key: str, data: bytes) -> None:
        target = self._target(key)
        with self._translated("put", key):
            self._client.put_object(**target, Body=data)
        self.meter.add_bytes(written=len(data))

    def put_file(self, key: str, path: Path) -> None:
        target = self._target(key)
        size = path.stat().st_size
        config = TransferConfig(
            multipart_threshold=_PART_BYTES,
            multipart_chunksize=_PART_BYTES,
            max_concurrency=_UPLOAD_THREADS,
        )
        with self._translated("put_file", key), tracing(HopTrace()):
            try:
                self._client.upload_file(str(path), **target, Config=config)
            except S3UploadFailedError as error:
                raise error.__cause__ or error.__context__ or error from None
        # boto3 sends from threads of its own: one request, or create, parts together, complete.
        trace = current_trace()
        if trace is not None:
            trace.depth += 1 if size < _PART_BYTES else 3
        self.meter.add_bytes(written=size)

    def put_if_absent(self, key: str, data: bytes, *, write_id: str) -> str:
        target = self._target(key)
        self.meter.add_bytes(written=len(data))
        with self._translated("put_if_absent", key, condition="absent"):
            response = self._conditional.put_object(
                **target, Body=data, IfNoneMatch="*", Metadata={"write-id": quote(write_id)}
            )
        return response["ETag"]

    def put_if_match(self, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        target = self._target(key)
        self.meter.add_bytes(written=len(data))
        with self._translated("put_if_match", key, condition="match"):
            response = self._conditional.put_object(
                **target, Body=data, IfMatch=etag, Metadata={"write-id": quote(write_id)}
            )
        return response["ETag"]

    def delete_if_match(self, key: str, etag: str) -> None:
        target = self._target(key)
        with self._translated("delete_if_match", key, condition="match"):
            self._conditional.delete_object(**target, IfMatch=etag)

    def delete_many(self, keys: Sequence[str]) -> None:
        names = [self._target(key)["Key"] for key in keys]
        batches = [names[start : start + PAGE] for start in range(0, len(names), PAGE)]
        if batches:
            self.parallel.map(self._delete_batch, batches)

    def _delete_batch(self, names: Sequence[str]) -> None:
        first = names[0].removeprefix(self._root)
        with self._translated("delete_many", first):
            response = self._client.delete_objects(
                Bucket=self.bucket,
                Delete={"Objects": [{"Key": name} for name in names], "Quiet": True},
            )
        errors = [e for e in response.get("Errors", []) if e.get("Code") != "NoSuchKey"]
        if errors:
            key = errors[0].get("Key", "").removeprefix(self._root)
            why = f"{errors[0].get('Code', '')} {errors[0].get('Message', '')}".strip()
            raise StorageBackendError(
                f"delete_many in {self.uri}: {len(errors)} of {len(names)} objects were not "
                f"deleted, the first is {key} ({why}); deleting again is safe",
                bucket=self.bucket,
                prefix=self.prefix,
                operation="delete_many",
                key=key,
                retryable=errors[0].get("Code") in {"InternalError", "SlowDown"},
            )

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self._offset.seconds)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def local_path(self, key: str) -> Path | None:
        return None

    def duckdb_url(self, key: str) -> str:
        return f"s3://{self.bucket}/{self._root}{check_key(key)}"

    def duckdb_secret(self) -> dict[str, str]:
        frozen = self.credentials()
        secret = {
            "REGION": self.region,
            "URL_STYLE": "path" if self.settings.path_style else "vhost",
        }
        if frozen is not None and frozen.access_key and frozen.secret_key:
            secret["KEY_ID"] = frozen.access_key
            secret["SECRET"] = frozen.secret_key
            if frozen.token:
                secret["SESSION_TOKEN"] = frozen.token
        endpoint = urlsplit(self._client.meta.endpoint_url)
        secret["USE_SSL"] = "false" if endpoint.scheme == "http" else "true"
        if not (endpoint.hostname or "").endswith(("amazonaws.com", "amazonaws.com.cn")):
            secret["ENDPOINT"] = endpoint.netloc
        return secret

    @property
    def region(self) -> str:
        return self._client.meta.region_name or "us-east-1"

    def credentials(self) -> ReadOnlyCredentials | None:
        """What the AWS chain has now. Those of roles expire: ask again rather than keep them."""
        with self._translated("credentials", ""):
            credentials = self._session.get_credentials()
            return credentials.get_frozen_credentials() if credentials else None

    def close(self) -> None:
        self.bulk.close()
        self.parallel.close()
        self._client.close()
        if self._conditional_client is not None:
            self._conditional_client.close()

    def _target(self, key: str) -> _ObjectAddress:
        return {"Bucket": self.bucket, "Key": self._root + check_key(key)}

    @contextmanager
    def _translated(self, operation: str, key: str, *, condition: str = "") -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            endpoint = self._client.meta.endpoint_url
            request = Request(self.bucket, self.prefix, endpoint, operation, key, condition)
            raise translate(error, request) from error

    def _connect(self, attempts: int, kinds: dict[str, str]) -> S3Client:
        settings = self.settings
        client: S3Client = self._session.client(
            "s3",
            endpoint_url=settings.endpoint,
            config=Config(
                retries={"mode": "standard", "total_max_attempts": attempts},
                connect_timeout=min(5.0, settings.timeout_s),
                read_timeout=settings.timeout_s,
                max_pool_connections=WORKERS + _UPLOAD_THREADS,
                tcp_keepalive=True,
                s3={"addressing_style": "path" if settings.path_style else "auto"},
                # Servers other than AWS stumble over the checksums that botocore adds by itself.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                user_agent_extra="ontologia",
                # A proxy cannot reach this machine's own loopback.
                proxies={} if settings.is_loopback else None,
            ),
        )

        def sent(model: Any, params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
            body = params.get("body")
            if isinstance(body, BytesIO) and body.getbuffer().nbytes < _SMALL_BODY_BYTES:
                # Waiting for "100 Continue" costs a round trip more than sending a small body.
                params["headers"].pop("Expect", None)
            context["ontologia_sent"] = time.time()
            self.meter.count(kinds.get(model.name) or _KINDS.get(model.name, "PUT"))

        def answered(http_response: Any, context: dict[str, Any], **_: Any) -> None:
            self._note_date(http_response.headers.get("Date"), context.get("ontologia_sent"))

        # Last, as botocore adds that header in the same event.
        client.meta.events.register_last("before-call.s3", sent)
        client.meta.events.register("after-call.s3", answered)
        client.meta.events.register("before-parse.s3.ListObjectsV2", take_contents)
        return client

    def _note_date(self, date: str | None, sent: float | None) -> None:
        if date is None or sent is None:
            return
        try:
            stamp = parsedate_to_datetime(date).timestamp()
        except ValueError:
            return  # A server with an odd Date header: its clock stays unknown.
        self._offset.observe(sent, time.time(), stamp)


class _DescriptionFiles(JSONFileLoader):
    """Descriptions of services, parsed by orjson: a megabyte of them is read for S3."""

    def load_file(self, file_path: str) -> Any:
        for ending, opened in ((".json", open), (".json.gz", gzip.open)):
            with suppress(FileNotFoundError), opened(file_path + ending, "rb") as file:
                return orjson.loads(file.read())
        return None


class _ServiceLoader(Loader):
    """Knows the services that are asked for here without looking into the folders of all 400.

    With it, and with orjson, the first client of a process takes a third of the time."""

    @classmethod
    def like(cls, loader: Loader) -> _ServiceLoader:
        """With the same search paths, some of which settings may name."""
        return cls(
            extra_search_paths=list(loader.search_paths),
            include_default_search_paths=False,
            file_loader=_DescriptionFiles(),
        )

    def list_available_services(self, type_name: str) -> list[str]:
        return list(_SERVICES)


def _new_session(
    region: str | None, credentials: S3Credentials | None = None
) -> boto3.session.Session:
    given = credentials or S3Credentials()
    core = botocore.session.Session(profile=given.profile)
    if not _loaders:
        _loaders.append(_ServiceLoader.like(core.get_component("data_loader")))
    core.register_component("data_loader", _loaders[0])
    return boto3.session.Session(
        botocore_session=core,
        region_name=region,
        aws_access_key_id=given.access_key_id,
        aws_secret_access_key=_revealed(given.secret_access_key),
        aws_session_token=_revealed(given.session_token),
    )


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret is not None else None


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in _TRUE


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
