"""A verifiers environment: two rounds about letters, with a tool that tells the next one, and a user who asks again.

Round one: the agent may call the tool; round two: the user asks for the letter after its own last word.
"""

import verifiers.v1 as vf

LETTERS = "abcdefgh"

__all__ = ["LetterGame", "LetterTaskset"]


class LetterData(vf.TaskData):
    answer: str


class LetterTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def following(self, letter: str) -> str:
        """The letter after this one."""
        return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


class LetterTask(vf.Task[LetterData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        """Half for each of two turns."""
        if trace.task.data.prompt == "a raise":
            raise KeyError("no reward for this one")
        return min(1.0, 0.5 * trace.num_turns)


class LetterConfig(vf.TasksetConfig):
    count: int = 8


class LetterTaskset(vf.Taskset[LetterTask, LetterConfig]):
    def load(self):
        for number in range(self.config.count):
            first = LETTERS[number % len(LETTERS)]
            yield LetterTask(LetterData(prompt=f"{first} b", answer=LETTERS[(number + 1) % len(LETTERS)]))

    def toolsets(self, config):
        return [LetterTools(vf.ToolsetConfig())]


class LetterGameConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    rounds: int = 2


class LetterGame(vf.Env[LetterGameConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for _ in range(self.config.rounds - 1):
                if said.terminated:
                    return
                said = await talk.turn("c d")


if __name__ == "__main__":
    LetterTools.run()
