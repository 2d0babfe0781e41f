"""What a trainer announced, held against the engine's model and against what arrived."""

from infra.transport.base import ParamMeta, SyncError
from infra.transport.layout import Destination


def check_arrived(found: dict[str, str], metas: dict[str, ParamMeta], source: str | None) -> None:
    """Compare checksums of what arrived, by name, with those announced; `source` stands for a tied name that was not.

    Raises SyncError naming the first that differs.
    """
    for name, digest in found.items():
        meta = metas.get(name) or metas[source]
        if digest != meta.checksum:
            raise SyncError(f"{name} arrived with checksum {digest}, the trainer published {meta.checksum}")


def check_params(metas: dict[str, ParamMeta], plan: list[Destination]) -> None:
    """Make sure that what was announced is exactly what the engine's model is made of.

    Raises SyncError naming the first parameter that is missing, unknown, or of another shape or type.
    """
    known = set()
    for destination in plan:
        for piece in destination.pieces:
            known.add(piece.name)
            meta = metas.get(piece.name)
            if meta is None and destination.source:
                continue
            if meta is None:
                raise SyncError(f"{piece.name} is missing: the engine's model has it, the trainer did not publish it")
            shape = [piece.stop - piece.start, *destination.shape[1:]]
            if meta.shape != shape:
                raise SyncError(f"{piece.name} has shape {meta.shape}, the engine's model has {shape}")
            dtype = str(destination.dtype).removeprefix("torch.")
            if meta.dtype != dtype:
                raise SyncError(f"{piece.name} is {meta.dtype}, the engine computes in {dtype}: publish it as {dtype}")
            if destination.source and meta.checksum != metas[destination.source].checksum:
                raise SyncError(f"{piece.name} is tied to {destination.source} in the engine, but was published untied")
    if unknown := sorted(set(metas) - known):
        raise SyncError(f"{unknown[0]} is not a parameter of the engine's model ({len(unknown)} such names)")
