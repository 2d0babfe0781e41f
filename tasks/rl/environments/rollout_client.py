"""verifiers' model client for training: tokens in and out of our engine, with log-probs and weight versions kept."""

from dataclasses import dataclass, field

from verifiers.v1.clients import Client
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import message_hash
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.types import AssistantMessage, Response, ToolCall, Usage

from infra.engine.answers import numbered
from infra.engine.client import EngineClient
from infra.engine.errors import EngineError, EngineGone
from tasks.rl.environments.chat import Chat, tool_calls


@dataclass
class Recording:
    """One agent's tokens as the engine saw and sampled them.

    prompt_ids: the conversation before its first turn. token_ids: its turns and what came between them, in order.
    logprobs: of `token_ids`; 0 for those of others. versions: (version, start, end) of its own tokens alone.
    budget: own tokens it may still sample. room: longest conversation, tokens. seed: of its first turn.
    rewritten: times the conversation was not a continuation of what it had seen, and the recording began anew.
    """

    engine: EngineClient
    temperature: float
    budget: int
    room: int
    seed: int
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    finish_reason: str = ""
    turns: int = 0
    rewritten: int = 0
    gone: EngineGone | None = None
    seen: list[str] = field(default_factory=list)


class RolloutClient(Client):
    """Answers every agent of an environment from the engine of its recording."""

    def __init__(self, chat: Chat):
        self._chat, self._recordings = chat, {}

    def record(self, trace_id: str, recording: Recording) -> None:
        """Let the agent of this trace be recorded."""
        self._recordings[trace_id] = recording

    def forget(self, trace_id: str) -> None:
        """Drop a recording that has ended."""
        del self._recordings[trace_id]

    async def get_response(self, dialect, body, sampling, session_id=None, turn=None, headers=None) -> Response:
        """One turn. Raises ProviderError with status 400, which ends the agent's part, when no token is left to sample
        or the engine failed."""
        request, recording = dialect.parse_request(body), self._recordings[session_id]
        tools = [tool_to_wire(tool) for tool in request.tools] if request.tools else None
        between = self._continue(recording, request.messages, tools)
        text = [*recording.prompt_ids, *recording.token_ids, *between]
        allowed = min(recording.budget, recording.room - len(text))
        if allowed < 1:
            recording.finish_reason = "length"
            raise ProviderError("no token is left to sample", status_code=400)
        try:
            done = await recording.engine.generate(
                text, max_new_tokens=allowed, temperature=recording.temperature, seed=recording.seed + recording.turns
            )
        except EngineError as error:
            recording.gone = error if isinstance(error, EngineGone) else None
            raise ProviderError(str(error), status_code=400) from error
        if not recording.token_ids:
            recording.prompt_ids, between = text, []
        start = len(recording.token_ids) + len(between)
        recording.token_ids += [*between, *done.token_ids]
        recording.logprobs += [*([0.0] * len(between)), *done.logprobs]
        recording.versions += [(numbered(v), start + first, start + end) for v, first, end in done.weight_versions]
        recording.budget -= len(done.token_ids)
        recording.turns += 1
        recording.finish_reason = done.finish_reason
        content, calls = tool_calls(self._chat.text(done.token_ids))
        message = AssistantMessage(
            content=content or None,
            tool_calls=[
                ToolCall(id=f"call_{recording.turns}_{number}", name=name, arguments=arguments)
                for number, (name, arguments) in enumerate(calls)
            ]
            or None,
        )
        recording.seen = [*map(message_hash, request.messages), message_hash(message)]
        finish = "tool_calls" if calls else "length" if done.finish_reason == "length" else "stop"
        used = Usage(prompt_tokens=len(text), completion_tokens=len(done.token_ids))
        response = Response(id="", created=0, model=body["model"], message=message, finish_reason=finish, usage=used)
        response.raw = serialize_completion(response, body["model"])
        return response

    def _continue(self, recording: Recording, messages: list, tools: list[dict] | None) -> list[int]:
        """Tokens that follow what is recorded; a conversation that is no continuation is recorded from here on."""
        seen = len(recording.seen)
        if recording.turns and list(map(message_hash, messages[:seen])) == recording.seen:
            tail = [message_to_wire(message) for message in messages[seen:]]
            return self._chat.reply(tail, recording.token_ids[-1], tools)
        recording.rewritten += bool(recording.turns)
        recording.prompt_ids, recording.token_ids, recording.logprobs, recording.versions = [], [], [], []
        return self._chat.prompt([message_to_wire(message) for message in messages], tools)


class Interceptor(InterceptionServer):
    """verifiers' server for model calls, with our client behind it instead of one that it makes from an address."""

    def __init__(self, client: RolloutClient):
        super().__init__()
        self._rollouts = client

    def _client(self, config: object) -> Client:
        return self._rollouts
