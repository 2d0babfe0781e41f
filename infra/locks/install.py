"""Install Lockstep and everything it needs, exactly as locked, into the environment of the interpreter that runs this.

    python infra/locks/install.py cpu|gpu
    python infra/locks/install.py llmcompressor FOLDER    (llm-compressor alone, into that folder)

uv does it in a quarter of pip's time. uv does not read pip's settings, so those that say where packages come from are
handed on. The build of torch is not hashed in the lock of the CPU: each machine has its own source of it.
"""

import os
import subprocess
import sys
from pathlib import Path

LOCKS = Path(__file__).resolve().parent
UV = "uv==0.13.9"
TORCH = {"cpu": "torch==2.13.0+cpu"}  # the GPU's torch is an ordinary locked package


def main(variant: str, folder: str | None = None) -> None:
    """Install variant `cpu` or `gpu`, or only the packages of a lock into `folder`. Exits with the installer's own code
    when a package cannot be had."""
    pip = [sys.executable, "-m", "pip"]
    _run([*pip, "install", "--quiet", "--disable-pip-version-check", UV])
    env, extra = _sources(pip)
    # compiled now, or the first start of every service would spend half a minute on it
    options = ["--python", sys.executable, "--no-deps"] + ([] if folder else ["--compile-bytecode"])
    install = [sys.executable, "-m", "uv", "pip", "install", *options]
    if folder:
        install += ["--target", folder]
    _run([*install, "--require-hashes", "-r", str(LOCKS / f"{variant}.txt")], env)
    if folder:
        return
    if variant in TORCH:
        _run([*install, TORCH[variant]], env | extra)
    _run([*install, "--quiet", "--no-build-isolation", "--editable", str(LOCKS.parents[1])], env)


def _sources(pip: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """uv's environment from pip's settings, and what to add to it for torch, which extra indexes often carry."""
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip("'\"")
    names = {"index-url": "UV_DEFAULT_INDEX", "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE"}
    env = {uv: os.environ.get(uv, settings[name]) for name, uv in names.items() if name in settings}
    extra = {"UV_INDEX": settings["extra-index-url"]} if "extra-index-url" in settings else {}
    return env, extra


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env={**os.environ, **(env or {})})
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    if sys.argv[1:] not in (["cpu"], ["gpu"]) and (len(sys.argv) != 3 or sys.argv[1] != "llmcompressor"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
