"""The whole loop on tiny models of two families, through a real Prefect server, MLflow, Ray and vLLM."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml
from contents import contents
from demo_runs import web

LOCKSTEP = Path(sys.executable).with_name("lockstep")
PHASES = ["rl", "drafter", "quantize", "release"]
LLAMA = ["--preset", "tiny"]
QWEN3 = ["--preset", "tiny", "--set", "target.name=tiny-qwen3", "--set", "target.source=random:qwen3"]


def ok(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trip(services, lockstep) -> dict:
    """Summary of a loop on the Llama, submitted to the worker."""
    ok(lockstep("loop", *LLAMA, "--set", "quantize.retrain_drafter=true"))
    return json.loads(ok(lockstep("report", "--json")))


def test_every_part_is_made_measured_linked_and_released(trip, lockstep):
    assert list(trip["phases"]) == PHASES
    assert trip["verdict"] == "released"
    versions = trip["versions"]
    assert versions["target"] == versions["parent"] + 1
    assert set(versions["aliases"]) == {"champion"}
    assert all(versions[part] for part in ("drafter", "quant", "release"))
    assert len(trip["mismatch"]["steps"]) == 2
    assert trip["mismatch"]["worst"]["k3"] < 1e-6  # the same float32 arithmetic on both sides
    assert trip["acceptance"]["after"]["all"]["length"] >= 1
    assert trip["acceptance"]["on_quant"]["all"]["n"] > 0
    assert 0 < trip["quant"]["kl"]["all"]["value"] < 0.1
    assert all(gate["verdict"] == "pass" for gate in trip["gates"])
    assert all(answer["question"] for answer in trip["served"])
    assert 0 <= trip["overhead"]["share"] < 1
    assert "no broken link" in ok(lockstep("lineage", "tiny", "--check")).lower()


def test_nothing_of_the_loop_is_lost_when_what_nothing_refers_to_is_deleted(trip, lockstep):
    swept = json.loads(ok(lockstep("gc", "--grace-days", "0", "--delete", "--json")))
    assert {name.split("/")[0] for name in swept["deleted"]} == {"drafter", "hidden-states", "view"}
    assert "no broken link" in ok(lockstep("lineage", "tiny", "--check"))


def test_the_drafter_is_compared_across_quants_as_it_is_and_retrained(trip, lockstep):
    table = json.loads(ok(lockstep("measure", "quants", *LLAMA, "--json")))["table"]
    lines = {(line["scheme"], line["domain"]): line for line in table}
    assert {scheme for scheme, _ in lines} == {"base", "W8A8 RTN"}
    assert {domain for _, domain in lines} == {"chat", "maths", "all"}
    base, quant = lines["base", "all"], lines["W8A8 RTN", "all"]
    assert base["kept"] == pytest.approx(trip["acceptance"]["after"]["all"]["length"]) and base["retrained"] is None
    assert quant["kept"] == pytest.approx(trip["acceptance"]["on_quant"]["all"]["length"])
    assert quant["retrained"] >= 1 and len(quant["retrained by position"].split()) == 3


def test_no_secret_of_the_environment_is_kept_anywhere_and_none_becomes_a_setting(trip, services, lockstep, planted):
    """Environment of services, worker and flow; then settings, the store's address, and MLflow's."""
    home = Path(services["LOCKSTEP_HOME"])
    said = []
    for settings, environment in (
        (["--set", f'engine.extra_flags=["--api-key={planted}"]'], {}),
        ([], {"LOCKSTEP_STORE": f"s3://id:{planted}@bucket/prefix"}),
    ):
        command = [LOCKSTEP, "rl", *LLAMA, "--new", "--local", *settings]
        said.append(subprocess.run(command, env=services | environment, capture_output=True, text=True))
        assert said[-1].returncode in (1, 2), said[-1].stderr
    books = json.loads((home / "services/mlflow.json").read_text())["address"]
    ours = {"MLFLOW_TRACKING_URI": books.replace("://", f"://ann:{planted}@")}
    said.append(subprocess.run([LOCKSTEP, "review", "--local"], env=services | ours, capture_output=True, text=True))
    assert said[-1].returncode == 0, said[-1].stderr
    said += [lockstep(*command) for command in (["status"], ["doctor"], ["report"], ["lineage", "tiny"])]
    assert not [done.args for done in said if planted in done.stdout + done.stderr]

    files = {path: planted.encode() in content for path, content in contents(home)}
    parts = {path.relative_to(home).parts[0] for path in files}  # all that is kept, and so all that is looked through
    assert parts >= {"logs", "results", "runs", "prefect", "mlflow", "artifacts"}
    assert not [path for path, found in files.items() if found]
    packed = [path for path in files if path.suffix == ".parquet"]
    assert packed and not [path for path in packed if planted in pd.read_parquet(path).to_csv()]


def test_people_find_the_loop_in_prefect_and_mlflow(trip, services, prefect_api):
    wanted = {"flow_runs": {"name": {"any_": [_flow_run(prefect_api, trip)["name"]]}}}
    keys = ["loop", "report", "rl-steps", "gates", "quant"]  # by name: the server lists 200 artifacts at most
    kept = web.post(f"{prefect_api}/artifacts/latest/filter", json={"artifacts": {"key": {"any_": keys}}}).json()
    assert {artifact["key"] for artifact in kept} == set(keys)
    assert web.post(f"{prefect_api}/flow_runs/filter", json=wanted).json()[0]["state_type"] == "COMPLETED"
    mlflow, run_id = trip["addresses"]["mlflow"].split("/#/")[0], trip["addresses"]["mlflow"].rsplit("/", 1)[1]
    files = web.get(f"{mlflow}/api/2.0/mlflow/artifacts/list", params={"run_id": run_id, "path": "report"}).json()
    assert {Path(f["path"]).name for f in files["files"]} >= {"index.html", "summary.md", "summary.json"}


def test_status_says_at_a_glance_what_stands_and_what_it_cost(trip, lockstep):
    told = json.loads(ok(lockstep("status", "--name", "tiny", "--json")))
    assert told["champion"]["target"] == told["newest"] == f"tiny/{trip['versions']['target']}"
    assert told["acceptance"] == pytest.approx(trip["acceptance"]["after"]["all"]["length"])
    assert set(told["idle"]) == {"engine", "trainer"}
    assert told["cost"]["device"] == "CPU" and told["cost"]["run"] == trip["run"]
    assert min(told["cost"][figure] for figure in ("seconds", "moved", "kept")) > 0
    assert len(told["gates"]) == len(trip["gates"])
    assert not told["running"]
    lines = ok(lockstep("status", "--name", "tiny")).splitlines()
    assert [word.split("/")[0] for word in lines[0].split()[:2]] == ["champion", "tiny-release"]
    assert any(line.startswith("last cost") and "CPU seconds" in line for line in lines)


def test_the_review_answers_its_questions_from_what_the_loop_measured(trip, services, lockstep, prefect_api):
    told = json.loads(ok(lockstep("review", "--local", "--json")))
    assert told["release"] == f"tiny-release/{trip['versions']['release']}"
    found = {finding["key"]: finding for finding in told["findings"]}
    assert len(found) == 7
    measured = ("weight-sync", "placement", "mismatch")
    assert all(found[key]["verdict"] in ("pass", "fail") for key in measured)  # by the speed of the machine
    assert found["mismatch"]["verdict"] == "pass"
    assert found["rollouts"]["because"] == "no answer was longer than 16 tokens"
    assert found["automation"]["because"].endswith("a person had started it")
    assert {fact["source"].split(":")[0] for fact in found["rollouts"]["facts"]} == {"tiny/2"}
    keys = {"artifacts": {"key": {"any_": ["review", "review-answers", "review-page"]}}}
    assert len(web.post(f"{prefect_api}/artifacts/latest/filter", json=keys).json()) == 3


def test_a_gate_refuses_with_exit_code_3_and_says_which_figure_fell_short(trip, lockstep):
    gate = '[{name="k3 below zero", part="target", figure="mismatch_k3_max", comparison="<", bound=-1.0}]'
    refused = lockstep("release", *LLAMA, "--set", f"release.gates={gate}", "--local")
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "mismatch_k3_max" in refused.stdout + refused.stderr
    aliases = json.loads(ok(lockstep("lineage", "tiny", "--json")))["aliases"]
    assert aliases["champion"] == f"tiny-release/{trip['versions']['release']}"


def test_a_copy_that_cannot_be_made_is_told_before_anything_is_trained(trip, lockstep):
    refused = lockstep("loop", *LLAMA, "--set", "quantize.scheme=NVFP4", "--local")
    assert refused.returncode == 1
    assert "quantize.scheme=NVFP4 needs scales of activations" in refused.stderr.splitlines()[-1]
    assert "step 1 of 2" not in refused.stderr


def test_a_fleet_serves_the_champion_and_a_release_takes_over_in_it(trip, services, lockstep):
    quick = [*LLAMA, "--set", "release.fleet.hold_s=0", "--set", "release.fleet.probes=3"]
    champion = f"tiny-release/{trip['versions']['release']}"
    address, served = ok(lockstep("serve", *quick)).split("/v1 ")
    assert served.startswith(f"serves {champion} as model tiny")
    released = json.loads(ok(lockstep("release", *quick, "--local", "--json")))
    assert released["address"] == address and released["release"] != champion
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}
    answer = web.post(f"{address}/v1/completions", json=asked)
    parts = [released[part] for part in ("target", "drafter", "quant") if released[part]]
    assert answer.status_code == 200 and answer.headers["x-lockstep-serves"].split() == parts
    serving = json.loads(ok(lockstep("status", "--json")))["serving"]
    assert serving["stable"].split() == parts and (serving["cut"], serving["failed"]) == (0, 0)
    assert "the same verdict as then" in ok(lockstep("rejudge", released["release"]))
    rendered = ok(lockstep("serve", *quick, "--render", "kubernetes", "--canary", champion, "--share", "20"))
    *pods, route = yaml.safe_load_all(rendered)
    assert [document["kind"] for document in pods] == ["Deployment", "Service"] * 2
    weights = {b["name"]: b["weight"] for b in route["spec"]["rules"][-1]["backendRefs"]}
    assert weights == {released["release"].replace("/", "-"): 80, champion.replace("/", "-"): 20}
    back = json.loads(ok(lockstep("rollback", "--name", "tiny", "--json")))
    assert back == {"champion": champion, "before": released["release"]}
    assert web.post(f"{address}/v1/completions", json=asked).status_code == 200
    assert "the fleet has ended" in lockstep("serve", "--stop").stderr


@pytest.mark.timeout(1200)
def test_a_loop_killed_again_and_again_continues_and_no_dead_run_stays_running(services, lockstep, prefect_api):
    """A Qwen3 with an untied head, the second family: killed three times, it ends as if never."""
    marks = ("step 2 of 2", "training: loss", "quantizing to W8A8")
    for mark in marks:
        process = subprocess.Popen(
            [LOCKSTEP, "loop", *QWEN3, "--local"],
            env=services,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in process.stdout:
            if mark in line:
                break
        else:
            pytest.fail(f"the loop ended before it said {mark!r}")
        children = [c for c in psutil.Process(process.pid).children(recursive=True) if not left_to_ray(c)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=600)
        assert not alive, f"left behind after a kill at {mark!r}: {alive}"
    told = ok(lockstep("loop", *QWEN3, "--local"))
    summary = json.loads(ok(lockstep("report", "--json")))
    assert summary["verdict"] == "released", told
    # the third kill came in the third phase, or just after it
    assert [p for p in PHASES if summary["phases"][p]["cached"]] in (PHASES[:2], PHASES[:3])
    assert summary["versions"]["target"] == 2  # each kill continued the same trip: nothing was registered twice
    wanted = {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    running = web.post(f"{prefect_api}/flow_runs/filter", json=wanted).json()
    assert not [run for run in running if "tiny-qwen3" in json.dumps(run["parameters"])]


def test_flows_of_one_target_at_once_leave_the_books_whole(services, lockstep):
    """By the worker and in a terminal, of a target that is not registered yet."""
    traffic = '[{domain="chat", source="writing", prompts=4}]'
    settings = ["target.name=twin", "drafter.kind=ngram", f"drafter.traffic={traffic}", "drafter.max_new_tokens=8"]
    command = [LOCKSTEP, "drafter", *LLAMA, *(f"--set={setting}" for setting in settings), "--json"]
    pipe = subprocess.PIPE
    at_once = [
        subprocess.Popen([*command, *way], env=services, stdout=pipe, stderr=pipe, text=True)
        for way in ([], ["--local"])
    ]
    told = [process.communicate() for process in at_once]
    assert [process.returncode for process in at_once] == [0, 0], told
    outcomes = [json.loads(out) for out, _ in told]
    assert [outcome["target"] for outcome in outcomes] == ["twin/1", "twin/1"], outcomes
    made = {outcome["drafter"] for outcome in outcomes}
    assert "no broken link" in ok(lockstep("lineage", "twin", "--check"))
    (target,) = json.loads(ok(lockstep("lineage", "twin", "--json")))["targets"]
    assert {f"twin-drafter/{drafter['version']}" for drafter in target["drafters"]} == made


def left_to_ray(process: psutil.Process) -> bool:
    """Ray's own helpers: they end by themselves once they have given up on reaching their server, after a minute."""
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # ended just now
        return True
    helpers = ("DashboardAgent", "RuntimeEnvAgent", "dashboard/agent.py", "runtime_env/agent")
    return any(name in command for name in helpers)


def _flow_run(api: str, trip: dict) -> dict:
    return web.get(f"{api}/flow_runs/{trip['addresses']['prefect'].rsplit('/', 1)[1]}").json()
