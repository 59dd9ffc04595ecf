"""The blob store in an S3 bucket: keys `prefix/sha256/ab/abcd…`."""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Iterator
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from loraplex.blob_content import CHUNK_BYTES, Readable, VerifiedReader, check_digest, missing_blob
from loraplex.s3 import is_absent, s3_client, s3_failure
from loraplex.status import LoraplexError, Unavailable

#: S3 asks for parts of at least 5 MiB; 8 MiB × 10,000 parts is 80 GB a blob.
PART_BYTES = 8 * 1024 * 1024
_S3_ERRORS = (BotoCoreError, ClientError)


class S3BlobStore:
    """Blobs of up to one part are one call; larger ones become visible when their digest held."""

    def __init__(self, bucket: str, prefix: str, endpoint_url: str | None) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._where = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self._client: Any = s3_client(endpoint_url)

    def contains(self, sha256: str) -> bool:
        try:
            self._client.head_object(Bucket=self._bucket, Key=self._key(sha256))
        except _S3_ERRORS as error:
            if is_absent(error):
                return False
            raise self._failure(error) from error
        return True

    def put(self, sha256: str, source: Readable, size_bytes: int) -> bool:
        if self.contains(sha256):
            return False
        reader = VerifiedReader(source, sha256, size_bytes)
        try:
            if size_bytes <= PART_BYTES:
                self._put_whole(sha256, reader)
            else:
                self._put_parts(sha256, reader)
        except _S3_ERRORS as error:
            raise self._failure(error) from error
        return True

    def chunks(self, sha256: str, start: int = 0) -> Iterator[bytes]:
        key = self._key(sha256)
        try:
            size = self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"]
            if start >= size:
                return
            found = self._client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={start}-")
            yield from found["Body"].iter_chunks(CHUNK_BYTES)
        except _S3_ERRORS as error:
            if is_absent(error):
                raise missing_blob(sha256) from error
            raise self._failure(error) from error

    def delete(self, sha256: str) -> None:
        try:
            self._client.delete_object(Bucket=self._bucket, Key=self._key(sha256))
        except _S3_ERRORS as error:
            raise self._failure(error) from error

    def discard_partial(self, age_s: float) -> int:
        oldest = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=age_s)
        place, count = {"Bucket": self._bucket}, 0
        prefix = f"{self._prefix}/sha256/" if self._prefix else "sha256/"
        try:
            pages = self._client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(**place, Prefix=prefix):
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"] <= oldest:
                        self._client.abort_multipart_upload(
                            **place, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                        count += 1
        except _S3_ERRORS as error:
            raise self._failure(error) from error
        return count

    def check(self) -> None:
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except _S3_ERRORS as error:
            if is_absent(error):
                raise self._no_bucket() from error
            raise self._failure(error) from error

    def _put_whole(self, sha256: str, reader: VerifiedReader) -> None:
        body = reader.read(PART_BYTES)
        reader.read(1)
        reader.verify()
        self._client.put_object(Bucket=self._bucket, Key=self._key(sha256), Body=io.BytesIO(body))

    def _put_parts(self, sha256: str, reader: VerifiedReader) -> None:
        place = {"Bucket": self._bucket, "Key": self._key(sha256)}
        upload = {**place, "UploadId": self._client.create_multipart_upload(**place)["UploadId"]}
        parts: list[dict[str, Any]] = []
        try:
            while block := reader.read(PART_BYTES):
                number = len(parts) + 1
                done = self._client.upload_part(**upload, PartNumber=number, Body=block)
                parts.append({"PartNumber": number, "ETag": done["ETag"]})
            reader.verify()
        except BaseException:
            self._client.abort_multipart_upload(**upload)
            raise
        self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    def _key(self, sha256: str) -> str:
        check_digest(sha256)
        key = f"sha256/{sha256[:2]}/{sha256}"
        return f"{self._prefix}/{key}" if self._prefix else key

    def _no_bucket(self) -> Unavailable:
        return Unavailable(
            f"{self._where}: the bucket does not exist; create it",
            reason="BLOB_STORE_UNREACHABLE",
            metadata={"store": self._where},
        )

    def _failure(self, error: Exception) -> LoraplexError:
        failure = s3_failure(error, self._where)
        return self._no_bucket() if failure.reason == "SOURCE_NOT_FOUND" else failure
