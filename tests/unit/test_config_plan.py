"""The plan that is printed before a run."""

import json
import re
from datetime import timedelta

import pytest

from infra.config.flows import LoopConfig, QuantizeFlowConfig, ReleaseFlowConfig, RLFlowConfig
from infra.config.load import load
from infra.config.memory import GIB, Shape, beside_gpus, gpu_bytes, misfit, on_gpu
from infra.config.plan import PlanError, make_plan
from infra.config.reach import out_of_reach
from infra.config.rl import LoRA
from infra.services import runs
from infra.services.durations import measured


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A loop on a model of known sizes: 1000 x 64 and 64 values in one file, 7 in another."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    model.mkdir()
    shape = {"hidden_size": 64, "vocab_size": 1000, "num_hidden_layers": 4}
    (model / "config.json").write_text(json.dumps(shape))
    for name, shapes in (("a", [[1000, 64], [64]]), ("b", [[7]])):
        tensors = {f"t{i}": {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for i, s in enumerate(shapes)}
        header = json.dumps(tensors | {"__metadata__": {"format": "pt"}}).encode()
        (model / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return load(LoopConfig, preset="tiny", overrides=[f"target.source={model}"])


def test_sizes_come_from_the_model_folder(config):
    plan = make_plan("loop", config)
    assert plan.model.parameters == 64071
    assert plan.sync == 4 * 64071
    assert plan.syncs == config.rl.steps
    tokens = sum(s.prompts for s in config.drafter.traffic) * (64 + config.drafter.max_new_tokens)
    assert plan.hidden_states == tokens * 4 * 64 * 4


def test_the_capture_budget_bounds_the_hidden_states(config):
    small = config.model_copy(update={"drafter": config.drafter.model_copy(update={"capture_budget_gib": 1e-6})})
    assert make_plan("loop", small).hidden_states == int(1e-6 * GIB)


def test_the_plan_says_what_hidden_states_take(config):
    drafter = config.drafter.model_copy(update={"stream": True})
    assert ", 1.0 KiB a token, kept" in make_plan("loop", config).as_text(config)
    streamed = config.model_copy(update={"drafter": drafter})
    assert "a token, at once: streamed" in make_plan("loop", streamed).as_text(streamed)
    ngram = config.model_copy(update={"drafter": config.drafter.model_copy(update={"kind": "ngram"})})
    assert make_plan("loop", ngram).hidden_states == 0
    assert "this kind of drafter needs none" in make_plan("loop", ngram).as_text(ngram)


def test_a_flow_without_training_plans_no_sync(config):
    plan = make_plan("quantize", config.narrow(QuantizeFlowConfig))
    assert plan.syncs == 0
    assert plan.memory < make_plan("rl", config.narrow(RLFlowConfig)).memory


def test_memory_and_disk_follow_how_it_is_trained(config):
    def planned(**rl):
        return make_plan("loop", config.model_copy(update={"rl": config.rl.model_copy(update=rl)}))

    plain = planned()
    assert planned(gradient_checkpointing=True).memory == plain.memory - config.rl.micro_batch_tokens * 1000 * 4
    assert planned(kl_coefficient=0.1).memory == plain.memory + 64071 * 4
    adapters = planned(lora=LoRA(rank=1))
    assert adapters.memory < plain.memory and adapters.disk < plain.disk


def test_each_side_of_a_run_is_told(config):
    plan = make_plan("rl", config.narrow(RLFlowConfig))
    assert plan.memory == plan.sides.total(config.cluster.engines)
    text = plan.as_text(config)
    assert "each engine" in text and "trainer  " in text
    assert "trainer  " not in make_plan("release", config.narrow(ReleaseFlowConfig)).as_text(config)


@pytest.mark.parametrize(
    ("fraction", "placement", "gpu_gib", "words"),
    [
        (0.5, "auto", 141, ""),
        (0.2, "auto", 141, "take 29.8 GiB, engine.gpu_memory_fraction=0.2 of a GPU is 28.2 GiB: raise it"),
        (0.6, "colocated", 141, "the trainer takes .* GiB, 56.4 of 141.0 GiB are left for it beside an engine's 84.6"),
        (0.6, "disaggregated", 141, ""),
        (0.6, "disaggregated", 60, "the trainer takes .* GiB, 60.0 of 60.0 GiB are left for it: lower"),
    ],
)
def test_what_does_not_fit_on_a_gpu_is_refused_with_figures(config, fraction, placement, gpu_gib, words):
    engine = config.engine.model_copy(update={"gpu_memory_fraction": fraction, "dtype": "bfloat16"})
    cluster = config.cluster.model_copy(update={"placement": placement})
    wanted = config.model_copy(update={"engine": engine, "cluster": cluster})
    parameters = 8_000_000_000 if "engine.gpu" in words else 4_000_000_000
    found = misfit(
        on_gpu(Shape(parameters=parameters, hidden=4096, vocab=128_000, layers=32), wanted), gpu_gib * GIB, wanted
    )
    assert re.search(words, found) if words else not found
    if words:
        with pytest.raises(PlanError, match="too little GPU memory"):
            make_plan("loop", config).model_copy(update={"misfit": found}).require()


@pytest.mark.parametrize(
    ("transport", "overrides", "words"),
    [
        ("ipc", [], ""),
        ("nccl", ["cluster.engines=2", "cluster.placement=disaggregated"], ""),
        ("ipc", ["cluster.placement=disaggregated"], "one GPU, cluster.placement=disaggregated puts them on several"),
        ("ipc", ["cluster.engines=2", "cluster.trainer_ranks=4"], "cluster.engines=2 and cluster.trainer_ranks=4 puts"),
        ("ipc", ["engine.tensor_parallel=2"], "engine.tensor_parallel=2 puts them on several: set rl.transport=nccl"),
        ("nccl", ["cluster.placement=colocated"], "GPUs of their own, cluster.placement=colocated shares them"),
    ],
)
def test_weights_that_cannot_reach_the_engines_gpus_are_refused(config, transport, overrides, words):
    overrides = [f"target.source={config.target.source}", f"rl.transport={transport}", *overrides]
    wanted = load(LoopConfig, preset="tiny", overrides=overrides)
    found = out_of_reach(wanted)
    assert words in found and bool(found) == bool(words)
    plan = make_plan("loop", wanted)
    assert plan.unreachable == (found if gpu_bytes() else "")  # engines on CPU take ipc as shared memory
    if words:
        with pytest.raises(PlanError, match=f"^rl.transport={transport} needs trainer and engine"):
            plan.model_copy(update={"unreachable": found}).require()


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_too_little_is_one_line_with_both_figures_and_a_cure(config, what):
    plan = make_plan("loop", config).model_copy(update={f"{what}_free": GIB // 1024})
    with pytest.raises(PlanError) as error:
        plan.model_copy(update={what: 3 * GIB}).require()
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"too little {what}: loop needs about 3.0 GiB, 0.0 GiB are free; ")


def test_a_model_that_is_not_prepared_leaves_its_figures_open(config):
    unprepared = config.model_copy(update={"target": config.target.model_copy(update={"source": "random:llama"})})
    plan = make_plan("loop", unprepared)
    assert (plan.model, plan.memory, plan.disk, plan.sync) == (None, None, None, None)
    plan.require()
    assert "first run" in plan.as_text(unprepared)


def test_minutes_are_those_of_the_same_configuration_else_of_the_same_target(config):
    assert make_plan("rl", config.narrow(RLFlowConfig)).minutes is None
    assert make_plan("loop", config).minutes == measured("tiny")["loop"] / 60
    with runs.claim("loop", config) as key:
        pass
    run = runs.read(key)
    runs._write(run.model_copy(update={"finished": run.started + timedelta(minutes=6), "flow_run_ids": ["one"]}))
    assert make_plan("loop", config).minutes == pytest.approx(6)
    other = config.model_copy(update={"rl": config.rl.model_copy(update={"lr": 1e-3})})
    assert make_plan("loop", other).minutes == pytest.approx(6)


def test_the_text_names_every_setting_and_the_json_holds_both(config):
    plan = make_plan("loop", config)
    assert "  rl.lr = 1e-05" in plan.as_text(config)
    printed = json.loads(plan.as_json(config))
    assert printed["config"]["target"]["name"] == "tiny"
    assert printed["plan"]["sync"] == plan.sync


def test_beside_gpus_the_host_holds_what_passes_through_it_and_not_what_trains(config):
    shape = Shape(parameters=8_000_000_000, hidden=4096, vocab=128_000, layers=32)
    weights = shape.parameters * 4  # float32 engines

    def host(sleep_level=2, **rl):
        cluster = config.cluster.model_copy(update={"sleep_level": sleep_level})
        return beside_gpus(shape, config.model_copy(update={"rl": config.rl.model_copy(update=rl), "cluster": cluster}))

    through_gpus = host(transport="ipc")
    assert through_gpus.engine < weights and host(sleep_level=1, transport="ipc").engine > weights
    assert host(transport="shm").trainer == through_gpus.trainer + weights
    assert host(transport="ipc", micro_batch_tokens=1_000_000) == through_gpus  # logits lie on the GPU
    stored = host(transport="store")
    assert stored.trainer == through_gpus.trainer + 2 * weights and stored.engine == through_gpus.engine + weights
