"""The lineage of one target as a tree: its versions, and what was made of each."""

from typing import TYPE_CHECKING

from pydantic import BaseModel

from infra.lineage.aliases import aliases
from infra.lineage.lineage import Lineage
from infra.lineage.versions import ADOPTED, KINDS, LineageError, Version, registered_model
from infra.store.refs import ArtifactRef

if TYPE_CHECKING:
    from rich.tree import Tree as RichTree

WIDTH = 160


class Node(BaseModel):
    """A target version with everything that names it, oldest first."""

    version: Version
    drafters: list[Version]
    quants: list[Version]
    releases: list[Version]

    @property
    def versions(self) -> list[Version]:
        """The target first, the releases last."""
        return [self.version, *self.drafters, *self.quants, *self.releases]


class Tree(BaseModel):
    """All versions of target `name`, oldest first; `aliases`: label of a release by alias."""

    name: str
    aliases: dict[str, str]
    targets: list[Node]

    def held(self, version: Version) -> list[str]:
        """Aliases of a release."""
        return sorted(alias for alias, label in self.aliases.items() if label == version.label)


def tree(lineage: Lineage, name: str) -> Tree:
    """The lineage of target `name`. Raises LineageError when it has no version."""
    targets = lineage.versions(name)
    if not targets:
        raise LineageError(f"no version of {name} is registered in MLflow at {lineage.uri}: `lockstep loop` makes some")
    made = {k: lineage.versions(registered_model(name, k)) for k in ("drafter", "quant", "release")}

    def of(kind: str, target: Version) -> list[Version]:
        return [v for v in reversed(made[kind]) if v.parts.get("target") == target.label]

    nodes = [
        Node(version=t, drafters=of("drafter", t), quants=of("quant", t), releases=of("release", t))
        for t in reversed(targets)
    ]
    return Tree(name=name, aliases=aliases(lineage, name), targets=nodes)


def render(tree: Tree) -> str:
    """The tree as text for a terminal."""
    from rich.console import Console
    from rich.tree import Tree as RichTree

    root = RichTree(f"{tree.name}: {len(tree.targets)} version{'s' if len(tree.targets) != 1 else ''}")
    for node in tree.targets:
        branch = root.add(_line(node.version))
        _about(branch, node.version)
        for version in (*node.drafters, *node.quants):
            _about(branch.add(_line(version)), version)
        for release in node.releases:
            held = tree.held(release)
            leaf = branch.add(_line(release) + (f"  <- {', '.join(held)}" if held else ""))
            leaf.add("serves " + ", ".join(release.parts.values()))
            _about(leaf, release)
    console = Console(width=WIDTH, color_system=None, highlight=False, markup=False)
    with console.capture() as text:
        console.print(root)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def _line(version: Version) -> str:
    digest, mib = _short(version.artifact.digest), version.artifact.bytes / 2**20
    return f"{version.kind} {version.label}  {version.created:%Y-%m-%d %H:%M} UTC  {digest}  {mib:,.1f} MiB"


def data(version: Version) -> list[ArtifactRef]:
    """What a version was made from besides versions: hidden states, say."""
    return [ref for ref in version.inputs if ref.name.split("/")[0] not in KINDS]


def made_with(version: Version) -> dict[str, str]:
    """Engine pin, git revision and digest of the configuration, where they were written down."""
    found = {name: version.tags.get(f"lockstep.{name}", "") for name in ("engine", "git", "config_digest")}
    return {name: text for name, text in found.items() if text}


def _about(branch: "RichTree", version: Version) -> None:
    if version.parent:
        branch.add(f"from {version.parent}")
    if source := version.tags.get("lockstep.source") or version.tags.get(ADOPTED):
        branch.add(f"from {source}")
    if refs := data(version):
        branch.add(f"data {', '.join(f'{ref.name} ({ref.bytes / 2**20:,.1f} MiB)' for ref in refs)}")
    how = made_with(version)
    if "config_digest" in how:
        code = how["git"] if how["git"].startswith("unknown") else how["git"][:12]
        branch.add(f"config {_short(how['config_digest'])}, code {code}, {how['engine']}")
    tables = [_short(ref.digest) for ref in version.evidence]
    unmeasured = "unproven: adopted, never measured" if version.unproven else "no evidence"
    branch.add(f"evidence {', '.join(tables)}" if tables else unmeasured)


def _short(digest: str) -> str:
    return digest[7:19]
