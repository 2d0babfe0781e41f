"""Environments of the verifiers package: problems are its tasks, and an answer is a whole episode with turns and tools.

The episode runs in a process of its own (`tasks.rl.environments.player_process`); here is what the run itself needs.
"""

import itertools
from typing import Any

from infra.config.rl import VerifiersEnvironment
from tasks.rl.environments.base import BadEnvironment, Problem


class Verifiers:
    """One taskset. Raises BadEnvironment for one that cannot be loaded, naming it."""

    def __init__(self, config: VerifiersEnvironment, seed: int):
        from verifiers.v1.utils.loaders import load_taskset

        self.label = config.title
        self.environment = environment_config(config)
        try:
            taskset = load_taskset(self.environment.taskset)
            self._stream = iter(taskset)
            self._tasks: list[Any] = [] if taskset.INFINITE else list(self._stream)
        except Exception as error:  # a taskset is the user's code: whatever it raises is why it cannot be used
            raise BadEnvironment(f"verifiers taskset {config.taskset} cannot be loaded: {_line(error)}") from error
        self.size = None if taskset.INFINITE else len(self._tasks)
        if self.size == 0:
            raise BadEnvironment(f"verifiers taskset {config.taskset} has no task")

    def task(self, index: int) -> Any:
        """Task number `index`, a `verifiers.v1.Task`."""
        self._tasks += itertools.islice(self._stream, max(0, index + 1 - len(self._tasks)))
        return self._tasks[index]

    def problem(self, index: int) -> Problem:
        """The task's prompt; what the user says later comes with the episode."""
        data = self.task(index).data
        if isinstance(data.prompt, str):
            messages = [{"role": "user", "content": data.prompt}]
        else:
            messages = [{"role": m.role, "content": _text(m.content)} for m in data.prompt or []]
        if data.system_prompt:
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        if not messages:
            raise BadEnvironment(f"task {index} of {self.label} has neither prompt nor system prompt")
        return Problem(self.label, index, tuple(messages), str(getattr(data, "answer", "")))


def environment_config(config: VerifiersEnvironment) -> Any:
    """verifiers' own configuration of the environment. Agents without a harness get the chat loop in this process,
    agents without a runtime a local process. Raises BadEnvironment."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import default_harness_id, resolve_env_config

    from tasks.rl.environments import chat_harness

    chat_harness.install()
    raw: dict[str, Any] = {"taskset": {"id": config.taskset, **config.params}, **config.env}
    if config.environment:
        raw["id"] = config.environment
    try:
        resolved = resolve_env_config(raw)
    except Exception as error:  # plug-ins are imported here: whatever their code raises is why they cannot be used
        raise BadEnvironment(f"verifiers environment {config.title} refuses its settings: {_line(error)}") from error
    own_harness = default_harness_id(config.taskset) == config.taskset
    agents = {}
    for name, agent in agent_config_fields(resolved).items():
        changes: dict[str, Any] = {}
        if agent.harness is None and not own_harness:
            changes["harness"] = chat_harness.ChatHarnessConfig(id=chat_harness.ID)
        if "runtime" not in agent.model_fields_set:
            changes["runtime"] = SubprocessConfig()
        if config.max_turns is not None and agent.max_turns is None:
            changes["max_turns"] = config.max_turns
        agents[name] = agent.model_copy(update=changes)
    return resolved.model_copy(update=agents)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(getattr(part, "text", "") for part in content or [])


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")
