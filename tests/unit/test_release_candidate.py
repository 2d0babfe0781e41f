"""Which drafter a release takes when it is asked for the best."""

from datetime import UTC, datetime

import pytest

from infra.lineage.versions import Version, evidence_tag
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.evaluate.evidence import row
from tasks.release.candidate import TABLE, fastest


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
            rows = [
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
