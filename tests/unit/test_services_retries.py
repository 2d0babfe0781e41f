"""What is tried again, and what is not."""

import httpx
import pytest
from botocore.exceptions import ClientError
from ray.exceptions import ActorDiedError

from infra.engine.errors import EngineError, EngineGone
from infra.services import retries
from infra.store.base import StoreError
from tasks.rl.errors import TrainerError


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """`error` as it is caught: raised while `cause` was handled, or out of nothing."""
    try:
        if cause is None:
            raise error
        try:
            raise cause
        except Exception:
            raise error from None
    except Exception as caught:
        return caught


def s3_answer(status: int) -> ClientError:
    return ClientError({"Error": {}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionResetError("by peer"), True),
        (httpx.ConnectTimeout("no answer"), True),
        (raised(StoreError("the store does not answer"), ConnectionRefusedError("refused")), True),
        (EngineError("engine of role eval ended: OSError: [Errno 98] Address already in use"), True),
        (EngineError("engine of role eval ended: ValueError: raise engine.kv_cache_gib"), False),
        (EngineGone("the engine at http://127.0.0.1:1 does not answer"), True),
        (EngineError("the eval engine was killed by signal 9: Loading weights (log: eval.log)"), True),
        (EngineError("http://127.0.0.1:1/v1/completions answered 500: EngineCore encountered an issue."), True),
        (raised(TrainerError("the trainer's process has died"), ActorDiedError()), True),
        (TrainerError("the loss is not finite"), False),
        (StoreError("no such bucket"), False),
        (raised(StoreError("InternalError"), s3_answer(500)), True),
        (raised(StoreError("AccessDenied"), s3_answer(403)), False),
        (ValueError("drafter.traffic names a domain twice"), False),
        (FileNotFoundError("mine.jsonl"), False),
    ],
)
def test_another_attempt_is_made_where_it_can_help(error, again):
    from prefect.states import Failed

    assert retries.transient(error) == again
    assert retries.may_help(None, None, Failed(data=error)) == again


def test_every_durable_task_is_tried_again_on_that_condition_alone():
    from infra.services.prefect import durable

    task = durable(lambda: None, name="nothing")
    assert (task.retries, task.retry_delay_seconds) == (2, [5, 30])
    assert task.retry_condition_fn is retries.may_help
