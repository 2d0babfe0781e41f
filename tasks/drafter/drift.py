"""Whether a drafter has drifted from its target, and what then has to be done."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from infra.config.watch import WatchConfig
from tasks.drafter.contract import aux_layer_ids
from tasks.drafter.export import read_card, tokenizer_digest

if TYPE_CHECKING:
    import pandas as pd

LENGTH = "acceptance_length"
ALL = "all"

Decision = Literal["keep", "refresh", "retrain"]


class Level(BaseModel):
    """An acceptance length, tokens per target pass, with its 95% interval, over `n` drafts."""

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float
    n: int


class Drift(BaseModel):
    """What was decided about a drafter, and why in one line.

    before: the level when it was made, by domain; empty when it was never measured. now: the level measured now.
    lost, lost_low, lost_high: share of its acceptance length over all domains that it lost, with the 95% interval of
    two independent levels; None where one of them is not known.
    """

    model_config = ConfigDict(frozen=True)

    decision: Decision
    reason: str
    before: dict[str, Level] = {}
    now: dict[str, Level] = {}
    lost: float | None = None
    lost_low: float | None = None
    lost_high: float | None = None

    @property
    def drifted(self) -> bool:
        """Whether the drafter has to be trained."""
        return self.decision != "keep"


def decide(before: Mapping[str, Level], now: Mapping[str, Level], config: WatchConfig) -> Drift:
    """What to do about a drafter of level `before` whose level is `now`, both by domain.

    The share lost is 1 - now/before over all domains. A drafter never measured before has lost nothing: its level alone
    decides.
    """
    known = dict(before=dict(before), now=dict(now))
    level = overall(now)
    if level is None:
        return Drift(decision="retrain", reason="the engine never took a proposal of it", **known)
    share = _lost(overall(before), level)
    known |= share
    lost = share.get("lost", 0.0)
    changed = f"{abs(lost):.1%} of its acceptance length {'gained' if lost < 0 else 'lost'}"
    was = changed if share else f"acceptance length {level.value:.2f}"
    if level.value < config.retrain_below:
        reason = f"acceptance length {level.value:.3g} is below watch.retrain_below={config.retrain_below:g}"
        return Drift(decision="retrain", reason=reason, **known)
    if lost > config.retrain_above:
        return Drift(decision="retrain", reason=f"{was}, over watch.retrain_above={config.retrain_above:.0%}", **known)
    if lost > config.refresh_above:
        return Drift(decision="refresh", reason=f"{was}, over watch.refresh_above={config.refresh_above:.0%}", **known)
    if level.n < config.min_drafts:
        reason = f"{level.n} drafts are too few to keep it, watch.min_drafts={config.min_drafts}"
        return Drift(decision="refresh", reason=reason, **known)
    within = (
        f"{was}, within watch.refresh_above={config.refresh_above:.0%}" if share else f"{was}, never measured before"
    )
    return Drift(decision="keep", reason=within, **known)


def levels(rows: "Iterable[Mapping] | pd.DataFrame", subject: str | None = None) -> dict[str, Level]:
    """Acceptance length by domain in rows of evidence (about `subject`), of several rows of one domain the last."""
    records = rows if isinstance(rows, list) else rows.to_dict("records")
    return {
        row["domain"]: Level(**{name: row[name] for name in Level.model_fields})
        for row in records
        if row["figure"] == LENGTH and subject in (None, row["subject"])
    }


def overall(by_domain: Mapping[str, Level]) -> Level | None:
    """The level over all domains; that of the only domain where there is but one; None where there is none."""
    return by_domain.get(ALL) or (next(iter(by_domain.values())) if len(by_domain) == 1 else None)


def misfit(drafter: Path, target: Path) -> str:
    """Why an engine cannot serve the target with this drafter, in one line; empty when it can.

    Unlike `contract.check` it allows a head that was trained for another version of the target: how much that costs is
    what is measured.
    """
    from transformers import AutoConfig

    card, text = read_card(drafter), AutoConfig.from_pretrained(target).get_text_config()
    differences = {"tokenizer": (card.target_tokenizer, tokenizer_digest(target))}
    if card.kind == "eagle3":
        layer = json.loads((drafter / "config.json").read_text())["transformer_layer_config"]
        differences |= {
            "hidden_size": (layer["hidden_size"], text.hidden_size),
            "vocab_size": (layer["vocab_size"], text.vocab_size),
            "auxiliary layers": (card.layer_ids, aux_layer_ids(text.num_hidden_layers)),
        }
    elif card.kind == "draft_model":
        differences["vocab_size"] = (card.draft_vocab_size, text.vocab_size)
    return "; ".join(f"its {what} is {a}, the target's {b}" for what, (a, b) in differences.items() if a != b)


def _lost(before: Level | None, now: Level) -> dict[str, float]:
    if before is None:
        return {}
    lost = 1 - now.value / before.value
    # of the ratio of two independent means, to first order
    spread = (now.value / before.value) * math.hypot(
        (now.high - now.low) / 2 / now.value, (before.high - before.low) / 2 / before.value
    )
    return {"lost": lost, "lost_low": lost - spread, "lost_high": lost + spread}
