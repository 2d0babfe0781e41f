"""Trainer and rollout engine on two nodes of a Ray cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rl_letters

from infra.cluster.connection import ADDRESS_VARIABLE
from infra.config.flows import RLFlowConfig
from infra.config.rl import JsonlEnvironment, RLConfig
from infra.config.target import ClusterConfig, EngineConfig

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = """
import json, sys
from pathlib import Path
from infra.config.flows import RLFlowConfig
from tasks.rl.run import train_policy

def nodes(step, figures):
    import ray
    groups = ray.util.placement_group_table().values()
    print("nodes", json.dumps([*{node for g in groups if g["state"] == "CREATED" for node in
                                 g["bundles_to_node_id"].values()}]))

result = train_policy(
    Path(sys.argv[1]), RLFlowConfig.model_validate_json(sys.argv[2]), Path(sys.argv[3]), on_step=nodes
)
print("placement", result.placement)
"""


@pytest.fixture
def cluster():
    """Two nodes of one CPU each; its address."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    yield nodes.address
    nodes.shutdown()


def test_trainer_and_engine_work_on_nodes_of_their_own(cluster, tmp_path):
    prompts = rl_letters.write_prompts(tmp_path / "prompts.jsonl")
    config = RLFlowConfig(
        engine=EngineConfig(cpu_threads=1, kv_cache_gib=0.1, max_model_len=32, max_batched_tokens=512),
        cluster=ClusterConfig(placement="disaggregated", trainer_threads=1),
        rl=RLConfig(
            environments=[JsonlEnvironment(label="letters", path=str(prompts), scorer="rl_letters:next_letter")],
            general_questions=[],
            scorer_processes=1,
            steps=1,
            max_new_tokens=1,
            eval_prompts=4,
        ),
    )
    model = rl_letters.write_model(tmp_path / "model")
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), config.model_dump_json(), str(tmp_path / "run")],
        env=os.environ | {ADDRESS_VARIABLE: cluster, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    (tmp_path / "run").mkdir(exist_ok=True)
    assert told.returncode == 0, told.stderr[-3000:]
    lines = dict(line.split(" ", 1) for line in told.stdout.splitlines() if line.startswith(("nodes ", "placement ")))
    assert len(json.loads(lines["nodes"])) == 2
    assert lines["placement"] == "disaggregated"
