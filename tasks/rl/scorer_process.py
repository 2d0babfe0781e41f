"""The process that scores: one JSON object a line in, one a line out. It ends when its standard input closes.

First line in: `{"environments": [...], "seed": n}`; out `{}` when they are loaded, else `{"error": ...}`.
Then in: `{"environment": label, "index": n, "answer": text}`; out `{"score": x}` or `{"error": ...}`.
"""

import json
import math
import os
import queue
import sys
import threading
from typing import TextIO

from tasks.rl.environments.base import BadEnvironment
from tasks.rl.environments.make import make
from tasks.rl.scoring import CONFIGS


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a scorer prints must not be taken for a reply
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    hello = json.loads(requests.get())
    try:
        environments = make(CONFIGS.validate_python(hello["environments"]), hello["seed"])
    except BadEnvironment as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {})
    while True:
        request = json.loads(requests.get())
        try:
            score = environments[request["environment"]].score(request["index"], request["answer"])
            if not (math.isfinite(score) and 0 <= score <= 1):
                raise ValueError(f"a score must lie in [0, 1], not {score}")
        except Exception as error:  # whatever a user's scorer raises costs this answer alone, and is reported
            _reply(replies, {"error": f"{type(error).__name__}: {error}".replace("\n", " ")})
        else:
            _reply(replies, {"score": score})


def _read(requests: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the owner is gone, even if a scorer hangs


def _reply(replies: TextIO, reply: dict) -> None:
    replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
