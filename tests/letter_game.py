"""A verifiers environment: a tool that tells the letter after another, and a user who speaks twice."""

import verifiers.v1 as vf

LETTERS = "abcdefgh"

__all__ = ["LetterGame", "LetterTaskset"]


class LetterTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def following(self, letter: str) -> str:
        """The letter after this one."""
        return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


class LetterTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        """Half for using the tool, half for what it said to the user's second message."""
        if self.data.prompt.startswith("h"):
            raise KeyError("no reward for an h")
        asked = sum(message.role == "user" for message in trace.messages)
        return 0.5 * bool(trace.tool_messages) + 0.5 * (asked == 2)


class LetterConfig(vf.TasksetConfig):
    count: int = 64


class LetterTaskset(vf.Taskset[LetterTask, LetterConfig]):
    def load(self):
        for number in range(self.config.count):
            yield LetterTask(vf.TaskData(prompt=f"{LETTERS[number % 8]} {LETTERS[number // 8 % 8]}"))

    def toolsets(self, config):
        return [LetterTools(vf.ToolsetConfig())]


class LetterGameConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class LetterGame(vf.Env[LetterGameConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            if not said.terminated:
                await talk.turn("c d")


if __name__ == "__main__":
    LetterTools.run()
