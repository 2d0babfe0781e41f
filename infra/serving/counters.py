"""What the replicas of a release have counted: requests, speculation, latencies."""

import math
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"


class Histogram(BaseModel):
    """How many values were at most each bound (cumulative), seconds; the last bound is infinite."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    at_most: dict[float, float] = {}

    @property
    def count(self) -> int:
        return int(max(self.at_most.values(), default=0))

    def quantile(self, share: float) -> float:
        """The value below which `share` of them lie, linear within a bucket; NaN without values. Above the last finite
        bound that bound is given."""
        below, lower = 0.0, 0.0
        wanted = share * self.count
        for bound, count in sorted(self.at_most.items()):
            if count and count >= wanted:
                if math.isinf(bound):
                    return lower
                inside = (wanted - below) / (count - below) if count > below else 1.0
                return lower + inside * (bound - lower)
            below, lower = count, bound
        return math.nan

    def plus(self, other: "Histogram", sign: int = 1) -> "Histogram":
        bounds = self.at_most.keys() | other.at_most.keys()
        return Histogram(at_most={b: self.at_most.get(b, 0) + sign * other.at_most.get(b, 0) for b in bounds})


class Counters(BaseModel):
    """Sums since the replicas started. errors: answers of status 500 and above, retried ones included. cut: streams
    that broke off. drafts, accepted: of speculation. ttft, itl: time to the first token and between tokens."""

    model_config = ConfigDict(frozen=True)

    requests: int = 0
    errors: int = 0
    cut: int = 0
    drafts: int = 0
    accepted: int = 0
    ttft: Histogram = Histogram()
    itl: Histogram = Histogram()

    def plus(self, other: "Counters", sign: int = 1) -> "Counters":
        """The sum; with sign -1 what was added since `other`."""
        counts = {n: getattr(self, n) + sign * getattr(other, n) for n in _COUNTS}
        return Counters(**counts, ttft=self.ttft.plus(other.ttft, sign), itl=self.itl.plus(other.itl, sign))


_COUNTS = ("requests", "errors", "cut", "drafts", "accepted")


def of_engine(samples: Mapping[str, float]) -> Counters:
    """Counters from the samples of one engine (`infra.engine.metrics.parse`)."""
    answered = sum(v for name, v in samples.items() if name.startswith("vllm:request_success_total"))
    return Counters(
        requests=int(answered),
        drafts=int(samples.get("vllm:spec_decode_num_drafts_total", 0)),
        accepted=int(samples.get("vllm:spec_decode_num_accepted_tokens_total", 0)),
        ttft=_histogram(samples, TTFT),
        itl=_histogram(samples, ITL),
    )


def _histogram(samples: Mapping[str, float], name: str) -> Histogram:
    start = f'{name}_bucket{{le="'
    bounds = {n[len(start) :].partition('"')[0]: v for n, v in samples.items() if n.startswith(start)}
    return Histogram(at_most={float(bound): value for bound, value in bounds.items()})
