"""`durable`: a Prefect task that is not done twice."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infra.services import environment

environment.apply()

from prefect import Task  # noqa: E402  (Prefect reads its settings when it is imported)
from prefect.cache_policies import CacheKeyFnPolicy  # noqa: E402
from prefect.utilities.annotations import quote  # noqa: E402
from pydantic_core import to_jsonable_python  # noqa: E402

from infra.services import durations, results, retries  # noqa: E402
from infra.services.pools import Pool, tags  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def durable(
    fn: Callable | None = None,
    *,
    name: str | None = None,
    outlives_edits: bool = False,
    pools: Sequence[Pool] = (),
    **options: Any,
) -> Task | Callable[[Callable], Task]:
    """A Prefect task whose result is kept under `home()/results`. Called again with the same arguments and the same
    source code, in this run or a later one, it gives that result and shows as Cached.

    Used as `@durable` or `@durable(name="train policy", pools=["trainer"])`; plain and async functions alike.
    Tried again after a while where that can help (`retries.py`), else it fails at once.
    Arguments and result must be JSON: pydantic models (of importable classes), paths, dates, numbers, strings, lists,
    dicts. Large data travels as an ArtifactRef or a path. What must not be shared between runs takes the run's key as
    an argument. The source code is that of every file in tasks/ and infra/, so an edit there runs everything anew.
    outlives_edits: the source code does not count: for choices that a resumed run must not make again.
    pools: the GPUs it works on; one run at a time has each (`pools.py`).
    options: further arguments of `prefect.task`.
    Calling the task raises TypeError when an argument is not JSON.
    """
    if fn is None:
        return functools.partial(durable, name=name, outlives_edits=outlives_edits, pools=pools, **options)
    name = name or fn.__name__.replace("_", " ")
    return _Durable(
        durations.timed(name, fn),
        name=name,
        tags=tags(*pools),
        retries=len(retries.AFTER_S),
        retry_delay_seconds=retries.AFTER_S,
        retry_condition_fn=retries.may_help,
        persist_result=True,
        result_serializer="json",
        cache_policy=CacheKeyFnPolicy(cache_key_fn=functools.partial(_cache_key, name, outlives_edits)),
        **options,
    )


class _Durable(Task):
    """Looks for no futures in its arguments, which have none: Prefect would visit every token of thousands of answers,
    twice."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*map(quote, args), **{name: quote(value) for name, value in kwargs.items()})


def _cache_key(name: str, outlives_edits: bool, context: Any, arguments: dict[str, Any]) -> str:
    values = {}
    for argument, value in arguments.items():
        try:
            values[argument] = to_jsonable_python(value, inf_nan_mode="constants")
        except ValueError as error:
            raise TypeError(f"task {name!r}: argument {argument!r} is not JSON ({error})") from None
    canonical = json.dumps([name, values, "" if outlives_edits else source_digest()], sort_keys=True)
    key = hashlib.sha256(canonical.encode()).hexdigest()
    results.used(key)
    return key


@functools.cache
def source_digest() -> str:
    """sha256 of the paths and contents of all Python files in tasks/ and infra/, as this process found them."""
    digest = hashlib.sha256()
    for folder in ("tasks", "infra"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
