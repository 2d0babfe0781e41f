"""What Lockstep keeps in the Prefect server: work pool, deployments, crash detection."""

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from infra.services import environment
from infra.services.home import home
from infra.services.supervise import ServiceError

environment.apply()

from prefect.automations import Automation, EventTrigger, Posture  # noqa: E402  (Prefect reads settings on import)
from prefect.client.orchestration import get_client  # noqa: E402
from prefect.client.schemas.actions import WorkPoolCreate  # noqa: E402
from prefect.client.schemas.objects import StateType  # noqa: E402
from prefect.events.actions import ChangeFlowRunState  # noqa: E402
from prefect.exceptions import ObjectAlreadyExists  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
POOL = "lockstep"
CRASH_AUTOMATION = "lockstep: mark silent runs crashed"
SILENT_S = 90  # three heartbeats


def prepare() -> None:
    """Create the work pool and the automation that marks silent runs crashed, where missing.

    One flow run at a time works on a machine: they would share its devices. The others wait in the queue.
    """
    with get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=1))
        if not client.read_automations_by_name(CRASH_AUTOMATION):
            _crash_automation().create()


def _crash_automation() -> Automation:
    terminal = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    return Automation(
        name=CRASH_AUTOMATION,
        description=f"A run that sent heartbeats and has been silent for {SILENT_S} s has lost its process.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *terminal},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENT_S),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat: its process is gone")],
    )


def deploy(say: Callable[[str], None]) -> None:
    """Register the deployments of prefect.yaml unless this server has them from the same files.

    Raises ServiceError when Prefect refuses one.
    """
    digest, stamp = _digest(), home() / "services" / "deployed"
    if stamp.is_file() and stamp.read_text() == digest and _deployed():
        return
    say("deploying the flows")
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        cwd=ROOT,
        env={**os.environ, **environment.variables()},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ServiceError(f"the flows could not be deployed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    stamp.write_text(digest)


def worker_online(name: str) -> bool:
    """Whether the worker has reported to the server."""
    with get_client(sync_client=True) as client:
        return any(w.name == name and w.status == "ONLINE" for w in client.read_workers_for_work_pool(POOL))


def _deployed() -> bool:
    with get_client(sync_client=True) as client:
        return bool(client.read_deployments(limit=1))


def _digest() -> str:
    digest = hashlib.sha256(os.environ["PREFECT_API_URL"].encode())
    for path in (ROOT / "prefect.yaml", *sorted(ROOT.glob("flows/*.py")), *sorted(ROOT.glob("infra/config/*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
