"""The house holds: imports run one way, and what must be light is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "vllm", "ray", "speculators", "mlflow", "transformers"}
FLOORS = {"flows": {"flows", "tasks", "infra"}, "tasks": {"tasks", "infra"}, "infra": {"infra"}}


def imports(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_from_flows_to_tasks_to_infra(floor):
    upstairs = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in (ROOT / floor).rglob("*.py")
        for module in imports(path)
        if module.split(".")[0] in FLOORS and module.split(".")[0] not in FLOORS[floor]
    }
    assert not upstairs


def test_a_task_room_imports_no_other_room_but_evaluate():
    strangers = set()
    for path in (ROOT / "tasks").rglob("*.py"):
        room = path.relative_to(ROOT / "tasks").parts[0]
        for module in imports(path):
            parts = module.split(".")
            if parts[0] == "tasks" and len(parts) > 1 and parts[1] not in (room, "evaluate"):
                strangers.add(f"{path.relative_to(ROOT)} imports {module}")
    assert not strangers


def loaded_by(code: str) -> set[str]:
    """Heavy packages that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys\nprint(*(sys.modules.keys() & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_the_command_line_imports_nothing_heavy():
    assert not loaded_by(
        "import contextlib, sys\nfrom flows.cli.main import app\nsys.argv = ['lockstep', '--help']\n"
        "with contextlib.suppress(SystemExit):\n    app()\nassert 'prefect' not in sys.modules"
    )


def test_loading_a_configuration_imports_nothing_heavy():
    assert not loaded_by(
        "from infra.config.load import load, presets\nfrom infra.config.flows import LoopConfig\n"
        "[load(LoopConfig, preset=name) for name in presets()]"
    )


def test_deploying_imports_every_flow_and_nothing_heavy():
    modules = [path.stem for path in (ROOT / "flows").glob("*.py") if path.stem != "__init__"]
    assert not loaded_by("\n".join(f"import flows.{module}" for module in modules))


def test_prefect_yaml_deploys_each_flow_under_its_own_name():
    import yaml

    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    from flows.cli.run import FLOWS

    assert all(d["work_pool"] == {"name": "lockstep", "work_queue_name": d["name"]} for d in deployments)
    assert {d["name"]: d["entrypoint"] for d in deployments} == {name: f"flows.{name}.{name}" for name in FLOWS}
    assert not any(schedule["active"] for d in deployments for schedule in d["schedules"])
