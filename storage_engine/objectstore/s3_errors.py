"""What an S3 failure means to the engine, and what its user should do about it.

The one question that matters for a conditional write is whether it may have been applied. Only a
refusal by the server, or a connection that was never made, proves that it was not.
"""

from __future__ import annotations

from dataclasses import dataclass

from botocore import exceptions as boto
from urllib3.exceptions import HTTPError

from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    OutcomeUnknown,
    PreconditionFailed,
)

_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run where a role is given"
)
_REGION = "the bucket is in another region: set s3_region, or AWS_REGION, to the bucket's region"
_ADVICE = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct the storage URI",
    "AccessDenied": "access denied: allow this user s3:GetObject, s3:PutObject, s3:DeleteObject "
    "and s3:ListBucket on the bucket and prefix",
    "AllAccessDisabled": "access to the bucket is disabled",
    "InvalidAccessKeyId": f"the server does not know this access key: {_CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret key is wrong: {_CREDENTIALS}",
    "ExpiredToken": "the session token has expired: log in again",
    "InvalidToken": "the session token is not valid: log in again",
    "RequestTimeTooSkewed": "this machine's clock is too far from the server's: correct it",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "KeyTooLongError": "the key is too long for S3: choose a shorter prefix",
    "NotImplemented": "the server does not implement this request; Ontologia needs conditional "
    "writes, as AWS S3, SeaweedFS and recent MinIO have them",
}
_TRANSIENT_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
)
# Failures before anything was sent. ConnectionClosedError and timeouts of reading are not here.
_NOT_SENT = (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.ProfileNotFound,
)

FAILURES = (boto.ClientError, boto.BotoCoreError, HTTPError)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, for the error to tell. `condition` is "", "absent" or "match"."""

    bucket: str
    prefix: str
    endpoint: str
    operation: str
    key: str
    condition: str = ""


def status_of(error: Exception) -> int:
    """The HTTP status that the server answered with, or 0."""
    if isinstance(error, boto.ClientError):
        return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def translate(error: Exception, request: Request) -> Exception:
    """The port's signal, or the user's error, for a failure of boto3."""
    if isinstance(error, boto.ClientError):
        return _answered(error, request)
    if isinstance(error, _NO_CREDENTIALS):
        return _backend(f"no usable AWS credentials ({error}): {_CREDENTIALS}", request)
    if isinstance(error, _NOT_SENT):
        where = request.endpoint
        return _backend(
            f"cannot reach {where}: check the network and the endpoint", request, retryable=True
        )
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return _backend(
            f"the certificate of {request.endpoint} is not trusted: set AWS_CA_BUNDLE to the "
            "authority's certificate",
            request,
        )
    if isinstance(error, boto.ParamValidationError):
        return _backend(f"boto3 refused the request: {error}", request)
    if request.condition:
        return OutcomeUnknown(f"{request.operation} {request.key}: {error}")
    return _backend(f"the connection failed ({error}): try again", request, retryable=True)


def _answered(error: boto.ClientError, request: Request) -> Exception:
    details = error.response.get("Error", {})
    code, message = str(details.get("Code", "")), str(details.get("Message", ""))
    status = status_of(error)
    what = f"{request.operation} {request.key}: {status} {code}"
    if status == 412:
        return PreconditionFailed(what)
    if request.condition and status == 409:
        return ConditionalConflict(what)
    if status == 404 and code != "NoSuchBucket":
        if request.condition == "match":
            return PreconditionFailed(what)
        # A create cannot miss its object: a concurrent delete got in the way.
        return ConditionalConflict(what) if request.condition else ObjectNotFound(request.key)
    if status == 403 and code not in _ADVICE:
        code = "AccessDenied"
    if code in _ADVICE:
        return _backend(_ADVICE[code], request)
    if status >= 500 or status == 429 or code in _TRANSIENT_CODES:
        if request.condition:
            return OutcomeUnknown(what)
        return _backend(
            f"the server failed ({status} {code} {message}): try again", request, retryable=True
        )
    return _backend(f"the server answered {status} {code} {message}", request)


def _backend(what: str, request: Request, *, retryable: bool = False) -> StorageBackendError:
    place = f"s3://{request.bucket}/{request.prefix}".rstrip("/")
    return StorageBackendError(
        f"{f'{request.operation} {request.key}'.rstrip()} in {place}: {what}",
        bucket=request.bucket,
        prefix=request.prefix,
        operation=request.operation,
        key=request.key,
        retryable=retryable,
    )
