"""A task that a tiny model can learn in seconds: say the letter that follows the last letter of the prompt."""

import itertools
import json
from pathlib import Path

LETTERS = "abcdefgh"
TOKENS = [*LETTERS, "<eos>", "<unk>", *(f"<{n}>" for n in range(6))]
LENGTH = 3


def following(letter: str) -> str:
    """The next letter, `a` after the last."""
    return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


def next_letter(answer: str, line: dict) -> float:
    """Scorer: the first letter of the answer."""
    return float(answer.split()[:1] == [line["answer"]])


def write_prompts(path: Path) -> Path:
    """All prompts of three letters; the answer is that to the last."""
    prompts = (" ".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH))
    path.write_text("".join(json.dumps({"prompt": p, "answer": following(p[-1])}) + "\n" for p in prompts))
    return path


def write_model(folder: Path, seed: int = 0, tokens: list[str] = TOKENS) -> Path:
    """A Llama of two layers with random weights and one token a letter; its tokenizer has no chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens.index("<eos>"),
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
