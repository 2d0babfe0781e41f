"""What a changed target costs a drafter, and what wins it back: a warm start beside training from nothing."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from infra.config.base import Section
from infra.config.drafter import DrafterConfig
from infra.config.flows import DrafterFlowConfig
from tasks.drafter.measure_engines import answering_and_capturing, asked, captured, engines
from tasks.evaluate.measurement import Line, Measured, MeasureError, Picture

if TYPE_CHECKING:
    from infra.lineage.versions import Version
    from tasks.drafter.traffic import Traffic

OLD, WARM, SCRATCH = "as it was", "warm start", "from nothing"
BEFORE = "before the change"
"""The drafter as it was, served with the target that it was made for, on the same prompts."""
REACHED = 0.95
"""Of the acceptance lost: so much back counts as recovered."""
Served = dict[str, tuple[float, int]]
"""By domain, `all` among them where there are several, the acceptance length that an engine gives, and drafts."""
PLATEAU = 0.01
"""Below its best by this share, training from nothing counts as done."""


class DriftOptions(Section):
    target: str = ""
    """Label of the changed target, such as `smol/2`; the newest version by default."""
    drafter: str = ""
    """Label of the drafter made for an earlier version; by default the newest of the target's nearest ancestor."""
    warm_share: float = Field(0.1, gt=0, le=1)
    """Steps of the warm start, as a share of `drafter.training_steps`, which training from nothing takes."""


@dataclass(frozen=True)
class Course:
    """How one head was trained. looks: (tokens trained on, acceptance length on held-out answers), the first before any
    step. head: its folder."""

    looks: list[tuple[int, float]]
    head: Path
    served: Served

    @property
    def best(self) -> float:
        return max(length for _, length in self.looks)

    @property
    def tokens(self) -> int:
        return self.looks[-1][0]

    def reached(self, level: float) -> int | None:
        """Tokens after which a look first showed `level`."""
        return next((tokens for tokens, length in self.looks if length >= level), None)


class DriftMeasurement:
    """One set of the changed target's answers and states, on which everything is trained and looked at."""

    help = "What a drafter accepts on a changed target: as it was, warmed, and trained from nothing, by tokens trained."
    config = DrafterFlowConfig
    options = DriftOptions

    def measure(self, config: DrafterFlowConfig, options: DriftOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError when there is no such target or drafter, or no source of traffic can be used."""
        import torch

        from infra.lineage.lineage import Lineage
        from infra.store.open import open_store

        target, drafter = _chosen(config.target.name, options)
        say(f"{drafter.label}, made for {drafter.parts['target']}, on {target.label}")
        unchanged = Lineage().get(drafter.parts["target"])
        model, old, made_for = (open_store().open(version.artifact) for version in (target, drafter, unchanged))
        torch.set_num_threads(config.cluster.trainer_threads)
        with tempfile.TemporaryDirectory() as scratch:
            here = Path(scratch)
            prompts = _capture(model, config, here, say)
            courses = {}
            for name, previous, share in ((WARM, old, options.warm_share), (SCRATCH, None, 1.0)):
                steps = max(1, round(share * config.drafter.training_steps))
                settings = config.drafter.model_copy(update={"training_steps": steps, "patience": 0})
                courses[name] = train(model, here / "states", settings, previous, here / name, config.engine.dtype)
                say(f"{name}: held-out acceptance {courses[name].best:.3f} of {_looks(courses[name])}")
            courses = {OLD: Course(courses[WARM].looks[:1], old, {}), **courses}
            before = _serve(model, made_for, courses, prompts, config, here, say)
        return measured(config.target.name, courses, before)


def train(target: Path, states: Path, config: DrafterConfig, previous: Path | None, folder: Path, dtype: str) -> Course:
    """A head trained for all of `config.training_steps`, from `previous` or from nothing, and written to `folder` in
    `dtype` as it was at its best look."""
    from tasks.drafter.export import tokenizer_digest
    from tasks.drafter.train import HeadTrainer

    trainer = HeadTrainer(target, states, config, previous)
    trainer.advance(config.training_steps)
    trainer.write(folder, tokenizer_digest(target), dtype)
    entries = zip(trainer.curve.step, trainer.curve.held_out_acceptance, strict=True)
    looks = [(round(trainer.tokens * step / trainer.steps), length) for step, length in entries if length is not None]
    return Course(looks, folder, {})


def measured(name: str, courses: dict[str, Course], before: Served) -> Measured:
    """Figures, table and sentences of the courses `OLD`, `WARM` and `SCRATCH`. before: of `BEFORE`."""
    from tasks.evaluate.evidence import row

    old, warm, scratch = (courses[course] for course in (OLD, WARM, SCRATCH))
    subject, start = f"target:{name}", old.best
    rows, table = [], []
    for label, course in ((BEFORE, None), *courses.items()):
        n, best, served = (course.tokens, course.best, course.served) if course else (0, None, before)
        if best is not None:
            rows.append(row("held_out_acceptance", best, n=max(1, n), unit="tokens", subject=subject, domain=label))
        rows += [
            row(f"served_acceptance_{domain}", length, n=drafts, unit="tokens/pass", subject=subject, domain=label)
            for domain, (length, drafts) in served.items()
        ]
        lengths = {f"served, {domain}": length for domain, (length, _) in served.items()}
        table.append({"drafter": label, "tokens trained on": n, "held-out acceptance": best, **lengths})
    lost = scratch.best - start
    share = lost / scratch.best
    rows.append(row("acceptance_lost", share, n=len(scratch.looks), unit="share", subject=subject))
    done = scratch.reached(scratch.best * (1 - PLATEAU))
    findings = [
        f"Served with the target that it was made for, the drafter accepts {_overall(before):.3f} tokens a pass, with "
        f"the changed one {_overall(old.served):.3f}, on the same prompts.",
        f"On held-out answers of the changed target the drafter as it was accepts {start:.3f} tokens a pass, one "
        f"trained from nothing {scratch.best:.3f} at its best, within {PLATEAU:.0%} of that after {done} tokens: "
        f"{f'{share:.1%} are lost to the change' if lost > 0 else 'training from nothing gave no more'}.",
    ]
    if lost > 0:
        back, needed = (warm.best - start) / lost, warm.reached(start + REACHED * lost)
        rows.append(row("acceptance_recovered", back, n=warm.tokens, unit="share", subject=subject))
        rows.append(row("tokens_of_scratch", warm.tokens / done, n=warm.tokens, unit="ratio", subject=subject))
        when = f"; {REACHED:.0%} of it after {needed}, {needed / done:.1%}" if needed is not None else ""
        if needed is not None:
            rows.append(row("tokens_to_recover", needed / done, n=needed, unit="ratio", subject=subject))
        findings.append(
            f"The warm start wins back {back:.0%} with {warm.tokens} tokens, {warm.tokens / done:.1%} of what training "
            f"from nothing took{when}."
        )
    lines = [Line(label, [(t / 1e6, length) for t, length in courses[label].looks]) for label in (WARM, SCRATCH)]
    picture = Picture("Acceptance on the changed target", "tokens trained on, millions", "tokens a pass", lines)
    return Measured(rows, table, findings, [picture])


def _chosen(name: str, options: DriftOptions) -> "tuple[Version, Version]":
    from infra.lineage.lineage import Lineage
    from tasks.drafter.steps import KIND_TAG

    lineage = Lineage()
    target = lineage.get(options.target) if options.target else lineage.resolve(name, "latest")
    if target is None:
        raise MeasureError(f"no version of {name} is registered: `lockstep rl` makes a changed target")
    if options.drafter:
        return target, lineage.get(options.drafter)
    ancestor = target
    while ancestor.parent:
        ancestor = lineage.get(ancestor.parent)
        for drafter in lineage.drafters(ancestor):
            if drafter.tags.get(KIND_TAG, "eagle3") == "eagle3":
                return target, drafter
    raise MeasureError(f"no version before {target.label} has an EAGLE-3 drafter: `lockstep drafter` makes one")


def _capture(model: Path, config: DrafterFlowConfig, here: Path, say: Callable[[str], None]) -> "Traffic":
    """The target's answers to the traffic, their states in `here`/states; what to measure on."""
    from tasks.drafter import heads
    from tasks.drafter.answers import answer
    from tasks.drafter.capture import layer_bytes
    from tasks.drafter.contract import captured_layers
    from tasks.drafter.states_writer import StatesWriter

    concurrency, layer_ids = config.engine.max_concurrent_sequences, captured_layers(model)
    size = layer_bytes(model, len(layer_ids), config.engine.dtype)
    specs = answering_and_capturing(model, config, layer_ids, here)
    say("starting an engine that answers and one that captures")
    with engines(specs, here, say, meanwhile=heads.warm_up) as (answerer, capturer):
        say("gathering prompts")
        prompts, answering = asked(model, config, None, config.drafter.eval_prompts, writer=answerer.handle())
        say(f"answering {len(prompts.train)} prompts")
        answers = asyncio.run(answer(answerer.handle(), prompts.train, answering))
        with StatesWriter(here / "states", layer_ids) as writer:
            speed = captured(capturer.handle(), answers, writer, size, concurrency)
        say(f"captured {sum(len(a.token_ids) for a in answers)} tokens, {speed:.0f} a second")
    return prompts


def _serve(
    model: Path,
    made_for: Path,
    courses: dict[str, Course],
    prompts: "Traffic",
    config: DrafterFlowConfig,
    here: Path,
    say: Callable[[str], None],
) -> Served:
    """Keep in each course what an engine accepts of its head, and give what one of the unchanged target, `made_for`,
    accepts of the head as it was."""
    from infra.engine.drafters import speculation
    from infra.engine.spec import EngineSpec, Role
    from tasks.evaluate.acceptance import measure

    settings, found = config.drafter, {}
    pairs = {BEFORE: (made_for, courses[OLD].head)} | {name: (model, one.head) for name, one in courses.items()}
    specs = [
        EngineSpec(
            model=target,
            role=Role.eval,
            config=config.engine,
            speculation=speculation(head, settings.num_speculative_tokens),
        )
        for target, head in pairs.values()
    ]
    say("serving the heads")
    with engines(specs, here, say) as running:
        for name, engine in zip(pairs, running, strict=True):
            labels = dict(subject=name, max_new_tokens=settings.max_new_tokens, concurrency=settings.eval_concurrency)
            rows = asyncio.run(measure(engine.handle(), prompts.held_out_ids(), **labels)).rows
            found[name] = {r["domain"]: (r["value"], r["n"]) for r in rows if r["figure"] == "acceptance_length"}
            say(f"{name}: " + ", ".join(f"{domain} {length:.3f}" for domain, (length, _) in found[name].items()))
    courses |= {name: replace(course, served=found[name]) for name, course in courses.items()}
    return found[BEFORE]


def _overall(served: Served) -> float:
    (length, _) = served.get("all") or next(iter(served.values()))
    return length


def _looks(course: Course) -> str:
    return " ".join(f"{length:.3f}@{tokens}" for tokens, length in course.looks)


MEASUREMENT = DriftMeasurement()
