"""A Hugging Face model that stands for the trainer in the transports' tests."""

from pathlib import Path

PROMPT = list(range(1000, 1300))  # two full blocks of the engine's prefix cache and a part of a third


class Trainer:
    """Weights that change with every `step`, and the log-probs they give."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._random = torch.Generator().manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def step(self) -> None:
        """Move every parameter by 5% of its spread, norms included."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=self._random)
                parameter.add_(noise * 0.05 * max(float(parameter.std()), 0.1))

    def weights(self) -> dict:
        """Parameters by name, a tied head left out, as trainers have them."""
        return dict(self.model.named_parameters())

    def logprobs(self) -> list[float]:
        """Natural log-probs of PROMPT's tokens from the second on."""
        table = self._table()
        return [float(table[i, token]) for i, token in enumerate(PROMPT[1:])]

    def next_logprob(self, token: int) -> float:
        """Natural log-prob of `token` after PROMPT."""
        return float(self._table()[-1, token])

    def _table(self):
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT])).logits[0].double()
        return torch.log_softmax(logits, -1)


async def engine_logprobs(client) -> list[float]:
    """The engine's for the same tokens."""
    return [scored.logprob for scored in await client.score(PROMPT, 0)]


def distance(a: list[float], b: list[float]) -> float:
    """Largest difference, nats."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
