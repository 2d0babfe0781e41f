"""Every transport, sender and source in one process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist

from infra.transport import delta, store
from infra.transport.base import Published, Reach, SyncError
from infra.transport.checksum import checksum
from infra.transport.group import Meeting
from infra.transport.nccl import NcclSender, NcclSource, _Sending
from infra.transport.shares import joined, own
from infra.transport.store import StoreSender, StoreSource
from infra.transport.transports import TRANSPORTS, make_sender, make_source

CPU = torch.device("cpu")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two matrices, a vector and integers, as models have them."""
    random = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(300, 70, generator=random),
        "b": torch.randn(7, generator=random),
        "c": torch.randn(90, 40, 2, generator=random),
        "ids": torch.arange(11) * 2**33,
    }


def take(source, published: Published) -> dict[str, torch.Tensor]:
    with source.open(Published.model_validate_json(published.model_dump_json())) as fetch:
        return {meta.name: fetch(meta).clone() for meta in published.params}


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> bool:
    return all(torch.equal(got[n], w.to(dtype) if w.is_floating_point() else w) for n, w in wanted.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_arrive_as_they_were_published(transport, dtype, tmp_path):
    source = make_source(transport, CPU)
    with make_sender(transport, dtype, Reach(folder=tmp_path, stall_s=20)) as sender:
        for version in (1, 2, 5):
            wanted = weights(version)
            published = sender.publish(version, wanted.items())
            got = take(source, published)
            assert same(got, wanted, getattr(torch, dtype)) and published.transport == transport
            assert {meta.name: meta.checksum for meta in published.params} == {n: checksum(t) for n, t in got.items()}
        joined = make_source(transport, CPU)
        assert same(take(joined, sender.offer(1)), wanted, getattr(torch, dtype))
        published = sender.publish(6, weights(6).items())
        assert same(take(joined, published), weights(6), getattr(torch, dtype))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_that_are_not_finite_are_refused_by_every_transport(transport, tmp_path):
    bad = weights() | {"b": torch.tensor([1.0, float("nan")])}
    with (
        make_sender(transport, None, Reach(folder=tmp_path)) as sender,
        pytest.raises(SyncError, match="b holds values that are not finite"),
    ):
        sender.publish(1, bad.items())


def test_a_transport_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="transport 'pigeon' is not known: use shm, ipc"):
        make_sender("pigeon", None, Reach())


# store


def nudged(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return old | {"a": old["a"] + torch.eye(*old["a"].shape)}


def test_only_what_changed_is_written_and_a_new_engine_follows_from_the_whole_version(tmp_path):
    early, late = StoreSource(CPU), StoreSource(CPU)
    with StoreSender("bfloat16", Reach(folder=tmp_path)) as sender:
        now = weights()
        take(early, sender.publish(1, now.items()))
        whole = sender.manifest
        for version in (2, 3):
            now = nudged(now)
            published = sender.publish(version, now.items())
            assert sender.manifest.base == version - 1
            assert sum(shard.changed for shard in sender.manifest.shards) <= 70
            assert sender.manifest.bytes < whole.bytes / 20
            assert same(take(early, published), now, torch.bfloat16)
        assert same(take(late, published), now, torch.bfloat16)


def test_a_change_is_found_in_pieces_and_kept_in_few_files(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PIECE_BYTES", 4096)
    monkeypatch.setattr(store, "CHANGE_BYTES", 3 * 4096)
    source, now = StoreSource(CPU), weights()  # 114 KB in float32: 28 pieces and a part of one
    with StoreSender("float32", Reach(folder=tmp_path)) as sender:
        take(source, sender.publish(1, now.items()))
        for version in (2, 3):
            now = nudged(now)
            published = sender.publish(version, now.items())
            shards = sender.manifest.shards
            assert [shard.start for shard in shards] == list(range(0, 3 * 4096 * len(shards), 3 * 4096))
            assert len(shards) > 5 and sum(shard.changed for shard in shards) == 70
            assert same(take(source, published), now, torch.float32)


def test_a_whole_version_follows_after_so_many_changes_and_older_ones_are_removed(tmp_path):
    with StoreSender(None, Reach(folder=tmp_path), whole_every=3) as sender:
        bases = []
        for version in range(1, 8):
            published = sender.publish(version, weights(version).items())
            bases.append(sender.manifest.base)
        assert bases == [None, 1, 2, None, 4, 5, None]
        (folder,) = tmp_path.iterdir()
        assert [place.name for place in folder.iterdir()] == ["version-00000007"]
        assert same(take(StoreSource(CPU), published), weights(7), torch.float32)


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "short", "missing", "manifest"])
def test_a_damaged_change_is_named_and_the_next_version_is_whole(tmp_path, how):
    source, now = StoreSource(CPU), weights()
    with StoreSender(None, Reach(folder=tmp_path)) as sender:
        take(source, sender.publish(1, now.items()))
        now = nudged(now)
        published = sender.publish(2, now.items())
        (shard,) = tmp_path.glob("*/version-00000002/*.safetensors")
        if how == "flipped":
            damage(shard)
        elif how == "short":
            shard.write_bytes(shard.read_bytes()[:-1])
        elif how == "missing":
            shard.unlink()
        else:
            (shard.parent / "manifest.json").write_text("{}")
        told = shard if how != "manifest" else shard.parent / "manifest.json"
        with pytest.raises(SyncError, match=f"{told} (is not what the trainer wrote|cannot be read)"):
            take(source, published)
        now = nudged(now)
        published = sender.publish(3, now.items())
        assert sender.manifest.base is None and same(take(source, published), now, torch.float32)


def test_changes_are_taken_in_their_order(tmp_path):
    source = StoreSource(CPU)
    with StoreSender(None, Reach(folder=tmp_path)) as sender:
        published = [sender.publish(version, weights(version).items()) for version in (1, 2, 3)]
        assert same(take(source, published[2]), weights(3), torch.float32)
        assert same(take(source, published[1]), weights(2), torch.float32)  # back: from the whole version again


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_a_change_gives_the_new_bytes_exactly(width, share):
    random = torch.Generator().manual_seed(width)
    old = torch.randint(0, 256, (8 * 1000,), generator=random, dtype=torch.uint8)
    new = torch.where(torch.rand(old.shape, generator=random) < share, torch.randint_like(old, 256), old)
    tensors, changed = delta.encode(old, new, width)
    assert changed == int((old.view(-1, width) != new.view(-1, width)).any(1).sum())
    delta.apply(old, tensors, width)
    assert torch.equal(old, new)


# nccl

PATIENT = Reach(stall_s=60)
"""Where nothing is meant to stall, however slow the machine."""


def taken_by(sources: list[NcclSource], published: Published) -> list[dict[str, torch.Tensor]]:
    """What each source gets of one broadcast."""
    with ThreadPoolExecutor(len(sources)) as threads:
        return list(threads.map(lambda source: take(source, published), sources))


def test_a_broadcast_reaches_every_engine():
    sources = [NcclSource(CPU), NcclSource(CPU)]
    with NcclSender("float32", PATIENT) as sender:
        for version in (1, 2):
            published = sender.publish(version, weights(version).items(), engines=2)
            assert all(same(got, weights(version), torch.float32) for got in taken_by(sources, published))


def shared_out(senders: list[NcclSender], version: int, tensors: dict[str, torch.Tensor], engines: int) -> Published:
    """What each sender publishes of its share, as one."""
    world = len(senders)
    shares = [s.publish(version, own(tensors.items(), n, world), engines) for n, s in enumerate(senders)]
    assert sorted(meta.name for share in shares for meta in share.params) == sorted(tensors)
    assert all(share.params for share in shares)
    return joined(shares)


def test_every_rank_may_send_its_share_to_every_engine():
    sources = [NcclSource(CPU), NcclSource(CPU)]
    with NcclSender("float32", PATIENT) as first, NcclSender("float32", PATIENT) as second:
        for version in (1, 2):
            published = shared_out([first, second], version, weights(version), engines=2)
            assert all(same(got, weights(version), torch.float32) for got in taken_by(sources, published))
            assert {meta.name: meta.checksum for meta in published.params} == {
                name: checksum(tensor) for name, tensor in weights(version).items()
            }


def test_a_rank_that_sends_nothing_is_named_and_the_next_version_arrives():
    source = NcclSource(CPU)
    with NcclSender("float32", PATIENT) as first, NcclSender("float32", Reach(stall_s=5)) as second:
        take(source, shared_out([first, second], 1, weights(), engines=1))
        published = shared_out([first, second], 2, weights(2), engines=1)
        second._give_up()
        nobody = published.location.replace(f":{second._store.port}/", ":9/").replace("stall_s=5", "stall_s=1")
        lost = published.model_copy(update={"location": nobody})
        with pytest.raises(SyncError, match=":9 does not answer: did the trainer die"):
            take(source, lost)
        assert same(take(source, joined([s.offer(1) for s in (first, second)])), weights(2), torch.float32)


def test_an_engine_that_does_not_come_is_told_to_both_sides_and_the_next_version_arrives():
    source = NcclSource(CPU)
    with NcclSender("float32", Reach(stall_s=3)) as sender:
        published = sender.publish(1, weights().items(), engines=2)
        with pytest.raises(SyncError, match="1 of 2 engines joined the broadcast within 3 s"):
            take(source, published)
        sender.reach = PATIENT
        again = sender.offer(engines=2)
        assert again.location != published.location and again.version == 1  # another group
        second = threading.Thread(target=lambda: take(NcclSource(CPU), again))
        second.start()
        assert same(take(source, again), weights(), torch.float32)
        second.join()


def test_an_engine_that_waits_for_others_lets_go_when_it_is_told():
    source, told = NcclSource(CPU), []
    with NcclSender("float32", PATIENT) as sender:
        published = sender.publish(1, weights().items(), engines=2)

        def wait() -> None:
            with pytest.raises(SyncError, match="given up"):
                take(source, published)
            told.append(True)

        waiting = threading.Thread(target=wait)
        waiting.start()
        names = dist.PrefixStore(urlsplit(published.location).path.strip("/"), sender._store)
        while names.add("members", 0) < 2:  # the trainer and this one
            threading.Event().wait(0.01)
        source.forget()
        waiting.join()
    assert told


def test_a_broadcast_that_does_not_come_back_is_left_alone_and_the_next_version_arrives():
    source, release = NcclSource(CPU), threading.Event()
    with NcclSender("float32", Reach(stall_s=5)) as sender:
        take(source, sender.publish(1, weights().items()))
        sender._sending = stuck = _Sending()  # as where an engine dies while NCCL connects it
        stuck.met.set()
        stuck.thread = threading.Thread(target=release.wait, daemon=True)
        stuck.thread.start()
        assert same(take(source, sender.publish(2, weights(2).items())), weights(2), torch.float32)
        assert stuck.stop.is_set() and stuck.thread.is_alive()
        release.set()


def test_a_sender_that_stalls_is_cut_off():
    with NcclSender("float32", PATIENT) as sender:
        published = sender.publish(1, weights().items())
        take(NcclSource(CPU), published)
        # The same store, another group, and a trainer that joins it and then sends nothing.
        location = published.location.replace("/0?", "/stalled?").replace("stall_s=60", "stall_s=5")
        joined = threading.Thread(target=lambda: held.append(Meeting(location, sender._store).join(CPU, trainer=True)))
        held = []
        joined.start()
        names = dist.PrefixStore(urlsplit(location).path.strip("/"), sender._store)
        while not names.add("members", 0):
            threading.Event().wait(0.01)
        with pytest.raises(SyncError, match="bucket 1 of 2 did not arrive within 5 s: it stalled"):
            take(NcclSource(CPU), published.model_copy(update={"location": location}))
        joined.join()
        assert held


def test_a_trainer_that_is_gone_is_named():
    with NcclSender("float32", PATIENT) as sender:
        published = sender.publish(1, weights().items())
        take(NcclSource(CPU), published)
        gone = published.location.replace(f":{sender._store.port}/", ":9/").replace("stall_s=60", "stall_s=1")
    with pytest.raises(SyncError, match="does not answer: did the trainer die"):
        take(NcclSource(CPU), published.model_copy(update={"location": gone}))


def test_another_version_than_announced_is_refused():
    with NcclSender("float32", PATIENT) as sender:
        published = sender.publish(1, weights().items()).model_copy(update={"version": 9})
        with pytest.raises(SyncError, match="version 9 was announced, but version 1 was broadcast"):
            take(NcclSource(CPU), published)
