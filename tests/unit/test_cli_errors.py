"""What the command line says of what the user can mend: one line, the right exit code, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

LOCKSTEP = Path(sys.executable).with_name("lockstep")


@pytest.fixture
def lockstep(tmp_path, monkeypatch):
    """`lockstep(*arguments)` in a home where nothing has run."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        return subprocess.run([LOCKSTEP, *arguments], capture_output=True, text=True)

    return call


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["rl", "--set", "rl.learning_rate=1"], 2, "unknown key rl.learning_rate: did you mean rl.lr?"),
        (["rl", "--preset", "smoll"], 2, "preset 'smoll' is not known: use h200 or smol or tiny"),
        (["rl", "--config", "none.toml"], 2, "none.toml: cannot be read"),
        (["rl", "--set", "target.source=."], 2, "has no config.json: it is not a model"),
        (["rl", "--set", "target.source=nowhere"], 2, "nowhere is not a folder"),
        (["loop", "--preset", "tiny"], 1, "no services are running: start them with `lockstep up`"),
        (["loop", "--preset", "tiny", "--local"], 1, "no services are running: start them with `lockstep up`"),
        (["report"], 1, "no loop has finished here yet: `lockstep loop` runs one"),
        (["report", "loop-1"], 1, "there is no run loop-1 here"),
        (["rollback"], 1, "nothing has run here yet: name the target"),
        (["lineage"], 1, "nothing has run here yet: name the target"),
        (["serve", "--canary", "smol-release/1"], 2, "--canary belongs to --render"),
    ],
)
def test_one_line_names_the_cause_and_the_cure(lockstep, tmp_path, arguments, code, said):
    done = lockstep(*arguments)
    (line,) = done.stderr.splitlines()
    assert line.startswith("lockstep: ")
    assert said in line
    assert done.returncode == code
    assert done.stdout == ""
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("arguments", [["train"], ["rl", "--lr", "1"], ["up", "--prefect-port", "x"]])
def test_bad_usage_ends_with_code_2(lockstep, arguments):
    done = lockstep(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_help_lists_the_commands_and_the_exit_codes(lockstep):
    done = lockstep("--help")
    assert done.returncode == 0
    for word in ("up", "down", "loop", "rollback", "Exit codes: 0 done"):
        assert word in done.stdout


def test_a_dry_run_prints_configuration_and_plan_without_services(lockstep):
    done = lockstep("loop", "--preset", "tiny", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "rl.group_size = 4" in done.stdout
    assert "weight sync" in done.stdout


def test_down_without_services_says_so(lockstep):
    done = lockstep("down")
    assert (done.returncode, done.stderr.strip()) == (0, "nothing to stop: no service was started here")
