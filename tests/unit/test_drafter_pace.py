"""How many requests an engine is sent at once."""

import asyncio

import pytest

from tasks.drafter.pace import SHORTEST, TOKENS, Pace


@pytest.mark.parametrize(
    ("tokens", "concurrency", "together"),
    [
        ([TOKENS // 4] * 8, 100, 4),
        ([1] * 300, 1000, TOKENS // SHORTEST),
        ([1] * 8, 3, 3),
        ([TOKENS + 1] * 3, 100, 1),
        ([TOKENS // 2, TOKENS, 1, 1], 100, 2),  # those behind a long one do not pass it
    ],
)
def test_requests_begin_in_order_and_only_so_many_are_in_flight(tokens, concurrency, together):
    begun, in_flight, most = [], 0, 0

    async def run() -> None:
        pace = Pace(concurrency)

        async def one(i: int) -> None:
            nonlocal in_flight, most
            async with pace.request(tokens[i]):
                begun.append(i)
                in_flight += 1
                most = max(most, in_flight)
                for _ in range(5):  # others have their turns
                    await asyncio.sleep(0)
                in_flight -= 1

        await asyncio.gather(*map(one, range(len(tokens))))

    asyncio.run(run())
    assert begun == list(range(len(tokens))) and most == together


def test_a_request_that_fails_or_is_cancelled_makes_room():
    async def run() -> list[str]:
        pace, begun = Pace(1), []

        async def one(name: str, ends: asyncio.Event) -> None:
            async with pace.request(1):
                begun.append(name)
                await ends.wait()
                raise ValueError(name)

        ends = asyncio.Event()
        tasks = [asyncio.create_task(one(name, ends)) for name in ("first", "second", "third", "fourth")]
        await asyncio.sleep(0)
        tasks[1].cancel()  # while it is the next
        await asyncio.sleep(0)
        tasks[0].cancel()
        ends.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return begun

    assert asyncio.run(run()) == ["first", "third", "fourth"]
