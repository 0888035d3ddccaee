"""``python -m tests.support.pictures FOLDER [NAME ...]``: makes the images of the docs, or those named, from real runs.

Takes minutes and needs an idle machine, because the images show measurements. Needs chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from PIL import Image
from rich.console import Console

from hpctrain.report import drawing
from hpctrain.report.charts import heat_chart
from hpctrain.report.drawing import Chart
from hpctrain.report.plots import shrink
from hpctrain.run.run_view import RunView
from hpctrain.watch import terminal
from hpctrain.watch.terminal import WatchedRun
from tests.slurm.cluster import two_nodes
from tests.slurm.run import Run
from tests.support import tutorial
from tests.support.command import HPCTRAIN, environment, hpctrain, reaches_step, started, wait_for

ROOT = Path(__file__).parents[2]
MOST_BYTES = 150_000
"""Largest size of an image."""
SLOW = '''
import time

import bearings
from hpctrain import TorchTask, World

CALLS = [0]


def slowed(loss, rank):
    """Every step takes 10 ms more, and on rank 1 from step 300 on 14 ms."""

    def loss_after_a_while(output, batch):
        CALLS[0] += output.requires_grad
        time.sleep(0.014 if rank == 1 and CALLS[0] > 300 else 0.010)
        return loss(output, batch)

    return loss_after_a_while


def task(world: World) -> TorchTask:
    made = bearings.task()
    return TorchTask(made.model, slowed(made.loss, world.rank), made.optimizer, made.train)
'''


def main(folder: Path, names: Sequence[str]) -> None:
    """Make all images, or those named."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as room:
        work = Path(room)
        tutorial.write_files(work)
        for words in tutorial.commands():
            if (words[0] == "python" and words[1] == "measure.py") or words[1:3] == ["data", "pack"]:
                command = [sys.executable, *words[1:]] if words[0] == "python" else [*HPCTRAIN, *words[1:]]
                subprocess.run(command, cwd=work, env=environment(), check=True)
        for name in names or PICTURES:
            PICTURES[name](work, folder / name)
    for picture in sorted(folder.iterdir()):
        size = picture.stat().st_size
        print(f"{picture}: {size / 1000:.0f} KB")
        assert size < MOST_BYTES, f"{picture} is larger than {MOST_BYTES} bytes"


def gpt(work: Path, **train: object) -> dict[str, object]:
    """Keys of a run of a GPT on the text of the docs."""
    tokens = work / "tokens.h5"
    if not tokens.exists():
        hpctrain("data", "pack", ROOT / "docs", "--kind", "text", "--context", 128, "-o", tokens, cwd=work)
    return {
        "name": "gpt",
        "task": f"{ROOT}/examples/gpt.py:task",
        "task_args": {"train": str(tokens), "width": 256, "blocks": 6, "heads": 8, "kv_heads": 4},
        "train": {"global_batch": 16, "clip_norm": 1.0, **train},
        "schedule": {"kind": "cosine", "warmup_steps": 40, "final_factor": 0.1},
    }


def watch(work: Path, picture: Path) -> None:
    """Draw the live view of a job of Slurm on two nodes, after it has reached two time limits of two minutes."""
    (work / "slurm").mkdir()
    with two_nodes(work / "slurm") as cluster:
        job = Run.write(
            cluster,
            work / "job",
            **gpt(work, steps=1200),
            checkpoint={"tiers": {"memory": {"every_steps": 50}}},
            launch={"ranks_per_node": 1},
            slurm={"time": "2"},
        )
        number = job.submit()
        job.wait_for(lambda: (seen := job.watch())["requeues"] == 2 and (seen["limit_in_s"] or 120) < 60, 900)
        os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
        console = Console(record=True, width=92, force_terminal=True, color_system="truecolor", highlight=False)
        terminal.print_once(WatchedRun(RunView(job.folder)).look(whole=True), console)
        job.hpctrain("stop", job.folder)
        job.wait(number, "FAILED", "COMPLETED")
    drawing = console.export_svg(title="hpctrain watch runs/gpt")
    drawing = re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.S)  # the image must not load fonts from the web
    picture.write_text(drawing, encoding="utf-8")


def report(work: Path, picture: Path) -> None:
    """Draw the upper part of the report of a run of minutes that was stopped, resumed and completed."""
    run, keys = work / "runs" / "gpt", {"checkpoint": {"every_steps": 60}, "track": {"every_steps": 5}}
    (work / "gpt.yaml").write_text(yaml.safe_dump({**gpt(work, steps=240), **keys, "run_dir": str(run)}))
    with started("run", "-n", 2, "gpt.yaml", cwd=work) as child:
        wait_for("steps", reaches_step(run, 130), 600)
        hpctrain("stop", run)
        child.wait(60)
    hpctrain("run", "-n", 2, "gpt.yaml", cwd=work, timeout=900)
    hpctrain("report", run)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "chromium is needed"
    page, shot = work / "report.html", work / "report.png"
    page.write_text((run / "report.html").read_text(encoding="utf-8").replace(str(work), "~/gpt"), encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1500",
        f"--user-data-dir={work / 'profile'}", f"--screenshot={shot}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    save_small(shot, picture)


def heat(work: Path, picture: Path) -> None:
    """Draw the monitor's heat map of a run on four ranks, one of which is slow."""
    (work / "slow.py").write_text(SLOW)
    run = work / "slow"
    options = "--task slow.py:task --train.epochs 15 --monitor.window_steps 16 --reduce.kind mpi"
    options += " --checkpoint.best_metric null"
    hpctrain("run", "-n", 4, "bearings.yaml", *options.split(), "--run_dir", run, cwd=work, timeout=300)
    print(hpctrain("explain", run).stdout)
    excess = RunView(run).heat_map()
    assert excess is not None
    heat = heat_chart("Busy time compared with the other ranks", shrink(100 * excess))
    save_charts([heat], work / "heat.png", picture)


def convergence(work: Path, picture: Path) -> None:
    """Draw what methods that save bytes cost in loss, on four ranks."""
    drawn, methods = work / "convergence.png", "fp16,local 32,overlap,averaging 32,DiLoCo 32"
    command = ["-m", "benchmarks.convergence", "--ranks", "4", "--methods", methods, "--picture", str(drawn)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    save_small(drawn, picture)


def save_charts(charts: Sequence[Chart], whole: Path, picture: Path) -> None:
    """Save hpctrain's charts, scaled down from a larger image."""
    with drawing.own_settings():
        drawing.figure_of(charts, titles=True).savefig(whole, dpi=160)
    save_small(whole, picture)


def save_small(source: Path, picture: Path) -> None:
    """Save an image at most 1100 pixels wide, in 256 colours."""
    with Image.open(source) as image:
        plain = image.convert("RGB")
        plain.thumbnail((1100, 2000))
        plain.quantize(256, Image.Quantize.FASTOCTREE).save(picture, optimize=True)


PICTURES = {"watch.svg": watch, "report.png": report, "heat.png": heat, "convergence.png": convergence}
"""Functions that make an image, by file name."""

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
