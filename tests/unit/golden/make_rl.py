"""Write rl.json: float64 golden values of advantages, corrections, losses and mismatch figures, computed by verl 0.9.1.

Needs an environment of its own with verl==0.9.1, tensordict, omegaconf, codetiming and torch:
    python tests/unit/golden/make_rl.py
The tests read rl.json and do not need verl.
"""

import json
from pathlib import Path

import numpy as np
import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

CLIP_LOW, CLIP_HIGH, DUAL, LOW, HIGH = 0.2, 0.28, 3.0, 0.5, 2.0
LENGTHS = [7, 5, 1, 6, 7, 3, 4, 2, 6]
GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2]
SINGLE = [0, 0, 0, 1, 1, 1, 1, 2, 3]  # two groups of one


def inputs() -> dict[str, torch.Tensor]:
    """Padded [9, 7] float64 log-probs with ratios beyond every bound, and a mask with holes inside answers."""
    torch.manual_seed(7)
    rows, longest = len(LENGTHS), max(LENGTHS)
    mask = torch.zeros(rows, longest, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    mask[1, 2] = mask[4, 0] = 0
    old = -torch.rand(rows, longest, dtype=torch.float64) * 3
    rollout = old + torch.randn(rows, longest, dtype=torch.float64) * 0.4
    rollout[5] = old[5] - 1.1  # a sequence far outside the bounds
    logp = old + torch.randn(rows, longest, dtype=torch.float64) * 0.6
    reference = logp + torch.randn(rows, longest, dtype=torch.float64) * 0.5
    return {"mask": mask, "old": old, "rollout": rollout, "logp": logp, "reference": reference}


def losses(data: dict[str, torch.Tensor], advantage: torch.Tensor, weights: torch.Tensor | None) -> dict:
    """Loss, gradient to the log-probs and clipped share of each loss under its usual aggregation."""
    out = {}
    kinds = {
        "grpo": ("vanilla", "seq-mean-token-mean"),
        "dapo": ("vanilla", "token-mean"),
        "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
        "gspo": ("gspo", "seq-mean-token-mean"),
        "cispo": ("cispo", "token-mean"),
    }
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=CLIP_LOW, clip_ratio_high=CLIP_HIGH
    )
    for name, (kind, aggregation) in kinds.items():
        logp = data["logp"].clone().requires_grad_()
        value, metrics = core_algos.get_policy_loss_fn(kind)(
            old_log_prob=data["old"],
            log_prob=logp,
            advantages=advantage,
            response_mask=data["mask"],
            loss_agg_mode=aggregation,
            config=config,
            rollout_is_weights=weights,
        )
        value.backward()
        clipped = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
        out[name] = {"loss": value.item(), "gradient": logp.grad.tolist(), "clipped": clipped}
    return out


def main() -> None:
    torch.set_default_dtype(torch.float64)
    data = inputs()
    rewards = torch.tensor([1.0, 0.0, 0.25, 0.0, 0.0, 1.0, 0.5, 0.75, 0.75])
    level = torch.zeros_like(data["mask"])
    level[:, 0] = rewards  # the reward sits on the first token; only its sum matters
    ones = torch.ones_like(data["mask"])
    estimators = {
        "grpo": lambda g: core_algos.compute_grpo_outcome_advantage(level, ones, g),
        "dr_grpo": lambda g: core_algos.compute_grpo_outcome_advantage(level, ones, g, norm_adv_by_std_in_grpo=False),
        "rloo": lambda g: core_algos.compute_rloo_outcome_advantage(level, ones, g),
    }
    advantages = {
        name: {
            kind: estimate(np.array(groups))[0][:, 0].tolist()
            for kind, groups in (("groups", GROUPS), ("single", SINGLE))
        }
        for name, estimate in estimators.items()
    }
    settings = {
        "none": {"rollout_is": None},
        "tis": {"rollout_is": "token", "rollout_is_threshold": HIGH},
        "tis_sequence": {"rollout_is": "sequence", "rollout_is_threshold": HIGH},
        "icepop": {"rollout_is": "token", "rollout_is_threshold": f"{LOW}_{HIGH}"},
        # verl's k1 is the mean of -D, so the bounds are inverted; a threshold that truncates nothing keeps rho whole
        "mis_sequence": {
            "rollout_is": "token",
            "rollout_is_threshold": 1e9,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": f"{1 / HIGH}_{1 / LOW}",
        },
    }
    corrections = {}
    for name, arguments in settings.items():
        weights, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            data["old"], data["rollout"], data["mask"], **arguments
        )
        weights = ones if weights is None else weights.batch["rollout_is_weights"]
        corrections[name] = {"weights": weights.tolist(), "mask": mask.tolist()}
    advantage = torch.tensor(advantages["dr_grpo"]["groups"]).unsqueeze(-1) * 3 * ones
    tis = torch.tensor(corrections["tis"]["weights"])
    figures = rollout_corr_helper.compute_offpolicy_metrics(data["old"], data["rollout"], data["mask"])
    # with bounds that touch nothing, verl's effective sample size is that of the plain ratios
    _, sample = rollout_corr_helper.compute_rollout_correction_weights(
        data["old"] - data["rollout"], data["mask"], "token", 1e9
    )
    golden = {
        "settings": {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "dual": DUAL, "low": LOW, "high": HIGH},
        "inputs": {name: values.tolist() for name, values in data.items()},
        "rewards": rewards.tolist(),
        "groups": GROUPS,
        "single": SINGLE,
        "advantages": advantages,
        "corrections": corrections,
        "loss_advantage": advantage[:, 0].tolist(),
        "losses": losses(data, advantage, None),
        "losses_tis": losses(data, advantage, tis),
        "k3_penalty": core_algos.kl_penalty(data["logp"], data["reference"], "k3").tolist(),
        "mismatch": {
            "k1": figures["kl"],
            "k3": figures["k3_kl"],
            "chi2": figures["chi2_token"],
            "ess": sample["rollout_is_eff_sample_size"],
            "max_ratio": sample["rollout_is_max"],
        },
    }
    Path(__file__).with_name("rl.json").write_text(json.dumps(golden, indent=0) + "\n")


if __name__ == "__main__":
    main()
