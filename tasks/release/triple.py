"""What the engines of a release serve: the parts of a candidate or of a registered release, and their settings."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.config.flows import ReleaseFlowConfig
from infra.config.recording import RecordingConfig
from infra.config.target import EngineConfig
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.serving.state import Triple
from infra.store.base import Store
from tasks.release.candidate import Candidate
from tasks.release.serve import spec_of

SERVING = "lockstep.serving"  # tag of a release: the settings that its engines run with


class Serving(BaseModel):
    """Settings of the engines of a release, kept with it: going back to it restores them too."""

    model_config = ConfigDict(frozen=True)

    engine: EngineConfig
    num_speculative_tokens: int | Literal["best"]
    recording: RecordingConfig = RecordingConfig()

    @classmethod
    def of(cls, config: ReleaseFlowConfig) -> "Serving":
        """What `config` asks for."""
        release = config.release
        return cls(
            engine=config.engine,
            num_speculative_tokens=release.num_speculative_tokens,
            recording=release.recording,
        )


def triple_of(store: Store, parts: Candidate, serving: Serving) -> Triple:
    """What serves `parts`. Its artifacts are those that lineage names."""
    model = parts.quant or parts.target
    spec = spec_of(store, parts, serving.engine, serving.num_speculative_tokens, serving.recording)
    labels = {part.kind: part.label for part in parts.versions}
    return Triple(
        parts=labels,
        artifacts=[model.artifact, *([parts.drafter.artifact] if parts.drafter else [])],
        spec=spec.model_copy(update={"served_name": parts.target.name, "label": " ".join(labels.values())}),
    )


def triple_of_release(lineage: Lineage, store: Store, release: Version, otherwise: Serving) -> Triple:
    """What serves a registered release, with the settings it was released with, or `otherwise` where none were kept
    (or they are of another version of Lockstep)."""
    parts = {kind: lineage.get(label) for kind, label in release.parts.items()}
    candidate = Candidate(target=parts["target"], drafter=parts.get("drafter"), quant=parts.get("quant"))
    try:
        serving = Serving.model_validate_json(release.tags[SERVING]) if SERVING in release.tags else otherwise
    except ValidationError:
        serving = otherwise
    return triple_of(store, candidate, serving)
