"""What engines run on, as the evidence names it."""

import os

import pytest

from infra.engine import pin

GPUS = ("0, GPU-aa11-0, NVIDIA H200", "1, GPU-bb22-1, NVIDIA H200", "2, GPU-cc33-2, NVIDIA L4")


@pytest.mark.parametrize(
    ("visible", "told"),
    [
        (None, "2x NVIDIA H200, 1x NVIDIA L4"),
        ("1", "1x NVIDIA H200"),
        ("2,0", "1x NVIDIA H200, 1x NVIDIA L4"),
        ("GPU-cc", "1x NVIDIA L4"),
        ("MIG-5f,MIG-6a", "2x MIG slice"),
        ("", ""),
    ],
)
def test_hardware_is_what_a_process_may_use(visible, told, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '%s\\n' " + " ".join(f"'{line}'" for line in GPUS) + "\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(pin, "distribution", lambda: ("vllm", "0.32.0"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert pin.hardware.__wrapped__() == told
    assert pin.gpus() == sum(int(part.split("x")[0]) for part in told.split(", ") if part)
