"""`lockstep register`: adopt a model, drafter or quant that was made elsewhere."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from flows.cli.books import Json
from flows.cli.exits import USAGE, Stop
from infra.config.target import TargetConfig
from infra.services import environment

Name = Annotated[str, typer.Argument(help="Name of the target: the registered model.")]
Folder = Annotated[Path, typer.Argument(help="Its folder. Its files are shared with the store and become read-only.")]
Target = Annotated[str, typer.Option("--target", help="The version that it was made for: a number, or smol/3.")]

NEXT = {
    "target": "`lockstep quantize` measures it, `lockstep drafter` follows; `lockstep automate` starts both",
    "drafter": "`lockstep watch --set watch.target={target}` measures it",
    "quant": "`lockstep quantize --set quantize.adopted={label}` measures it",
}


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(
        help="Adopt what was made elsewhere. It is unproven: no release serves it until it is measured.",
        no_args_is_help=True,
    )
    for command in (target, drafter, quant):
        group.command()(command)
    app.add_typer(group, name="register")


def target(name: Name, path: Folder, as_json: Json = False) -> None:
    """A model folder becomes the next version of the target NAME."""
    from flows.adopt import adopt_target

    _adopt(as_json, name, lambda: adopt_target(name, path))


def drafter(name: Name, path: Folder, of: Target, as_json: Json = False) -> None:
    """A drafter, or an EAGLE-3 head in speculators' format, becomes a drafter of one version of the target NAME."""
    from flows.adopt import adopt_drafter

    _adopt(as_json, name, lambda: adopt_drafter(name, path, _label(name, of)))


def quant(name: Name, path: Folder, of: Target, as_json: Json = False) -> None:
    """A quantized model folder becomes a copy of one version of the target NAME."""
    from flows.adopt import adopt_quant

    _adopt(as_json, name, lambda: adopt_quant(name, path, _label(name, of)))


def _label(name: str, of: str) -> str:
    return f"{name}/{of}" if of.isdigit() else of


def _adopt(as_json: bool, name: str, work) -> None:
    environment.apply()
    from tasks.drafter.contract import ContractError
    from tasks.quant.schemes import SchemeError

    try:
        TargetConfig(name=name)
    except ValidationError as error:
        raise Stop(f"NAME {name!r} cannot be a target's: {error.errors()[0]['msg']}", code=USAGE) from None
    try:
        version = work()
    except (ContractError, SchemeError) as error:
        raise Stop(str(error), code=USAGE) from None
    if as_json:
        print(version.model_dump_json())
        return
    if not version.unproven:
        print(f"{version.label} has this content already")
        return
    where = version.parts.get("target", version.label)
    print(f"{version.label}, unproven: {NEXT[version.kind].format(target=where.split('/')[-1], label=version.label)}")
