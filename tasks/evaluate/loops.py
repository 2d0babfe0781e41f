"""Answers that go in circles: greedy decoding of a small model repeats itself, and whatever it repeats is accepted."""

from collections.abc import Iterable, Sequence

NGRAM = 8


def repeated(tokens: Sequence[int], n: int = NGRAM) -> list[bool]:
    """For each token, whether it lies in an `n`-gram that the same answer had before."""
    seen: set[tuple[int, ...]] = set()
    inside = [False] * len(tokens)
    for start in range(len(tokens) - n + 1):
        gram = tuple(tokens[start : start + n])
        if gram in seen:
            inside[start : start + n] = [True] * n
        seen.add(gram)
    return inside


def fresh_passes(arrivals: Iterable[Sequence[int]], longest: int) -> list[int]:
    """Tokens of each target pass that gave no repeated token, oldest first.

    arrivals: of one answer; the first comes with the prompt, each later one from one pass. longest: most tokens that a
    pass can give; arrivals of more are several passes that reached the reader together, and are left out, as is the
    last one, which the end of the answer may have cut.
    """
    parts = [list(tokens) for tokens in arrivals]
    marks = repeated([token for tokens in parts for token in tokens])
    passes, at = [], 0
    for number, tokens in enumerate(parts):
        looped = any(marks[at : at + len(tokens)])
        at += len(tokens)
        if 0 < number < len(parts) - 1 and not looped and len(tokens) <= longest:
            passes.append(len(tokens))
    return passes
