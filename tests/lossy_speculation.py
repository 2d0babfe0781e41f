"""Lossy speculation that tests plant into an engine (`--worker-extension-cls=tests.lossy_speculation.Generous`)."""

import torch
from vllm.v1.sample import rejection_sampler

GENEROSITY = 1.0
"""A proposal is accepted when the target's logit of it is at most this much below its best, as typical acceptance does:
fast, and no longer what the target says."""

_strictly = rejection_sampler.rejection_sample


def _generously(draft_token_ids, num_draft_tokens, longest, cumulative, draft_probs, target_logits, *rest, **options):
    target_logits[torch.arange(len(draft_token_ids)), draft_token_ids.long()] += GENEROSITY
    return _strictly(
        draft_token_ids, num_draft_tokens, longest, cumulative, draft_probs, target_logits, *rest, **options
    )


class Generous:
    """Importing it does it."""

    rejection_sampler.rejection_sample = _generously
