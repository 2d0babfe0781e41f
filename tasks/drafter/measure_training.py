"""How fast a head learns and what it then accepts, beside speculators' own trainer on the same packs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from infra.config.drafter import DrafterConfig

UNTIMED = 0.1
"""Of the steps, the first, and two at least: memory is allocated, code compiled, kernels chosen."""
HERE, THEIRS, THEIRS_FROM_HERE = "training", "training by speculators", "training by speculators from the start here"


@dataclass(frozen=True)
class Learned:
    """tokens_per_second: rows a second of the timed steps, loading included. tokens: of all steps. acceptance:
    length on the held-out answers after the last step. head: folder in which it was written. served: acceptance length
    that an engine gives, where it was served, in `drafts` target passes."""

    tokens_per_second: float
    tokens: int
    acceptance: float
    head: Path
    served: float | None = None
    drafts: int = 0


@dataclass(frozen=True)
class Training:
    """by: each trainer's. start: acceptance length before the first step here. trained_share: of the tokens, those that
    the loss reads. held_out: sequences that acceptance was counted on."""

    by: dict[str, Learned]
    start: float
    trained_share: float
    held_out: int


def compare(
    target: Path,
    states: Path,
    config: DrafterConfig,
    steps: int,
    folder: Path,
    say: Callable[[str], None],
    dtype: str = "float32",
) -> Training:
    """Train three heads for as many steps on the same packs, one after the other: here; by speculators as it begins a
    head; and by speculators from the start that a head has here.

    folder: for the states as speculators reads them, and the heads. dtype: of the heads as written.
    """
    from tasks.drafter import heads, speculators_trainer
    from tasks.drafter.dataset import loss_mask
    from tasks.drafter.export import tokenizer_digest
    from tasks.drafter.train import HeadTrainer

    config = config.model_copy(update={"training_steps": steps})

    def begun() -> HeadTrainer:
        return HeadTrainer(target, states, config)

    say(f"training for {steps} steps")
    here = begun()
    packs = list(islice(here.packs, steps))
    here.packs = iter(packs)
    cut = [min(len(loss_mask(c.sequence)), config.micro_batch_tokens) for c in here.train]
    sizes = [sum(cut[i] for i in pack) for pack in packs]
    trained = [int(loss_mask(c.sequence)[: cut[i]].sum()) for i, c in enumerate(here.train)]
    share = sum(trained[i] for pack in packs for i in pack) / sum(sizes)

    def learned(trainer: HeadTrainer, seconds: list[float], name: str) -> Learned:
        first = max(2, round(UNTIMED * len(sizes)))
        speed = sum(sizes[first:]) / sum(seconds[first:])
        head = folder / f"head {name}"
        trainer.write(head, tokenizer_digest(target), dtype)
        made = Learned(speed, sum(sizes), trainer.acceptance().length, head)
        say(f"{name}: {speed:.0f} tokens/s, held-out acceptance {made.acceptance:.3f} after {made.tokens} tokens")
        return made

    start, by = here.acceptance().length, {HERE: learned(here, _steps(here), HERE)}
    for name in (THEIRS, THEIRS_FROM_HERE):
        say(f"{name} for {steps} steps")
        other = begun()
        if name == THEIRS:
            drawn = heads.build(target, other.vocab, other.layer_ids, config)
            other.model.load_state_dict(drawn.state_dict())
        seconds = speculators_trainer.train(other.model, other.train, packs, config, folder / name)
        by[name] = learned(other, seconds, name)
    return Training(by, start, share, len(here.held_out))


def _steps(trainer) -> list[float]:
    seconds, begun, last = [], time.monotonic(), None
    for step, ready in enumerate(trainer.ahead(trainer.packs), 1):
        now = trainer.learn(ready, trainer.learning_rate(step))
        if last is not None:
            last.read()  # one step behind, as in training
        last = now
        seconds.append(time.monotonic() - begun)
        begun = time.monotonic()
    last.read()
    seconds[-1] += time.monotonic() - begun
    return seconds


def rows(training: Training, subject: str) -> list[dict]:
    """Evidence: speed and acceptance of each trainer, and the ratio of speeds."""
    from tasks.evaluate.evidence import row

    made = []
    for name, one in training.by.items():
        common = {"subject": subject, "domain": name}
        made.append(row("training_tokens_per_second", one.tokens_per_second, n=one.tokens, unit="tokens/s", **common))
        made.append(row("held_out_acceptance", one.acceptance, n=training.held_out, unit="tokens", **common))
        if one.served is not None:
            made.append(row("served_acceptance", one.served, n=one.drafts, unit="tokens/pass", **common))
    ratio = training.by[HERE].tokens_per_second / training.by[THEIRS].tokens_per_second
    tokens = training.by[HERE].tokens
    return [*made, row("training_speed_beside_speculators", ratio, n=tokens, unit="ratio", subject=subject)]


def findings(training: Training) -> list[str]:
    """What the figures say, and where the difference comes from."""
    here, theirs, same = (training.by[name] for name in (HERE, THEIRS, THEIRS_FROM_HERE))
    ratio = here.tokens_per_second / theirs.tokens_per_second
    reason = (
        f"of the {1 - training.trained_share:.0%} of tokens that no loss reads only keys and values are computed "
        f"here, a document attends within itself, and packs are not padded"
    )
    served = []
    if here.served is not None:
        served = [f"Served, it is accepted {here.served:.2f} tokens a pass, speculators' head {theirs.served:.2f}."]
    return [
        f"An EAGLE-3 head trains on {here.tokens_per_second:.0f} tokens/s, {ratio:.2f} times speculators' own trainer "
        f"({theirs.tokens_per_second:.0f}) on the same packs: {reason}.",
        f"After {here.tokens} tokens it accepts {here.acceptance:.2f} tokens a pass on {training.held_out} held-out "
        f"answers ({training.start:.2f} before the first), speculators' head {theirs.acceptance:.2f}, and "
        f"{same.acceptance:.2f} when it begins where the head here did, with what the target's own layers know.",
        *served,
    ]
