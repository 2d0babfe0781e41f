"""What is tried again, and what is not."""

import httpx
import pytest

from infra.engine.errors import EngineError
from infra.services import retries
from infra.store.base import StoreError


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


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionResetError("by peer"), True),
        (httpx.ConnectTimeout("no answer"), True),
        (raised(StoreError("the store does not answer"), ConnectionRefusedError("refused")), True),
        (EngineError("engine of role eval ended: OSError: [Errno 98] Address already in use"), True),
        (EngineError("engine of role eval ended: ValueError: raise engine.kv_cache_gib"), False),
        (StoreError("no such bucket"), False),
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
