"""What assets, checks and sensors reach an ontology through.

A resource only remembers where the storage is. It is opened by the step that uses it and closed
at the step's end, so loading definitions needs no storage, and no lock outlives a step. An error of
ours ends a step as one clear failure with the error's facts.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import dagster as dg
from dagster_aws.s3 import S3Resource
from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator

from ontologia_dagster.dagster_compat import FixedResource
from ontologia_dagster.ingestion.provenance import RUN_ID
from ontologia_dagster.resources.branches import (
    AUDITED,
    BRANCH_TAG,
    DIRECT,
    BegunBranch,
    checked_branch,
    checked_retention,
    existing,
    find,
    fork_once,
    lost_failure,
    published_failure,
    refuse_without_branches,
    run_branch,
)
from ontologia_dagster.resources.environments import refuse_production
from ontologia_dagster.resources.secrets import child_environment
from storage_engine.config import OntologiaConfig, S3Credentials, duration
from storage_engine.errors import (
    ConfigurationError,
    LockContentionError,
    MigrationTokenError,
    MissingUpgraderError,
    OntologiaError,
    SchemaOutdatedError,
    TypeDroppedError,
    UninitializedStorageError,
    UnknownBranchError,
)
from storage_engine.repository import MAIN, initialize_storage, open_repository
from storage_engine.repository.open import DEFAULT_FOLDER, DEFAULT_PATH, STORAGE_URI_VARIABLE

if TYPE_CHECKING:
    from storage_engine import Branch, Entity, Relation, Session
    from storage_engine.events.protocol import EventStore
    from storage_engine.repository.protocol import Repository


T = TypeVar("T")

DEFAULT_LOCATION = "ontologia"
# Settings of an S3Resource that the storage engine does not know, and what does it instead.
_NOT_FOLLOWED = {
    "use_unsigned_session": "the engine signs every request",
    "max_attempts": "the engine has retries of its own",
    "use_ssl": "write the endpoint as http://",
    "verify": "set AWS_CA_BUNDLE",
}


class OntologyResource(FixedResource, dg.ConfigurableResource):  # type: ignore[type-arg]
    """An ontology, by the URI of its storage."""

    storage_uri: str = Field(
        description="s3://bucket/prefix, file:///path, a directory, or sqlite:///path.db"
    )
    runtime_id: str = Field(
        default="dagster", description="Written into every commit as who made it"
    )
    namespace: str = Field(default="default", description="The namespace of its events")
    engine_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Further options of OntologiaConfig, such as s3_lock_timeout_ms",
    )
    s3: S3Resource = Field(
        default_factory=S3Resource,
        description="Endpoint, region and credentials; what is left out comes from the AWS chain",
    )
    location_name: str = Field(
        default=DEFAULT_LOCATION,
        description="The code location's name, for runs that Dagster did not start from one",
    )
    explore_url: str | None = Field(
        default=None,
        description="Where web pages of the storage are served, https://...: materialisations then "
        "link to <explore_url>/commits/ID and <explore_url>/types/NAME",
    )
    environment: str = Field(default="", description="The environment this location is in")
    guarded: bool = Field(
        default=False, description="Refuse production storages, as the location is not production"
    )
    production_uris: list[str] = Field(
        default_factory=list, description="Storages that only production may open"
    )

    creates_storage: bool = Field(
        default=False,
        description="Make the storage when it is not there, instead of saying that it is not",
    )
    publish: Literal["direct", "audited"] = Field(
        default=DIRECT,
        description="audited: a run works on a branch of its own, which is published as one commit "
        "when its checks have passed",
    )
    recheck: bool = Field(
        default=False,
        description="Before an audited run is published, bring into its branch what others have "
        "published meanwhile, and run its blocking checks again",
    )
    branch_retention: str = Field(
        default="7d", description="How long the branch of a run stands that was not published"
    )
    branch: str | None = Field(
        default=None, description="What the location works on and publishes to; main if left out"
    )

    _run_location: str | None = PrivateAttr(default=None)
    _run: dg.DagsterRun | None = PrivateAttr(default=None)
    _instance: dg.DagsterInstance | None = PrivateAttr(default=None)

    @field_validator("explore_url")
    @classmethod
    def _is_url(cls, given: str | None) -> str | None:
        if given is None or isinstance(given, dg.EnvVar):
            return given
        if not given.startswith(("http://", "https://")):
            raise ValueError(f"explore_url {given!r} is no web address: begin with https://")
        return given

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        origin = context.run.remote_job_origin if context.run is not None else None
        self._run_location = origin.location_name if origin is not None else None
        self._run = context.run
        self._instance = context.instance

    @field_validator("branch_retention")
    @classmethod
    def _is_retention(cls, given: str) -> str:
        return checked_retention(given)

    @model_validator(mode="after")
    def _has_branches(self) -> Self:
        """Told when the location is loaded, as far as it can be known without opening anything."""
        if self.branch is not None and not isinstance(self.branch, dg.EnvVar):
            checked_branch(self.branch, "branch")
        if self.recheck and self.publish == DIRECT:
            raise ConfigurationError(
                f"recheck has no effect with publish={DIRECT!r}: say publish={AUDITED!r}, or leave "
                "recheck out"
            )
        needs_branches = self.publish != DIRECT or self.branch is not None
        if needs_branches and not isinstance(self.storage_uri, dg.EnvVar):
            refuse_without_branches(self.storage_uri, self.publish, self.branch)
        return self

    @property
    def home(self) -> str:
        """The branch that runs of this location are published to."""
        return self.branch or MAIN

    @property
    def run_branch(self) -> str | None:
        """The branch of this run, whether it is there yet or not; None where it has none."""
        if self._run is None or (self.publish == DIRECT and not self._names_branch):
            return None
        return run_branch(self._run)

    @property
    def _names_branch(self) -> bool:
        """Whether who started the run has said which branch it works on."""
        return self._run is not None and BRANCH_TAG in self._run.tags

    def begin_branch(self) -> Branch | None:
        """The branch that this run writes to, made unless it is there; None: it has none. Of steps
        that begin at once, all get the same."""
        name = self.run_branch
        if name is None:
            return None
        with self.repository(branch=self.home) as repository:
            begun = self.begun_branch()
            if begun is not None:
                now = find(repository, name)
                if begun.is_lost(repository, now):
                    raise lost_failure(name)
                if self._run is not None and begun.is_published_by(
                    repository, self._run.run_id, now
                ):
                    raise published_failure(name)
            if self._names_branch:
                branch = existing(repository, name)
            else:
                branch = fork_once(
                    repository,
                    name,
                    owner=self.location,
                    expires_in=duration(self.branch_retention),
                )
        if self._instance is not None and self._run is not None:
            BegunBranch.remember(self._instance, self._run, self.storage_uri, branch)
        return branch

    def begun_branch(self) -> BegunBranch | None:
        """Which branch of its name this run, or the one that it goes on from, has written to."""
        if self._instance is None or self._run is None:
            return None
        return BegunBranch.before(self._instance, self._run, self.storage_uri)

    @property
    def location(self) -> str:
        """The code location that the run belongs to: the first part of its writes' app id."""
        return self._run_location or self.location_name

    def config(self) -> OntologiaConfig:
        s3 = self.s3
        _refuse_unknown(s3)
        given = S3Credentials(
            profile=s3.profile_name,
            access_key_id=s3.aws_access_key_id,
            secret_access_key=_hidden(s3.aws_secret_access_key),
            session_token=_hidden(s3.aws_session_token),
        )
        options = {
            "runtime_id": self.runtime_id,
            "s3_endpoint_url": s3.endpoint_url,
            "s3_region": s3.region_name,
            "s3_credentials": given if given != S3Credentials() else None,
        }
        return OntologiaConfig(**{**options, **self.engine_options})

    def child_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process that is started for this storage: it opens it as we do."""
        return child_environment(self, inherited)

    @contextmanager
    def repository(self, *, branch: str | None = None) -> Iterator[Repository]:
        """The opened storage, without types: for inspection and maintenance. On the run's branch
        where there is one, unless another is named."""
        repository = self._opened(
            lambda name: open_repository(self.storage_uri, self.config(), branch=name), branch
        )
        try:
            yield repository
        finally:
            repository.close()

    @contextmanager
    def bus(self) -> Iterator[EventStore]:
        """The event bus of the storage, to look at."""
        from storage_engine.events.protocol import open_event_store
        from storage_engine.runtime.arguments import checked_namespace

        checked_namespace(self.namespace)  # one that no session takes would look empty for ever
        with self.repository(branch=self.home) as repository:
            yield open_event_store(repository, self.config())

    def session(
        self,
        *,
        entity_types: Sequence[type[Entity]] = (),
        relation_types: Sequence[type[Relation[Any, Any]]] = (),
        holder: Mapping[str, str] | None = None,
        branch: str | None = None,
        writes: bool = False,
    ) -> Session:
        """A session on the storage. Use it in a `with` block: that commits and closes it.

        holder:  tells others who this is while they wait for the write lock
        branch:  what to work on; that of the run if left out, where it has one
        writes:  in a run that is published audited, make its branch if it is not there yet. A step
                 that writes says so; one that only reads does not need a branch
        """
        from storage_engine import Session

        if writes and branch is None:
            begun = self.begin_branch()
            # By its name: one that is thrown away just now is not taken for main.
            branch = begun.name if begun is not None else None
        return self._opened(
            lambda name: Session(
                self.storage_uri,
                entity_types=entity_types,
                relation_types=relation_types,
                config=self.config(),
                namespace=self.namespace,
                instance_metadata=holder,
                branch=name,
            ),
            branch,
        )

    def _opened(self, open_it: Callable[[str | None], T], branch: str | None) -> T:
        self._guard()
        try:
            return self._on_branch(open_it, branch)
        except UninitializedStorageError:
            if not self.creates_storage:
                raise
        _refuse_beside_default(self.storage_uri)
        initialize_storage(self.storage_uri, config=self.config(), exist_ok=True)
        return self._on_branch(open_it, branch)

    def _on_branch(self, open_it: Callable[[str | None], T], branch: str | None) -> T:
        name = branch or self.run_branch
        if name is not None and name != self.home:
            try:
                return open_it(name)
            except UnknownBranchError:
                # A run that has written nothing yet, or is published, sees what all see. What was
                # asked for by name has to be there.
                if branch is not None or self._names_branch:
                    raise
                self._refuse_lost(name)
        if self.home == MAIN:
            return open_it(None)
        try:
            return open_it(self.home)
        except UnknownBranchError:
            with closing(open_repository(self.storage_uri, self.config())) as main:
                fork_once(main, self.home, owner=self.location, expires_in=None)
        return open_it(self.home)

    def _refuse_lost(self, name: str) -> None:
        """What a run has written and somebody has thrown away is not looked for on main."""
        begun = self.begun_branch()
        if begun is None:
            return
        with self.repository(branch=self.home) as repository:
            if begun.is_lost(repository, find(repository, name)):
                raise lost_failure(name)

    def _guard(self) -> None:
        if self.guarded:
            refuse_production(self.storage_uri, self.environment, tuple(self.production_uris))


def _refuse_beside_default(uri: str) -> None:
    """A folder that has a storage for `onto` and Python does not get another one unasked."""
    folder, default = Path(uri), Path(DEFAULT_FOLDER).parts
    if folder.parts[-len(default) :] != default:
        return
    other = folder.parents[len(default) - 1] / DEFAULT_PATH
    if other.is_file():
        raise ConfigurationError(
            f"{other} is the storage of this folder, and Spark does not write to SQLite: bring it "
            f"along with `onto copy {shlex.quote(str(other))} {shlex.quote(uri)} --apply` and move "
            f"the file away, or name the storage that you mean in {STORAGE_URI_VARIABLE}"
        )


def _refuse_unknown(s3: S3Resource) -> None:
    """A setting that nobody follows is a mistake that nobody sees."""
    fields = type(s3).model_fields
    for name, instead in _NOT_FOLLOWED.items():
        if getattr(s3, name) != fields[name].default:
            raise ConfigurationError(f"S3Resource.{name} has no effect on an ontology: {instead}")


def _hidden(secret: str | None) -> SecretStr | None:
    return SecretStr(secret) if secret is not None else None


# -- failures -------------------------------------------------------------------------------------


@contextmanager
def report_failures(
    instance: dg.DagsterInstance | None = None, advice: SchemaAdvice | None = None
) -> Iterator[None]:
    """Turn an OntologiaError into a `dg.Failure` that Dagster retries only if that can help.

    With `instance`, the failure links to the run that holds the lock, where it is one of its runs;
    with `advice`, that of a class which differs from the storage to the job that migrates.
    """
    try:
        yield
    except OntologiaError as error:
        name, facts = type(error).__name__, error.facts()
        more = advice.about(name, facts) if advice is not None else {}
        raise failure(name, str(error), facts, error.retryable, instance, more) from error


def failure(
    name: str,
    message: str,
    facts: Mapping[str, Any],
    retryable: bool,
    instance: dg.DagsterInstance | None,
    more: Mapping[str, Any] | None = None,
) -> dg.Failure:
    """Of an error by its name and facts, which may have come from another process."""
    return dg.Failure(
        description=message,
        metadata={
            "error": name,
            **{name: _shown(fact) for name, fact in facts.items()},
            **_holding_run(name, facts, instance),
            **(more or {}),
        },
        allow_retries=retryable,
    )


def _holding_run(
    name: str, facts: Mapping[str, Any], instance: dg.DagsterInstance | None
) -> dict[str, dg.MetadataValue[Any]]:
    holder = facts.get("holder")
    if name != LockContentionError.__name__ or not isinstance(holder, Mapping):
        return {}
    run_id = holder.get(RUN_ID) or holder.get("run_id")
    if not run_id:
        return {}
    if instance is None or not instance.has_run(str(run_id)):
        return {"lock_held_by_run": dg.MetadataValue.text(f"{run_id} of another instance")}
    return {"lock_held_by_run": dg.MetadataValue.dagster_run(str(run_id))}


def _shown(fact: Any) -> str | int | float | bool:
    """Facts hold whatever the error knows; Dagster takes less."""
    return fact if isinstance(fact, str | int | float | bool) else str(fact)


# -- classes that differ ---------------------------------------------------------------------------

_MODULE = "MODULE"  # stands for what nobody knows
_ABOUT_SCHEMA = {
    error.__name__
    for error in (SchemaOutdatedError, TypeDroppedError, MissingUpgraderError, MigrationTokenError)
}


def migration_job_name(storage: str) -> str:
    return f"{storage}_migration"


@dataclass(frozen=True)
class SchemaAdvice:
    """What to do about a class that differs: the job, where it is known, and the command for those
    at a terminal."""

    job: str | None
    location: str
    storage_uri: str
    models: str = _MODULE

    @classmethod
    def of(
        cls, ontology: OntologyResource, storage: str | None, models: str | None = None
    ) -> SchemaAdvice:
        """`storage` is the key of the resource."""
        job = migration_job_name(storage) if storage is not None else None
        return cls(job, ontology.location, ontology.storage_uri, models or _MODULE)

    def command(self, *, upgraders: bool = False) -> str:
        more = f" --upgraders {_MODULE}" if upgraders else ""
        uri = shlex.quote(self.storage_uri)
        return f"onto migrate --models {shlex.quote(self.models)}{more} --storage-uri {uri}"

    def sentence(self, *, upgraders: bool = False) -> str:
        job = f"the job {self.job} or " if self.job is not None else ""
        return (
            f"Run {job}`{self.command(upgraders=upgraders)}`: it shows what it would do, and a "
            "token to apply it with"
        )

    def metadata(self, *, upgraders: bool = False) -> dict[str, Any]:
        metadata: dict[str, Any] = {"command": self.command(upgraders=upgraders)}
        if self.job is not None:
            metadata["migration_job"] = dg.MetadataValue.job(self.job, self.location)
        return metadata

    def about(self, error: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """For a failure, by its error's name: nothing where it is about something else."""
        if error not in _ABOUT_SCHEMA:
            return {}
        differences = facts.get("differences") or ()
        listed = "\n".join(f"- {sentence}" for sentence in differences)
        return {
            **({"differences": dg.MetadataValue.md(listed)} if listed else {}),
            **self.metadata(upgraders=error == MissingUpgraderError.__name__),
        }
