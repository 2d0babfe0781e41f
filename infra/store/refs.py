"""How one task names an artifact to another."""

from pydantic import BaseModel, ConfigDict


class ArtifactRef(BaseModel):
    """A committed artifact.

    name: path-like, unique in the store, such as `targets/smol/3f2a...`.
    digest: `sha256:` of the canonical list of its files (path, bytes, sha256).
    bytes: total size of its files.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    digest: str
    bytes: int
