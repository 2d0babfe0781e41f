"""Which drafter a release takes when it is asked for the best."""

from datetime import UTC, datetime

import pytest

from infra.config.recording import RecordingConfig
from infra.config.target import EngineConfig
from infra.engine.drafters import CARD
from infra.lineage.versions import Version, evidence_tag
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.evaluate.evidence import row
from tasks.release.candidate import TABLE, Candidate, fastest
from tasks.release.serve import ServeError, spec_of


@pytest.fixture
def drafter(tmp_path, monkeypatch):
    """`drafter(number, *speedups)`: a version with a table of evidence for each measured speedup."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_STORE", str(tmp_path / "store"))

    def made(number: int, *speedups: float) -> Version:
        tags = {}
        for i, speedup in enumerate(speedups):
            folder = tmp_path / f"{number}-{i}"
            folder.mkdir()
            subject = f"drafter:t/{number}"
            best = [
                row("best_num_speculative_tokens", 3 if speedup > 1 else 0, n=9, unit="tokens", subject=subject),
                row("speedup_at_best", max(speedup, 1.0), n=9, unit="ratio", subject=subject),
            ]
            rows = [
                *({**r, "concurrency": 4} for r in best),
                row("speculation_speedup", speedup, n=9, unit="ratio", subject=subject),
                row("load_speculation_speedup", 9.0, n=9, unit="ratio", subject=subject, concurrency=64),
                row("speculation_speedup", 9.0, n=9, unit="ratio", subject="quant:t/1"),
            ]
            evidence.write(evidence.table(rows, engine="e", hardware="h", command="c"), folder / TABLE)
            key, value = evidence_tag(open_store().put(folder, "evidence", producer="test"))
            tags[key] = value
        return Version(
            kind="drafter",
            name="t",
            model="t-drafter",
            version=number,
            artifact=ArtifactRef(name=f"drafter/{number}", digest=f"sha256:{number}", bytes=1),
            run_id="r",
            created=datetime.now(UTC),
            tags=tags,
        )

    return made


def test_the_best_drafter_is_the_one_measured_fastest(drafter):
    slow, fast, unmeasured = drafter(1, 1.1), drafter(2, 1.7), drafter(3)
    assert fastest([unmeasured, slow, fast]) is fast
    assert fastest([unmeasured]) is None and fastest([]) is None
    assert fastest([fast, drafter(4, 2.0, 1.2)]) is fast, "the later measurement counts"


def test_a_release_proposes_as_many_tokens_as_were_best(drafter, tmp_path):
    for folder, card in (("target", "config.json"), ("head", CARD)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / card).write_text('{"kind": "eagle3"}')
    target, head = (open_store().put(tmp_path / f, f, producer="test") for f in ("target", "head"))

    def spec(version: Version, tokens):
        parts = Candidate(
            target=version.model_copy(update={"kind": "target", "artifact": target}),
            drafter=version.model_copy(update={"artifact": head}),
            quant=None,
        )
        return spec_of(open_store(), parts, EngineConfig(), tokens, RecordingConfig(share=0.5))

    assert spec(drafter(1, 1.7), 2).speculation.num_speculative_tokens == 2
    fast = spec(drafter(2, 1.7), "best")
    assert fast.speculation.schedule == [(1, 2**20, 3)] and fast.recording.share == 0.5
    assert spec(drafter(3, 0.8), "best").speculation is None, "slower than plain decoding"
    with pytest.raises(ServeError, match="t-drafter/4 was never measured"):
        spec(drafter(4), "best")
