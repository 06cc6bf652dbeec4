"""All settings in one frozen, validated object, with the defaults of the specification.

Sizes and spans of time are read here as people write them, in settings and elsewhere: `256MB`,
`1.5GiB`; `90s`, `26h`, `7d`, `1d12h`.
"""

from __future__ import annotations

import re
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic import ValidationError as PydanticValidationError

from storage_engine.errors import ConfigurationError

KIB = 1024
MIB = 1024 * KIB
DAY_MS = 24 * 3600 * 1000


class S3Credentials(BaseModel):
    """Who to be on S3, for programs that hold several identities at once. Never shown or dumped.

    Either a profile of the AWS configuration, or keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    profile: str | None = None
    access_key_id: str | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None


class OntologiaConfig(BaseModel):
    """Settings of one runtime. Credentials come from the AWS chain unless a program gives some;
    a config file cannot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime_id: str = Field(default="ontologia", min_length=1)
    max_batch_size: int = Field(default=10_000, ge=1)
    max_commit_metadata_bytes: int = Field(default=64 * KIB, ge=0)

    s3_region: str | None = None
    s3_endpoint_url: str | None = None
    s3_credentials: S3Credentials | None = Field(default=None, repr=False, exclude=True)
    s3_lock_timeout_ms: int = Field(default=5_000, ge=0)
    s3_lease_ttl_ms: int = Field(default=30_000, ge=100)
    s3_request_timeout_s: float = Field(default=10.0, gt=0)
    s3_duckdb_memory_limit: str = Field(default="256MB", pattern=r"^\d+(\.\d+)?\s*[KMGT]i?B$")

    commit_max_attempts: int = Field(default=10, ge=1)
    checkpoint_interval: int = Field(default=100, ge=1)
    auto_compact: bool = True
    target_part_bytes: int = Field(default=48 * MIB, ge=64 * KIB)

    snapshot_part_bytes: int = Field(default=256 * MIB, ge=64 * KIB)
    snapshot_row_group_rows: int = Field(default=256 * KIB, ge=1_000)
    snapshot_page_bytes: int = Field(default=8 * MIB, ge=64 * KIB, le=64 * MIB)
    snapshot_bloom_fpp: float = Field(default=0.01, ge=0, lt=1)

    max_event_chain_depth: int = Field(default=20, ge=0)
    event_poll_interval_ms: int = Field(default=1_000, ge=1)
    event_claim_limit: int = Field(default=50, ge=1)
    event_lease_ms: int = Field(default=30_000, ge=100)
    event_max_attempts: int = Field(default=10, ge=1)
    event_backoff_base_ms: int = Field(default=1_000, ge=0)
    event_backoff_max_ms: int = Field(default=300_000, ge=0)
    event_retention_ms: int = Field(default=7 * DAY_MS, ge=0)
    session_ttl_ms: int = Field(default=60_000, ge=100)

    cache_dir: Path | None = None
    cache_bytes: int = Field(default=1024 * MIB, ge=0)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except PydanticValidationError as error:
            raise ConfigurationError(_describe(error)) from None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a TOML file whose keys are the option names (at top level or under [ontologia])."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"cannot read config file {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"config file {path} is not valid TOML: {error}") from error
        settings = data.get("ontologia", data)
        if "s3_credentials" in settings:
            raise ConfigurationError(
                f"config file {path} holds credentials: remove them, and set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machine a role"
            )
        return cls(**settings)


def _describe(error: PydanticValidationError) -> str:
    options = ", ".join(sorted(OntologiaConfig.model_fields))
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown option {name!r} (known: {options})")
        elif problem["loc"][:1] == ("s3_credentials",):
            lines.append(f"{name}: {problem['msg']}")  # what was given may be a secret
        else:
            lines.append(f"{name}: {problem['msg']}, got {problem['input']!r}")
    return "; ".join(lines)


# --- as people write them -----------------------------------------------------------------------

_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_SPAN = re.compile(r"(\d+)([smhdw])")


def size_in_bytes(text: str) -> int:
    """Of a size as `s3_duckdb_memory_limit` states it: 256MB, 1.5GiB."""
    unit = text.rstrip("B").rstrip()
    base = 1024 if unit.endswith("i") else 1000
    unit = unit.removesuffix("i")
    return int(float(unit[:-1]) * base ** _UNITS[unit[-1]])


def duration(text: str) -> timedelta:
    """Of a sequence of numbers with units; ValueError for anything else."""
    parts = _SPAN.findall(text)
    if not parts or "".join(f"{n}{unit}" for n, unit in parts) != text.strip().lower():
        raise ValueError(f"{text!r} is no duration: write 90s, 30m, 12h, 7d, 2w or 1d12h")
    try:
        return timedelta(seconds=sum(int(n) * _SPANS[unit] for n, unit in parts))
    except OverflowError:
        raise ValueError(f"{text!r} is too long") from None


def show_duration(span: timedelta) -> str:
    """The largest units first: `1d12h`."""
    left, shown = int(span.total_seconds()), ""
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, _SPANS[unit])
        shown += f"{count}{unit}" if count else ""
    return shown or "0s"
