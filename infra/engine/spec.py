"""What an engine is: one vLLM server process group with a role."""

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from infra.config.recording import RecordingConfig
from infra.config.target import EngineConfig


class Role(StrEnum):
    """Decides what an engine exposes: only `rollout` and `capture` have the RL endpoints."""

    rollout = "rollout"
    capture = "capture"
    eval = "eval"
    serve = "serve"

    @property
    def has_rl_endpoints(self) -> bool:
        return self in (Role.rollout, Role.capture)


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Speculation(_Frozen):
    """Speculative decoding of an engine.

    model: the drafter's folder; none for `ngram`.
    num_speculative_tokens: proposed tokens per target pass.
    draft_sampling: how a drafter with a distribution proposes: its most likely token, or a sample of it.
    schedule: (from, to, tokens): how many are proposed while from..to requests are in flight, in place of
        `num_speculative_tokens`, which is the most; 0 proposes none. Empty: always as many.
    """

    method: Literal["eagle3", "ngram", "draft_model"]
    model: Path | None = None
    num_speculative_tokens: int = Field(ge=1)
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    schedule: list[tuple[int, int, int]] = []

    @model_validator(mode="after")
    def _check(self):
        if (self.model is None) != (self.method == "ngram"):
            raise ValueError("speculation by ngram takes no model, every other method needs its drafter's folder")
        return self


class Capture(_Frozen):
    """Hidden states written by the engine, one file per request (`infra.engine.client.EngineClient.capture`).

    layer_ids: id k is the residual stream after k layers, as in HF `hidden_states[k]`; id = number of layers is the
        final state before the final norm.
    folder: where the files go.
    """

    layer_ids: list[int] = Field(min_length=1)
    folder: Path


class EngineSpec(_Frozen):
    """Everything that decides how an engine runs.

    model: folder in Hugging Face format.
    served_name: what requests call the model; the folder's name by default.
    label: what it serves, told with every answer in the header `x-lockstep-serves`.
    port: 0 takes a free one.
    key: the secret that opens it; a random one by default. Never written or shown.
    recording: requests that a serve engine keeps (`infra.engine.recorder`).
    pinned: digests, as lineage names them, by the folders that are loaded; an engine with other weights does not start
        (`infra.transport.loaded`).
    seed: vLLM's own seed, used by requests that carry none.
    matched: log-probs as near to a trainer's as can be had: a float32 output head and, on GPUs, kernels that give a
        token the same one in whatever batch it is computed.
    """

    model: Path
    role: Role
    served_name: str = ""
    label: str = ""
    config: EngineConfig = EngineConfig()
    speculation: Speculation | None = None
    capture: Capture | None = None
    recording: RecordingConfig = RecordingConfig()
    pinned: dict[str, str] = {}
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    seed: int = 0
    matched: bool = False
    key: SecretStr | None = Field(None, exclude=True)

    @model_validator(mode="after")
    def _check(self):
        if (self.capture is not None) != (self.role is Role.capture):
            raise ValueError("an engine captures hidden states if and only if its role is capture")
        if self.capture and self.speculation:
            raise ValueError("a capture engine cannot speculate: capturing takes the place of the drafter")
        if self.recording.share and self.role is not Role.serve:
            raise ValueError(f"a {self.role} engine keeps no requests: only a serve engine is asked by users")
        return self

    @property
    def model_name(self) -> str:
        """The name under which the engine serves its model."""
        return self.served_name or self.model.name


class EngineHandle(_Frozen):
    """How to reach a running engine from any process.

    key: a secret, it opens every endpoint. model: the name to ask for. accelerated: whether it runs on GPUs.
    """

    url: str
    key: str = Field(repr=False)
    model: str
    role: Role
    accelerated: bool
