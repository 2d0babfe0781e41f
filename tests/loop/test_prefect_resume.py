"""Runs on a real Prefect server: followed, killed in both modes, marked crashed, continued with what is finished."""

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from demo_runs import (
    at_the_gate,
    automations,
    below,
    by_id,
    call,
    demo,
    flow_run,
    heartbeats,
    messages,
    paused,
    until,
    web,
)

LOCKSTEP = Path(sys.executable).with_name("lockstep")
LIVES, GONE = "its process lives", "its process is gone"
BLOCK = """
import os
from infra.services.automations import notify
from prefect.blocks.notifications import CustomWebhookNotificationBlock

told = {"about": "{{subject}}", "why": "{{body}}"}
CustomWebhookNotificationBlock(name="ops", url=os.environ["INBOX"], json_data=told).save("ops", overwrite=True)
for name in ("nobody", "ops"):
    os.environ["LOCKSTEP_NOTIFY_BLOCK"] = f"custom-webhook/{name}"
    try:
        print(notify())
    except ValueError as error:
        print(error)
"""
MODES = pytest.mark.parametrize("mode", [[], ["--local"]], ids=["worker", "local"])


@pytest.fixture(scope="module")
def silent(deployed, prefect_api, tmp_path_factory) -> str:
    """A local run that was killed in a home of its own, where no later command settles it; what it had told."""
    folder, elsewhere = tmp_path_factory.mktemp("silent"), tmp_path_factory.mktemp("elsewhere")
    os.mkfifo(folder / "gate")
    victim = demo(deployed | {"LOCKSTEP_HOME": str(elsewhere), "PREFECT_API_URL": prefect_api}, folder, "--local")
    with at_the_gate(folder) as pid:
        until(lambda: heartbeats(prefect_api, folder))
        os.kill(pid, signal.SIGKILL)
        return victim.communicate()[1]


@MODES
def test_a_killed_run_is_marked_crashed_and_continues_with_its_finished_phase(
    silent, deployed, prefect_api, folder, mode
):
    victim = demo(deployed, folder, *mode)
    with at_the_gate(folder) as pid:
        os.kill(pid, signal.SIGKILL)
        _, told = victim.communicate()
    assert victim.returncode == (-signal.SIGKILL if mode else 1)
    assert mode or "continues it" in told.splitlines()[-1]
    about_to_go_on = {"type": "SCHEDULED", "name": "AwaitingRetry"}
    about_to_go_on["state_details"] = {"scheduled_time": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}
    set_state(prefect_api, flow_run(prefect_api, told), about_to_go_on, force=True)
    assert call(deployed, "from infra.services.crashes import settle; print(settle())") == "[]\n"
    # others may report the crash late, but it was not settled
    assert not [said for said in messages(prefect_api, flow_run(prefect_api, told)) if GONE in said]
    set_state(prefect_api, flow_run(prefect_api, told), {"type": "RUNNING"}, force=True)

    again = demo(deployed, folder, *mode)
    out, told_again = again.communicate()
    assert again.returncode == 0, told_again
    assert json.loads(out) == {"what": "first, second", "where": str(folder)}
    assert "make first: cached" in told_again
    assert len((folder / "first.calls").read_text().split()) == 1

    dead = flow_run(prefect_api, told)
    assert dead["state_type"] == "CRASHED"
    assert not {part["state_type"] for part in below(prefect_api, dead)} & {"RUNNING", "PENDING"}
    alive = flow_run(prefect_api, told_again)
    assert alive["state_type"] == "COMPLETED"
    assert "Cached" in {part["state_name"] for part in below(prefect_api, alive)}


def test_what_a_dead_worker_had_taken_and_not_begun_is_begun_by_the_next(deployed, prefect_api, lockstep, tmp_path):
    worker = json.loads((Path(deployed["LOCKSTEP_HOME"]) / "services/worker.json").read_text())
    deployment = web.get(f"{prefect_api}/deployments/name/demo/demo").json()
    taken = {
        "state": {"type": "PENDING", "name": "Submitting"},
        "parameters": {"config": {"target": {"name": "demo"}, "folder": str(tmp_path)}},
    }
    run = web.post(f"{prefect_api}/deployments/{deployment['id']}/create_flow_run", json=taken).json()
    os.kill(worker["pid"], signal.SIGKILL)
    up = lockstep("up")
    assert up.returncode == 0, up.stderr
    until(lambda: by_id(prefect_api, run["id"])["state_type"] == "COMPLETED")


@MODES
def test_an_interrupt_stops_the_run_and_says_how_to_continue(deployed, prefect_api, folder, mode):
    victim = demo(deployed, folder, *mode)
    with at_the_gate(folder):
        victim.send_signal(signal.SIGINT)
        _, told = victim.communicate()
    assert victim.returncode == 1
    assert told.splitlines()[-1].endswith(f"`{' '.join(['lockstep demo', *mode])}` continues it")
    assert "Traceback" not in told
    assert flow_run(prefect_api, told)["state_type"] in ("CANCELLED", "CRASHED")


def test_a_finished_run_starts_anew_and_a_gate_that_refuses_ends_with_code_3(deployed, tmp_path):
    done = demo(deployed, tmp_path, "--local")
    _, told = done.communicate()
    assert done.returncode == 0
    assert "at the gate (1/2)" in told
    (tmp_path / "refuse").touch()
    for _ in range(2):
        refused = demo(deployed, tmp_path, "--local")
        _, told = refused.communicate()
        assert refused.returncode == 3
        assert told.splitlines()[-1] == "acceptance 1.1 is below 1.3"
    keys = (tmp_path / "first.calls").read_text().split()
    assert len(keys) == len(set(keys)) == 3


def test_a_failed_flow_ends_with_one_line_and_can_be_abandoned(deployed, tmp_path):
    (tmp_path / "fail").touch()
    for options in ([], ["--new"]):
        failed = demo(deployed, tmp_path, "--local", *options)
        out, told = failed.communicate()
        assert failed.returncode == 1
        assert told.splitlines()[-1] == "the disk is full: free some"
        assert "Traceback" not in told + out
    assert len(set((tmp_path / "first.calls").read_text().split())) == 2


def test_a_run_killed_while_it_waited_for_a_person_is_retried_in_the_ui_and_asks_again(deployed, prefect_api, tmp_path):
    (tmp_path / "ask").touch()
    victim = demo(deployed, tmp_path)
    until(lambda: paused(prefect_api, tmp_path))
    os.kill(int((tmp_path / "second.pid").read_text()), signal.SIGKILL)
    _, told = victim.communicate()

    def press_retry() -> None:
        """The button, again where a late report of the same crash took it back."""
        if (dead := flow_run(prefect_api, told))["state_type"] == "CRASHED":
            set_state(prefect_api, dead, {"type": "SCHEDULED", "name": "AwaitingRetry"}, force=True)

    until(lambda: flow_run(prefect_api, told)["state_type"] == "CRASHED")
    waiting = until(lambda: paused(prefect_api, tmp_path) or press_retry())
    word = [LOCKSTEP, "approve", waiting["name"], "--name", "Ann", "--reason", "it pays"]
    approved = subprocess.run(word, env=deployed, capture_output=True, text=True)
    assert approved.returncode == 0, approved.stderr
    done = until(lambda: (r := flow_run(prefect_api, told))["state_type"] not in ("PAUSED", "RUNNING") and r)
    assert done["state_type"] == "COMPLETED", done["state"]
    assert (tmp_path / "said").read_text() == "approved by Ann: it pays"
    assert len((tmp_path / "first.calls").read_text().split()) == 1


def test_a_run_in_a_terminal_takes_the_word_that_is_given_in_another(deployed, prefect_api, tmp_path):
    (tmp_path / "ask").touch()
    asking = demo(deployed, tmp_path, "--local")
    waiting = until(lambda: paused(prefect_api, tmp_path))
    word = [LOCKSTEP, "reject", waiting["id"], "--name", "Bob", "--reason", "too slow"]
    rejected = subprocess.run(word, env=deployed, capture_output=True, text=True)
    assert rejected.returncode == 0, rejected.stderr
    _, told = asking.communicate()
    assert asking.returncode == 0, told
    assert (tmp_path / "said").read_text() == "rejected by Bob: too slow"


def test_what_a_person_says_while_the_process_is_gone_counts(deployed, prefect_api, tmp_path):
    (tmp_path / "ask").touch()
    victim = demo(deployed, tmp_path, "--local")
    waiting = until(lambda: paused(prefect_api, tmp_path))
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    word = {"run_input": {"decision": "reject", "name": "Bob", "reason": "too slow"}}
    web.post(f"{prefect_api}/flow_runs/{waiting['id']}/resume", json=word).raise_for_status()
    again = demo(deployed, tmp_path, "--local")
    assert again.communicate()[0]
    assert (tmp_path / "said").read_text() == "rejected by Bob: too slow"
    assert by_id(prefect_api, waiting["id"])["state_type"] == "CRASHED"


def set_state(api: str, run: dict, state: dict, force: bool) -> None:
    """Ask for a state as others than the run's own process do."""
    wanted = {"state": state, "force": force}
    done = web.post(f"{api}/flow_runs/{run['id']}/set_state", json=wanted)
    assert done.json()["status"] == "ACCEPT", done.text


@pytest.fixture
def inbox() -> Iterator[tuple[str, list[dict]]]:
    """An address that somebody listens at, and what was posted there."""
    posted: list[dict] = []

    class Inbox(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Inbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/s3cret-path", posted
        server.shutdown()


def told_of(about: str, posted: list[dict], again: Callable[[], object]) -> None:
    """Until somebody was told. On SQLite, Prefect's server gives an event up that meets writers four times within a
    second: then it has to happen again."""
    for _ in range(8):
        with contextlib.suppress(AssertionError):
            until(lambda: about in {news["about"] for news in posted}, patience_s=30)
            return
        again()
    pytest.fail(f"nobody was told of {about}: {posted}")


def test_a_crash_is_told_to_whom_it_concerns_and_the_run_goes_on_by_itself(deployed, prefect_api, folder, inbox):
    address, posted = inbox
    told = automations(deployed | {"LOCKSTEP_NOTIFY_URL": address}, "resume_crashed(True); print(notify())")
    try:
        victim = demo(deployed, folder)
        with at_the_gate(folder) as pid:
            os.kill(pid, signal.SIGKILL)
        _, said = victim.communicate()  # who follows the run may find it going on again, or crashed
        done = until(lambda: (run := flow_run(prefect_api, said))["state_type"] == "COMPLETED" and run)
        assert done["run_count"] >= 2  # a late report of the crash that is taken back counts too
        assert len((folder / "first.calls").read_text().split()) == 1
        automations(deployed, "resume_crashed(False)")
        told_of(done["name"], posted, lambda: set_state(prefect_api, done, {"type": "CRASHED"}, force=True))
        assert {"prefect.flow-run.Crashed"} == {news["event"] for news in posted if news["about"] == done["name"]}
        logs = Path(deployed["LOCKSTEP_HOME"]) / "logs"
        assert not [path for path in logs.rglob("*.log") if "s3cret-path" in path.read_text(errors="replace")]
        assert told == "the address in LOCKSTEP_NOTIFY_URL\n"
    finally:
        automations(deployed, "resume_crashed(False)")


def test_a_late_report_of_a_crash_is_taken_back_and_a_second_process_leaves_the_run_to_the_first(
    deployed, prefect_api, folder
):
    """One crash is reported by the worker, by the server and by who looks, and the run may have gone on since."""
    follower = demo(deployed, folder)
    with at_the_gate(folder):
        run = until(lambda: running(prefect_api, folder))
        set_state(prefect_api, run, {"type": "CRASHED", "message": "late"}, force=False)
        until(lambda: (now := by_id(prefect_api, run["id"])["state"])["type"] == "RUNNING" and LIVES in now["message"])
        again = [sys.executable, "-m", "prefect", "flow-run", "execute", run["id"]]  # as the worker does
        second = subprocess.run(
            again, env=deployed | {"PREFECT_API_URL": prefect_api}, capture_output=True, text=True, timeout=900
        )
        assert second.returncode == 0, second.stderr
        assert by_id(prefect_api, run["id"])["state_type"] == "RUNNING"
    done = until(lambda: (r := by_id(prefect_api, run["id"]))["state_type"] != "RUNNING" and r)
    assert done["state_type"] == "COMPLETED", done["state"]
    assert len((folder / "first.calls").read_text().split()) == 1
    follower.communicate()


def running(api: str, folder: Path) -> dict | None:
    """The demo in `folder`, while it runs."""
    wanted = {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}, "flows": {"name": {"any_": ["demo"]}}}
    found = web.post(f"{api}/flow_runs/filter", json=wanted).json()
    return next((run for run in found if run["parameters"]["config"]["folder"] == str(folder)), None)


def event_happens(api: str, event: str, about: str) -> None:
    news = {"id": str(uuid4()), "occurred": datetime.now(UTC).isoformat(), "event": event}
    resource = {"prefect.resource.id": about, "prefect.resource.name": about}
    payload = {"reason": "acceptance fell", "lost": 0.4}
    web.post(f"{api}/events", json=[news | {"resource": resource, "payload": payload}]).raise_for_status()


def test_a_notification_block_is_told_in_words_of_a_failure_drift_and_a_refusal_until_nobody_is(
    deployed, prefect_api, tmp_path, inbox
):
    address, posted = inbox
    told = call(deployed | {"INBOX": address}, BLOCK).splitlines()
    assert told == [
        "LOCKSTEP_NOTIFY_BLOCK=custom-webhook/nobody: this Prefect server has no such block, make it there",
        "custom-webhook/ops",
    ]

    (tmp_path / "fail").touch()
    failed = demo(deployed, tmp_path)
    _, said = failed.communicate()
    run = flow_run(prefect_api, said)
    failed = {key: run["state"][key] for key in ("type", "message")}
    told_of(f"{run['name']}: Failed", posted, lambda: set_state(prefect_api, run, failed, force=True))
    for event, about in (("lockstep.drafter.drifted", "d/1"), ("lockstep.release.refused", "r/1")):
        happens = partial(event_happens, prefect_api, event, about)
        happens()
        told_of(f"{about}: {event}", posted, happens)
    why = {news["about"]: news["why"] for news in posted}
    assert "the disk is full" in why[f"{run['name']}: Failed"]
    assert why[f"{run['name']}: Failed"].endswith(f"/runs/flow-run/{run['id']}")
    assert why["d/1: lockstep.drafter.drifted"].split("\n")[:2] == ["reason: acceptance fell", "lost: 0.4"]

    call(deployed, "from infra.services.automations import tell_nobody; tell_nobody()")
    left = web.post(f"{prefect_api}/automations/filter", json={}).json()
    assert not [automation["name"] for automation in left if "tell of" in automation["name"]]


def test_a_silent_run_is_marked_crashed_by_the_server_alone(silent, prefect_api):
    crashed = until(lambda: (run := flow_run(prefect_api, silent))["state_type"] == "CRASHED" and run)
    assert "no heartbeat" in crashed["state"]["message"]
