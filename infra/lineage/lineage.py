"""The book of record: targets, drafters, quants and releases as versions of MLflow's registered models."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NotRequired, TypedDict, Unpack

from pydantic import BaseModel

from infra.lineage.client import connect, experiment_id, write
from infra.lineage.provenance import provenance
from infra.lineage.runs import Run, open_run
from infra.lineage.versions import (
    ALIASES,
    ARTIFACT,
    INPUTS,
    KEY,
    KIND,
    LINK,
    NAME,
    PARENT,
    PARTS,
    Kind,
    LineageError,
    Version,
    evidence_tag,
    from_mlflow,
    registered_model,
    split_label,
    split_model,
)
from infra.services.environment import tracking_uri
from infra.store.refs import ArtifactRef

__all__ = ["Lineage", "LineageError", "Version"]

_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow answers the latter for an unknown alias


class Origin(TypedDict):
    """Where a registered version comes from.

    run_id: MLflow's id of the run that made it, "" for what was brought from outside. The same artifact registered
    again by the same run is the same version. inputs: artifacts it was made from, besides those of the versions it
    names. evidence: tables that measured it. config: the flow's configuration. tags: further tags of the version.
    """

    run_id: str
    inputs: NotRequired[Sequence[ArtifactRef]]
    evidence: NotRequired[Sequence[ArtifactRef]]
    config: NotRequired[BaseModel | None]
    tags: NotRequired[Mapping[str, str]]


class Lineage:
    """Versions, their links and aliases, and runs, in MLflow at `uri` (default: `environment.tracking_uri()`).

    Every registration can be repeated after an interruption: it finds what is there and adds what is missing. Links
    are one tag each, so writers in several processes never overwrite each other's.
    """

    def __init__(self, uri: str | None = None):
        self.uri = uri or tracking_uri()

    @cached_property
    def client(self):
        """The MlflowClient. Made on first use: importing MLflow takes seconds."""
        return connect(self.uri)

    @cached_property
    def experiment(self) -> str:
        """Id of the experiment that holds the runs."""
        return experiment_id(self.client, self.uri)

    @contextmanager
    def run(
        self,
        run_key: str,
        phase: str,
        parent: Run | str | None = None,
        *,
        model: str = "",
        tags: Mapping[str, str] | None = None,
    ) -> Iterator[Run]:
        """The MLflow run of this phase of the run `run_key`: a new one, or the one an interrupted attempt opened.

        parent: the run, or its id, that this one is shown below; by default the first phase that this run opened.
        model: the target's name, kept as tag `model`.
        """
        parent_id = parent.id if isinstance(parent, Run) else parent
        all_tags = dict(tags or {}) | ({"model": model} if model else {})
        with open_run(self.client, self.uri, self.experiment, run_key, phase, parent_id, all_tags) as run:
            yield run

    def register_target(
        self, name: str, artifact: ArtifactRef, *, parent: Version | None = None, **origin: Unpack[Origin]
    ) -> Version:
        """A new version of the target `name`, made from `parent`."""
        return self._register("target", name, artifact, parent, {}, origin)

    def register_drafter(
        self,
        name: str,
        artifact: ArtifactRef,
        *,
        target: Version,
        parent: Version | None = None,
        **origin: Unpack[Origin],
    ) -> Version:
        """A drafter of the version `target` of the target `name`; linked both ways. parent: what it was warmed from."""
        return self._register("drafter", name, artifact, parent, {"target": target}, origin)

    def register_quant(self, name: str, artifact: ArtifactRef, *, target: Version, **origin: Unpack[Origin]) -> Version:
        """A quantized copy of the version `target` of the target `name`; linked both ways."""
        return self._register("quant", name, artifact, None, {"target": target}, origin)

    def register_release(
        self,
        name: str,
        artifact: ArtifactRef,
        *,
        target: Version,
        drafter: Version | None,
        quant: Version | None,
        **origin: Unpack[Origin],
    ) -> Version:
        """A release of the triple, linked both ways with each part. artifact: its evidence, verdicts and answers."""
        parts = {"target": target} | {k: v for k, v in (("drafter", drafter), ("quant", quant)) if v is not None}
        return self._register("release", name, artifact, None, parts, {**origin, "evidence": [artifact]})

    def attach_evidence(self, version: Version, evidence: ArtifactRef) -> Version:
        """Add an evidence table to `version`; attaching it again changes nothing."""
        key, value = evidence_tag(evidence)
        if key not in version.tags:
            self.tag(version, {key: value})
        return self.get(version.label)

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        """Set further tags of `version`."""
        for key, value in tags.items():
            write(self.client.set_model_version_tag, version.model, str(version.version), key, value)

    def get(self, label: str) -> Version:
        """The version `MODEL/NUMBER`. Raises LineageError when there is none."""
        model, number = split_label(label)
        found = self.resolve(model, number)
        if found is None:
            raise LineageError(f"there is no {label} in MLflow at {self.uri}: `lockstep lineage` lists what there is")
        return found

    def resolve(self, model: str, which: str | int) -> Version | None:
        """The version of a registered model by number, `latest` or alias; None when there is none.

        Aliases belong to releases and move the triple: `champion` of `smol` or `smol-drafter` is the part that the
        champion release of `smol` serves (none when it was released without).
        Raises LineageError for another word.
        """
        if which == "latest":
            newest = self.versions(model)
            return newest[0] if newest else None
        if str(which).isdigit():
            return self._version(lambda: self.client.get_model_version(model, str(which)))
        if which not in ALIASES:
            raise LineageError(f"{which!r} is not a version of {model}: give a number, latest, {', '.join(ALIASES)}")
        name, kind = split_model(model)
        releases = registered_model(name, "release")
        release = self._version(lambda: self.client.get_model_version_by_alias(releases, str(which)))
        if release is None or kind == "release":
            return release
        return self.get(release.parts[kind]) if kind in release.parts else None

    def versions(self, model: str, where: str = "") -> list[Version]:
        """Versions of a registered model, newest first. where: a further MLflow filter."""
        query = f"name = '{model}'" + (f" AND {where}" if where else "")
        found, token = [], None
        while True:
            page = self.client.search_model_versions(query, max_results=1000, page_token=token)
            found += page
            token = page.token
            if not token:
                return sorted((from_mlflow(v) for v in found if v.tags or self._stays(v)), key=lambda v: -v.version)

    def drafters(self, target: Version) -> list[Version]:
        """Drafters of this target version, newest first."""
        return self._made_for("drafter", target)

    def quants(self, target: Version) -> list[Version]:
        """Quantized copies of this target version, newest first."""
        return self._made_for("quant", target)

    def link(self, version: Version) -> None:
        """Write the links of the versions that `version` names back to it; those that exist stay as they are."""
        for label in [*version.parts.values(), *([version.parent] if version.parent else [])]:
            model, number = split_label(label)
            write(self.client.set_model_version_tag, model, str(number), LINK + version.label, version.artifact.digest)

    def _register(
        self,
        kind: Kind,
        name: str,
        artifact: ArtifactRef,
        parent: Version | None,
        parts: Mapping[str, Version],
        origin: Origin,
    ) -> Version:
        model, run_id = registered_model(name, kind), origin["run_id"]
        named = {PARTS[part]: version.label for part, version in parts.items()}
        key = hashlib.sha256(json.dumps([model, run_id, artifact.digest, named]).encode()).hexdigest()
        version = self._by_key(model, key)
        if version is None:
            self._ensure_model(model, kind, name)
            made_from = [*(v.artifact for v in parts.values()), *origin.get("inputs", ())]
            tags = {
                **origin.get("tags", {}),
                **provenance(origin.get("config")),
                **named,
                KIND: kind,
                NAME: name,
                KEY: key,
                ARTIFACT: artifact.model_dump_json(),
                INPUTS: json.dumps([ref.model_dump() for ref in made_from]),
                **({PARENT: parent.label} if parent else {}),
            }
            source = f"lockstep-artifact:///{artifact.name}"  # an MLflow server refuses relative paths
            about = _about(kind, parent, parts)
            self.client.create_model_version(model, source, run_id=run_id or None, tags=tags, description=about)
            version = self._by_key(model, key)
            assert version is not None
        self.link(version)
        for evidence in origin.get("evidence", ()):
            version = self.attach_evidence(version, evidence)
        return version

    def _by_key(self, model: str, key: str) -> Version | None:
        """The version with this key. Two processes that registered the same thing at once made two: the first stays,
        whoever sees the second removes it, so both return the same one."""
        found = self.versions(model, f"tags.`{KEY}` = '{key}'")
        for double in found[:-1]:
            self._found(lambda number=double.version: self.client.delete_model_version(model, str(number)))
        return found[-1] if found else None

    def _stays(self, found: Any) -> bool:
        """Whether a version listed without its tags is still there: another process may be deleting a double."""
        return self._found(lambda: self.client.get_model_version(found.name, found.version)) is not None

    def _ensure_model(self, model: str, kind: Kind, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(model, tags={KIND: kind, NAME: name})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _made_for(self, kind: Kind, target: Version) -> list[Version]:
        return self.versions(registered_model(target.name, kind), f"tags.`{PARTS['target']}` = '{target.label}'")

    def _version(self, ask: Callable[[], Any]) -> Version | None:
        found = self._found(ask)
        return None if found is None else from_mlflow(found)

    def _found(self, ask: Callable[[], Any]) -> Any:
        """What `ask` returns, None when MLflow does not have it."""
        from mlflow.exceptions import MlflowException

        try:
            return ask()
        except MlflowException as error:
            if error.error_code not in _ABSENT:
                raise
            return None


def _about(kind: Kind, parent: Version | None, parts: Mapping[str, Version]) -> str:
    """What MLflow's page of a version says first."""
    labels = ", ".join(part.label for part in parts.values())
    made = {"target": "Target", "drafter": f"Drafter of {labels}", "quant": f"Quantized copy of {labels}"}
    return made.get(kind, f"Release of {labels}") + (f", from {parent.label}" if parent else "")
