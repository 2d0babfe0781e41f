"""The artifact store in an S3 bucket: AWS, SeaweedFS, MinIO and the like."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.store.base import ArtifactConflict, ArtifactCorrupt, ArtifactMissing, StoreError, check_held, check_unchanged
from infra.store.local import LocalStore
from infra.store.manifest import FileEntry, Manifest, build, check_name, files_of, hash_files
from infra.store.refs import ArtifactRef
from infra.store.s3_client import PART_BYTES, THREADS, Access, connect
from infra.store.s3_errors import named
from infra.store.s3_fetch import fetch
from infra.store.s3_wanted import condemn, condemned, want

READ_BYTES = 2**20
ABANDONED = timedelta(days=1)  # no upload of one file takes longer


class S3Store:
    """Artifacts below `s3://bucket/prefix`; opened ones are kept in the local store `cache`.

    Files lie under `files/NAME/DIGEST/`, so writers of different content never touch each other's, and the manifest
    under `manifests/NAME.json`, put last and only if there is none: of several writers one wins. Without `access`,
    credentials, region and endpoint come from boto3's own settings (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...).
    """

    def __init__(self, bucket: str, prefix: str, cache: LocalStore, access: Access | None = None):
        self.bucket, self.cache, self._access = bucket, cache, access
        self._prefix = f"{check_name(prefix)}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}"

    @cached_property
    def client(self):
        """boto3's client. Made on first use: importing boto3 takes a second."""
        return connect(self._access)

    def put(
        self, folder: Path, kind: str, *, producer: str, inputs: Sequence[ArtifactRef] = (), name: str | None = None
    ) -> ArtifactRef:
        """See `Store.put`. Files that an interrupted upload of the same content left whole are not sent again."""
        folder = Path(folder)
        try:
            paths = files_of(folder)
            if not paths:
                raise ValueError(f"it is {'empty' if folder.is_dir() else 'not a folder'}")
            manifest = build(hash_files(folder, paths), kind, producer, inputs, name)
        except ValueError as error:
            raise StoreError(f"cannot store {folder}: {error}") from None
        with named(self.url, f"storing {folder}", self._takes):
            if not (want(self.client, self.bucket, self._manifest_key(manifest.name)) and self._is_there(manifest)):
                self.sweep(manifest.name, ABANDONED)
                self._upload(folder, manifest)
                self._commit(manifest)
        return manifest.ref

    def open(self, ref: ArtifactRef) -> Path:
        """See `Store.open`."""
        manifest = self.manifest(ref)
        try:
            return self.cache.open(ref)
        except ArtifactMissing:
            self._download(manifest)
        except ArtifactCorrupt:
            self.cache.discard(ref.name)
            self._download(manifest)
        return self.cache.open(ref)

    def probe(self) -> None:
        """See `Store.probe`."""
        with self._speaking("writing"):
            self._put_one_byte()

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """See `Store.manifest`."""
        with self._speaking(f"reading {ref.name}"):
            manifest = self._read(ref.name)
        check_held(manifest, ref, self.url)
        return manifest

    def verify(self, ref: ArtifactRef) -> None:
        """See `Store.verify`: every object is read back from the bucket."""
        manifest = self.manifest(ref)

        def check(file: FileEntry) -> None:
            with self._speaking(f"reading {ref.name}"):
                held = self._hash(manifest, file)
            if held != file.sha256:
                raise self._corrupt(ref, file.path)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(check, manifest.files))

    def delete(self, ref: ArtifactRef) -> None:
        """See `Store.delete`."""
        manifest = self.manifest(ref)
        with self._speaking(f"deleting {ref.name}"):
            self.client.delete_object(Bucket=self.bucket, Key=self._manifest_key(ref.name))
            self._delete_files(manifest)
        self.cache.discard(ref.name)

    def collect(self, ref: ArtifactRef, before: datetime) -> bool:
        """See `Store.collect`. A deletion that was interrupted is taken up again."""
        key = self._manifest_key(ref.name)
        with self._speaking(f"deleting {ref.name}"):
            try:
                if not condemn(self.client, self.bucket, key, before):
                    return False
            except self.client.exceptions.NoSuchKey:
                raise ArtifactMissing(f"no artifact {ref.name} in {self.url}") from None
            self._delete_files(self._held(ref.name)[0])
            self.client.delete_object(Bucket=self.bucket, Key=key)
        self.cache.discard(ref.name)
        return True

    def sweep(self, name: str, age: timedelta) -> int:
        """Abort uploads of files of artifact `name` that were begun more than `age` ago; how many there were."""
        prefix, limit, swept = f"{self._prefix}files/{check_name(name)}/", datetime.now(UTC) - age, 0
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
        for upload in (u for page in pages for u in page.get("Uploads", [])):
            if upload["Initiated"] <= limit:
                self.client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                swept += 1
        return swept

    def _upload(self, folder: Path, manifest: Manifest) -> None:
        def send(manager, file: FileEntry):
            key = self._file_key(manifest, file)
            extra = {"Metadata": {"sha256": file.sha256}}
            return manager.upload(str((folder / file.path).resolve()), self.bucket, key, extra)

        with ThreadPoolExecutor(THREADS) as pool:
            whole = list(pool.map(lambda file: self._is_whole(manifest, file), manifest.files))
        missing = [file for file, there in zip(manifest.files, whole, strict=True) if not there]
        self.transfer(send, missing)

    def _download(self, manifest: Manifest) -> None:
        files = {self._file_key(manifest, file): file for file in manifest.files}

        def fill(folder: Path) -> None:
            with self._speaking(f"reading {manifest.name}"):
                damaged = fetch(self.client, self.bucket, files, folder)
            if damaged:
                raise self._corrupt(manifest.ref, damaged[0])

        self.cache.adopt(manifest, fill)

    def transfer(self, start: Callable[[Any, Any], Any], files: Sequence[Any]) -> None:
        """Transfers of all files at once, large ones in parts; the first failure is raised, the rest is cancelled.

        start: given boto3's transfer manager and one of `files`, begins its transfer and gives the future.
        """
        from boto3.s3.transfer import TransferConfig, create_transfer_manager

        config = TransferConfig(
            multipart_threshold=2 * PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=THREADS
        )
        with create_transfer_manager(self.client, config) as manager:
            for future in [start(manager, file) for file in files]:
                future.result()

    def _commit(self, manifest: Manifest) -> None:
        from botocore.exceptions import ClientError

        body = manifest.model_dump_json(indent=1).encode()
        try:
            self.client.put_object(
                Bucket=self.bucket, Key=self._manifest_key(manifest.name), Body=body, IfNoneMatch="*"
            )
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (409, 412):
                raise
            try:
                self._is_there(manifest)
            except ArtifactConflict:
                self._delete_files(manifest)
                raise

    def _is_there(self, manifest: Manifest) -> bool:
        try:
            held = self._read(manifest.name)
        except ArtifactMissing:
            return False
        check_unchanged(held, manifest, self.url)
        return True

    def _is_whole(self, manifest: Manifest, file: FileEntry) -> bool:
        from botocore.exceptions import ClientError

        try:
            head = self.client.head_object(Bucket=self.bucket, Key=self._file_key(manifest, file))
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            return False
        return head["ContentLength"] == file.bytes and head["Metadata"].get("sha256") == file.sha256

    def _read(self, name: str) -> Manifest:
        manifest, body = self._held(name)
        if condemned(body):
            raise ArtifactMissing(f"no artifact {name} in {self.url}: it is being deleted")
        return manifest

    def _held(self, name: str) -> tuple[Manifest, bytes]:
        try:
            body = self.client.get_object(Bucket=self.bucket, Key=self._manifest_key(name))["Body"].read()
            return Manifest.model_validate_json(body), body
        except self.client.exceptions.NoSuchKey:
            raise ArtifactMissing(f"no artifact {name} in {self.url}") from None
        except ValidationError as error:
            raise ArtifactCorrupt(f"{name} in {self.url} has no manifest: {error.errors()[0]['msg']}") from None

    def _hash(self, manifest: Manifest, file: FileEntry) -> str:
        digest = hashlib.sha256()
        try:
            body = self.client.get_object(Bucket=self.bucket, Key=self._file_key(manifest, file))["Body"]
        except self.client.exceptions.NoSuchKey:
            raise self._corrupt(manifest.ref, file.path) from None
        for block in body.iter_chunks(READ_BYTES):
            digest.update(block)
        return digest.hexdigest()

    def _delete_files(self, manifest: Manifest) -> None:
        for file in manifest.files:
            self.client.delete_object(Bucket=self.bucket, Key=self._file_key(manifest, file))

    def _takes(self) -> bool:
        from botocore.exceptions import ClientError

        try:
            self._put_one_byte()
        except ClientError:
            return False
        return True

    def _put_one_byte(self) -> None:
        client, key = connect(self._access, attempts=1), f"{self._prefix}probe"
        client.put_object(Bucket=self.bucket, Key=key, Body=b"?")
        client.delete_object(Bucket=self.bucket, Key=key)

    def _file_key(self, manifest: Manifest, file: FileEntry) -> str:
        return f"{self._prefix}files/{manifest.name}/{manifest.digest[7:23]}/{file.path}"

    def _manifest_key(self, name: str) -> str:
        try:
            return f"{self._prefix}manifests/{check_name(name)}.json"
        except ValueError as error:
            raise StoreError(str(error)) from None

    def _corrupt(self, ref: ArtifactRef, path: str) -> ArtifactCorrupt:
        return ArtifactCorrupt(
            f"artifact {ref.name} in {self.url} is damaged: {path} is not what was committed; delete it and run again "
            f"what made it"
        )

    @contextmanager
    def _speaking(self, what: str) -> Iterator[None]:
        with named(self.url, what):
            yield

    def list(self, kind: str = "") -> list[ArtifactRef]:
        """See `Store.list`. One whose deletion was interrupted is among them, so that `collect` can end it."""
        start = f"{self._prefix}manifests/"
        with self._speaking("listing"), ThreadPoolExecutor(THREADS) as pool:
            prefix = start + (f"{check_name(kind)}/" if kind else "")
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
            names = [o["Key"][len(start) : -len(".json")] for page in pages for o in page.get("Contents", [])]
            return [manifest.ref for manifest, _ in pool.map(self._held, sorted(names))]
