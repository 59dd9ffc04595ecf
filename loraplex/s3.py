"""S3 clients with our timeouts, and S3's failures as errors that name the cause."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import urlsplit

from loraplex.address import is_loopback
from loraplex.status import LoraplexError, NotFound, Unavailable

#: Codes by which servers say that the credentials, not the object, are at fault.
_DENIED = frozenset(
    {
        "403", "401", "AccessDenied", "AllAccessDisabled", "ExpiredToken", "Forbidden",
        "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "Unauthorized",
    }
)  # fmt: skip
_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})


def s3_client(endpoint_url: str | None) -> Any:
    """An S3 client: credentials from the standard variables, path style, no proxy to loopback."""
    from botocore.config import Config
    from botocore.session import Session

    proxies: dict[str, str] | None = None
    if endpoint_url is not None and is_loopback(f"{urlsplit(endpoint_url).hostname}:0"):
        proxies = {}
    config = Config(
        connect_timeout=5,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 3},
        s3={"addressing_style": "path" if endpoint_url else "auto"},
        proxies=proxies,
        max_pool_connections=16,
    )
    session = Session()
    session.register_component("data_loader", _service_models())
    region = session.get_config_variable("region") or "us-east-1"
    return session.create_client("s3", region, endpoint_url=endpoint_url, config=config)


@functools.cache
def _service_models() -> Any:
    """Botocore's descriptions of S3: megabytes of JSON, read once a process."""
    from botocore.loaders import create_loader

    return create_loader()


def is_absent(error: Exception) -> bool:
    """Whether a botocore error says that the object does not exist."""
    return _code(error) in _ABSENT


def s3_failure(error: Exception, where: str) -> LoraplexError:
    """A botocore error about `where` (an s3:// URL) as DENIED, a missing bucket, or UNREACHABLE."""
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    code = _code(error)
    metadata = {"store": where}
    if code in _DENIED or isinstance(error, NoCredentialsError | PartialCredentialsError):
        return Unavailable(
            f"{where}: the S3 server refused the credentials"
            f" ({code or 'none are set'}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            reason="BLOB_STORE_DENIED",
            metadata=metadata,
        )
    if code == "NoSuchBucket":
        return NotFound(
            f"{where}: the bucket does not exist", reason="SOURCE_NOT_FOUND", metadata=metadata
        )
    detail = code or type(error).__name__
    return Unavailable(
        f"{where}: the S3 server cannot be used ({detail})",
        reason="BLOB_STORE_UNREACHABLE",
        metadata=metadata,
        retry_after_s=1.0,
    )


def _code(error: Exception) -> str:
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    code = str(response.get("Error", {}).get("Code", ""))
    if code in _DENIED or code in _ABSENT or code == "NoSuchBucket":
        return code
    status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    return status if status in ("401", "403") else code
