"""The report and the lineage page in a real browser: offline, drawn, and what moves in them at work."""

import re
import shutil
import subprocess

import pytest
import report_sample as sample

from tasks.report import lineage
from tasks.report.build import build

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return build(tmp_path_factory.mktemp("report"), sample.summary(), sample.measured())


def dump(page, tmp_path, *flags: str) -> str:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
               "--disable-background-networking", "--disable-component-update",
               f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def test_figures_are_drawn_and_the_browser_of_rollouts_runs(page, tmp_path):
    dom = dump(page, tmp_path, "--dump-dom")
    drawn = re.findall(r'<figure id="([^"]+)".*?<svg[^>]*>(.*?)</svg>', dom, re.DOTALL)
    assert len(drawn) == page.read_text().count("<figure")
    for key, marks in drawn:
        assert "<text" in marks and "NaN" not in marks, key
    assert ">12 of 12 groups<" in dom  # written by the page's script


def test_a_picture_of_the_page_can_be_taken(page, tmp_path):
    picture = tmp_path / "page.png"
    dump(page, tmp_path, f"--screenshot={picture}", "--window-size=1200,1600")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 50_000


def test_the_lineage_is_drawn_and_a_box_leads_to_its_version(tmp_path):
    tree, measured = sample.lineage()
    page = lineage.build(tmp_path / "lineage.html", tree, measured, [])
    dom = dump(page, tmp_path, "--dump-dom")
    ((key, marks),) = re.findall(r'<figure id="([^"]+)".*?<svg[^>]*>(.*?)</svg>', dom, re.DOTALL)
    assert key == "versions"
    for text in ("smol-drafter/2", "acceptance 1.73, speedup 0.86", "W4A16, KL 0.016", "adopted, not measured"):
        assert f">{text}</text>" in marks, text
    assert ">champion</text>" in marks and ">previous</text>" in marks
    boxes = re.findall(r'<a href="#([^"]+)"', marks)
    assert len(boxes) == 12
    assert all(f'id="{box}"' in dom for box in boxes)
