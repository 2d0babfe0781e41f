"""Captured states on disk."""

import fcntl
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
from captured_states import add, engine_file

from tasks.drafter.states import Captured, Sequence, StatesError, read_index, read_states
from tasks.drafter.states_writer import StatesWriter

LAYERS = [2, 4, 5, 8]


def captured(key: str, tokens: int = 6, hidden: int = 3, dtype=torch.float32) -> Captured:
    generator = torch.Generator().manual_seed(len(key) * 100 + tokens)
    sequence = Sequence(
        key=key, domain="d", token_ids=list(range(tokens)), answers=[(2, tokens)], finish_reason="length"
    )
    return Captured(sequence, torch.randn(tokens - 1, len(LAYERS), hidden, generator=generator).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_read_back_over_shards(tmp_path, dtype):
    written = [captured("a" * i, tokens=3 + i, dtype=dtype) for i in range(1, 6)]
    with StatesWriter(tmp_path, LAYERS, shard_bytes=300) as writer:
        files = [add(writer, one) for one in written]
    assert len(read_index(tmp_path)) > 1
    back = list(read_states(tmp_path))
    assert [c.sequence.key for c in back] == [c.sequence.key for c in written]
    for one, other in zip(written, back, strict=True):
        assert torch.equal(one.states, other.states)
        assert one.sequence.token_ids == other.sequence.token_ids
    assert not any(file.exists() for file in files), "the engine's files are gone"


def test_states_of_the_last_token_are_left_out(tmp_path):
    """An engine that goes on behind an answer captures it too."""
    one = captured("a")
    more = Captured(one.sequence, torch.cat([one.states, torch.full_like(one.states[:1], torch.nan)]))
    with StatesWriter(tmp_path, LAYERS) as writer:
        add(writer, more)
    assert torch.equal(next(read_states(tmp_path)).states, one.states)


def test_sequences_larger_than_what_is_read_at_once(tmp_path):
    written = [captured("a", tokens=700, hidden=500), captured("bb", tokens=132, hidden=500)]
    with StatesWriter(tmp_path, LAYERS) as writer:
        for one in written:
            add(writer, one)
    for one, other in zip(written, read_states(tmp_path), strict=True):
        assert torch.equal(one.states, other.states)


def test_an_interrupted_writer_goes_on_behind_its_last_shard(tmp_path):
    with StatesWriter(tmp_path, LAYERS) as writer:
        add(writer, captured("a"))
    (tmp_path / "shard-00001.safetensors").write_bytes(b"torn")
    (tmp_path / ".shard-00001.json").write_text("{")
    again = StatesWriter(tmp_path, LAYERS)
    assert again.done == {"a"} and len(list(tmp_path.iterdir())) == 2
    with again:
        add(again, captured("bb"))
    assert [c.sequence.key for c in read_states(tmp_path)] == ["a", "bb"]


def test_a_later_shard_survives_an_earlier_one_that_was_not_finished(tmp_path):
    """Shards are written at once, in any order."""
    with StatesWriter(tmp_path, LAYERS, shard_bytes=1) as writer:
        for key in ("a", "bb", "ccc"):
            add(writer, captured(key))
    (tmp_path / "shard-00000.json").unlink()
    with StatesWriter(tmp_path, LAYERS, shard_bytes=1) as again:
        assert again.done == {"bb", "ccc"}
        add(again, captured("a"))
    assert not (tmp_path / "shard-00000.safetensors").exists()
    assert [c.sequence.key for c in read_states(tmp_path)] == ["bb", "ccc", "a"]


def test_a_shard_that_cannot_be_written_is_told(tmp_path):
    with (
        pytest.raises(StatesError, match="No such file or directory: .*shard-00000"),
        StatesWriter(tmp_path / "states", LAYERS) as writer,
    ):
        add(writer, captured("a"))
        (tmp_path / "states").rmdir()


def test_other_layers_do_not_mix(tmp_path):
    with StatesWriter(tmp_path, LAYERS) as writer:
        add(writer, captured("a"))
    with pytest.raises(StatesError, match="empty the folder"):
        StatesWriter(tmp_path, [1, 2, 3, 8])


def test_a_changed_file_is_not_read(tmp_path):
    with StatesWriter(tmp_path, LAYERS) as writer:
        add(writer, captured("a"))
    (shard,) = tmp_path.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StatesError, match="capture again"):
        list(read_states(tmp_path))


@pytest.mark.parametrize("spoil", [lambda states: states[:-1], lambda states: states[:, :-1]])
def test_states_that_do_not_fit_their_tokens_are_told_and_the_others_kept(tmp_path, spoil):
    bad = captured("bb")
    with pytest.raises(StatesError, match="states of bb have shape"), StatesWriter(tmp_path, LAYERS) as writer:
        for one in (captured("a"), Captured(bad.sequence, spoil(bad.states)), captured("ccc")):
            add(writer, one)
    assert [c.sequence.key for c in read_states(tmp_path)] == ["a", "ccc"]


@pytest.mark.parametrize("damage", ["another request's", "no file", "empty", "cut in its head"])
def test_an_engines_file_that_is_not_the_right_one_is_told_and_the_others_kept(tmp_path, damage):
    one, other = captured("bb"), captured("dddd", tokens=9)
    file = engine_file(other if damage == "another request's" else one)
    if damage == "no file":
        file.unlink()
    elif damage != "another request's":
        file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:40])
    told = {"another request's": "belongs to another request", "no file": "the engine did not write"}
    with pytest.raises(StatesError, match=told.get(damage, "is not whole")), StatesWriter(tmp_path, LAYERS) as writer:
        add(writer, captured("a"))
        writer.add(one.sequence, file, 1)
    assert [c.sequence.key for c in read_states(tmp_path)] == ["a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_states_that_are_not_finite_are_told_and_not_kept(tmp_path, value, dtype):
    bad = captured("bb", dtype=dtype)
    bad.states[1, 2, 0] = value
    with pytest.raises(StatesError, match="states of bb are not finite"), StatesWriter(tmp_path, LAYERS) as writer:
        for one in (captured("a", dtype=dtype), bad):
            add(writer, one)
    assert not list(tmp_path.iterdir())


def test_shards_behind_one_that_is_refused_are_kept(tmp_path):
    bad, held = captured("bb"), engine_file(captured("a"))
    bad.states[0] = torch.nan
    lock = held.with_name(f"{held.name}.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # the engine is still writing this one
    threading.Timer(2, lock.close).start()
    with (
        pytest.raises(StatesError, match="not finite"),
        StatesWriter(tmp_path, LAYERS, shard_bytes=1) as writer,
    ):
        add(writer, bad)
        writer.add(captured("a").sequence, held, 1)
    assert [c.sequence.key for c in read_states(tmp_path)] == ["a"]


def test_a_file_that_ends_too_early_is_told_and_not_kept(tmp_path):
    one = captured("bb")
    file = engine_file(one)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(StatesError, match="cut short"), StatesWriter(tmp_path, LAYERS) as writer:
        writer.add(one.sequence, file, 1)
    assert not list(tmp_path.iterdir())


def test_what_has_failed_is_told_to_whoever_checks_and_the_rest_is_kept(tmp_path):
    with StatesWriter(tmp_path, LAYERS, shard_bytes=1) as writer:
        writer.check()
        bad = captured("bb")
        bad.states[0] = torch.inf
        add(writer, bad)
        while writer.unwritten:
            time.sleep(0.01)
        add(writer, captured("a"))
        with pytest.raises(StatesError, match="not finite"):
            writer.check()
    assert [c.sequence.key for c in read_states(tmp_path)] == ["a"]


def test_a_writer_whose_process_dies_says_so(tmp_path):
    with (
        pytest.raises(StatesError, match="the process that writes shards has died"),
        StatesWriter(tmp_path, LAYERS, shard_bytes=1) as writer,
    ):
        add(writer, captured("a"))
        writer.wait()
        (child,) = (c for c in psutil.Process().children() if "tasks.drafter.shard_process" in c.cmdline())
        child.kill()
        child.wait()
        add(writer, captured("bb"))
    assert [c.sequence.key for c in read_states(tmp_path)] == ["a"]


def test_no_process_is_left_of_a_writer_that_is_killed(tmp_path):
    held = tmp_path / "held.safetensors"
    script = f"""
        import fcntl, sys, time
        from pathlib import Path
        from tasks.drafter.states import Sequence
        from tasks.drafter.states_writer import StatesWriter
        lock = open({f"{held}.lock"!r}, "w")
        fcntl.flock(lock, fcntl.LOCK_EX)  # as an engine that has not written the file yet
        writer = StatesWriter(Path({str(tmp_path / "states")!r}), {LAYERS}, shard_bytes=1).__enter__()
        one = Sequence(key="a", domain="d", token_ids=[1, 2], answers=[(1, 2)], finish_reason="length")
        writer.add(one, Path({str(held)!r}), 1)
        print("written", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"written\n"
        (child,) = psutil.Process(process.pid).children()
        process.kill()
    child.wait(timeout=20)
    assert not list((tmp_path / "states").glob("*.json"))


def test_an_empty_folder_says_so(tmp_path):
    with pytest.raises(StatesError, match="no captured states"):
        list(read_states(tmp_path))
