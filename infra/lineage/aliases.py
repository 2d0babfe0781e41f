"""Which release is candidate, champion and previous. Aliases are on releases alone, so a triple moves as one."""

from infra.lineage.client import write
from infra.lineage.lineage import Lineage
from infra.lineage.versions import LineageError, Version, registered_model, split_label

REPLACES = "lockstep.replaces"  # label of the champion whose place a promoted release took


def aliases(lineage: Lineage, name: str) -> dict[str, str]:
    """Labels of the releases of target `name`, by alias."""
    from mlflow.exceptions import MlflowException

    model = registered_model(name, "release")
    try:
        held = lineage.client.get_registered_model(model).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return {}
    return {alias: f"{model}/{version}" for alias, version in held.items()}


def nominate(lineage: Lineage, release: Version) -> None:
    """Make `release` the candidate."""
    _move(lineage, "candidate", release.label)


def promote(lineage: Lineage, release: Version) -> None:
    """Make `release` the champion, and the champion so far `previous`. Interrupted, it can be called again."""
    held = aliases(lineage, release.name)
    champion = held.get("champion")
    if champion != release.label:
        if champion:
            _move(lineage, "previous", champion)
            write(lineage.client.set_model_version_tag, release.model, str(release.version), REPLACES, champion)
        _move(lineage, "champion", release.label)
    withdraw(lineage, release)


def withdraw(lineage: Lineage, release: Version) -> None:
    """Make `release` the candidate no longer."""
    if aliases(lineage, release.name).get("candidate") == release.label:
        lineage.client.delete_registered_model_alias(release.model, "candidate")


def rolled_back_to(lineage: Lineage, name: str) -> tuple[Version, Version]:
    """The release that `roll_back` would make the champion, and the champion. Raises LineageError as it does."""
    model = registered_model(name, "release")
    before, now = lineage.resolve(model, "champion"), lineage.resolve(model, "previous")
    if before is None:
        raise LineageError(f"nothing of {name} has been released yet: there is no champion to roll back")
    if now is None:
        raise LineageError(f"{before.label} is the first release of {name}: there is no previous one to go back to")
    return now, before


def roll_back(lineage: Lineage, name: str) -> tuple[Version, Version]:
    """Make the previous release of target `name` the champion again, all its parts with it.

    `previous` then names what that release had replaced, so a second call goes one further back.
    Returns (champion now, champion before). Raises LineageError when there is nothing to go back to.
    """
    now, before = rolled_back_to(lineage, name)
    _move(lineage, "champion", now.label)
    if REPLACES in now.tags:
        _move(lineage, "previous", now.tags[REPLACES])
    else:
        lineage.client.delete_registered_model_alias(now.model, "previous")
    return now, before


def _move(lineage: Lineage, alias: str, label: str) -> None:
    model, number = split_label(label)
    write(lineage.client.set_registered_model_alias, model, alias, str(number))
