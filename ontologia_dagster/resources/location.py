"""The resources of a location, as its environment says. Binding them opens nothing."""

from __future__ import annotations

import os
from typing import Any

import dagster as dg
from dagster_aws.s3 import S3Resource

from ontologia_dagster.resources.environments import Environment, Environments, S3Table
from ontologia_dagster.resources.ontology import DEFAULT_LOCATION, OntologyResource
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.storage.alerts import Notifier
from ontologia_dagster.storage.storage_defs import STORAGE

_WEBHOOK = "ONTOLOGIA_WEBHOOK_URL"


def location_resources(
    environments: Environments | None = None, *, location: str = DEFAULT_LOCATION
) -> dict[str, Any]:
    """`ontology`, `ontology_<tenant>` for each tenant, `spark` and `notifier`.

    `location` is the code location's name, for runs that Dagster did not start from one.
    """
    environments = environments or Environments.load()
    current = environments.current
    spark = current.spark
    return {
        STORAGE: _ontology(environments, location, current.uri, current.s3),
        **{
            f"{STORAGE}_{tenant}": _ontology(
                environments, location, current.uri_of(tenant), table.s3 or current.s3
            )
            for tenant, table in current.tenants.items()
        },
        "spark": SparkResource(
            mode=spark.mode,
            master=spark.master,
            spark_config=dict(spark.config),
            submit_arguments=list(spark.submit_arguments),
        ),
        "notifier": Notifier(webhook_url=_secret(_webhook(current))),
    }


def _ontology(environments: Environments, location: str, uri: str, s3: S3Table) -> OntologyResource:
    current = environments.current
    return OntologyResource(
        storage_uri=uri,
        runtime_id=current.runtime_id,
        engine_options=dict(current.engine),
        location_name=location,
        environment=current.name,
        guarded=not current.production,
        production_uris=list(environments.production_uris),
        s3=S3Resource(
            endpoint_url=s3.endpoint_url,
            region_name=s3.region,
            profile_name=s3.profile,
            aws_access_key_id=_secret(s3.access_key_id_variable),
            aws_secret_access_key=_secret(s3.secret_access_key_variable),
            aws_session_token=_secret(s3.session_token_variable),
        ),
    )


def _secret(variable: str | None) -> Any:
    """A typed reference: its value is read by the process that needs it, and shown by none. There
    a variable that is named and not set is an error that names it."""
    return dg.EnvVar(variable) if variable else None


def _webhook(current: Environment) -> str | None:
    """Nobody has to be told: the usual variable may be unset, one that is named may not."""
    return current.webhook_url_variable or (_WEBHOOK if _WEBHOOK in os.environ else None)
