"""Scorers that tests name as `tests.unit.scorers:FUNCTION`."""

import os
import time


def exact(answer: str, line: dict) -> float:
    print("a scorer may print")
    return float(answer.strip() == line["answer"])


def moody(answer: str, line: dict) -> float:
    if answer == "raise":
        raise KeyError("no such answer")
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        os._exit(3)
    return 2.0 if answer == "too much" else 1.0
