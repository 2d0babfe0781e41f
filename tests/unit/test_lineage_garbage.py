"""What may be deleted, what must stay, and that a flow which commits meanwhile loses nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.config.flows import RLFlowConfig
from infra.lineage import garbage
from infra.lineage.aliases import promote
from infra.lineage.lineage import Lineage
from infra.services import results, runs
from infra.store.local import LocalStore
from infra.store.refs import ArtifactRef

NOW = timedelta(0)


@pytest.fixture
def lineage(tmp_path: Path, book) -> Lineage:
    """A book of its own: what it names must be in the test's store."""
    return Lineage(book(tmp_path / "mlflow.db"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store in a home where nothing has run."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    for name in ("PREFECT_API_URL", "PREFECT_LOCAL_STORAGE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return LocalStore(tmp_path / "store")


def put(store: LocalStore, tmp_path: Path, kind: str, text: str, inputs: tuple[ArtifactRef, ...] = ()) -> ArtifactRef:
    folder = tmp_path / f"{kind}-{text}"
    folder.mkdir(exist_ok=True)
    if not (folder / "file").exists():
        (folder / "file").write_text(f"{kind} {text}")
    return store.put(folder, kind, producer="a test", inputs=inputs)


def test_what_versions_and_releases_name_stays_and_the_rest_goes(lineage, store, tmp_path):
    def new(kind: str, *inputs: ArtifactRef) -> ArtifactRef:
        return put(store, tmp_path, kind, str(len(store.list())), inputs)

    states, unused_states, view, lost = new("hidden-states"), new("hidden-states"), new("view"), new("target")
    target = lineage.register_target("swept", new("target"), run_id="", evidence=[new("evidence")])
    drafter = lineage.register_drafter("swept", new("drafter"), target=target, inputs=[states], run_id="")
    other = lineage.register_drafter("swept", new("drafter"), target=target, inputs=[unused_states], run_id="")
    record = new("release", new("evidence"))
    promote(
        lineage,
        lineage.register_release("swept", record, target=target, drafter=drafter, quant=None, run_id=""),
    )
    lineage.tag(target, {"lockstep.refusal": new("refusal").model_dump_json()})

    assert garbage.find(lineage, store, timedelta(days=1)).artifacts == []  # all are young
    found = garbage.find(lineage, store, NOW)
    assert found.artifacts == [lost, view]  # by name, as the store lists them
    assert (found.kept, found.bytes) == (len(store.list()) - 2, lost.bytes + view.bytes)
    assert garbage.find(lineage, store, NOW, data=True).artifacts == [unused_states, lost, view]
    assert list(garbage.delete(lineage, store, found)) == [(lost, True), (view, True)]
    assert not {lost, view} & set(store.list())
    for ref in (target.artifact, drafter.artifact, other.artifact, states, record):
        store.verify(ref)
    assert garbage.find(lineage, store, NOW).artifacts == []


def test_a_run_that_is_not_finished_keeps_what_is_younger(lineage, store, tmp_path):
    old = put(store, tmp_path, "view", "old")
    with pytest.raises(RuntimeError), runs.claim("rl", RLFlowConfig()) as key:
        young = put(store, tmp_path, "view", "young")
        raise RuntimeError("the run is interrupted")
    found = garbage.find(lineage, store, NOW)
    assert found.artifacts == [old]
    assert found.because == f"what is younger than {key} stays: it was interrupted and can be resumed"
    runs.abandon("rl", RLFlowConfig())
    assert set(garbage.find(lineage, store, NOW).artifacts) == {old, young}


def test_a_kept_result_goes_before_its_artifact_unless_it_was_just_asked_for(lineage, store, tmp_path):
    wanted, unwanted = put(store, tmp_path, "view", "wanted"), put(store, tmp_path, "view", "unwanted")
    results.folder().mkdir(parents=True)
    for ref in (wanted, unwanted):
        (results.folder() / ref.digest[7:23]).write_text(f'{{"result": {ref.model_dump_json()}}}')
    found = garbage.find(lineage, store, NOW)
    assert {ref.name for ref in found.artifacts} == {wanted.name, unwanted.name}
    with pytest.raises(RuntimeError), runs.claim("rl", RLFlowConfig()):
        results.used(wanted.digest[7:23])  # a run that began after the list was made gets this result
        raise RuntimeError("the run is interrupted")
    assert dict(garbage.delete(lineage, store, found)) == {wanted: False, unwanted: True}
    store.verify(wanted)
    assert [path.name for path in results.folder().iterdir()] == [wanted.digest[7:23]]


def test_a_version_registered_after_the_list_was_made_keeps_its_artifact(lineage, store, tmp_path):
    ref = put(store, tmp_path, "target", "late")
    found = garbage.find(lineage, store, NOW)
    lineage.register_target("late", ref, run_id="")
    assert list(garbage.delete(lineage, store, found)) == [(ref, False)]


def test_whoever_commits_at_the_same_moment_keeps_the_artifact(store, tmp_path):
    together = threading.Barrier(2)
    ref = put(store, tmp_path, "view", "same")

    def collect(before: datetime) -> bool:
        together.wait()
        return store.collect(ref, before)

    def commit() -> ArtifactRef:
        together.wait()
        return put(store, tmp_path, "view", "same")

    with ThreadPoolExecutor() as pool:
        for _ in range(40):
            collecting, committing = pool.submit(collect, datetime.now(UTC)), pool.submit(commit)
            assert committing.result() == ref
            collecting.result()
            store.verify(ref)
            assert store.list() == [ref]
