"""The `store` transport: versions in a folder that trainer and engines share, for engines that share nothing else.

A version is a folder of safetensors shards, written and read in parallel, and a manifest that is there once they are:
every value of the model, or only those that changed since the version before (`infra.transport.delta`). An engine that
does not hold the version before starts at the newest whole one and takes each change in its order.
"""

import io
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from infra.transport import delta
from infra.transport.base import SAME_HOST, Fetch, Published, Reach, SyncError
from infra.transport.flat import fill, flat_bytes, lay_out, view
from infra.transport.publisher import Publisher

SHARD_BYTES = 64 * 2**20
WHOLE_EVERY = 16
"""Versions from one whole version to the next: as many changes at most does a new engine read."""
_THREADS = min(16, 2 * (os.cpu_count() or 1))
_MANIFEST = "manifest.json"
_DAMAGED = ".damaged"
"""Left beside a version by an engine that could not use it, so that the next one is written whole."""


class Shard(BaseModel):
    """One file: bytes [start, stop) of the flat weights, or what changed there.

    bytes, crc32: of the tensors in the file, checked before they are used.
    changed: number of values that differ from the version before; none in a whole version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    start: int
    stop: int
    bytes: int
    crc32: int
    changed: int | None = None


class Manifest(BaseModel):
    """One version in the folder. base: the version that it changes; none for a whole one. width: bytes of a value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    base: int | None
    width: int
    shards: list[Shard]

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


class StoreSender(Publisher):
    """Writes versions below a folder of its own in `reach.folder`, which is removed when it is closed.

    The newest whole version and what follows it are kept, older ones removed.
    """

    transport = "store"

    def __init__(self, dtype: str | None = None, reach: Reach = SAME_HOST, *, whole_every: int = WHOLE_EVERY) -> None:
        """whole_every: versions from one whole version to the next; 1 writes only whole ones.
        Raises ValueError without a folder.
        """
        if reach.folder is None:
            raise ValueError("the store transport needs a folder that trainer and engines share")
        super().__init__(dtype, reach)
        self._whole_every = whole_every
        self._folder = reach.folder.absolute() / f"weights-{self.sender}"
        self._flat_before: torch.Tensor | None = None
        self._kept: list[int] = []
        self.manifest: Manifest | None = None
        """Of the version published last."""

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], engines: int = 1) -> Published:
        """Write `named_tensors` (Hugging Face names, any device) as `version`, whole or as the change since the last.

        Raises SyncError when a tensor holds values that are not finite, and OSError when the folder cannot be written:
        nothing of the version is left then.
        """
        started = time.monotonic()
        tensors, slots, size = lay_out(named_tensors, self.dtype)
        flat = torch.zeros(size, dtype=torch.uint8)
        params = fill(flat, tensors, slots)
        whole = (
            self._flat_before is None
            or self._flat_before.numel() != size
            or len(self._kept) >= self._whole_every
            or version <= self._kept[-1]
            or any(_place(self._folder, kept).with_suffix(_DAMAGED).exists() for kept in self._kept)
        )
        width = min(slot.dtype.itemsize for slot in slots)
        base = None if whole else self._kept[-1]
        self.manifest = self._write(version, base, width, flat)
        self._flat_before = flat
        self._kept = [version] if whole else [*self._kept, version]
        if whole:
            self._remove_older(version)
        return self._announce(version, str(_place(self._folder, version)), params, started)

    def close(self) -> None:
        """Remove what was published. May be called again."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._flat_before, self._kept = None, []

    def _write(self, version: int, base: int | None, width: int, flat: torch.Tensor) -> Manifest:
        place = _place(self._folder, version)
        scratch = place.with_name(f".{place.name}")
        shutil.rmtree(scratch, ignore_errors=True)  # of an attempt that failed here
        scratch.mkdir(parents=True)
        try:
            last = self._flat_before if base is not None else None
            with ThreadPoolExecutor(_THREADS) as pool:
                write = partial(_write_shard, scratch, flat, last, width)
                shards = list(pool.map(write, range(0, flat.numel(), SHARD_BYTES)))
            manifest = Manifest(version=version, base=base, width=width, shards=shards)
            (scratch / _MANIFEST).write_text(manifest.model_dump_json())
            shutil.rmtree(place, ignore_errors=True)
            os.rename(scratch, place)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return manifest

    def _remove_older(self, version: int) -> None:
        for folder in self._folder.iterdir():
            if folder.suffix == _DAMAGED:
                folder.unlink(missing_ok=True)
            elif folder != _place(self._folder, version):
                shutil.rmtree(folder, ignore_errors=True)


class StoreSource:
    """Reads versions into host memory, which is kept: the next version is likely a change of it."""

    def __init__(self, device: torch.device) -> None:
        """device: of the engine's model; what is read lies on the host."""
        self._flat: torch.Tensor | None = None
        self._held: tuple[Path, int] | None = None

    @contextmanager
    def open(self, published: Published) -> Iterator[Fetch]:
        place = Path(published.location)
        size = flat_bytes(published.params)
        if self._flat is None or self._flat.numel() != size:
            self.forget()
            self._flat = torch.empty(size, dtype=torch.uint8)
        try:
            self._follow(place, published.version)
            yield partial(view, self._flat)
        except BaseException:
            self.forget()  # the next version is read from the newest whole one
            with suppress(OSError):  # an engine that may not write there waits for the next whole version
                place.with_suffix(_DAMAGED).touch()
            raise

    def forget(self) -> None:
        self._flat = self._held = None

    def _follow(self, place: Path, version: int) -> None:
        for manifest in self._missing(place, version):
            self._held = None  # what is half read is no version
            self._read(_place(place.parent, manifest.version), manifest)
            self._held = (place.parent, manifest.version)

    def _missing(self, place: Path, version: int) -> list[Manifest]:
        """Manifests to apply in order, from what is held or from the newest whole version up to `version`."""
        chain: list[Manifest] = []
        wanted: int | None = version
        while wanted is not None and self._held != (place.parent, wanted):
            manifest = _manifest(_place(place.parent, wanted))
            if manifest.version != wanted or (manifest.base is not None and manifest.base >= wanted):
                raise SyncError(f"{_place(place.parent, wanted)} is not version {wanted}: it says {manifest.version}")
            chain.append(manifest)
            wanted = manifest.base
        return chain[::-1]

    def _read(self, place: Path, manifest: Manifest) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(
                pool.map(
                    partial(_read_shard, place, self._flat, manifest.base is None, manifest.width), manifest.shards
                )
            )


def _place(folder: Path, version: int) -> Path:
    return folder / f"version-{version:08d}"


def _manifest(place: Path) -> Manifest:
    try:
        return Manifest.model_validate_json((place / _MANIFEST).read_text())
    except FileNotFoundError as error:
        raise SyncError(f"{place} is not there: was the trainer stopped, or is the folder not shared?") from error
    except ValueError as error:
        raise SyncError(f"{place / _MANIFEST} cannot be read: {str(error).splitlines()[0]}") from error


def _write_shard(folder: Path, flat: torch.Tensor, last: torch.Tensor | None, width: int, start: int) -> Shard:
    part = flat[start : start + SHARD_BYTES]
    if last is None:
        tensors, changed = {"weights": part}, None
    else:
        tensors, changed = delta.encode(last[start : start + SHARD_BYTES], part, width)
    shard = Shard(
        file=f"shard-{start // SHARD_BYTES:05d}.safetensors",
        start=start,
        stop=start + part.numel(),
        bytes=sum(tensor.numel() for tensor in tensors.values()),
        crc32=_crc32(tensors),
        changed=changed,
    )
    with open(folder / shard.file, "wb", buffering=0) as file:
        file.write(_header(tensors))
        for tensor in tensors.values():
            file.write(tensor.numpy())
        os.fsync(file.fileno())
    return shard


def _read_shard(folder: Path, flat: torch.Tensor, whole: bool, width: int, shard: Shard) -> None:
    """Raises SyncError naming the file when it is missing or its content is not what was written."""
    path, target = folder / shard.file, flat[shard.start : shard.stop]
    try:
        with open(path, "rb", buffering=0) as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            body = target if whole else torch.empty(shard.bytes, dtype=torch.uint8)
            count = _read_into(file, body)
    except OSError as error:
        raise SyncError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SyncError(f"{path} is not a safetensors file: {error}") from error
    if count != shard.bytes or _crc32({"": body}) != shard.crc32:
        raise SyncError(f"{path} is not what the trainer wrote: its checksum differs, or it was cut short")
    if not whole:
        places = {name: entry["data_offsets"] for name, entry in header.items()}
        delta.apply(target, {name: body[start:stop] for name, (start, stop) in places.items()}, width)


def _read_into(file: io.FileIO, body: torch.Tensor) -> int:
    memory, count = memoryview(body.numpy()), 0
    while count < len(memory) and (read := file.readinto(memory[count:])):
        count += read
    return count


def _header(tensors: dict[str, torch.Tensor]) -> bytes:
    """The head of a safetensors file of these uint8 vectors; their bytes follow."""
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [tensor.numel()], "data_offsets": [offset, offset + tensor.numel()]}
        offset += tensor.numel()
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _crc32(tensors: dict[str, torch.Tensor]) -> int:
    found = 0
    for tensor in tensors.values():
        found = zlib.crc32(tensor.numpy(), found)
    return found
