"""How fast artifacts are stored and fetched, beside the plainest transfer of the same files."""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import FlowConfig
from tasks.evaluate.measurement import Line, Measured, MeasureError, Picture

if TYPE_CHECKING:
    from infra.store.base import Store

GB = 1e9
MIB = 2**20
COPIES = 4  # of the files on disk at once: source, stored, fetched, and the plain transfer's
WAYS = ("store", "fetch")


class StoreOptions(Section):
    url: str | None = None
    """Where the artifacts go: a folder or s3://bucket/prefix; by default the store that flows use."""
    sizes: list[int] = Field([16, 64, 256], min_length=1, max_length=8)
    """Sizes of the files of each artifact to store, MiB."""
    files: int = Field(4, ge=1, le=1000)
    """Files of each artifact."""
    repeats: int = Field(3, ge=1, le=100)
    """Artifacts of each size; figures are their medians. One more goes before, to warm up."""


class StoreMeasurement:
    """Artifacts of random bytes, stored, fetched into an empty cache, and deleted again."""

    help = "Artifacts stored and fetched, hashed on the way, beside a plain transfer of the same files."
    config = FlowConfig
    options = StoreOptions

    def measure(self, config: FlowConfig, options: StoreOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError when there is no room for the files."""
        from infra.store.open import open_store

        store, rows, table = open_store(options.url), [], []
        for mib in options.sizes:
            nbytes = options.files * mib * MIB
            say(f"{options.files} files of {mib} MiB: {options.repeats} times to {store.url} and back")
            with tempfile.TemporaryDirectory() as scratch:
                _require_disk(nbytes, Path(scratch))
                rounds = [
                    _round(store, Path(scratch) / str(i), options.files, mib, ours_first=bool(i % 2))
                    for i in range(options.repeats + 1)
                ][1:]
            for way in WAYS:
                ours, plain = ([found[way, who] for found in rounds] for who in ("ours", "plain"))
                table.append(_line(way, mib, nbytes, ours, plain))
                rows += _rows(store.url.split(":")[0], way, mib, nbytes, ours, plain)
        return Measured(rows, table, _findings(table), _pictures(table))


def _round(store: "Store", scratch: Path, files: int, mib: int, *, ours_first: bool) -> dict[tuple[str, str], float]:
    """Seconds of one artifact both ways, by us and plainly, in turns who goes first."""
    source = scratch / "source"
    source.mkdir(parents=True)
    for i in range(files):
        (source / f"part-{i}").write_bytes(os.urandom(mib * MIB))
    contenders = {"ours": _Artifact(store, source), "plain": _plain(store, source, scratch / "fetched")}
    turns = [(way, who) for way in WAYS for who in sorted(contenders, reverse=not ours_first)]
    try:
        return {(way, who): _timed(getattr(contenders[who], way)) for way, who in turns}
    finally:
        for contender in contenders.values():
            contender.clean()
        shutil.rmtree(scratch)


class _Artifact:
    """The files as an artifact of the store."""

    def __init__(self, store: "Store", source: Path):
        self._store, self._source, self._ref = store, source, None

    def store(self) -> None:
        self._ref = self._store.put(self._source, "measured", producer="lockstep measure store")

    def fetch(self) -> None:
        self._store.open(self._ref)

    def clean(self) -> None:
        if self._ref:
            self._store.delete(self._ref)


class _Copy:
    """A plain copy on the disk of a store that is a folder."""

    def __init__(self, store: "Store", source: Path, fetched: Path):
        store.root.mkdir(parents=True, exist_ok=True)
        self._there = Path(tempfile.mkdtemp(dir=store.root, prefix=".plain-"))
        self._source, self._fetched = source, fetched

    def store(self) -> None:
        shutil.copytree(self._source, self._there, dirs_exist_ok=True)

    def fetch(self) -> None:
        shutil.copytree(self._there, self._fetched)

    def clean(self) -> None:
        shutil.rmtree(self._there)


class _Transfer:
    """boto3's own transfer to and from the bucket, with as many threads and parts as the store uses."""

    def __init__(self, store: "Store", source: Path, fetched: Path):
        self._store, self._fetched = store, fetched
        self._paths = sorted(source.iterdir())

    def store(self) -> None:
        self._transfer(lambda manager, path: manager.upload(str(path), self._store.bucket, _key(path)))

    def fetch(self) -> None:
        self._fetched.mkdir()
        self._transfer(
            lambda manager, path: manager.download(self._store.bucket, _key(path), str(self._fetched / path.name))
        )

    def _transfer(self, start: Callable) -> None:
        from infra.store.s3_errors import named

        with named(self._store.url, "a plain transfer"):
            self._store.transfer(start, self._paths)

    def clean(self) -> None:
        for path in self._paths:
            self._store.client.delete_object(Bucket=self._store.bucket, Key=_key(path))


def _plain(store: "Store", source: Path, fetched: Path) -> _Copy | _Transfer:
    return (_Transfer if store.url.startswith("s3:") else _Copy)(store, source, fetched)


def _key(path: Path) -> str:
    return f"measured/plain/{path.name}"


def _timed(do: Callable[[], object]) -> float:
    os.sync()  # what others wrote is on the disk: nobody waits for it in our time
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _require_disk(nbytes: int, folder: Path) -> None:
    need, free = COPIES * nbytes, shutil.disk_usage(folder).free
    if need > free:
        raise MeasureError(
            f"artifacts of {nbytes / GB:.1f} GB take about {need / GB:.1f} GB while they are measured, {free / GB:.1f} "
            f"GB are free in {folder.parent}: measure smaller --sizes or fewer --files"
        )


def _line(way: str, mib: int, nbytes: int, ours: Sequence[float], plain: Sequence[float]) -> dict:
    seconds, plainly = statistics.median(ours), statistics.median(plain)
    return {
        "way": way,
        "file, MiB": mib,
        "GB": nbytes / GB,
        "seconds": seconds,
        "GB/s": nbytes / GB / seconds,
        "plain, GB/s": nbytes / GB / plainly,
        "share of plain": plainly / seconds,
    }


def _rows(scheme: str, way: str, mib: int, nbytes: int, ours: Sequence[float], plain: Sequence[float]) -> list[dict]:
    from tasks.evaluate import evidence

    about = {"n": len(ours), "domain": f"{scheme}/{mib} MiB", "subject": f"store:{scheme}"}
    speeds, plainly = ([nbytes / GB / s for s in seconds] for seconds in (ours, plain))
    return [
        evidence.row(
            f"store_{way}_gb_per_s",
            statistics.median(speeds),
            low=min(speeds),
            high=max(speeds),
            unit="GB/s",
            **about,
        ),
        evidence.row(f"store_{way}_plain_gb_per_s", statistics.median(plainly), unit="GB/s", **about),
        evidence.row(
            f"store_{way}_share_of_plain", statistics.median(plain) / statistics.median(ours), unit="share", **about
        ),
    ]


def _findings(table: list[dict]) -> list[str]:
    words = {"store": "Storing", "fetch": "Fetching"}
    return [
        f"{words[line['way']]} {line['GB']:.3g} GB in files of {line['file, MiB']} MiB: {line['GB/s']:.3g} GB/s with "
        f"every byte hashed, {line['share of plain']:.0%} of the plain transfer's {line['plain, GB/s']:.3g} GB/s."
        for line in table
    ]


def _pictures(table: list[dict]) -> list[Picture]:
    def curve(name: str, way: str, column: str) -> Line:
        return Line(name, [(line["file, MiB"], line[column]) for line in table if line["way"] == way])

    return [
        Picture(
            title,
            "MiB a file",
            "GB/s",
            [curve("with hashes", way, "GB/s"), curve("plain transfer", way, "plain, GB/s")],
            log_x=True,
        )
        for way, title in (("store", "Into the store"), ("fetch", "Out of the store"))
    ]


MEASUREMENT = StoreMeasurement()
