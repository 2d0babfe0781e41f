"""Cache keys of durable tasks, and the words in which runs are told."""

import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import BaseModel

from infra.config.flows import LoopConfig
from infra.config.load import load, presets
from infra.services import durations


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    return tmp_path


class Ref(BaseModel):
    name: str
    digest: str


@pytest.fixture
def key():
    """`key(name, **arguments)`: the cache key of a task called so."""
    from infra.services.prefect import _cache_key

    return lambda name="train", *, outlives_edits=False, **arguments: _cache_key(name, outlives_edits, None, arguments)


def test_a_key_is_of_name_arguments_and_source(key, monkeypatch):
    from infra.services import prefect

    ref = Ref(name="a", digest="sha256:1")
    one = key(ref=ref, folder=Path("/a"), sizes={"x": 1, "y": 2.5}, run="r")
    assert one == key(run="r", sizes={"y": 2.5, "x": 1}, folder=Path("/a"), ref=Ref(name="a", digest="sha256:1"))
    changes = [
        key("evaluate", ref=ref, folder=Path("/a"), sizes={"x": 1, "y": 2.5}, run="r"),
        key(ref=Ref(name="a", digest="sha256:2"), folder=Path("/a"), sizes={"x": 1, "y": 2.5}, run="r"),
        key(ref=ref, folder=Path("/b"), sizes={"x": 1, "y": 2.5}, run="r"),
        key(ref=ref, folder=Path("/a"), sizes={"x": 1, "y": float("nan")}, run="r"),
        key(ref=ref, folder=Path("/a"), sizes={"x": 1, "y": 2.5}, run="s"),
    ]
    monkeypatch.setattr(prefect, "source_digest", lambda: "other source")
    changes.append(key(ref=ref, folder=Path("/a"), sizes={"x": 1, "y": 2.5}, run="r"))
    assert len({one, *changes}) == len(changes) + 1


def test_a_choice_that_outlives_edits_is_not_made_again(key, monkeypatch):
    from infra.services import prefect

    before = key("choose", outlives_edits=True, run="r")
    monkeypatch.setattr(prefect, "source_digest", lambda: "other source")
    assert key("choose", outlives_edits=True, run="r") == before
    assert key("choose", outlives_edits=True, run="s") != before


def test_arguments_are_handed_over_as_they_are_and_prefect_looks_at_none_of_their_parts(monkeypatch):
    from prefect import task_engine
    from prefect.utilities.collections import visit_collection
    from prefect.utilities.engine import collect_task_run_inputs_sync, resolve_to_final_result

    from infra.services.prefect import durable

    class Tokens(list):
        looks = 0

        def __iter__(self):
            Tokens.looks += 1
            return super().__iter__()

    given = {}
    monkeypatch.setattr(task_engine, "run_task", lambda parameters, **_: given.update(parameters))
    first, second = Tokens([1, 2]), [{"tokens": Tokens([3])}]
    durable(lambda one, other, more=None: None, name="take")(first, other=second)
    for asked, parameter in ((first, "one"), (second, "other"), (None, "more")):
        assert not collect_task_run_inputs_sync(given[parameter])
        resolved = visit_collection(
            given[parameter], resolve_to_final_result, return_data=True, context={}, remove_annotations=True
        )
        assert resolved is asked
    assert Tokens.looks == 0


def test_an_argument_that_is_not_json_is_named(key):
    with pytest.raises(TypeError, match="task 'train': argument 'model' is not JSON"):
        key(model=object())


def test_the_source_digest_covers_every_file_of_tasks_and_infra(tmp_path, monkeypatch):
    from infra.services import prefect

    monkeypatch.setattr(prefect, "ROOT", tmp_path)
    digests = set()
    for name in ("tasks/a.py", "infra/b/c.py", "flows/d.py", "tasks/readme.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
        digests.add(prefect.source_digest.__wrapped__())
    (tmp_path / "tasks/a.py").write_text("2")
    digests.add(prefect.source_digest.__wrapped__())
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("Flow run encountered an exception: Refused: reward fell", "Refused", "reward fell"),
        ("Flow run encountered an exception: a.b.ModelError: x is\nnot a model", "ModelError", "x is not a model"),
        (
            "Flow run process exited with non-zero status code -9.",
            "",
            "Flow run process exited with non-zero status code -9.",
        ),
    ],
)
def test_the_cause_of_an_end_is_one_line(message, kind, text):
    from prefect.states import Failed

    from infra.services.follow import cause

    assert cause(Failed(message=message)) == (kind, text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (3780, "1 h 03 min")]
)
def test_seconds_as_people_say_them(seconds, text):
    assert durations.words(seconds) == text


def test_the_usual_duration_is_the_median_of_the_last_completed_calls_for_the_target(home):
    task = durations.timed("train policy", lambda fail: 1 / 0 if fail else 0)
    with durations.of_target("a"):
        with pytest.raises(ZeroDivisionError):
            task(True)
        assert durations.usual("train policy", "a") is None
        task(False)
    assert durations.usual("train policy", "a") is not None
    assert durations.usual("train policy", "b") is None
    (home / "durations" / "a" / "train policy").write_text("900\n1\n2\n3\n4\n5\n")
    assert durations.usual("train policy", "a") == 3
    (home / "durations" / "a" / "train policy").write_text("")  # as another process finds it while it is made
    assert durations.usual("train policy", "a") is None


def test_before_a_first_run_the_presets_have_durations_measured_elsewhere(home):
    targets = {load(LoopConfig, preset=preset).target.name for preset in presets()}
    told = {target for target in targets if durations.measured(target)}
    assert told == set(tomllib.loads(durations.MEASURED.read_text())) >= {"smol", "tiny"}
    tasks = _task_names()
    for target in told:
        for task, seconds in durations.measured(target).items():
            assert durations.usual(task, target) == seconds
            assert task == "loop" or task in tasks, f"no task is called {task!r} any more"
    assert durations.usual("look at quant", "smol-h200") is None  # what nobody measured nobody is told


def _task_names() -> set[str]:
    """Of every durable task, as the source has them."""
    found = set()
    for path in (Path(__file__).parents[2] / "tasks").rglob("*.py"):
        found |= set(re.findall(r'@durable\(\s*name="([^"]+)"', path.read_text()))
    return found


def test_the_live_line_says_what_runs_for_how_long_and_how_long_it_takes(capsys):
    from prefect.states import Running

    from flows.cli.screen import Screen
    from infra.services.follow import Line, Snapshot

    screen = Screen()
    now = datetime.now(UTC)
    screen.show(
        Snapshot(
            state=Running(),
            lines=[Line(now, 20, "step 1 of 2"), Line(now, 30, "k3 is high")],
            doing="rl: train the policy",
            task_started=now,
            usual_s=125.0,
        )
    )
    screen.close()
    *lines, live = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["step 1 of 2", "k3 is high"]
    assert re.fullmatch(r"\[\d+ s\] rl: train the policy \(\d+ s, usually 2 min 05 s\)", live)
    screen.show(Snapshot(state=Running(), lines=[Line(now, 20, "late")], doing="failed"))
    assert capsys.readouterr().err == "", "the last line is the command's own"
