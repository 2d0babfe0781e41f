"""What a registered version is, and how it is written in MLflow's tags."""

import json
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from infra.store.refs import ArtifactRef

Kind = Literal["target", "drafter", "quant", "release"]
KINDS: tuple[Kind, ...] = ("target", "drafter", "quant", "release")
ALIASES = ("candidate", "champion", "previous")

NAME = "lockstep.name"  # of the target that this version belongs to
KIND = "lockstep.kind"
KEY = "lockstep.key"  # two registrations of the same thing have the same key
ARTIFACT = "lockstep.artifact"
INPUTS = "lockstep.inputs"
PARENT = "lockstep.parent"  # label of the version of the same model that this one was made from
PARTS = {k: f"lockstep.{k}" for k in ("target", "drafter", "quant")}  # labels; a release has all that it serves
LINK = "lockstep.link/"  # + label of a version that names this one; value: that version's digest
EVIDENCE = "lockstep.evidence/"  # + digest; value: when attached, and the artifact
ADOPTED = "lockstep.adopted"  # where a version that no run made was brought from


class LineageError(RuntimeError):
    """The book of record cannot be read or written, or does not hold what was asked for."""


class Version(BaseModel):
    """One version of a registered model.

    model, version: MLflow's name and number; name: the target's name; artifact: weights, or a release's evidence.
    """

    model_config = ConfigDict(frozen=True)

    kind: Kind
    name: str
    model: str
    version: int
    artifact: ArtifactRef
    run_id: str
    created: datetime
    tags: dict[str, str]

    @property
    def label(self) -> str:
        """Such as `smol-drafter/3`."""
        return f"{self.model}/{self.version}"

    @property
    def subject(self) -> str:
        """Such as `drafter:smol/3`: the evidence table's name for it."""
        return f"{self.kind}:{self.name}/{self.version}"

    @property
    def parent(self) -> str | None:
        """Label of the version that it was made from."""
        return self.tags.get(PARENT)

    @property
    def parts(self) -> dict[str, str]:
        """Labels of the target, drafter and quant that it names: a release's parts, a drafter's or quant's target."""
        return {kind: self.tags[tag] for kind, tag in PARTS.items() if tag in self.tags}

    @property
    def links(self) -> dict[str, str]:
        """Labels of the versions that name this one, and their digests."""
        return {tag[len(LINK) :]: digest for tag, digest in self.tags.items() if tag.startswith(LINK)}

    @property
    def inputs(self) -> list[ArtifactRef]:
        """The artifacts that it was made from."""
        return [ArtifactRef(**ref) for ref in json.loads(self.tags.get(INPUTS, "[]"))]

    @property
    def unproven(self) -> bool:
        """Whether it was adopted and has not been measured."""
        return ADOPTED in self.tags and not self.evidence

    @property
    def evidence(self) -> list[ArtifactRef]:
        """Its evidence tables, oldest first."""
        rows = [json.loads(value) for tag, value in self.tags.items() if tag.startswith(EVIDENCE)]
        return [ArtifactRef(**row["artifact"]) for row in sorted(rows, key=lambda row: row["attached"])]


def registered_model(name: str, kind: Kind) -> str:
    """`smol` for targets, `smol-drafter`, `smol-quant`, `smol-release` for the rest."""
    return name if kind == "target" else f"{name}-{kind}"


def split_model(model: str) -> tuple[str, Kind]:
    """The target's name and the kind of a registered model."""
    for kind in KINDS[1:]:
        if model.endswith(f"-{kind}"):
            return model[: -len(kind) - 1], kind
    return model, "target"


def split_label(label: str) -> tuple[str, int]:
    """Registered model and number of a label. Raises LineageError when it is not one."""
    model, _, number = label.rpartition("/")
    if not model or not number.isdigit():
        raise LineageError(f"{label!r} is not a version: write MODEL/NUMBER, such as smol/2 or smol-drafter/1")
    return model, int(number)


def evidence_tag(ref: ArtifactRef) -> tuple[str, str]:
    """Key and value of the tag that attaches `ref`."""
    row = {"attached": datetime.now(UTC).isoformat(), "artifact": ref.model_dump()}
    return EVIDENCE + ref.digest.removeprefix("sha256:"), json.dumps(row)


def from_mlflow(entity) -> Version:
    """The version that MLflow's ModelVersion `entity` describes. Raises LineageError when Lockstep did not write it."""
    tags = dict(entity.tags)
    missing = [tag for tag in (KIND, NAME, ARTIFACT) if tag not in tags]
    if missing:
        raise LineageError(
            f"{entity.name}/{entity.version} in MLflow lacks the tags {', '.join(missing)}: Lockstep did not register "
            f"it; give the target another name or delete that version"
        )
    return Version(
        kind=tags[KIND],
        name=tags[NAME],
        model=entity.name,
        version=int(entity.version),
        artifact=ArtifactRef(**json.loads(tags[ARTIFACT])),
        run_id=entity.run_id or "",
        created=datetime.fromtimestamp(entity.creation_timestamp / 1000, UTC),
        tags=tags,
    )
