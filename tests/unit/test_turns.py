"""A slot that becomes free wakes one who waits, and is never lost."""

import asyncio

from infra.cluster.turns import Turns


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def waiting(turns: Turns, names: str, entered: list[str]) -> list[asyncio.Task]:
    async def enter(name: str) -> None:
        await turns.wait()
        entered.append(name)

    tasks = [asyncio.create_task(enter(name)) for name in names]
    await asyncio.sleep(0)  # each stands in the queue
    return tasks


def test_who_came_first_is_let_in_first_and_one_at_a_time():
    async def scenario():
        turns, entered = Turns(), []
        tasks = await waiting(turns, "abcd", entered)
        turns.let_in()
        await tasks[0]
        assert entered == ["a"] and not any(task.done() for task in tasks[1:])
        turns.let_in()
        await tasks[1]
        turns.let_all_in()
        await asyncio.gather(*tasks)
        assert entered == ["a", "b", "c", "d"]
        turns.let_in()  # nobody waits: the slot stays free, it is not kept for the next
        late = await waiting(turns, "e", entered)
        assert not late[0].done()
        late[0].cancel()

    run(scenario())


def test_one_that_gives_up_leaves_its_turn_to_the_next():
    async def scenario():
        turns, entered = Turns(), []
        tasks = await waiting(turns, "abcd", entered)
        tasks[0].cancel()
        turns.let_in()  # a has not noticed yet that it was cancelled
        await tasks[1]
        turns.let_in()
        tasks[2].cancel()  # after it was let in
        await tasks[3]
        assert entered == ["b", "d"]

    run(scenario())


def test_one_that_found_nothing_goes_first():
    async def scenario():
        turns, entered = Turns(), []
        tasks = await waiting(turns, "ab", entered)
        again = asyncio.create_task(turns.wait(again=True))
        await asyncio.sleep(0)
        turns.let_in()
        await again
        assert not entered
        turns.let_all_in()
        await asyncio.gather(*tasks)

    run(scenario())
