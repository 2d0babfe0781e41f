"""Which services a home has: `local` keeps its books in SQLite and its artifacts in a folder, `team` in PostgreSQL and
in object storage."""

from typing import Literal, get_args

from infra.services.home import home

Profile = Literal["local", "team"]


def current() -> Profile:
    """The profile that `lockstep up` last started here. It stands while the services are down, so that no command
    takes the books of one profile for those of the other."""
    try:
        kept = (home() / "services" / "profile").read_text()
    except FileNotFoundError:
        return "local"
    return next(profile for profile in get_args(Profile) if profile == kept)


def remember(profile: Profile) -> None:
    """Make `profile` the one that `current` gives."""
    (home() / "services").mkdir(parents=True, exist_ok=True)
    (home() / "services" / "profile").write_text(profile)
