"""Manifests against the published schemas of what takes them, and against what they must and must not say."""

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from infra.config.fleet import FleetConfig
from infra.config.kubernetes import KubernetesConfig
from infra.config.target import EngineConfig
from infra.engine.spec import EngineSpec, Role, Speculation
from infra.serving.client import FleetError
from infra.serving.kubernetes import Side, inference_services, manifests, text
from infra.serving.state import Triple
from infra.store.refs import ArtifactRef

SCHEMAS = json.loads((Path(__file__).parents[1] / "schemas" / "kubernetes.json").read_text())["schemas"]
CONFIG = FleetConfig(replicas=2, kubernetes=KubernetesConfig(hostnames=["smol.example"]))


def triple(*drafter: str) -> Triple:
    """Of a target, and of a drafter where one is named."""
    refs = [ArtifactRef(name=name, digest=f"sha256:{name}", bytes=1) for name in ("quant/aa", *drafter)]
    speculation = Speculation(method="eagle3", model=Path("/here/drafter"), num_speculative_tokens=3)
    engine = EngineConfig(tensor_parallel=2, dtype="bfloat16", start_timeout_s=900)
    spec = EngineSpec(
        model=Path("/here/quant/aa"),
        role=Role.serve,
        served_name="smol",
        label="smol/2 smol-quant/1",
        config=engine,
        speculation=speculation if drafter else None,
        pinned={"/here/quant/aa": "sha256:quant/aa"},
    )
    return Triple(parts={"target": "smol/2"}, artifacts=refs, spec=spec)


ALONE = [Side("smol-release-2", triple(), 100)]
BOTH = [Side("smol-release-2", triple(), 90), Side("smol-release-3", triple("drafter/bb"), 10)]


def documents(make, sides, config=CONFIG) -> dict[tuple[str, str], dict]:
    """By kind and name, as read back from the YAML that users apply, each valid by its published schema."""
    found = list(yaml.safe_load_all(text(make("smol", sides, config))))
    for document in found:
        Draft202012Validator(SCHEMAS[document["kind"]]).validate(document)
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


@pytest.mark.parametrize("sides", [ALONE, BOTH])
def test_the_route_gives_each_side_its_share_and_a_header_chooses(sides):
    found = documents(manifests, sides)
    assert len(found) == 2 * len(sides) + 1
    rules = found["HTTPRoute", "smol"]["spec"]["rules"]
    weights = {backend["name"]: backend["weight"] for backend in rules[-1]["backendRefs"]}
    assert weights == {side.name: side.weight for side in sides} and sum(weights.values()) == 100
    chosen = {rule["matches"][0]["headers"][0]["value"]: rule["backendRefs"][0]["name"] for rule in rules[:-1]}
    assert chosen == dict(zip(("stable", "canary"), weights, strict=False))
    for side in sides:
        service, deployment = found["Service", side.name], found["Deployment", side.name]
        assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
        assert deployment["spec"]["replicas"] == 2


def test_the_pods_load_what_lineage_names_and_no_secret_is_written(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_SERVE_KEY", "the key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the other key")
    found = documents(manifests, BOTH) | documents(inference_services, BOTH)
    assert "the key" not in str(found) and "the other key" not in str(found) and "/here" not in str(found)
    for pod in (
        found["Deployment", "smol-release-3"]["spec"]["template"]["spec"],
        found["LLMInferenceService", "smol-release-3"]["spec"]["template"],
    ):
        (container,) = pod["containers"]
        assert "--model=/store/quant/aa" in container["args"] and "--tensor-parallel-size=2" in container["args"]
        (speculative,) = [a for a in container["args"] if a.startswith("--speculative-config=")]
        assert json.loads(speculative.partition("=")[2])["model"] == "/store/drafter/bb"
        env = {entry["name"]: entry for entry in container["env"]}
        pinned = {"/store/quant/aa": "sha256:quant/aa", "/store/drafter/bb": "sha256:drafter/bb"}
        assert json.loads(env["LOCKSTEP_ENGINE_PINNED"]["value"]) == pinned
        assert env["LOCKSTEP_ENGINE_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "lockstep-serve", "key": "key"}}
        assert env["VLLM_SERVER_DEV_MODE"]["value"] == "0"  # no RL endpoints
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 900
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "lockstep-store", "readOnly": True}


def test_kserve_weighs_the_members_of_one_group_and_fetches_nothing():
    found = documents(inference_services, BOTH)
    routes = [document["spec"]["router"]["route"] for document in found.values()]
    assert [(route["group"], route["weight"]) for route in routes] == [("smol", 90), ("smol", 10)]
    spec = found["LLMInferenceService", "smol-release-2"]["spec"]
    assert spec["model"] == {"name": "smol", "uri": "pvc://lockstep-store/quant/aa"}
    assert spec["storageInitializer"] == {"enabled": False} and spec["template"]["containers"][0]["name"] == "main"


def test_engines_on_cpu_ask_for_cores():
    cpu = FleetConfig(kubernetes=KubernetesConfig(gpu_resource="", image="lockstep:cpu"))
    (container,) = documents(manifests, ALONE, cpu)["Deployment", "smol-release-2"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["resources"]["limits"] == {"memory": "32Gi", "cpu": "2"}
    assert not any("gpu" in argument or "tensor" in argument for argument in container["args"])


def test_the_schemas_refuse_what_they_do_not_know_and_names_are_checked():
    document = documents(manifests, ALONE)["HTTPRoute", "smol"]
    document["spec"]["rules"][-1]["backendRefs"][0]["wieght"] = 1
    assert not Draft202012Validator(SCHEMAS["HTTPRoute"]).is_valid(document)
    with pytest.raises(FleetError, match="Kubernetes takes no object called 'My_Model-release-1'"):
        manifests("My_Model", [Side("My_Model-release-1", triple(), 100)], CONFIG)
