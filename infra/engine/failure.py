"""Why an engine died, from its own log."""

import re
from pathlib import Path
from textwrap import shorten

from infra.engine.pin import accelerated

# A line that ends a traceback, or argparse's complaint; vLLM puts a process name and a log prefix in front.
_EXCEPTION = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): ?(.*)$")
_INFO = re.compile(r"\bINFO [-0-9: ]+\[.*?\] (.*\w.*)")
_ADVICE = "Restart vllm serve with"  # for whoever starts vLLM by hand
_ROUTE = "Route: "  # one line for each of dozens
_LONGEST = 100  # characters; its whole configuration, 4,000 of them, is among what it says
_USAGE = re.compile(r"^\S+: error: (.*)$")
# Exceptions that only pass on that another process failed.
_ECHOES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "WorkerProc failed to start",
    "cancelled",
    "See root cause above",
    "EngineCore encountered an issue",
)
_PASSING = (
    "Error in memory profiling",
)  # another process gave GPU memory back while the engine looked at how much is free
_FORKED = ("CUDA in forked subprocess", "CUDA error: initialization error")  # an import has used CUDA before the fork
_HINTS = (  # the first that fits; {cache} is what decides how much the KV cache gets
    ("desired gpu memory utilization", "lower engine.gpu_memory_fraction, or free memory of the GPU"),
    ("to serve at least one request", "raise {cache} or lower engine.max_model_len"),
    ("memory for the cache blocks", "raise {cache}{counted}"),
    ("kv cache", "lower {cache}, or free memory"),
    ("out of memory", "lower {cache} or engine.max_batched_tokens, or free memory"),
    ("allocate memory", "lower {cache}, or free memory"),
    ("max_model_len", "lower engine.max_model_len"),
)
_CPU_WORDS = {"cache": "engine.kv_cache_gib", "counted": ""}
_GPU_WORDS = {
    "cache": "engine.gpu_memory_fraction",
    "counted": ", or start it while others on the GPU take no memory: what they take meanwhile counts as the engine's",
}


def root_cause(log: Path, gpus: bool | None = None) -> str:
    """The exception that ended the engine, as one line with a hint where one is known.

    log: the engine's output. The last exception that is not merely the echo of another process's failure counts;
    without one, the last line. gpus: what the engine ran on; none asks which vLLM is installed.
    """
    lines = log.read_text(errors="replace").splitlines()
    found = None
    for number, line in enumerate(lines):
        if usage := _USAGE.match(line):
            found = usage[1]
        elif (match := _EXCEPTION.search(line)) and not any(echo in line for echo in _ECHOES):
            found = _sentence(match[1].rsplit(".", 1)[-1], match[2], lines[number + 1 : number + 3])
    if found is None:
        written = [line for line in lines if line.strip()]
        return written[-1].strip() if written else "it wrote nothing"
    hints = [hint for sign, hint in _HINTS if sign in found.lower()]
    if not hints:
        return found
    words = _GPU_WORDS if (accelerated() if gpus is None else gpus) else _CPU_WORDS
    return f"{found}; {hints[0].format(**words)}"


def passing(cause: str) -> bool:
    """Whether an engine that ended for this `root_cause` may just be started again."""
    return any(sign in cause for sign in _PASSING)


def unforkable(cause: str) -> bool:
    """Whether an engine that ended for this `root_cause` may start when it is executed in place of forked."""
    return any(sign in cause for sign in _FORKED)


def doing(log: Path) -> str:
    """What the engine said last about its own progress, without vLLM's prefix and no longer than a line; warnings,
    advice and lists stay in the log."""
    found = [match[1] for line in log.read_text(errors="replace").splitlines() if (match := _INFO.search(line))]
    said = [words for words in found if _ADVICE not in words and not words.startswith(_ROUTE)]
    return shorten(said[-1], _LONGEST, placeholder=" ...") if said else "starting its processes"


def _sentence(kind: str, text: str, following: list[str]) -> str:
    if kind == "ValidationError" and following:  # pydantic puts the reason on the next lines
        reasons = [re.sub(r"^.*?(Value error, |Assertion failed, )", "", f) for f in following if "rror" in f]
        text = reasons[0].split(" [type=")[0] if reasons else text
    return f"{kind}: {text}" if text else kind
