"""Fixtures for all suites: the S3 servers, started when first asked for."""

from tests.servers import aws_environment, moto_s3, seaweedfs_s3

__all__ = ["aws_environment", "moto_s3", "seaweedfs_s3"]
