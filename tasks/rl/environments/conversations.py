"""Training problems as conversations, for whoever wants the prompts without the scores."""

from infra.config.rl import RLConfig
from tasks.rl.environments.base import Message
from tasks.rl.environments.make import make
from tasks.rl.environments.problems import Problems


def conversations(config: RLConfig, count: int) -> list[list[Message]]:
    """Up to `count` different training problems with the configured system prompt, as they are rolled out.

    Fewer where the environments repeat themselves: ten times as many problems are looked at. Raises BadEnvironment.
    """
    problems = Problems(config.environments, make(config.environments, config.seed), config.held_out_share, config.seed)
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    found: dict[str, list[Message]] = {}
    for problem in problems.take(10 * count):
        found.setdefault(problem.question, system + list(problem.messages))
    return list(found.values())[:count]
