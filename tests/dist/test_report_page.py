"""The report of real runs in a real browser: no request, no console message, nothing clipped, the events' values."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.command import PROJECT, events, hpctrain, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
BROWSERS_OWN = re.compile(r"https?://([\w-]+\.)*(google|googleapis|gvt1|gstatic)\.com/")
SLOW = f"{PROJECT}/tests/support/torch_slow_task.py:task"


@pytest.fixture
def browser(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Opens a page in headless Chromium; gives the page as it stands then, and what the browser wrote to its log."""
    if CHROMIUM is None:
        pytest.skip("this machine has no chromium")

    def open_page(path: Path, log: Path) -> tuple[str, str]:
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *QUIET.split(), "--window-size=1440,2000",
            f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--net-log-capture-mode=Everything",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0", "--dump-dom", path.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, done.stderr

    return open_page


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["finished", "stopped", "crashed"])
def test_the_report_of_a_real_run_in_a_browser(kind: str, tmp_path: Path, browser) -> None:  # type: ignore[no-untyped-def]
    run_file = write_run(
        tmp_path,
        task=SLOW,
        task_args={"step_s": 0.002},
        train={"steps": 60, "global_batch": 16, "eval_every_steps": 20},
    )
    run = tmp_path / "runs/run"
    hpctrain("train", run_file, cwd=tmp_path)
    if kind == "crashed":
        (run / "run.json").write_text((run / "run.json").read_text()[:-20])  # half a file, as a crash may leave it
        with open(run / "events.jsonl", "a") as file:
            file.write('{"time": 17')
    if kind == "stopped":
        shutil.rmtree(run / "ranks")
    hpctrain("report", run, cwd=tmp_path)

    measured = tmp_path / "measured.html"
    probe = "<script>document.title=[document.documentElement.scrollWidth,innerWidth].join(' ')</script></body>"
    measured.write_text((run / "report.html").read_text().replace("</body>", probe))
    dom, said = browser(measured, tmp_path / "net.json")
    page_width, window_width = map(int, re.search(r"<title>(\d+) (\d+)</title>", dom).groups())  # type: ignore[union-attr]
    assert page_width <= window_width == 1440
    assert "CONSOLE" not in said
    requests = set(re.findall(r'"url":"([^"]+)"', (tmp_path / "net.json").read_text()))
    assert not [url for url in requests if re.match(r"http|ws|ftp", url) and not BROWSERS_OWN.match(url)]
    assert not re.search(r"https?://|url\(|@import", (run / "report.html").read_text())

    drawing = ET.fromstring(re.search(r"<svg.*?</svg>", dom.split('id="loss"')[1], re.S).group(0))  # type: ignore[union-attr]
    drawn = {line.attrib["data-name"]: values(drawing, line) for line in drawing.iter() if "points" in line.attrib}
    told = [(event["step"], event["loss"]) for event in events(run, "train")]
    height = float(drawing.attrib["data-y"].split()[1])
    assert drawn["loss"] == [
        (pytest.approx(step, abs=0.1), pytest.approx(loss, abs=1e-3 * height)) for step, loss in told
    ]
    rows = re.findall(r"<td>loss</td><td>([^<]+)</td><td>([^<]+)</td>", dom.split('id="loss_time"')[0])
    assert [(float(step), float(loss)) for step, loss in rows] == told


def values(drawing: ET.Element, line: ET.Element) -> list[tuple[float, float]]:
    """A curve's points, from pixels back to values."""
    ranges = [[float(part) for part in drawing.attrib[name].split()] for name in ("data-x", "data-y")]
    points = []
    for pair in line.attrib["points"].split():
        x, y = (
            low + (float(at) - begin) / (end - begin) * (high - low)
            for at, (low, high, begin, end) in zip(pair.split(","), ranges, strict=True)
        )
        points.append((x, y))
    return points


def test_report_and_explain_as_json(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, task=SLOW, task_args={"step_s": 0}, train={"steps": 20, "global_batch": 16})
    hpctrain("train", run_file, cwd=tmp_path)
    run = tmp_path / "runs/run"
    report = json.loads(hpctrain("report", run, "--json", cwd=tmp_path).stdout)
    assert (report["state"], report["steps"], report["ranks"]) == ("completed", 20, 1)
    assert 0 < report["goodput"] <= 1
    answer = json.loads(hpctrain("explain", run_file, "--json", cwd=tmp_path).stdout)
    assert answer["cause"] == "completed"
    nothing = hpctrain("report", tmp_path / "none", cwd=tmp_path, code=64)
    assert "there is no run folder" in nothing.stderr
