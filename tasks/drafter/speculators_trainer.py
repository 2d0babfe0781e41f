"""speculators' own trainer on states captured here: its data format, its loader, its Trainer, on packs made here."""

import io
import time
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch

from infra.config.drafter import DrafterConfig
from tasks.drafter.states import Captured

LOADERS = 4  # processes that read ahead on GPUs; on CPU they would take the cores that train


def train(
    model: torch.nn.Module, captured: Sequence[Captured], packs: list[list[int]], config: DrafterConfig, folder: Path
) -> list[float]:
    """Train `model`, one step for each pack of numbers of `captured`; seconds of each step, its loading included.

    Loss, learning rate and precision are those of `config`; what it does not name is as speculators has it. folder: for
    the states as speculators reads them.
    """
    from speculators.train.trainer import Trainer, TrainerConfig

    on_gpu = torch.cuda.is_available()

    class OnThisDevice(Trainer):
        """The original is written for accelerators alone."""

        def setup_trainer(self):
            super().setup_trainer()
            if not on_gpu:
                self.local_rank = self.device_type = "cpu"
            self.global_step = 1  # steps whose number log_freq divides wait for the accelerator to be timed

    write(captured, folder)
    dtype = getattr(torch, config.dtype)
    call, _ = type(model).get_trainer_kwargs(
        loss_fn=config.loss,
        loss_implementation="fused" if on_gpu else "eager",
        ttt_steps=config.ttt_steps,
        ttt_step_loss_decay=config.ttt_decay,
    )
    settings = TrainerConfig(
        lr=config.lr,
        num_epochs=1,
        save_path=str(folder / "checkpoints"),
        train_call_kwargs=call,
        scheduler_type="cosine",
        scheduler_warmup_ratio=config.warmup_share,
        scheduler_total_steps=len(packs),
        hidden_states_dtype=dtype,
        log_freq=len(packs) + 2,
    )
    stamps = [time.monotonic()]
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # it draws a bar
        warnings.simplefilter("ignore")  # of an accelerator that is not there
        loader = _loader(model, folder, packs, config, LOADERS if on_gpu else 0)
        trainer = OnThisDevice(model, settings, loader)
        stamps[0] = time.monotonic()
        trainer.train_epoch(0, step_callback=lambda: stamps.append(time.monotonic()))
        if on_gpu:  # which may still be at the last steps
            torch.cuda.synchronize()
            stamps[-1] = time.monotonic()
    return [after - before for before, after in zip(stamps, stamps[1:], strict=False)]


def write(captured: Sequence[Captured], folder: Path) -> None:
    """`captured` in the form that speculators trains on: a data set of tokens and masks, and a file of states for each
    of its rows."""
    from datasets import Dataset
    from safetensors.torch import save_file

    rows = []
    (folder / "hidden_states").mkdir(parents=True)
    for number, one in enumerate(captured):
        count = one.sequence.num_states
        token_ids, mask = one.sequence.token_ids[:count], [False] * count
        for start, end in one.sequence.answers:
            mask[start : end - 1] = [True] * (end - 1 - start)
        rows.append({"input_ids": token_ids, "loss_mask": mask, "seq_len": count})
        states = {"hidden_states": one.states.contiguous(), "token_ids": torch.tensor(token_ids)}
        save_file(states, folder / "hidden_states" / f"hs_{number}.safetensors")
    Dataset.from_list(rows).with_format("torch").save_to_disk(folder / "data")


def _loader(model: torch.nn.Module, folder: Path, packs: list[list[int]], config: DrafterConfig, workers: int):
    from hs_connectors import FileTransfer
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    dtype = getattr(torch, config.dtype)
    return torch.utils.data.DataLoader(
        ArrowDataset(
            config.micro_batch_tokens,
            folder / "data",
            FileTransfer(folder / "hidden_states"),
            on_missing="raise",
            hidden_states_dtype=dtype,
        ),
        batch_sampler=packs,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=workers > 0,
        collate_fn=CollateFn(
            config.micro_batch_tokens,
            model.hidden_size,
            num_target_layers=len(model.target_layer_ids),
            dtype=dtype,
            preprocess=shift_batch,
        ),
        multiprocessing_context="spawn" if workers else None,
    )
