"""Create the blob store's bucket unless it is there.

    python make_bucket.py s3://BUCKET/PREFIX ENDPOINT_URL

Credentials come from the standard AWS variables.
"""

from __future__ import annotations

import sys
import time
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

TIMEOUT_S = 60.0
_EXISTS = ("BucketAlreadyOwnedByYou", "BucketAlreadyExists")


def main(url: str, endpoint_url: str) -> int:
    bucket = urlsplit(url).netloc
    config = Config(
        proxies={}, s3={"addressing_style": "path"}, retries={"max_attempts": 1},
        connect_timeout=5, read_timeout=10,
    )  # fmt: skip
    client = boto3.client("s3", endpoint_url=endpoint_url, region_name="us-east-1", config=config)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            client.create_bucket(Bucket=bucket)
            break
        except ClientError as error:
            if error.response["Error"]["Code"] in _EXISTS:
                break
            problem: Exception = error
        except BotoCoreError as error:
            problem = error
        if time.monotonic() > deadline:
            print(f"{bucket} at {endpoint_url}: {problem}", file=sys.stderr)
            return 1
        time.sleep(1.0)
    print(f"bucket {bucket} is there")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
