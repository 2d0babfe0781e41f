"""Drafters on disk, as engines use them."""

import json
from pathlib import Path

from infra.engine.errors import EngineError
from infra.engine.spec import Speculation

CARD = "lockstep.json"
"""File in a drafter's folder that names its kind."""


def speculation(drafter: Path, num_speculative_tokens: int) -> Speculation:
    """How an engine speculates with the drafter in the folder `drafter`, whatever its kind.

    Raises EngineError when the folder says of no kind that engines know.
    """
    try:
        kind = json.loads((drafter / CARD).read_text())["kind"]
        model = None if kind == "ngram" else drafter
        return Speculation(method=kind, model=model, num_speculative_tokens=num_speculative_tokens)
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"{drafter} is no drafter ({error}): make one with `lockstep drafter`") from error
