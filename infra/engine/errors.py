"""What goes wrong with an engine."""


class EngineError(RuntimeError):
    """An engine that cannot start, has died, or refused a request. The message names the cause and what to do."""


class EngineGone(EngineError):
    """Nobody answers at the engine's address: it has died or was stopped. Its requests can be retried elsewhere."""
