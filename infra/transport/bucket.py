"""Versions of weights in an S3 bucket, for engines that share no folder with the trainer."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from infra.store.base import StoreError
from infra.store.open import access_to
from infra.store.s3_client import connect
from infra.store.s3_errors import named
from infra.transport.shelf import MANIFEST, version_name

_DAMAGED = "damaged"
_AT_ONCE = 1000  # keys that one request deletes at most


class BucketShelf:
    """Below the prefix of `url`, `s3://bucket/prefix`. A version's manifest is put last, and deleted first."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self.url, self._bucket, self._prefix = url.rstrip("/"), parts.netloc, parts.path.strip("/")

    @cached_property
    def _client(self) -> Any:
        return connect(access_to(self._bucket))

    def begin(self, version: int) -> None:
        self.discard(version)

    def put(self, version: int, file: str, parts: Sequence[bytes | memoryview]) -> None:
        with named(self.url, "writing weights"):
            self._client.put_object(Bucket=self._bucket, Key=self._key(version, file), Body=b"".join(parts))

    def commit(self, version: int, manifest: str) -> None:
        self.put(version, MANIFEST, [manifest.encode()])

    def discard(self, version: int) -> None:
        self._delete([self._key(version, MANIFEST)])
        self._delete(self._keys(f"{self._prefix}/{version_name(version)}/"))

    def keep(self, version: int) -> None:
        kept = f"{self._prefix}/{version_name(version)}/"
        old = [key for key in self._keys(f"{self._prefix}/") if not key.startswith(kept) or key.endswith(_DAMAGED)]
        self._delete(sorted(old, key=lambda key: not key.endswith(MANIFEST)))

    def clear(self) -> None:
        self._delete(self._keys(f"{self._prefix}/"))

    def manifest(self, version: int) -> str:
        with self.open(version, MANIFEST) as body:
            return body.read().decode()

    @contextmanager
    def open(self, version: int, file: str) -> Iterator[Any]:
        with named(self.url, "reading weights"):
            try:
                body = self._client.get_object(Bucket=self._bucket, Key=self._key(version, file))["Body"]
            except self._client.exceptions.NoSuchKey as error:
                raise FileNotFoundError(2, "there is no such object", file) from error
            with body:
                yield body

    def mark_damaged(self, version: int) -> None:
        with suppress(StoreError):  # an engine that may not write there waits for the next whole version
            self.put(version, _DAMAGED, [b"?"])

    def is_damaged(self, versions: Collection[int]) -> bool:
        wanted = {self._key(version, _DAMAGED) for version in versions}
        return not wanted.isdisjoint(self._keys(f"{self._prefix}/"))

    def _key(self, version: int, file: str) -> str:
        return f"{self._prefix}/{version_name(version)}/{file}"

    def _keys(self, prefix: str) -> list[str]:
        with named(self.url, "listing weights"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def _delete(self, keys: Sequence[str]) -> None:
        with named(self.url, "deleting weights"):
            for start in range(0, len(keys), _AT_ONCE):
                objects = [{"Key": key} for key in keys[start : start + _AT_ONCE]]
                self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
