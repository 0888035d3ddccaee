"""Reports of real runs in a real browser: no requests, no console messages, nothing clipped, values of the events."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.report.page import number
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.time_account import SHORT_S
from tests.support.command import (
    PROJECT,
    events,
    hpctrain,
    misbehaving_run,
    ranks_of,
    started,
    write_run,
)
from tests.support.gate import Gate
from tests.support.mpi import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
BROWSERS_OWN = re.compile(r"https?://([\w-]+\.)*(google|googleapis|gvt1|gstatic)\.com/")
SLOW = f"{PROJECT}/tests/tasks/torch_slow_task.py:task"
PROBE = """<script>
const clipped = [...document.querySelectorAll("svg")].flatMap((picture) => {
  const frame = picture.getBoundingClientRect();
  return [...picture.querySelectorAll("text, use")].filter((part) => {
    const box = part.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  }).map((part) => picture.ariaLabel + ": " + (part.textContent || part.tagName));
});
document.title = [document.documentElement.scrollWidth, innerWidth, clipped.length, ...clipped.slice(0, 3)].join("|");
</script></body>"""
"""Script that measures the rendered page: its width, and elements that extend beyond their chart's frame."""


@dataclass(frozen=True)
class Page:
    """A report as rendered by the browser."""

    dom: str

    def drawing(self, section: str) -> str:
        """The chart of a section."""
        return re.search(r"<svg.*?</svg>", self.dom.split(f'id="{section}"')[1], re.S).group(0)  # type: ignore[union-attr]

    def rows(self, section: str) -> list[list[str]]:
        """Rows of the table behind a chart."""
        return self._cells(self.dom.split(f'id="{section}"')[1])

    def table(self, title: str) -> list[list[str]]:
        """The table under a heading."""
        return self._cells(self.dom.split(f"<h2>{title}</h2>")[1])

    @staticmethod
    def _cells(text: str) -> list[list[str]]:
        rows = re.findall(r"<tr>(.*?)</tr>", text.split("</table>")[0], re.S)
        cells = [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)] for row in rows]
        return [row for row in cells if row]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[Path], Page]:
    """Make the report of a run, open it in headless Chromium, and check what must hold for every report."""
    if CHROMIUM is None:
        pytest.skip("this machine has no chromium")

    def open_page(run: Path) -> Page:
        hpctrain("report", run)
        text, log, measured = (run / "report.html").read_text(), tmp_path / "net.json", tmp_path / "measured.html"
        assert not re.search(r"https?://|url\((?!#)|@import", text)
        measured.write_text(text.replace("</body>", PROBE))
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *QUIET.split(), "--window-size=1440,2000",
            f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--net-log-capture-mode=Everything",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0", "--dump-dom",
            measured.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        width, window, clipped, *which = re.search(r"<title>(.*?)</title>", done.stdout).group(1).split("|")  # type: ignore[union-attr]
        assert int(width) <= int(window) == 1440
        assert int(clipped) == 0, which
        assert "CONSOLE" not in done.stderr
        requests = set(re.findall(r'"url":"([^"]+)"', log.read_text()))
        assert not [url for url in requests if re.match(r"http|ws|ftp", url) and not BROWSERS_OWN.match(url)]
        return Page(done.stdout)

    return open_page


def check_loss(page: Page, run: Path, told: list[dict[str, Any]] | None = None) -> None:
    """Check that there is a chart of the loss, and that the table behind it has the events' values."""
    assert "<path" in page.drawing("loss")
    points = [(event["step"], event["loss"]) for event in (events(run, "train") if told is None else told)]
    assert points
    rows = [(float(step), float(loss)) for name, step, loss in page.rows("loss") if name == "loss"]
    assert rows == points


@pytest.mark.tour
def test_a_finished_run_whole_and_partly_lost(tmp_path, opened):
    run_file = write_run(
        tmp_path,
        task=SLOW,
        task_args={"step_s": 0.002},
        train={"steps": 60, "global_batch": 16, "eval_every_steps": 20},
    )
    run = tmp_path / "runs/run"
    hpctrain("train", run_file, cwd=tmp_path, warm="torch")
    check_loss(opened(run), run)
    report = json.loads(hpctrain("report", run, "--json", cwd=tmp_path).stdout)
    assert (report["state"], report["steps"], report["ranks"]) == ("completed", 60, 1)
    assert 0 < report["goodput"] <= 1
    (run / "run.json").write_text((run / "run.json").read_text()[:-20])  # a truncated file, as a crash may leave it
    shutil.rmtree(run / "ranks")
    with open(run / "events.jsonl", "a") as file:
        file.write('{"time": 17')
    check_loss(opened(run), run)


def test_a_run_while_it_runs_after_it_crashed_and_when_it_was_resumed(tmp_path, opened):
    run = tmp_path / "run"
    every, gate = {"track": {"every_steps": 5}, "checkpoint": {"every_steps": 20}}, Gate(tmp_path / "gate").close(1)
    path = misbehaving_run(tmp_path, train={"steps": 200}, task_args={"gate": str(gate.folder), "at": 52}, **every)
    with started("run", "-n", 1, path, env={"STEP_S": "0.02"}, warm="torch") as child:
        gate.await_ranks(1)
        page = opened(run)
        assert "The run is under way" in page.dom
        *_, (_, _, _, _, _, ending) = page.rows("attempts")
        assert ending == "running"
        check_loss(
            page, run, [event for event in events(run, "train") if event["step"] <= int(page.rows("loss")[-1][1])]
        )
        for rank in ranks_of(child.pid):
            rank.kill()
        assert child.wait(PATIENCE_S) == 70
    crashed = opened(run)
    check_loss(crashed, run)
    ending = Attempts(RunDir(run)).info()["attempts"][0]["verdict"]["reason"]
    assert ending in crashed.rows("attempts")[0] and f": {ending}</text>" in crashed.dom
    before = events(run, "train")

    hpctrain("run", "-n", 1, path, warm="torch")
    page = opened(run)
    check_loss(page, run)
    first, _ = Attempts(RunDir(run)).info()["attempts"]
    repeated = {event["time"] for event in before if event["step"] > first["to_step"]}
    kept = {event["time"] for event in events(run, "train")}
    assert len(kept) == 40 and repeated and not repeated & kept
    assert [row[0] for row in page.rows("attempts")] == ["1", "2"]
    assert page.rows("attempts")[1][3:] == [str(first["to_step"]), "200", "done after step 200"]
    shown = page.drawing("attempts")
    assert all(f"attempt {number}, from step " in shown for number in (1, 2))


@pytest.mark.world_size(2)
def test_a_run_with_a_slow_rank(tmp_path, opened):
    path = misbehaving_run(
        tmp_path, "slow", task_args={"at": 48}, train={"steps": 80}, monitor={"enabled": True, "window_steps": 8}
    )
    hpctrain("run", "-n", 2, path, env={"STEP_S": "0.02"}, warm="torch")
    run = tmp_path / "run"
    info = json.loads((run / "run.json").read_text())
    info["attempts"][0]["started"] -= SHORT_S  # reports of shorter runs have no heat map
    (run / "run.json").write_text(json.dumps(info))
    page = opened(run)
    check_loss(page, run)
    told = events(run, "straggler")
    of_rank = [(event["rank"], event["cause"], event["state"]) for event in told if event["kind"] == "rank"]
    assert of_rank == [(1, "forward", "confirmed")], "at load, others may have paused, too"
    keys = ("step", "rank", "host", "cause", "slowdown", "cost", "state", "sentence")
    assert page.table("Stragglers") == [[number(event[key], key) for key in keys] for event in told]
    assert any(f"The run completed; {event['sentence'].split(':')[0]}" in page.dom for event in told)

    with np.load(run / "monitor" / "heat.npz") as saved:
        excess = saved["excess"].astype(np.float64) * 100
    assert "<image" in page.drawing("heat")
    rows = [[float(cell) for cell in row[:3]] for row in page.rows("heat")]
    assert [row[0] for row in rows] == [0, 1]
    assert [row[2] for row in rows] == np.nanmax(excess, axis=1).tolist()
    assert rows[1][2] > 50
