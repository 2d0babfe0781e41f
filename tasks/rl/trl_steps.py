"""Run where TRL can be imported: steps of its GRPOTrainer on recorded rollouts. Arguments: what is asked, and where the
answer goes, both JSON (`tasks/rl/measure_trl.py`)."""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

ROWS_AT_ONCE = 8  # TRL's default per_device_train_batch_size


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args, **kwargs) -> None:
        self._start = time.monotonic()

    def on_step_end(self, *args, **kwargs) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.monotonic() - self._start)


def main(asked_path: str, found_path: str) -> None:
    sys.modules["vllm"] = None  # nothing is generated here, and TRL knows older versions of it
    from trl import GRPOConfig, GRPOTrainer

    asked = json.loads(Path(asked_path).read_text())
    torch.set_num_threads(asked["threads"])
    groups, group_size = asked["groups"], len(asked["groups"][0]["answers"])
    count = len(groups) * group_size
    rows = next(n for n in range(min(ROWS_AT_ONCE, count), 0, -1) if count % n == 0)
    on_gpu = torch.cuda.is_available()

    def recorded(prompts: list[str], trainer: Any) -> dict[str, list]:
        seen: Counter[str] = Counter()
        chosen = []
        for prompt in prompts:
            group = groups[int(prompt)]
            chosen.append((group["prompt"], group["answers"][seen[prompt]]))
            seen[prompt] += 1
        return {
            "prompt_ids": [prompt for prompt, _ in chosen],
            "completion_ids": [answer for _, answer in chosen],
            "logprobs": [[0.0] * len(answer) for _, answer in chosen],
        }

    def reward(completions: list[str], **kwargs) -> list[float]:
        return [float(n % 2) for n in range(len(completions))]

    sizes: list[tuple[int, int]] = []

    class Counted(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
            sizes.append((input_ids.numel(), int(attention_mask.sum())))
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)

    clock = Clock()
    trainer = Counted(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(Path(found_path).parent / "trl"),
            max_steps=asked["steps"],
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=count // rows,
            num_generations=group_size,
            max_completion_length=max(len(a) for group in groups for a in group["answers"]),
            learning_rate=asked["lr"],
            gradient_checkpointing=asked["gradient_checkpointing"],
            bf16=asked["bfloat16"],
            use_cpu=not on_gpu,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(len(groups))]),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        rollout_func=recorded,
        callbacks=[clock],
    )
    trainer.train()
    per_step = len(sizes) // asked["steps"]
    inputs, real = (sum(column) for column in zip(*sizes[:per_step], strict=True))
    found = {"seconds": clock.seconds[1:], "inputs": float(inputs), "padding": 1 - real / inputs}
    Path(found_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
