"""What Lockstep keeps in the Prefect server: work pool, deployments, crash detection."""

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from infra.engine.pin import gpus
from infra.services import environment
from infra.services.home import home
from infra.services.standing import Standing
from infra.services.supervise import ServiceError

environment.apply()

from prefect.client.orchestration import get_client  # noqa: E402  (Prefect reads its settings on import)
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate  # noqa: E402
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError  # noqa: E402

from infra.services import automations, pools  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
POOL = "lockstep"
AUTOMATED = "LOCKSTEP_AUTOMATED"  # in prefect.yaml: the target whose events start runs


def prepare() -> None:
    """Create the work pool with a queue for each flow, the limits that guard GPUs, and the automation for silent runs,
    where missing.

    One flow run at a time works on a machine: they would share its devices. The others wait in their queues.
    """
    with get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=1))
        for queue in _queues():
            with contextlib.suppress(ObjectAlreadyExists):
                client.create_work_queue(name=queue, work_pool_name=POOL, concurrency_limit=1)
        pools.guard(client, gpus())
    automations.mark_silent()


def deploy(say: Callable[[str], None]) -> None:
    """Register the deployments of prefect.yaml unless this server has them from the same files.

    What runs by itself is as `lockstep automate` was told last.
    Raises ServiceError when Prefect refuses one.
    """
    digest, stamp = _digest(), home() / "services" / "deployed"
    if stamp.is_file() and stamp.read_text() == digest and _deployed():
        return
    say("deploying the flows")
    standing = Standing.read()
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        cwd=ROOT,
        env={**os.environ, **environment.variables(), AUTOMATED: standing.target if standing else ""},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ServiceError(f"the flows could not be deployed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    if standing:
        _stand(standing)
    automations.resume_crashed(bool(standing and standing.resume))
    stamp.write_text(digest)


def _stand(standing: Standing) -> None:
    """Give the deployments the settings that scheduled and triggered runs use, and switch schedules on.

    Raises ServiceError when they were given to code that knew other settings.
    """
    with get_client(sync_client=True) as client:
        for flow, config in standing.configs.items():
            deployment = client.read_deployment_by_name(f"{flow}/{flow}")
            wanted = DeploymentUpdate(
                parameters={"config": config}, job_variables={"working_dir": str(standing.folder)}
            )
            try:
                client.update_deployment(deployment.id, wanted)
            except PrefectHTTPStatusError as error:
                said = " ".join(error.response.text.split())[:200]
                raise ServiceError(
                    f"the settings that `lockstep automate` was given do not fit the flow {flow} any more ({said}): "
                    f"give that command again, or `lockstep automate --off`"
                ) from None
            for schedule in client.read_deployment_schedules(deployment.id):
                active = f"{flow}/{schedule.slug}" in standing.schedules
                client.update_deployment_schedule(deployment.id, schedule.id, active=active)


def worker_online(name: str) -> bool:
    """Whether the worker has reported to the server."""
    with get_client(sync_client=True) as client:
        return any(w.name == name and w.status == "ONLINE" for w in client.read_workers_for_work_pool(POOL))


def _queues() -> list[str]:
    import yaml

    return [
        d["work_pool"]["work_queue_name"] for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    ]


def _deployed() -> bool:
    with get_client(sync_client=True) as client:
        return bool(client.read_deployments(limit=1))


def _digest() -> str:
    digest = hashlib.sha256(os.environ["PREFECT_API_URL"].encode())
    for path in (ROOT / "prefect.yaml", *sorted(ROOT.glob("flows/*.py")), *sorted(ROOT.glob("infra/config/*.py"))):
        digest.update(path.read_bytes())
    if Standing.path().is_file():
        digest.update(Standing.path().read_bytes())
    return digest.hexdigest()
