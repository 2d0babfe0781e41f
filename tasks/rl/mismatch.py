"""How far the engine's log-probs are from the trainer's: D = logp_old - logp_rollout, rho = exp(D), untruncated."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from infra.config.rl import MismatchBounds
from tasks.rl.errors import MismatchError

MAX_LOG_RATIO = 20.0
WORSE = 1.5
"""Times as far from no mismatch at all: less is the noise of a step."""


def mismatch(log_ratio: np.ndarray, *, high: float, dropped: np.ndarray, num_nonfinite: int) -> dict[str, float]:
    """Figures of one step.

    log_ratio: D of every sampled token with a finite engine log-prob [T], nats. high: truncation of the correction.
    dropped: bool [T], tokens that the correction gave no weight. num_nonfinite: tokens left out because the engine's
    log-prob was not finite.

    k1 = mean(-D) and k3 = mean(e^D - D - 1) estimate KL(rollout || trainer), nats per token (Schulman 2020);
    chi2 = mean(rho^2) - 1; ess = 1 / mean((rho / mean rho)^2), in (0, 1]; max_ratio = max(rho); share_clipped = share
    with rho > high; share_dropped; mean_abs = mean |D|; prob_error = mean(e^|D|) (NeMo-RL's token_mult_prob_error).
    D is clamped to plus and minus 20. All zero (ess, max_ratio and prob_error one) for no tokens.
    """
    d = np.clip(np.asarray(log_ratio, dtype=np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if d.size == 0:
        d, dropped = np.zeros(1), np.zeros(1, dtype=bool)
    rho = np.exp(d)
    return {
        "k1": float(-d.mean()),
        "k3": float((np.expm1(d) - d).mean()),
        "chi2": float((rho**2).mean() - 1),
        "ess": float(1 / ((rho / rho.mean()) ** 2).mean()),
        "max_ratio": float(rho.max()),
        "share_clipped": float((rho > high).mean()),
        "share_dropped": float(np.mean(dropped)),
        "mean_abs": float(np.abs(d).mean()),
        "prob_error": float(np.exp(np.abs(d)).mean()),
        "nonfinite": float(num_nonfinite),
    }


class Watch:
    """What is said of the mismatch while a run goes on. bounds: that warn, by figure."""

    def __init__(self, bounds: Mapping[str, float]):
        self._bounds = bounds
        self._said: dict[str, float] = {}

    def past(self, figures: Mapping[str, float]) -> list[str]:
        """Each figure that is past its bound, in words."""
        return _past(figures, self._bounds, "warn")

    def news(self, figures: Mapping[str, float]) -> list[str]:
        """What there is to say of a step: each figure past its bound that nothing was said of, or that is `WORSE` times
        as bad as when it was; and each that something was said of and that now is as far within."""
        words = []
        for name, bound in self._bounds.items():
            now, limit, said = _distance(name, figures[name]), _distance(name, bound), self._said.get(name, 0.0)
            if now > max(limit, WORSE * said):
                self._said[name] = now
                words += _past(figures, {name: bound}, "warn")
            elif said and WORSE * now < limit:
                del self._said[name]
                words.append(f"{name} of {figures[name]:.3g} is within rl.mismatch.warn_{name}={bound:g} again")
        return words


def check(figures: Mapping[str, float], bounds: MismatchBounds) -> None:
    """Raises MismatchError when a figure of the step is past its bound that stops a run."""
    if found := _past(figures, bounds.stops(), "stop"):
        raise MismatchError(
            f"mismatch: {'; '.join(found)}: engine and trainer do not compute the same model, so the step was not "
            f"trained on"
        )


def _past(figures: Mapping[str, float], bounds: Mapping[str, float], kind: Literal["warn", "stop"]) -> list[str]:
    found = []
    for name, bound in bounds.items():
        if _distance(name, figures[name]) > _distance(name, bound):
            side = "below" if name == "ess" else "above"
            found.append(f"{name} of {figures[name]:.3g} is {side} rl.mismatch.{kind}_{name}={bound:g}")
    return found


def _distance(name: str, figure: float) -> float:
    """From what equal policies have: 1 for ess and max_ratio, 0 for the others."""
    return {"ess": 1 - figure, "max_ratio": figure - 1}.get(name, figure)
