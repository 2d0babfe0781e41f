"""Captured states on disk."""

import pytest
import torch

from tasks.drafter.states import Captured, Sequence, StatesError, StatesWriter, read_index, read_states

LAYERS = [2, 4, 5, 8]


def captured(key: str, tokens: int = 6, hidden: int = 3) -> Captured:
    generator = torch.Generator().manual_seed(len(key) * 100 + tokens)
    sequence = Sequence(
        key=key, domain="d", token_ids=list(range(tokens)), answers=[(2, tokens)], finish_reason="length"
    )
    return Captured(sequence, torch.randn(tokens - 1, len(LAYERS), hidden, generator=generator))


def test_what_is_written_is_read_back_over_shards(tmp_path):
    written = [captured("a" * i, tokens=3 + i) for i in range(1, 6)]
    with StatesWriter(tmp_path, LAYERS, shard_bytes=300) as writer:
        for one in written:
            writer.add(one)
    assert len(read_index(tmp_path)) > 1
    back = list(read_states(tmp_path))
    assert [c.sequence.key for c in back] == [c.sequence.key for c in written]
    for one, other in zip(written, back, strict=True):
        assert torch.equal(one.states, other.states)
        assert one.sequence.token_ids == other.sequence.token_ids


def test_an_interrupted_writer_goes_on_behind_its_last_shard(tmp_path):
    writer = StatesWriter(tmp_path, LAYERS)
    writer.add(captured("a"))
    writer.close_shard()
    writer.add(captured("bb"))  # lost: its shard is never closed
    (tmp_path / "shard-00001.safetensors").write_bytes(b"torn")
    (tmp_path / ".shard-00001.json").write_text("{")
    again = StatesWriter(tmp_path, LAYERS)
    assert again.done == {"a"} and len(list(tmp_path.iterdir())) == 2
    with again:
        again.add(captured("bb"))
    assert [c.sequence.key for c in read_states(tmp_path)] == ["a", "bb"]


def test_a_later_shard_survives_an_earlier_one_that_was_not_finished(tmp_path):
    """Shards are written at once, in any order."""
    with StatesWriter(tmp_path, LAYERS, shard_bytes=1) as writer:
        for key in ("a", "bb", "ccc"):
            writer.add(captured(key))
    (tmp_path / "shard-00000.json").unlink()
    with StatesWriter(tmp_path, LAYERS, shard_bytes=1) as again:
        assert again.done == {"bb", "ccc"}
        again.add(captured("a"))
    assert not (tmp_path / "shard-00000.safetensors").exists()
    assert [c.sequence.key for c in read_states(tmp_path)] == ["bb", "ccc", "a"]


def test_a_shard_that_cannot_be_written_is_told(tmp_path):
    writer = StatesWriter(tmp_path / "states", LAYERS)
    writer.add(captured("a"))
    (tmp_path / "states").rmdir()
    with pytest.raises(FileNotFoundError, match="shard-00000"):
        writer.close_shard()


def test_other_layers_do_not_mix(tmp_path):
    with StatesWriter(tmp_path, LAYERS) as writer:
        writer.add(captured("a"))
    with pytest.raises(StatesError, match="empty the folder"):
        StatesWriter(tmp_path, [1, 2, 3, 8])


def test_a_changed_file_is_not_read(tmp_path):
    with StatesWriter(tmp_path, LAYERS) as writer:
        writer.add(captured("a"))
    (shard,) = tmp_path.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StatesError, match="capture again"):
        list(read_states(tmp_path))


@pytest.mark.parametrize("spoil", [lambda s: s[:-1], lambda s: s[:, :-1]])
def test_states_that_do_not_fit_their_tokens_are_refused(tmp_path, spoil):
    one = captured("a")
    with pytest.raises(StatesError, match="states of a"):
        StatesWriter(tmp_path, LAYERS).add(Captured(one.sequence, spoil(one.states)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_states_that_are_not_finite_are_told_and_not_kept(tmp_path, value):
    writer = StatesWriter(tmp_path, LAYERS)
    spoiled = captured("bb")
    spoiled.states[1, 2, 0] = value
    for one in (captured("a"), spoiled):
        writer.add(one)
    with pytest.raises(StatesError, match="states of bb are not finite"):
        writer.close_shard()
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_says_so(tmp_path):
    with pytest.raises(StatesError, match="no captured states"):
        list(read_states(tmp_path))
