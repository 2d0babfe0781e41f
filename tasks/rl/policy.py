"""The policy: a causal language model that gives the log-probs of sampled tokens, whole or sharded over ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from infra.cluster.ranks import Ranks, whole
from infra.config.rl import LoRA
from tasks.rl import attention
from tasks.rl.errors import TrainerError
from tasks.rl.head import token_logprobs


class Policy(torch.nn.Module):
    """The model of a folder in Hugging Face format, in float32, without dropout.

    lora: adapters that are trained in place of the weights. checkpointing: activations are computed again for the
    gradient instead of kept. float32_head: logits of a bfloat16 body in float32.
    Raises TrainerError for a model that cannot be packed, or whose log-probs are more than its last layer's.
    """

    def __init__(self, folder: Path, *, lora: LoRA | None = None, checkpointing: bool = False, float32_head=False):
        from transformers import AttentionInterface, AutoModelForCausalLM

        super().__init__()
        AttentionInterface.register(attention.NAME, attention.attention)
        self.causal = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention.NAME
        )
        kinds = set(getattr(self.causal.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise TrainerError(f"{folder} has layers of type {sorted(kinds)}: only full attention can be trained here")
        self._recompute, self._float32_head = checkpointing, float32_head
        self._without_dropout()
        self._check_head(folder)
        if lora:
            self._add_adapters(lora)
        if checkpointing:
            self.causal.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(
        self,
        input_T: torch.Tensor,
        position_T: torch.Tensor,
        layout: attention.Layout,
        row_N: torch.Tensor,
        target_N: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """Log-probs of softmax(logits / temperature) of the tokens sampled after `row_N`, float32 [N], nats.

        input_T, position_T, layout, row_N, target_N: as in `tasks.rl.packing.MicroBatch`.
        """
        hidden_TH = self._body(
            input_ids=input_T[None], position_ids=position_T[None], layout=layout, use_cache=False
        ).last_hidden_state[0]
        return token_logprobs(
            hidden_TH[row_N],
            self._head.weight,
            target_N,
            temperature,
            float32=self._float32_head,
            recompute=self._recompute,
        )

    def shard(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> None:
        """Spread weights, gradients and what the optimizer keeps of them over the ranks (FSDP2).

        dtype: of the forward and backward pass; weights, their gradients' sums and moments stay float32.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (ranks.world,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in self._body.modules():
            if type(module).__name__ in (self.causal._no_split_modules or ()):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(self, mesh=mesh, mp_policy=policy)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer changes, by its name in the model."""
        return {name: p for name, p in self.causal.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight whole and with adapters merged, under its Hugging Face name; one that is tied to another appears
        once. With several ranks a collective call: each iterates, and has one weight at a time."""
        adapted = {f"{name}.base_layer.weight": layer for name, layer in self._adapted()}
        for name, parameter in self.causal.named_parameters():
            if ".lora_" in name:
                continue
            weight = whole(parameter.detach())
            if name in adapted:
                layer = adapted[name]
                a, b = (whole(part["default"].weight.detach()) for part in (layer.lora_A, layer.lora_B))
                weight = weight + layer.scaling["default"] * (b @ a)
            yield name.replace(".base_layer.", "."), weight

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The model that training started from, where adapters are trained."""
        layers = [layer for _, layer in self._adapted()]
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    @property
    def _body(self) -> torch.nn.Module:
        return getattr(self.causal, self.causal.base_model_prefix)

    @property
    def _head(self) -> torch.nn.Module:
        return self.causal.get_output_embeddings()

    def _adapted(self) -> list[tuple[str, torch.nn.Module]]:
        return [(name, module) for name, module in self.causal.named_modules() if hasattr(module, "lora_A")]

    def _without_dropout(self) -> None:
        """The ratio of the first update is exactly one. The mode is that of training: only there are activations
        recomputed."""
        self.causal.train()
        self.causal.config.attention_dropout = 0.0
        for module in self.causal.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0

    @torch.no_grad()
    def _check_head(self, folder: Path) -> None:
        """Some models scale, cap or shift their logits: those would be trained as another model than is served."""
        tokens = torch.arange(2)
        logits = self.causal(input_ids=tokens[None], use_cache=False).logits[0]
        states = self._body(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        if not torch.allclose(states @ self._head.weight.t(), logits, atol=1e-3, rtol=1e-3):
            raise TrainerError(f"{folder} changes its logits after its last layer: such a model cannot be trained here")

    def _add_adapters(self, lora: LoRA) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM"
        )
        try:
            inject_adapter_in_model(config, self.causal)
        except ValueError as error:
            raise TrainerError(f"rl.lora: {error}") from error
        if hasattr(self._head, "lora_A"):
            raise TrainerError("rl.lora.target_modules names the output head, which takes no adapter: leave it out")
        for name, parameter in self.causal.named_parameters():
            parameter.requires_grad_(".lora_" in name)
