"""What ends a run, apart from faults of engines and environments."""


class TrainerError(RuntimeError):
    """The policy cannot be trained, or training went wrong."""


class MismatchError(RuntimeError):
    """Engine and trainer disagree by more than the bound of the configuration."""
