"""Quantization by llm-compressor. Its packages do not fit vLLM's: they lie in a folder of their own, made on demand."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from infra.config.quant import QuantizeConfig
from infra.services.home import home
from infra.services.progress import report
from tasks.quant.schemes import SCHEMES, SchemeError

RECIPES = Path(__file__).with_name("recipes")
LOCKS = Path(__file__).parents[2] / "infra" / "locks"
COPIED = (".json", ".jinja", ".model", ".txt")  # tokenizer and chat template
LOCK = LOCKS / "llmcompressor.txt"


class CompressorError(RuntimeError):
    """llm-compressor could not be installed, or failed. The message ends with its own last words."""


def recipe_of(config: QuantizeConfig) -> str:
    """The recipe that `config` names, as YAML. Raises SchemeError when there is none."""
    own = RECIPES / f"{config.recipe}.yaml"
    path = own if own.is_file() else Path(config.recipe)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in RECIPES.glob("*.yaml")))
        raise SchemeError(f"quantize.recipe={config.recipe} is no recipe: use RTN, {known}, or the path of a YAML file")
    return path.read_text()


def quantize(model: Path, config: QuantizeConfig, texts: Sequence[Sequence[int]], folder: Path) -> None:
    """Write the model in folder `model`, quantized by `config.recipe` calibrated on `texts`, into `folder` in
    compressed-tensors format. Raises CompressorError."""
    packages = environment()
    with tempfile.TemporaryDirectory() as scratch:
        request = Path(scratch) / "request.json"
        grouped = SCHEMES[config.scheme].grouped
        asked = {
            "model": str(model),
            "folder": str(folder),
            "recipe": recipe_of(config),
            "scheme": config.scheme,
            "group_size": config.group_size if grouped else 0,
            "ignore": config.ignore,
            "texts": [list(text) for text in texts],
        }
        request.write_text(json.dumps(asked))
        report(f"{config.recipe} is calibrated on {len(texts)} texts, {sum(map(len, texts))} tokens")
        env = os.environ | {"PYTHONPATH": str(packages), "TOKENIZERS_PARALLELISM": "false"}
        _run([sys.executable, str(Path(__file__).with_name("oneshot.py")), str(request)], env, cwd=scratch)
    for file in model.iterdir():
        about = file.suffix in COPIED and not file.name.endswith(".safetensors.index.json")
        if about and not (folder / file.name).exists():
            shutil.copy2(file, folder / file.name)


def environment() -> Path:
    """The folder with llm-compressor's packages, as locked; torch is that of this environment. Made when it is not
    there: a minute the first time. Raises CompressorError when a package cannot be had."""
    name = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    folder = home() / "environments" / f"llmcompressor-{name}"
    if not folder.is_dir():
        report("installing llm-compressor in an environment of its own")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".llmcompressor-", dir=folder.parent) as scratch:
            made = Path(scratch) / "packages"
            _run([sys.executable, str(LOCKS / "install.py"), "llmcompressor", str(made)], os.environ, cwd=scratch)
            try:
                os.rename(made, folder)
            except OSError:  # another run was faster
                if not folder.is_dir():
                    raise
    return folder


def _run(command: list[str], env, cwd: str) -> None:
    log = home() / "logs" / "llmcompressor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        done = subprocess.run(command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        words = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise CompressorError(f"llm-compressor failed: {(words or ['it said nothing'])[-1]} (log: {log})")
