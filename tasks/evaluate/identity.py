"""Whether speculation leaves greedy output as it is, against the noise of two runs without it."""

from collections.abc import Mapping, Sequence

from tasks.evaluate.evidence import row

Outputs = Mapping[str, Sequence[Sequence[int]]]  # by domain, generated token ids of each prompt


def identity_rows(
    without: Outputs,
    with_speculation: Outputs,
    *,
    again: Outputs | None = None,
    subject: str,
    prefix: str = "",
    **labels,
) -> list[dict]:
    """Evidence rows of answers to the same prompts at temperature 0, per domain, n = prompts.

    output_identity: share of prompts that `with_speculation` answers with the same tokens as `without`.
    output_agreement: mean share of an answer's tokens before the first that differs.
    output_identity_noise: identity of `again`, a second run without speculation, where there was one.
    Raises ValueError when the numbers of answers differ.
    """
    figures = {"output_identity": (_identity, with_speculation), "output_agreement": (_agreement, with_speculation)}
    if again is not None:
        figures["output_identity_noise"] = (_identity, again)
    return [
        row(
            f"{prefix}{figure}",
            _mean(share, without[domain], other[domain]),
            n=len(without[domain]),
            unit="share",
            subject=subject,
            domain=domain,
            **labels,
        )
        for domain in without
        for figure, (share, other) in figures.items()
    ]


def _mean(share, one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    if len(one) != len(other):
        raise ValueError(f"{len(one)} answers against {len(other)}: compare runs on the same prompts")
    return sum(share(a, b) for a, b in zip(one, other, strict=True)) / len(one)


def _identity(a: Sequence[int], b: Sequence[int]) -> float:
    return float(list(a) == list(b))


def _agreement(a: Sequence[int], b: Sequence[int]) -> float:
    longest = max(len(a), len(b))
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return first / longest if longest else 1.0
