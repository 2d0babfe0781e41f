"""One configuration per flow, composed of the sections."""

from typing import Any, TypeVar

from pydantic import model_validator

from infra.config import confidential
from infra.config.base import Section
from infra.config.drafter import DrafterConfig
from infra.config.quant import QuantizeConfig
from infra.config.release import ReleaseConfig
from infra.config.review import ReviewConfig
from infra.config.rl import RLConfig
from infra.config.target import ClusterConfig, EngineConfig, TargetConfig
from infra.config.watch import WatchConfig


class FlowConfig(Section):
    """What every flow needs."""

    target: TargetConfig = TargetConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="before")
    @classmethod
    def _check_nothing_is_secret(cls, values: Any) -> Any:
        for path, known_by in confidential.find(values):
            raise ValueError(f"{'.'.join(path)}: {known_by}; {confidential.WHY}")
        return values

    def narrow(self, kind: "type[Narrower]") -> "Narrower":
        """The part of this configuration that another flow takes."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})


Narrower = TypeVar("Narrower", bound=FlowConfig)


class RLFlowConfig(FlowConfig):
    rl: RLConfig = RLConfig()

    @model_validator(mode="after")
    def _check_numerics(self):
        return _matched(self)


class DrafterFlowConfig(FlowConfig):
    rl: RLConfig = RLConfig()
    """Only its environments are read, for traffic whose source is `rl`."""
    drafter: DrafterConfig = DrafterConfig()


class QuantizeFlowConfig(FlowConfig):
    rl: RLConfig = RLConfig()
    """Only its environments are read, for traffic whose source is `rl` and for held-out problems."""
    drafter: DrafterConfig = DrafterConfig()
    """Its traffic gives the texts; its drafter's acceptance is measured on the quant."""
    quantize: QuantizeConfig = QuantizeConfig()


class ReleaseFlowConfig(FlowConfig):
    release: ReleaseConfig = ReleaseConfig()


class ReviewFlowConfig(FlowConfig):
    review: ReviewConfig = ReviewConfig()


class LoopConfig(FlowConfig):
    rl: RLConfig = RLConfig()
    drafter: DrafterConfig = DrafterConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    release: ReleaseConfig = ReleaseConfig()

    @model_validator(mode="after")
    def _check_numerics(self):
        return _matched(self)

    @model_validator(mode="after")
    def _check_concurrency(self):
        measured = [self.drafter.eval_concurrency, *self.drafter.load_concurrency]
        asked = {gate.concurrency for gate in self.release.judged} - {"any", *measured}
        if asked:
            raise ValueError(
                f"release judges at {min(asked)} requests in flight (release.concurrency, or a gate's), and speed is "
                f"measured at {', '.join(map(str, measured))}: add {min(asked)} to drafter.load_concurrency"
            )
        return self


class WatchFlowConfig(FlowConfig):
    rl: RLConfig = RLConfig()
    """Only its environments are read, for traffic whose source is `rl`."""
    drafter: DrafterConfig = DrafterConfig()
    """Its traffic, and how the drafter is served while it is measured."""
    watch: WatchConfig = WatchConfig()


class Settings(LoopConfig):
    """Every section that a file may hold."""

    watch: WatchConfig = WatchConfig()
    review: ReviewConfig = ReviewConfig()


Trains = TypeVar("Trains", RLFlowConfig, LoopConfig)


def _matched(config: Trains) -> Trains:
    if config.rl.numerics == "matched" and config.rl.trainer_dtype != config.engine.dtype:
        raise ValueError(
            f"rl.numerics=matched needs one precision on both sides: rl.trainer_dtype is {config.rl.trainer_dtype}, "
            f"engine.dtype is {config.engine.dtype}"
        )
    return config
