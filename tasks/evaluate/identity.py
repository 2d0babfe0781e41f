"""Whether speculation leaves greedy output as it is, against the noise of two runs without it."""

from collections.abc import Mapping, Sequence

from tasks.evaluate.evidence import row

Outputs = Mapping[str, Sequence[Sequence[int]]]  # by domain, generated token ids of each prompt


def identity_rows(
    without: Outputs, again: Outputs, with_speculation: Outputs, *, subject: str, prefix: str = "", **labels
) -> list[dict]:
    """Evidence rows output_identity (`with_speculation` against `without`) and output_identity_noise (`again`, a second
    run without speculation, against `without`): the share of prompts answered by the same tokens, n = prompts, and
    output_agreement: the mean share of an answer's tokens before the first that differs.

    All three answer the same prompts at temperature 0. Raises ValueError when they do not match in number.
    """
    rows = []
    for domain in without:
        same, agreement = _agreement(without[domain], with_speculation[domain])
        noise, _ = _agreement(without[domain], again[domain])
        n = len(without[domain])
        for figure, value in (
            ("output_identity", same),
            ("output_identity_noise", noise),
            ("output_agreement", agreement),
        ):
            rows.append(row(f"{prefix}{figure}", value, n=n, unit="share", subject=subject, domain=domain, **labels))
    return rows


def _agreement(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Share of pairs that are equal, and mean share of tokens before the first difference."""
    if len(one) != len(other):
        raise ValueError(f"{len(one)} answers against {len(other)}: compare runs on the same prompts")
    pairs = list(zip(one, other, strict=True))
    return sum(list(a) == list(b) for a, b in pairs) / len(pairs), sum(_shared(a, b) for a, b in pairs) / len(pairs)


def _shared(a: Sequence[int], b: Sequence[int]) -> float:
    longest = max(len(a), len(b))
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return first / longest if longest else 1.0
