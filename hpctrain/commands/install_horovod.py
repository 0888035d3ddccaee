"""`hpctrain install-horovod`: Horovod built from its sdist, with our edits, for what is installed here.

The wheel is cached under a key of everything it was built against, so a second environment like this one gets it in
seconds. An interrupted build resumes where it was. Builds are in a folder that only this user can write to. A folder
that others can write to holds only finished wheels, which are checked before use.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpctrain.errors import ExitCode, RunFailed, UserError
from hpctrain.horovod_wheel import build, patch, toolchain
from hpctrain.system import foreign_text, python
from hpctrain.system.files import take_lock

_SMOKE_TEST = "import horovod.{0} as hvd; assert hvd.mpi_built()"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--gpu", action="store_true", help="reduce on GPUs with NCCL (needs nvcc and a CUDA torch)")
    for name, title in (("torch", "PyTorch"), ("tensorflow", "TensorFlow")):
        parser.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, help=f"build for {title} (default: if it is installed)"
        )
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="cache of wheels (default: in ~/.cache/hpctrain)")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help=f"{patch.SDIST}, on a machine without network")
    parser.add_argument("--force", action="store_true", help="build again even if the cache has the wheel")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(args: argparse.Namespace) -> int:
    """Builds the wheel unless it is cached, installs it, and checks that it loads.

    Raises:
        UserError: something that the build needs is missing.
        RunFailed: the build failed; the message names its log.
    """
    begin = time.monotonic()
    say: build.Say = _silent if args.json else foreign_text.show
    folder = (args.wheel_dir or build.own_folder()).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    room = folder if build.is_private(folder) else build.own_folder()
    frameworks = _frameworks(args.torch, args.tensorflow, args.gpu)
    toolchain.check_python()
    compiler = toolchain.check_compiler()
    mpi = toolchain.find_mpi()
    toolchain.check_mpi4py(mpi)
    cuda = toolchain.find_cuda() if args.gpu else None
    edits = patch.edits(args.gpu)
    recipe = patch.WheelRecipe(
        horovod=patch.VERSION,
        patch=patch.digest(edits),
        python=f"{sys.implementation.cache_tag} {sysconfig.get_platform()}",
        torch=frameworks.get("torch"),
        tensorflow=frameworks.get("tensorflow"),
        compiler=compiler,
        mpi=mpi.version,
        mpi_rpath=mpi.rpath,
        cuda=cuda.identity if cuda else None,
    )
    built = False
    wheel = _cached_wheel((room, folder), recipe)
    if wheel is None or args.force:
        build.make_private(room)
        with _locked(room / f"{recipe.key}.lock", say):
            wheel = None if args.force else _cached_wheel((room, folder), recipe)
            if wheel is None:
                wheel = build.Build(room, recipe, mpi, cuda, args.sdist).run(edits, say)
                built = True
                wheel.chmod(0o644)
        if built and folder != room:
            wheel = _share(wheel, folder, say)
    if built or python.version_of("horovod") != recipe.version:
        say(f"Installing {wheel.name}")
        with build.checked(wheel) as copy:
            _install(copy, again=built)
    for framework in frameworks:
        _check_it_loads(framework, mpi)
    outcome = {
        "version": recipe.version, "frameworks": frameworks, "mpi": mpi.name, "gpu": args.gpu, "built": built,
        "wheel": str(wheel), "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip
    against = " and ".join(f"{name} {version}" for name, version in frameworks.items())
    text = f"Horovod {patch.VERSION} for {against} over {mpi.name} is installed ({outcome['seconds']:.0f} s)"
    foreign_text.answer(args.json, outcome, [text])
    return ExitCode.DONE


def _frameworks(torch: bool | None, tensorflow: bool | None, gpu: bool) -> dict[str, str]:
    """Returns name and version of each framework to build for."""
    if gpu and tensorflow:
        fix = "leave out --tensorflow: --gpu builds for PyTorch"
        raise UserError("Horovod's TensorFlow operations do not build for GPUs against today's TensorFlow", fix)
    wanted = {"torch": torch, "tensorflow": False if gpu else tensorflow}
    versions = {"torch": python.version_of("torch"), "tensorflow": python.version_of("tensorflow-cpu", "tensorflow")}
    for name, want in wanted.items():
        if want and versions[name] is None:
            raise UserError(what=f"{name} is not installed", fix=f'pip install "hpctrain[{name}]" first')
    found = {name: version for name, version in versions.items() if version and wanted[name] is not False}
    if not found:
        fix = 'install one first: pip install "hpctrain[torch]" or "hpctrain[tensorflow]"'
        raise UserError("there is no framework to build Horovod for", fix)
    return found


def _cached_wheel(folders: Sequence[Path], recipe: patch.WheelRecipe) -> Path | None:
    return next((wheel for folder in folders for wheel in folder.glob(f"horovod-{recipe.version}-*.whl")), None)


def _share(wheel: Path, folder: Path, say: build.Say) -> Path:
    try:
        return build.share(wheel, folder)
    except OSError as error:
        say(f"{folder} cannot hold the wheel ({error.strerror}): it stays in {wheel.parent}")
        return wheel


def _install(wheel: Path, again: bool) -> None:
    command = [*build.PIP, "install", "--quiet", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0 and again:  # the same version from another build: pip would leave the old one
        done = subprocess.run([*command, "--force-reinstall", "--no-deps"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RunFailed(what=f"pip cannot install {wheel}: {toolchain.last_line(done.stderr)}", fix="try again")


def _check_it_loads(framework: str, mpi: toolchain.Mpi) -> None:
    done = subprocess.run(python.code(_SMOKE_TEST.format(framework)), capture_output=True, text=True)
    if done.returncode != 0:
        fix = f"build it again with --force, with {mpi.name} loaded as it will be in jobs"
        raise RunFailed(f"horovod.{framework} does not load: {toolchain.last_line(done.stderr)}", fix)


@contextlib.contextmanager
def _locked(path: Path, say: build.Say) -> Iterator[None]:
    """Lets simultaneous set-ups build one after the other; the kernel frees the lock of a process that died."""
    with path.open("w") as file:
        if take_lock(file.fileno()) is False:
            say("Another process builds the same wheel; waiting for it")
            while take_lock(file.fileno()) is False:
                time.sleep(1)
        yield


def _silent(text: str) -> None:
    """Prints nothing."""
