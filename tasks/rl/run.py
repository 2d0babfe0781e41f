"""Train a policy: rollouts, update, new weights in the engines, again; held-out reward before and after."""

import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from infra.cluster.placement import place
from infra.cluster.session import session
from infra.config.flows import RLFlowConfig
from infra.engine.client import EngineClient
from infra.engine.load import LoadMeter
from infra.engine.pin import engine_pin, hardware
from infra.engine.spec import EngineHandle, EngineSpec, Role
from infra.services.progress import report
from infra.services.runs import config_digest
from infra.services.spans import Spans
from infra.transport.sync import sync
from tasks.evaluate import questions as general
from tasks.rl.checkpoint import Checkpoints
from tasks.rl.environments.base import Problem
from tasks.rl.environments.make import make
from tasks.rl.environments.problems import Problems
from tasks.rl.errors import MismatchError, TrainerError
from tasks.rl.figures import rollout_figures, to_batch, write_rollouts
from tasks.rl.result import ROLLOUTS, STEPS, HeldOut, RLResult
from tasks.rl.rollout import Group, RolloutWorker, admit
from tasks.rl.schedule import Schedule
from tasks.rl.scoring import ScorerPool
from tasks.rl.worker import TrainerWorker, done

OnStep = Callable[[int, Mapping[str, float]], None]


def train_policy(base: Path, config: RLFlowConfig, workdir: Path, *, on_step: OnStep | None = None) -> RLResult:
    """Run `config.rl.steps` steps from the model in `base`; a run that was interrupted in `workdir` goes on there.

    base: model folder. workdir: of this run alone, for checkpoints and results. on_step: called with the number (from
    1) and the figures of each step; after an interruption once more with the last step done before it.
    Raises BadEnvironment, ScorerError, PromptTooLong, EngineError, SyncError, TrainerError, CheckpointError, and
    MismatchError naming the last checkpoint.
    """
    return _PolicyRun(base, config, workdir, on_step or (lambda step, figures: None)).train()


class _PolicyRun:
    def __init__(self, base: Path, config: RLFlowConfig, workdir: Path, on_step: OnStep):
        self.base, self.config, self.rl, self.workdir, self.on_step = base, config, config.rl, workdir, on_step
        if config.cluster.trainer_ranks > 1:
            raise TrainerError(
                f"cluster.trainer_ranks={config.cluster.trainer_ranks}: the trainer is one process, set it to 1"
            )
        environments = make(self.rl.environments, self.rl.seed)
        self.problems = Problems(self.rl.environments, environments, self.rl.held_out_share, self.rl.seed)
        self.held_out = self.problems.held_out(self.rl.eval_prompts)
        self.questions = general.load(self.rl.general_questions, self.rl.general_questions_each, self.rl.seed)
        self.checkpoints = Checkpoints(workdir / "checkpoints", self.rl.keep_checkpoints)
        self.digest = config_digest(f"rl {base}", config)
        self.spans = Spans()
        self.rows: list[dict[str, float]] = []
        self.cursors: dict[int, dict] = {}
        self.sampling_s: dict[int, float] = {}

    def train(self) -> RLResult:
        spec = EngineSpec(model=self.base, role=Role.rollout, config=self.config.engine, seed=self.rl.seed)
        with ExitStack() as stack:
            with self.spans.measure("engine_start"):
                report("starting the trainer and the rollout engine")
                where = place(self.config.cluster, self.config.engine, session().resources())
                self.placement = where.mode
                self.trainer = session().actor(
                    TrainerWorker,
                    self.base,
                    self.rl,
                    self.config.engine.dtype,
                    cpus=where.trainer.cpus,
                    gpus=where.trainer.gpus,
                    threads=where.trainer_threads,
                )
                ready = self.trainer.begin.remote()  # loads the model while the engine starts
                engine = partial(session().engine, spec, reserve=where.engine, progress=report)
                handles = [stack.enter_context(engine()) for _ in range(self.config.cluster.engines)]
            return asyncio.run(self._train(handles, ready))

    async def _train(self, handles: Sequence[EngineHandle], ready: Any) -> RLResult:
        from transformers import AutoTokenizer

        async with AsyncExitStack() as stack:
            self.clients = [await stack.enter_async_context(EngineClient(handle)) for handle in handles]
            scorers = ScorerPool(
                self.rl.environments,
                self.rl.seed,
                processes=self.rl.scorer_processes,
                timeout_s=self.rl.scorer_timeout_s,
            )
            self.sampler = RolloutWorker(
                self.clients,
                await stack.enter_async_context(scorers),
                AutoTokenizer.from_pretrained(self.base),
                max_new_tokens=self.rl.max_new_tokens,
                max_model_len=self.config.engine.max_model_len,
                max_concurrent=self.config.engine.max_concurrent_sequences * len(self.clients),
                system_prompt=self.rl.system_prompt,
            )
            with self.spans.measure("trainer"):
                await done(ready)
            first = await self._restore()
            await self._broadcast(first)
            before = await self._before(handles[0])
            self.load = await stack.enter_async_context(LoadMeter(self.clients))
            async with Schedule(self._sample, first, self.rl.steps, self.rl.max_staleness) as schedule:
                schedule.published(first)
                for step in range(first, self.rl.steps):
                    await self._step(step, schedule)
            if self.checkpoints.latest() is None:  # no steps were asked for
                await self._checkpoint(0)
            after = await self._evaluate(handles[0], "after")
            return await self._result(before, after)

    async def _restore(self) -> int:
        """Load the newest checkpoint; the number of steps done."""
        latest = self.checkpoints.latest()
        if latest is None:
            return 0
        state = self.checkpoints.state(latest, self.digest)
        report(f"resuming from {latest.name}")
        with self.spans.measure("trainer"):
            await done(self.trainer.load.remote(latest))
        self.problems.restore(state["problems"])
        self.rows = state["rows"]
        for row in self.rows[-1:]:
            self.on_step(int(row["step"]), row)
        return state["version"]

    async def _sample(self, step: int) -> list[Group]:
        self.cursors[step] = self.problems.state()
        chosen, start = self.problems.take(self.rl.prompts_per_step), time.monotonic()
        with self.load.working():
            groups = await self.sampler.sample(
                chosen, self.rl.group_size, temperature=self.rl.temperature, seed=self.rl.seed, step=step
            )
        self.sampling_s[step] = time.monotonic() - start
        return groups

    async def _step(self, step: int, schedule: Schedule) -> None:
        name, start = f"step {step + 1} of {self.rl.steps}", time.monotonic()
        report(f"{name}: sampling {self.rl.prompts_per_step * self.rl.group_size} answers", step, self.rl.steps)
        with self.spans.measure("engine"):
            groups = await schedule.rollouts(step)
        waited_s, rollout_s = time.monotonic() - start, self.sampling_s.pop(step)
        admitted = admit(groups, version=step, max_staleness=self.rl.max_staleness)
        batch = to_batch(admitted.groups, self.rl.advantage, self.rl.temperature, self.rl.max_new_tokens)
        row = {"step": step + 1, **rollout_figures(groups, admitted)}
        report(
            f"{name}: training on {batch.num_answers} answers, mean reward {row['reward_mean']:.3f}",
            step,
            self.rl.steps,
        )
        with self.spans.measure("trainer"):
            try:
                row |= await done(self.trainer.step.remote(batch))
            except MismatchError as error:
                latest = self.checkpoints.latest()
                raise MismatchError(
                    f"step {step + 1}: {error}; the last good checkpoint is {latest or self.base}"
                ) from None
        report(f"{name}: sending the weights to the engines", step, self.rl.steps)
        row |= await self._broadcast(step + 1)
        row |= await self.load.take()
        schedule.published(step + 1)
        step_s = time.monotonic() - start
        row |= {
            "rollout_s": rollout_s,
            "waited_for_rollouts_s": waited_s,
            "tokens_per_second": row["tokens"] / rollout_s,
            "step_s": step_s,
            "engine_idle_share": max(0.0, 1 - row["engine_busy_s"] / step_s),
            "trainer_idle_share": (waited_s + row["sync_s"]) / step_s,
            "mismatch_warning": float(row["k3"] > self.rl.mismatch.warn_k3),
        }
        self.rows.append(row)
        speed = f"{row['tokens_per_second']:.0f} tokens/s, {row['step_s']:.1f} s"
        report(
            f"{name}: reward {row['reward_mean']:.3f}, {row['length_mean']:.0f} tokens an answer, {speed}",
            step + 1,
            self.rl.steps,
        )
        write_rollouts(self._rollout_file(step), step + 1, groups, batch, admitted)
        if row["mismatch_warning"]:
            report(f"{name}: mismatch k3 of {row['k3']:.3g} exceeds rl.mismatch.warn_k3={self.rl.mismatch.warn_k3:g}")
        if (step + 1) % self.rl.checkpoint_every == 0 or step + 1 == self.rl.steps:
            await self._checkpoint(step + 1)
        self.on_step(step + 1, row)

    async def _broadcast(self, version: int) -> dict[str, float]:
        with self.spans.measure("trainer"):
            published = await done(self.trainer.publish.remote(version))
        with self.spans.measure("sync"):
            synced = await sync(self.clients, published, in_flight="keep")
        return {
            "publish_s": published.publish_s,
            "sync_s": synced.prepare_s + synced.pause_s,
            "pause_s": synced.pause_s,
            "transfer_s": synced.transfer_s,
            "finalize_s": synced.finalize_s,
            "verify_s": synced.verify_s,
            "sync_bytes": float(synced.bytes),
        }

    async def _checkpoint(self, version: int) -> None:
        state = {
            "version": version,
            "problems": self.cursors.get(version, self.problems.state()),
            "rows": self.rows,
        }
        save, result = self.trainer.save.remote, session().result
        with self.spans.measure("trainer"):
            await asyncio.to_thread(self.checkpoints.commit, version, lambda f: result(save(f)), state, self.digest)

    async def _before(self, handle: EngineHandle) -> dict[str, Any]:
        """Scores of the model the run started from; kept, because after an interruption the engine has others."""
        path = self.workdir / "before.json"
        if not path.is_file():
            scratch = path.with_suffix(".unfinished")
            scratch.write_text(json.dumps(await self._evaluate(handle, "before")))
            os.replace(scratch, path)
        return json.loads(path.read_text())

    async def _evaluate(self, handle: EngineHandle, when: str) -> dict[str, Any]:
        report(f"{len(self.held_out)} held-out problems and {len(self.questions)} general questions {when} training")
        with self.spans.measure("engine"):
            rollouts = await self.sampler.answer(self.held_out)
            answers = await general.ask(
                handle,
                self.questions,
                self.base,
                max_new_tokens=self.rl.general_max_new_tokens,
                concurrency=self.config.engine.max_concurrent_sequences,
            )
        return {
            "rewards": [rollout.reward or 0.0 for rollout in rollouts],
            "general": [answer.model_dump(mode="json") for answer in answers],
        }

    async def _result(self, before: dict[str, Any], after: dict[str, Any]) -> RLResult:
        import pandas as pd

        model, tables = self.workdir / "model", self.workdir / "tables"
        shutil.rmtree(model, ignore_errors=True)  # of an attempt that was interrupted here
        report("writing the trained model")
        with self.spans.measure("trainer"):
            await done(self.trainer.export.remote(model))
            await done(self.trainer.close.remote())
        tables.mkdir(exist_ok=True)
        pd.DataFrame(self.rows).to_parquet(tables / STEPS, index=False)
        texts = [self._rollout_file(step).read_text() for step in range(self.rl.steps)]
        (tables / ROLLOUTS).write_text("".join(texts))
        return RLResult(
            model=model,
            tables=tables,
            held_out=_paired(self.held_out, before["rewards"], after["rewards"]),
            general_before=before["general"],
            general_after=after["general"],
            general_digest=general.digest(self.questions),
            spans=dict(self.spans.seconds),
            placement=self.placement,
            engine=engine_pin(),
            hardware=hardware(),
        )

    def _rollout_file(self, step: int) -> Path:
        return self.workdir / "rollouts" / f"step-{step:06d}.jsonl"


def _paired(problems: Sequence[Problem], before: Sequence[float], after: Sequence[float]) -> list[HeldOut]:
    scores: dict[str, list[tuple[str, float, float]]] = {}
    for problem, old, new in zip(problems, before, after, strict=True):
        scores.setdefault(problem.environment, []).append((problem.question, old, new))
    return [
        HeldOut(
            environment=environment,
            before=[old for _, old, _ in rows],
            after=[new for _, _, new in rows],
            dataset_digest="sha256:" + hashlib.sha256(json.dumps([q for q, _, _ in rows]).encode()).hexdigest(),
        )
        for environment, rows in scores.items()
    ]
