"""What serves a release in Kubernetes, as manifests: the same engines as the local fleet's, checked alike for the
weights that lineage names, behind one route that gives the canary its share.

Nothing here talks to a cluster, and no secret is written: the key is named by its Secret.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infra.config.fleet import FleetConfig
from infra.engine.flags import KEY_VARIABLE, arguments, settings
from infra.engine.spec import EngineSpec
from infra.serving.client import FleetError
from infra.serving.state import SIDE_HEADER, Triple

PORT = 8000
STORE = Path("/store")
EVERY_S = 10
LEAVE_S = 10  # a pod that is to end still gets requests until every proxy has heard of it
NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
Manifest = dict[str, Any]


class Side(NamedTuple):
    """A release and its share of the requests, percent. name: of its objects, such as `smol-release-3`."""

    name: str
    triple: Triple
    weight: int


def manifests(target: str, sides: Sequence[Side], config: FleetConfig) -> list[Manifest]:
    """A Deployment and a Service for each side, and the HTTPRoute of the Gateway API that weighs them.

    target: name of the target, and of the route. A request with the header `x-lockstep-side` goes to that side whatever
    the shares, as in the local fleet. Raises FleetError when Kubernetes takes no such name.
    """
    rendered = [made for side in sides for made in (_deployment(target, side, config), _service(target, side, config))]
    return [*rendered, _route(target, sides, config)]


def inference_services(target: str, sides: Sequence[Side], config: FleetConfig) -> list[Manifest]:
    """An LLMInferenceService of KServe's for each side: KServe makes the rest, and weighs the members of one group.

    The engines read the store's claim themselves, so that KServe's storage initializer has nothing to fetch.
    """
    return [_inference_service(target, side, config) for side in sides]


def text(rendered: Sequence[Manifest]) -> str:
    """The manifests as YAML, for `kubectl apply -f -`."""
    import yaml

    class Plain(yaml.SafeDumper):
        """Without anchors, which people do not read."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump_all(rendered, Dumper=Plain, sort_keys=False, width=1000)


def _deployment(target: str, side: Side, config: FleetConfig) -> Manifest:
    labels = _labels(target, side)
    return _object("apps/v1", "Deployment", side.name, config, labels) | {
        "spec": {
            "replicas": config.replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": labels}, "spec": _pod("engine", side, config)},
        }
    }


def _service(target: str, side: Side, config: FleetConfig) -> Manifest:
    labels = _labels(target, side)
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    return _object("v1", "Service", side.name, config, labels) | {"spec": {"selector": labels, "ports": ports}}


def _route(target: str, sides: Sequence[Side], config: FleetConfig) -> Manifest:
    kubernetes = config.kubernetes
    asked = {"type": "PathPrefix", "value": "/v1"}
    told = [
        {"path": asked, "headers": [{"type": "Exact", "name": SIDE_HEADER, "value": name}]}
        for name in ("stable", "canary")[: len(sides)]
    ]
    forever = {"request": "0s"}  # an answer may stream for as long as it takes
    rules = [
        {"matches": [match], "backendRefs": [{"name": side.name, "port": PORT}], "timeouts": forever}
        for match, side in zip(told, sides, strict=True)
    ]
    weighed = [{"name": side.name, "port": PORT, "weight": side.weight} for side in sides]
    spec: Manifest = {"parentRefs": [{"name": kubernetes.gateway}]}
    if kubernetes.hostnames:
        spec["hostnames"] = kubernetes.hostnames
    spec["rules"] = [*rules, {"matches": [{"path": asked}], "backendRefs": weighed, "timeouts": forever}]
    return _object("gateway.networking.k8s.io/v1", "HTTPRoute", target, config, {}) | {"spec": spec}


def _inference_service(target: str, side: Side, config: FleetConfig) -> Manifest:
    model = side.triple.artifacts[0].name
    return _object("serving.kserve.io/v1alpha2", "LLMInferenceService", side.name, config, _labels(target, side)) | {
        "spec": {
            "model": {"name": target, "uri": f"pvc://{config.kubernetes.claim}/{model}"},
            "storageInitializer": {"enabled": False},
            "replicas": config.replicas,
            "parallelism": {"tensor": side.triple.spec.config.tensor_parallel},
            "router": {"gateway": {}, "route": {"group": target, "weight": side.weight, "http": {}}},
            "template": _pod("main", side, config),
        }
    }


def _object(version: str, kind: str, name: str, config: FleetConfig, labels: dict[str, str]) -> Manifest:
    if not NAME.fullmatch(name):
        raise FleetError(
            f"Kubernetes takes no object called {name!r}, only up to 63 lower-case letters, digits and dashes: release "
            f"a target of another name"
        )
    metadata: Manifest = {"name": name, "namespace": config.kubernetes.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata | ({"labels": labels} if labels else {})}


def _labels(target: str, side: Side) -> dict[str, str]:
    return {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/part-of": target, "lockstep/release": side.name}


def _pod(container: str, side: Side, config: FleetConfig) -> Manifest:
    """A replica; the container is called as the controller expects it."""
    kubernetes, spec = config.kubernetes, _in_pod(side.triple)
    gpus = bool(kubernetes.gpu_resource)
    limits = {"memory": kubernetes.memory}
    if gpus:
        limits[kubernetes.gpu_resource] = str(spec.config.tensor_parallel)
    else:
        limits["cpu"] = str(spec.config.cpu_threads)
    secret = {"secretKeyRef": {"name": kubernetes.secret_name, "key": "key"}}
    env = [{"name": KEY_VARIABLE, "valueFrom": secret}]
    env += [{"name": name, "value": value} for name, value in settings(spec, gpus=gpus).items()]
    health = {"httpGet": {"path": "/health", "port": "http", "scheme": "HTTP"}, "periodSeconds": EVERY_S}
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": int(config.drain_s) + LEAVE_S,
        "containers": [
            {
                "name": container,
                "image": kubernetes.image,
                "command": ["python", "-m", "vllm.entrypoints.openai.api_server"],
                "args": [*arguments(spec, gpus=gpus), f"--port={PORT}", f"--shutdown-timeout={int(config.drain_s)}"],
                "env": env,
                "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
                "startupProbe": health | {"failureThreshold": int(spec.config.start_timeout_s / EVERY_S) + 1},
                "readinessProbe": health | {"failureThreshold": 1},
                "livenessProbe": health | {"failureThreshold": int(config.silent_s / EVERY_S) + 1},
                "lifecycle": {"preStop": {"sleep": {"seconds": LEAVE_S}}},
                "resources": {"limits": limits, "requests": limits},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [
                    {"name": "store", "mountPath": str(STORE), "readOnly": True},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "store", "persistentVolumeClaim": {"claimName": kubernetes.claim, "readOnly": True}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _in_pod(triple: Triple) -> EngineSpec:
    """The engine's spec with the store's folders as the pod sees them."""
    folders = [STORE / artifact.name for artifact in triple.artifacts]
    speculation = triple.spec.speculation
    if speculation and speculation.model:
        speculation = speculation.model_copy(update={"model": folders[1]})
    pinned = {str(folder): artifact.digest for folder, artifact in zip(folders, triple.artifacts, strict=True)}
    update = {"model": folders[0], "speculation": speculation, "pinned": pinned, "host": "0.0.0.0"}
    return triple.spec.model_copy(update=update)
