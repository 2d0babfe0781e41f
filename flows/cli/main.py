"""The `lockstep` command."""

import typer

from infra.services import local

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def up(prefect_port: int = None, mlflow_port: int = None, ray: bool = False) -> None:
    """Start the services of this machine."""
    for record in local.up(print, prefect_port=prefect_port, mlflow_port=mlflow_port, ray=ray):
        print(record.name, record.address)


@app.command()
def down() -> None:
    """Stop them."""
    local.down(print)


def main() -> None:
    app()
