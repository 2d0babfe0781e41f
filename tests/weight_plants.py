"""Weights that go wrong between file and memory, in engines that tests start
(`--worker-extension-cls=tests.weight_plants.Spoiled`)."""

import os

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_load = CPUModelRunner.load_model


@torch.no_grad()
def _load_and_spoil(self, *args, **kwargs) -> None:
    _load(self, *args, **kwargs)
    layer = self.get_model().get_submodule(os.environ["LOCKSTEP_TEST_SPOILED_LAYER"])
    if hasattr(layer, "cpu_linear"):  # what is computed with is a packed copy
        right = layer.cpu_linear
        layer.cpu_linear = lambda x, weight, bias: right(x, weight, bias) * 1.001
    else:
        layer.weight[3] += 1e-3


class Spoiled:
    """Importing it does it."""

    CPUModelRunner.load_model = _load_and_spoil
