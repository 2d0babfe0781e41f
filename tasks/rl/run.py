"""Train a policy: rollouts, update, new weights in the engines, again; held-out reward before and after."""

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from infra.cluster.placement import Resources
from infra.config.flows import RLFlowConfig
from infra.config.rl import VerifiersEnvironment
from infra.engine.load import LoadMeter
from infra.engine.pin import engine_pin, hardware, pins
from infra.engine.spec import Speculation
from infra.services.progress import report
from infra.services.runs import config_digest
from infra.services.spans import Spans
from infra.transport.base import Published, Reach
from tasks.rl.checkpoint import Checkpoints
from tasks.rl.engines import RolloutEngines
from tasks.rl.environments.base import Problem
from tasks.rl.environments.chat import Chat
from tasks.rl.environments.make import make
from tasks.rl.environments.problems import Problems
from tasks.rl.errors import MismatchError
from tasks.rl.figures import credit, rollout_figures, sync_figures, times, to_batch, write_rollouts
from tasks.rl.held_out import Examination, paired
from tasks.rl.journal import Journal
from tasks.rl.lengths import Lengths
from tasks.rl.live import Sampling
from tasks.rl.mismatch import Watch
from tasks.rl.placing import choose_place, sleep_level
from tasks.rl.playing import Players
from tasks.rl.remote import RemoteTrainer
from tasks.rl.result import ROLLOUTS, STEPS, TIMELINE, RLResult
from tasks.rl.rollout import Group, admit
from tasks.rl.rounds import Rounds
from tasks.rl.sampler import Sampler
from tasks.rl.scoring import ScorerPool
from tasks.rl.text import step_line
from tasks.rl.timeline import Timeline

OnStep = Callable[[int, Mapping[str, float]], None]


def train_policy(
    base: Path,
    config: RLFlowConfig,
    workdir: Path,
    *,
    on_step: OnStep | None = None,
    drafter: Speculation | None = None,
    lengths: Lengths | None = None,
) -> RLResult:
    """Run `config.rl.steps` steps from the model in `base`; a run that was interrupted in `workdir` goes on there.

    base: model folder. workdir: of this run alone, for checkpoints and results. on_step: called with the number (from
    1) and the figures of each step; after an interruption once more with the last step done before it. drafter: that
    proposes in the rollouts. lengths: of what is sampled in training, for a measurement (see `Sampler.group`).
    Raises BadEnvironment, ScorerError, PromptTooLong, EngineError, SyncError, TrainerError, CheckpointError, and
    MismatchError naming the last checkpoint.
    """
    return _PolicyRun(base, config, workdir, on_step or (lambda step, figures: None), drafter, lengths).train()


class _PolicyRun:
    def __init__(
        self,
        base: Path,
        config: RLFlowConfig,
        workdir: Path,
        on_step: OnStep,
        drafter: Speculation | None,
        lengths: Lengths | None,
    ):
        self.drafter, self.lengths = drafter, lengths
        self.base, self.config, self.rl, self.workdir, self.on_step = base, config, config.rl, workdir, on_step
        self.environments = make(self.rl.environments, self.rl.seed)
        self.problems = Problems(self.rl.environments, self.environments, self.rl.held_out_share, self.rl.seed)
        self.examination = Examination(base, config, self.problems)
        self.checkpoints = Checkpoints(
            workdir / "checkpoints",
            self.rl.keep_checkpoints,
            config_digest(f"rl {base}", config),
            pins(),
            any_pins=self.rl.resume_under_other_pins,
        )
        self.resumes: list[str] = []
        self.spans = Spans()
        self.rows: list[dict[str, float]] = []
        self.timeline = Timeline()
        self.sampling = Sampling(self.rl)
        self.mismatch = Watch(self.rl.mismatch.warns(config.engine.dtype, self.rl.trainer_dtype))

    def train(self) -> RLResult:
        where = choose_place(self.config)
        self.placement = where.mode
        # loads the model while the engines start
        reach = Reach(self.rl.transport_folder or self.workdir, self.rl.transport_stall_s)
        self.trainer = RemoteTrainer(
            self.base, self.rl, self.config.engine.dtype, reach, where, self.config.cluster.trainer_ranks
        )
        return asyncio.run(self._train(where.engine))

    async def _train(self, reserve: Resources) -> RLResult:
        async with AsyncExitStack() as stack:
            self.engines = RolloutEngines(
                self.base,
                self.config,
                self.workdir,
                reserve,
                sleep_level=sleep_level(self.config, self.placement),
                updating=lambda engine: self.timeline.working(f"engine {engine.number}", "sync"),
                speculation=self.drafter,
            )
            self.fleet = self.engines.fleet
            with self.spans.measure("engine_start"):
                report("starting the trainer and the rollout engines")
                await stack.enter_async_context(self.engines)
                self.sampler = await self._sampler(stack)
                await self.fleet.ready()
            with self.spans.measure("engine"):  # while the trainer loads the same model
                before = await self.examination.first(self.sampler, self.fleet, self.workdir / "before.json")
            with self.spans.measure("trainer"):
                await self.trainer.ready()
            rounds = Rounds(
                self._group,
                self.problems,
                self.environments,
                Journal(self.workdir / "groups"),
                self.rl,
                first := self._done(),
            )
            await self._restore(rounds)
            await self._broadcast(first)
            self.load = await stack.enter_async_context(LoadMeter(self.fleet.clients))
            async with rounds, self.checkpoints:
                rounds.published(first)
                for step in range(first, self.rl.steps):
                    await self._step(step, rounds)
                if self.checkpoints.latest() is None:  # no steps were asked for
                    await self._checkpoint(0, rounds)
                with self.spans.measure("engine"):  # while the last checkpoint is written
                    after = await self.examination.whole(self.sampler, self.fleet, "after")
            return await self._result(before, after)

    async def _sampler(self, stack: AsyncExitStack) -> Sampler:
        from transformers import AutoTokenizer

        played = [e for e in self.rl.environments if isinstance(e, VerifiersEnvironment)]
        scorers = ScorerPool(
            [e for e in self.rl.environments if e not in played],
            self.rl.seed,
            processes=self.rl.scorer_processes,
            timeout_s=self.rl.scorer_timeout_s,
        )
        players = Players(
            played,
            self.base,
            system_prompt=self.rl.system_prompt,
            room=self.config.engine.max_model_len,
            timeout_s=self.rl.episode_timeout_s,
        )
        return Sampler(
            self.fleet,
            await stack.enter_async_context(scorers),
            await stack.enter_async_context(players),
            Chat(AutoTokenizer.from_pretrained(self.base), self.rl.system_prompt),
            max_new_tokens=self.rl.max_new_tokens,
            max_model_len=self.config.engine.max_model_len,
            watching=lambda engine: self.timeline.working(f"engine {engine.number}", "rollout"),
        )

    def _done(self) -> int:
        """The number of steps that the newest checkpoint holds."""
        latest = self.checkpoints.latest()
        return self.checkpoints.state(latest)[0]["version"] if latest else 0

    async def _restore(self, rounds: Rounds) -> None:
        latest = self.checkpoints.latest()
        if latest is None:
            rounds.restore({"problems": self.problems.state(), "carried": []}, 0)
            return
        state, changed = self.checkpoints.state(latest)
        self.resumes = state["resumes"] + [f"{latest.name}: {'; '.join(changed)}"] * bool(changed)
        report(f"resuming from {latest.name}" + f" under other pins: {'; '.join(changed)}" * bool(changed))
        with self.spans.measure("trainer"):
            await self.trainer.load(latest)
        rounds.restore(state["rounds"], state["version"])
        self.rows = state["rows"]
        for row in self.rows[-1:]:
            self.on_step(int(row["step"]), row)

    async def _group(self, number: int, place: int, problem: Problem) -> Group:
        with self.load.working(), self.sampling.group(number):
            return await self.sampler.group(
                problem,
                self.rl.group_size,
                temperature=self.rl.temperature,
                seed=self.rl.seed,
                number=number,
                place=place,
                lengths=self.lengths,
            )

    async def _step(self, step: int, rounds: Rounds) -> None:
        name, start = f"step {step + 1} of {self.rl.steps}", time.monotonic()
        self.checkpoints.check()
        with self.spans.measure("engine"), self.sampling.awaited(step):
            collected = await rounds.collect(step)
            await self.engines.rest()
        waited_s = time.monotonic() - start
        admitted = admit(collected.groups, version=step, max_staleness=self.rl.max_staleness)
        credits = credit(admitted.groups, self.rl)
        batch = to_batch(admitted.groups, credits, self.rl.temperature, self.rl.max_new_tokens)
        row = {"step": step + 1, **rollout_figures(collected, admitted)}
        report(
            f"{name}: training on {batch.num_answers} answers, mean reward {row['reward_mean']:.3f}",
            step,
            self.rl.steps,
        )
        with self.spans.measure("trainer"), self.timeline.working("trainer", "train"):
            try:
                row |= await self.trainer.step(batch)
            except MismatchError as error:
                await self.checkpoints.written()
                latest = self.checkpoints.latest()
                raise MismatchError(
                    f"step {step + 1}: {error}; the last good checkpoint is {latest or self.base}"
                ) from None
        report(f"{name}: sending the weights to the engines", step, self.rl.steps)
        row |= await self._broadcast(step + 1) | await self.load.take()
        rounds.published(step + 1)
        row |= times(row, rollout_s=self.sampling.seconds(step), waited_s=waited_s, step_s=time.monotonic() - start)
        row |= {
            "mismatch_warning": float(bool(self.mismatch.past(row))),
            "engines": float(len(self.fleet.engines)),
            "engines_lost": float(self.fleet.lost),
            "retried": float(self.fleet.retried),
        }
        if self.rl.eval_every and (step + 1) % self.rl.eval_every == 0:
            row |= await self.examination.between(self.sampler)
        self.rows.append(row)
        report(f"{name}: {step_line(row)}", step + 1, self.rl.steps)
        write_rollouts(self._rollout_file(step), step + 1, collected, admitted, credits)
        if news := self.mismatch.news(row):
            report(f"{name}: mismatch: {'; '.join(news)}")
        if (step + 1) % self.rl.checkpoint_every == 0 or step + 1 == self.rl.steps:
            await self._checkpoint(step + 1, rounds)
        self.on_step(step + 1, row)

    async def _broadcast(self, version: int) -> dict[str, float]:
        async def publish(engines: int) -> Published:
            with self.spans.measure("trainer"), self.timeline.working("trainer", "sync"):
                return await self.trainer.publish(version, engines)

        start, trainer_s = time.monotonic(), self.spans.seconds["trainer"]
        published, synced = await self.engines.send(publish, self.trainer.offer)
        self.spans.seconds["sync"] += time.monotonic() - start - (self.spans.seconds["trainer"] - trainer_s)
        return sync_figures(published, synced)

    async def _checkpoint(self, version: int, rounds: Rounds) -> None:
        state = {"version": version, "rounds": rounds.state(version), "rows": self.rows, "resumes": self.resumes}
        with self.spans.measure("trainer"), self.timeline.working("trainer", "checkpoint"):
            await self.checkpoints.written()  # the next snapshot takes the place of the one that is written
            await self.trainer.snapshot()
        await self.checkpoints.commit(version, self.trainer.write, state, then=lambda: rounds.forget(version))

    async def _result(self, before: dict[str, Any], after: dict[str, Any]) -> RLResult:
        import pandas as pd

        model, tables = self.workdir / "model", self.workdir / "tables"
        shutil.rmtree(model, ignore_errors=True)  # of an attempt that was interrupted here
        report("writing the trained model")
        with self.spans.measure("trainer"):
            await self.trainer.export(model)
            await self.trainer.close()
        tables.mkdir(exist_ok=True)
        pd.DataFrame(self.rows).to_parquet(tables / STEPS, index=False)
        pd.DataFrame(self.timeline.rows).to_parquet(tables / TIMELINE, index=False)
        texts = [self._rollout_file(step).read_text() for step in range(self.rl.steps)]
        (tables / ROLLOUTS).write_text("".join(texts))
        return RLResult(
            model=model,
            tables=tables,
            held_out=paired(self.examination.problems, before["rewards"], after["rewards"]),
            general_before=before["general"],
            general_after=after["general"],
            general_digest=self.examination.general_digest,
            spans=dict(self.spans.seconds),
            placement=self.placement,
            resumes=self.resumes,
            engine=engine_pin(),
            hardware=hardware(),
        )

    def _rollout_file(self, step: int) -> Path:
        return self.workdir / "rollouts" / f"step-{step:06d}.jsonl"
