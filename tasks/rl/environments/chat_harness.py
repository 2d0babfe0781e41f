"""verifiers' agent loop without a program of its own: answer, call the tools that the answer names, go on."""

import json
import sys
from contextlib import AsyncExitStack

import aiohttp
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["ChatHarness"]

ID = "lockstep_chat"


class ChatHarnessConfig(HarnessConfig):
    pass


class ChatHarness(Harness[ChatHarnessConfig]):
    """The `null` harness of verifiers, run here: an episode needs no process, no installation and no network."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Until an answer calls no tool, or the model may not go on (turns and tokens used up, a stop of the task)."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            specs = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, servers = await connect_mcp({"mcpServers": specs}, stack) if specs else ([], {}, {})
            while True:
                request = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                async with http.post(f"{endpoint}/chat/completions", json=request) as response:
                    said = await response.json()
                if response.status == 400:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                if response.status != 200:
                    return ProgramResult(exit_code=1, stdout="", stderr=json.dumps(said))
                message = said["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    if name not in dispatch:
                        content = f"error: there is no tool {name!r}"
                    elif not isinstance(arguments, dict):
                        content = "error: the arguments of a tool are one JSON object"
                    else:
                        content = await call_mcp(servers, dispatch, name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})


def install() -> None:
    """Make the harness known: verifiers finds plug-ins by the name of a top-level module, which this is not."""
    sys.modules.setdefault(ID, sys.modules[__name__])
