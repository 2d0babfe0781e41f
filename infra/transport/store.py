"""The `store` transport: versions on a shelf that trainer and engines reach, for engines that share nothing else.

A version is a set of safetensors shards, written and read in parallel, and a manifest that is there once they are:
every value of the model, or only those that changed since the version before (`infra.transport.delta`). An engine that
does not hold the version before starts at the newest whole one and takes each change in its order. The shelf is a
folder or a bucket (`infra.transport.shelf`).
"""

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
from pydantic import BaseModel, ConfigDict

from infra.store.base import StoreError
from infra.store.tensor_files import header, read_header
from infra.transport import delta
from infra.transport.base import SAME_HOST, Fetch, Published, Reach, SyncError
from infra.transport.flat import fill, flat_bytes, lay_out, view
from infra.transport.pinned import host_memory
from infra.transport.publisher import Publisher
from infra.transport.shards import crc32, read_into
from infra.transport.shelf import MANIFEST, Shelf, open_shelf, version_name

SHARD_BYTES = 64 * 2**20
"""Of a whole version, in one file."""
CHANGE_BYTES, PIECE_BYTES = 2**30, 8 * 2**20
"""Bytes of weights whose change is one file, and those of them that one thread compares and changes at a time."""
WHOLE_EVERY = 16
"""Versions from one whole version to the next: as many changes at most does a new engine read."""
_THREADS = min(16, 2 * (os.cpu_count() or 1))


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
    """One version on the shelf.

    base: the version that it changes; none for a whole one.
    width: bytes of a value.
    piece: bytes of weights in each piece of a change.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    base: int | None
    width: int
    piece: int
    shards: list[Shard]

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


class StoreSender(Publisher):
    """Writes versions to a shelf of its own below `reach.folder`, which is cleared when it is closed.

    The newest whole version and what follows it are kept, older ones removed.
    """

    transport = "store"

    def __init__(self, dtype: str | None = None, reach: Reach = SAME_HOST, *, whole_every: int = WHOLE_EVERY) -> None:
        """whole_every: versions from one whole version to the next; 1 writes only whole ones.
        Raises ValueError without a folder.
        """
        if reach.folder is None:
            raise ValueError("the store transport needs a folder or a bucket that trainer and engines share")
        super().__init__(dtype, reach)
        self._whole_every = whole_every
        self._shelf = open_shelf(f"{reach.folder}/weights-{self.sender}")
        self._flat_before: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None
        self._kept: list[int] = []
        self.manifest: Manifest | None = None
        """Of the version published last."""

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], engines: int = 1) -> Published:
        """Write `named_tensors` (Hugging Face names, any device) as `version`, whole or as the change since the last.

        Raises SyncError when a tensor holds values that are not finite, and OSError or StoreError when the shelf cannot
        be written: nothing of the version is left then.
        """
        started = time.monotonic()
        tensors, slots, size = lay_out(named_tensors, self.dtype)
        if self._spare is None or self._spare.numel() != size:
            self._spare = host_memory(size, pinned=any(tensor.is_cuda for tensor in tensors.values()))
        flat = self._spare  # touched before: fresh memory costs more than the copy
        params = fill(flat, tensors, slots)
        whole = (
            self._flat_before is None
            or self._flat_before.numel() != size
            or len(self._kept) >= self._whole_every
            or version <= self._kept[-1]
            or self._shelf.is_damaged(self._kept)
        )
        width = min(slot.dtype.itemsize for slot in slots)
        base = None if whole else self._kept[-1]
        self.manifest = self._write(version, base, width, flat)
        self._flat_before, self._spare = flat, self._flat_before
        self._kept = [version] if whole else [*self._kept, version]
        if whole:
            self._shelf.keep(version)
        return self._announce(version, self._shelf.url, params, started)

    def close(self) -> None:
        """Remove what was published. May be called again."""
        self._shelf.clear()
        self._flat_before = self._spare = None
        self._kept = []

    def _write(self, version: int, base: int | None, width: int, flat: torch.Tensor) -> Manifest:
        self._shelf.begin(version)
        try:
            last = self._flat_before if base is not None else None
            with ThreadPoolExecutor(_THREADS) as pool:
                if last is None:
                    packed = [(start, {"weights": part}, None) for start, part in _parts(flat, SHARD_BYTES)]
                else:
                    packed = _packed(pool, last, flat, width)
                shards = list(pool.map(partial(_write_shard, self._shelf, version, flat.numel()), packed))
            manifest = Manifest(version=version, base=base, width=width, piece=PIECE_BYTES, shards=shards)
            self._shelf.commit(version, manifest.model_dump_json())
        except BaseException:
            self._shelf.discard(version)
            raise
        return manifest


class StoreSource:
    """Reads versions into host memory, which is kept: the next version is likely a change of it."""

    lands = False

    def __init__(self, device: torch.device) -> None:
        """device: of the engine's model; what is read lies on the host."""
        self._flat: torch.Tensor | None = None
        self._held: tuple[str, int] | None = None
        self._shelf: Shelf | None = None

    @contextmanager
    def open(self, published: Published) -> Iterator[Fetch]:
        if self._shelf is None or self._shelf.url != published.location:
            self._shelf = open_shelf(published.location)
        size = flat_bytes(published.params)
        if self._flat is None or self._flat.numel() != size:
            self.forget()
            self._flat = torch.empty(size, dtype=torch.uint8)
        try:
            self._follow(self._shelf, published.version)
            yield partial(view, self._flat)
        except BaseException:
            self.forget()  # the next version is read from the newest whole one
            self._shelf.mark_damaged(published.version)
            raise

    def forget(self) -> None:
        self._flat = self._held = None

    def _follow(self, shelf: Shelf, version: int) -> None:
        for manifest in self._missing(shelf, version):
            self._held = None  # what is half read is no version
            self._read(shelf, manifest)
            self._held = (shelf.url, manifest.version)

    def _missing(self, shelf: Shelf, version: int) -> list[Manifest]:
        """Manifests to apply in order, from what is held or from the newest whole version up to `version`."""
        chain: list[Manifest] = []
        wanted: int | None = version
        while wanted is not None and self._held != (shelf.url, wanted):
            manifest = _manifest(shelf, wanted)
            if manifest.version != wanted or (manifest.base is not None and manifest.base >= wanted):
                raise SyncError(
                    f"{shelf.url}/{version_name(wanted)} is not version {wanted}: it says {manifest.version}"
                )
            chain.append(manifest)
            wanted = manifest.base
        return chain[::-1]

    def _read(self, shelf: Shelf, manifest: Manifest) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            changes = pool.map(partial(_read_shard, shelf, manifest, self._flat), manifest.shards)
            # Every file has been checked before a value changes.
            pieces = [piece for change in list(changes) for piece in change]
            list(pool.map(lambda piece: delta.apply(*piece, manifest.width), pieces))


def _manifest(shelf: Shelf, version: int) -> Manifest:
    place = f"{shelf.url}/{version_name(version)}"
    try:
        return Manifest.model_validate_json(shelf.manifest(version))
    except FileNotFoundError as error:
        raise SyncError(f"{place} is not there: was the trainer stopped, or is the folder not shared?") from error
    except ValueError as error:
        raise SyncError(f"{place}/{MANIFEST} cannot be read: {str(error).splitlines()[0]}") from error
    except StoreError as error:
        raise SyncError(str(error)) from error


Packed = tuple[int, dict[str, torch.Tensor], int | None]
"""Where a shard starts, its tensors by name, and how many values changed in it; none in a whole version."""


def _parts(flat: torch.Tensor, size: int) -> list[tuple[int, torch.Tensor]]:
    return [(start, flat[start : start + size]) for start in range(0, flat.numel(), size)]


def _packed(pool: Executor, last: torch.Tensor, flat: torch.Tensor, width: int) -> list[Packed]:
    """What changed, found in many pieces at once and kept in few files: each costs a wait for the disk."""
    pieces = _parts(flat, PIECE_BYTES)
    found = list(pool.map(lambda piece: delta.encode(last[piece[0] : piece[0] + PIECE_BYTES], piece[1], width), pieces))
    packed, together = [], CHANGE_BYTES // PIECE_BYTES
    for first in range(0, len(found), together):
        some = found[first : first + together]
        tensors = {f"{name}.{n}": tensor for n, (made, _) in enumerate(some) for name, tensor in made.items()}
        packed.append((first * PIECE_BYTES, tensors, sum(changed for _, changed in some)))
    return packed


def _write_shard(shelf: Shelf, version: int, size: int, packed: Packed) -> Shard:
    """size: bytes of the whole flat weights."""
    start, tensors, changed = packed
    span = SHARD_BYTES if changed is None else CHANGE_BYTES
    shard = Shard(
        file=f"shard-{start // span:05d}.safetensors",
        start=start,
        stop=min(size, start + span),
        bytes=sum(tensor.numel() for tensor in tensors.values()),
        crc32=crc32(tensors),
        changed=changed,
    )
    head = header({name: ("U8", [t.numel()], t.numel()) for name, t in tensors.items()})
    shelf.put(version, shard.file, [head, *(memoryview(tensor.numpy()) for tensor in tensors.values())])
    return shard


Piece = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Old bytes, and what `delta.apply` turns them into new ones with."""


def _read_shard(shelf: Shelf, manifest: Manifest, flat: torch.Tensor, shard: Shard) -> list[Piece]:
    """Read a shard of a whole version into `flat`, or return the pieces of a change.

    Raises SyncError naming the file when it is missing or its content is not what was written.
    """
    path, target = f"{shelf.url}/{version_name(manifest.version)}/{shard.file}", flat[shard.start : shard.stop]
    whole = manifest.base is None
    try:
        with shelf.open(manifest.version, shard.file) as file:
            entries = read_header(file)
            body = target if whole else torch.empty(shard.bytes, dtype=torch.uint8)
            count = read_into(file, body)
    except OSError as error:
        raise SyncError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SyncError(f"{path} is not a safetensors file: {error}") from error
    except StoreError as error:
        raise SyncError(str(error)) from error
    if count != shard.bytes or crc32({"": body}) != shard.crc32:
        raise SyncError(f"{path} is not what the trainer wrote: its checksum differs, or it was cut short")
    if whole:
        return []
    pieces: list[dict[str, torch.Tensor]] = [{} for _ in _parts(target, manifest.piece)]
    for entry, where in entries.items():
        name, _, n = entry.rpartition(".")
        pieces[int(n)][name] = body[slice(*where["data_offsets"])]
    return [(part, piece) for (_, part), piece in zip(_parts(target, manifest.piece), pieces, strict=True)]
