"""N-gram lookup: proposes what followed the last tokens where they occurred before. Nothing to train."""

import tempfile
from pathlib import Path

from infra.config.flows import DrafterFlowConfig
from infra.lineage.versions import Version
from infra.store.open import open_store
from tasks.drafter.export import CARD, DrafterCard, tokenizer_digest
from tasks.drafter.kinds.base import Made
from tasks.drafter.steps import COMMAND, Answers


def make(target: Version, previous: Version | None, answers: Answers, config: DrafterFlowConfig, run: str) -> Made:
    """Say that the target is served with n-gram lookup."""
    store = open_store()
    card = DrafterCard(
        kind="ngram",
        target_tokenizer=tokenizer_digest(store.open(target.artifact)),
        num_speculative_tokens=config.drafter.num_speculative_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CARD).write_text(card.model_dump_json(indent=2) + "\n")
        return Made(drafter=store.put(Path(folder), "drafter", producer=COMMAND, inputs=[target.artifact]))
