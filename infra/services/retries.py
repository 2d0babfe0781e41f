"""Which failures another attempt may mend: those of the network, of what an engine needs when it starts, and of a
process that was killed. A setting that is wrong stays wrong, so everything else fails at once."""

from typing import Any

AFTER_S = [5, 30]  # before the second and the third attempt

_NETWORK = {
    "builtins.ConnectionError",
    "httpx.TransportError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
    "botocore.exceptions.ConnectionError",
    "botocore.exceptions.HTTPClientError",
}
_DIED = {"infra.engine.errors.EngineGone", "ray.exceptions.RayActorError"}
_ANSWER = "botocore.exceptions.ClientError"
_ENGINE = "infra.engine.errors.EngineError"
_SIGNS = (
    # what another engine, or one that ended a moment ago, still holds
    "address already in use",
    "less than desired gpu memory utilization",
    # of an engine that was killed: while it started, and behind a server that still answers
    "was killed by signal",
    "enginecore encountered an issue",
)


def transient(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, may be over in half a minute."""
    while error is not None:
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
        if kinds & (_NETWORK | _DIED) or (_ENGINE in kinds and any(sign in str(error).lower() for sign in _SIGNS)):
            return True
        if _ANSWER in kinds and error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:  # storage that comes back
            return True
        error = error.__cause__ or error.__context__
    return False


def may_help(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's `retry_condition_fn`: whether the task whose run ended in `state` is tried again."""
    try:
        state.result()
    except Exception as error:
        return transient(error)
    return False
