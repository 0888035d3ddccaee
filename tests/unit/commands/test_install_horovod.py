"""Building Horovod: what is checked before minutes are spent, and what is said when it breaks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.errors import UserError
from hpctrain.horovod_wheel import build, patch
from hpctrain.horovod_wheel.build import Build, cuda_environment, explain_log
from hpctrain.horovod_wheel.patch import WheelRecipe
from hpctrain.horovod_wheel.toolchain import Cuda, Mpi, check_mpi4py, find_mpi
from tests.conftest import NOT_PERMITTED
from tests.support.hostile import SOMEBODY, as_somebody
from tests.support.programs import write_programs

RECIPE = WheelRecipe("0.28.1", "digest", "cpython-311", "2.13.0", "2.21.0", "g++ 12", "Open MPI v5", "", None)


def sources(root: Path, chosen: tuple[patch.Edit, ...]) -> Path:
    """Files that hold just the text that the edits look for."""
    for edit in chosen:
        file = root / edit.path
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.read_text() if file.exists() else ""
        file.write_text(f"{before}# before\n{edit.old}\n# after\n")
    return root


@pytest.mark.parametrize("gpu", [False, True])
def test_every_edit_is_made_and_the_rest_left_alone(tmp_path, gpu):
    edits = patch.edits(gpu)
    patch.apply(sources(tmp_path, edits), edits)
    for edit in edits:
        text = (tmp_path / edit.path).read_text()
        assert f"# before\n{edit.new}\n# after\n" in text


@pytest.mark.parametrize("text", ["", "set(CMAKE_CXX_STANDARD 98)", "set(CMAKE_CXX_STANDARD 14)\n" * 2])
def test_a_source_that_the_edits_do_not_fit_is_refused(tmp_path, text):
    sources(tmp_path, patch.edits(gpu=False))
    (tmp_path / "CMakeLists.txt").write_text(text)
    with pytest.raises(UserError, match=r"CMakeLists\.txt.*0\.28\.1"):
        patch.apply(tmp_path, patch.edits(gpu=False))


def test_edits_for_gpus_and_for_cpus_are_told_apart():
    assert patch.digest(patch.edits(gpu=True)) != patch.digest(patch.edits(gpu=False))


def test_a_changed_sdist_is_refused(tmp_path):
    file = tmp_path / patch.SDIST
    file.write_bytes(b"not Horovod")
    with pytest.raises(UserError, match="SHA-256"):
        patch.verify(file)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(WheelRecipe)])
def test_the_key_changes_with_everything_that_the_wheel_depends_on(field):
    assert dataclasses.replace(RECIPE, **{field: "other"}).key != RECIPE.key


def test_the_key_is_the_same_in_every_process():
    code = f"from hpctrain.horovod_wheel.patch import WheelRecipe; print({RECIPE!r}.key)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == RECIPE.key


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("g++: fatal error: Killed signal terminated program cc1plus\n", "the compiler ran out of memory"),
        ("/tmp/x.s: No space left on device\nmake: error: 1\n", "the disk is full"),
        ("ERROR: No matching distribution found for horovod==0.28.1\n", "the package index cannot be reached"),
        ("ok\n/a/b.cc:12:3: error: 'x' was not declared\nb.cc:13:1: error: later\n", "'x' was not declared"),
        ("CMake Error at CMakeLists.txt:3 (find_package):\n", "find_package"),
    ],
)
def test_the_log_of_a_failed_build_is_explained(log, reason):
    what, fix = explain_log(log)
    assert reason in what and "later" not in what
    assert fix


def install_horovod(cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpctrain", "install-horovod", "--wheel-dir", str(cache)]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=60)


def only(folder: Path, *programs: str) -> str:
    """A PATH with these programs and no others; each exits with 0 and has version 1."""
    folder.mkdir()
    write_programs(folder, **dict.fromkeys(programs, "echo version 1"))
    return str(folder)


def test_a_missing_compiler_is_one_sentence_and_costs_nothing(tmp_path):
    done = install_horovod(tmp_path / "cache", PATH=only(tmp_path / "bin", "make"))
    assert done.returncode == 64
    assert "g++ is not on PATH" in done.stderr and "g++ 11 or newer" in done.stderr
    assert "Traceback" not in done.stderr and not list((tmp_path / "cache").iterdir())


def test_a_compiler_without_cxx20_is_named(tmp_path):
    path = only(tmp_path / "bin", "make")
    script = '[ "$1" = --version ] && echo "old-g++ 9.4" && exit 0\nexit 1'
    write_programs(tmp_path / "bin", **{"old-g++": script})
    done = install_horovod(tmp_path / "cache", PATH=path, CXX=str(tmp_path / "bin" / "old-g++"))
    assert done.returncode == 64
    assert "old-g++ 9.4 does not compile C++20" in done.stderr


def test_another_mpi_than_mpi4pys_is_refused():
    other = Mpi(Path("/opt/other/bin/mpicc"), Path("/opt/other/lib/libmpi.so"), "Other MPI 1.0, of no one")
    with pytest.raises(UserError, match=r"mpi4py loads .*/opt/other/bin/mpicc belongs to Other MPI 1\.0") as caught:
        check_mpi4py(other)
    # pip takes wheels that it built before, for whatever MPI, from its cache
    assert "--no-cache-dir --no-binary mpi4py" in caught.value.fix
    assert other.rpath == "/opt/other/lib"


def test_an_mpi_inside_this_environment_is_found_relative_to_the_wheel():
    assert Mpi(Path("mpicc"), Path(sys.prefix).resolve() / "lib/libmpi.so.40", "Open MPI").rpath == ""


def test_cuda_is_told_apart_by_versions_not_by_folders(tmp_path):
    (tmp_path / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH 7\n")
    cuda = Cuda(Path("/opt/cuda"), "13.0", tmp_path, Path("libnccl.so.2"), "80,90")
    assert cuda.identity == "CUDA 13.0 for 80,90, NCCL 2.29.7"


FIND_CUDA = """
from hpctrain.errors import UserError
from hpctrain.horovod_wheel.toolchain import find_cuda
try:
    cuda = find_cuda()
    print(cuda.home, cuda.release)
except UserError as error:
    print(error.what, error.fix)
"""


def toolkit(home: Path, release: str) -> Path:
    """A folder with an nvcc that does nothing but say its version."""
    (home / "bin").mkdir(parents=True)
    write_programs(home / "bin", nvcc=f"echo Cuda compilation tools, release {release}, V{release}.88")
    return home


def found_cuda(site: Path, path: Path | None = None, **env: str) -> str:
    """What find_cuda finds or says, for torch with CUDA 13.0 and its NCCL wheel in `site`."""
    for name, text in (
        ("torch/__init__.py", ""),
        ("torch/version.py", "cuda: Optional[str] = '13.0'\n"),
        ("nvidia/__init__.py", ""),
        ("nvidia/nccl/include/nccl.h", ""),
        ("nvidia/nccl/lib/libnccl.so.2", ""),
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    clean = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "NCCL_HOME")}
    clean |= {"PYTHONPATH": str(site), "PATH": f"{path}/bin:/usr/bin:/bin" if path else "/usr/bin:/bin"} | env
    done = subprocess.run([sys.executable, "-c", FIND_CUDA], env=clean, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_toolkit_from_wheels_is_found_before_that_on_path_and_after_cuda_home(tmp_path):
    wheels = toolkit(tmp_path / "site/nvidia/cu13", "13.0")
    path, module = toolkit(tmp_path / "path", "13.1"), toolkit(tmp_path / "module", "13.2")
    assert found_cuda(tmp_path / "site", path=path) == f"{wheels} 13.0"
    assert found_cuda(tmp_path / "site", path=path, CUDA_HOME=str(module)) == f"{module} 13.2"


def test_a_toolkit_of_another_major_version_is_passed_over(tmp_path):
    old, fits = toolkit(tmp_path / "old", "12.4"), toolkit(tmp_path / "path", "13.1")
    assert found_cuda(tmp_path / "site", path=fits, CUDA_HOME=str(old)) == f"{fits} 13.1"
    said = found_cuda(tmp_path / "site", path=old)
    assert f"no nvcc of CUDA 13 on PATH; {old}/bin/nvcc has CUDA 12.4" in said
    assert 'pip install "cuda-toolkit[nvcc,cccl]==13.0.*"' in said


def cuda_of(folder: Path) -> Cuda:
    """The files of CUDA's and NCCL's wheels, empty."""
    for name in ("cuda/lib/libcudart.so.13", "cuda/lib/libcudart_static.a", "nccl/include/nccl.h", "nccl/libnccl.so.2"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return Cuda(folder / "cuda", "13.0", folder / "nccl/include", folder / "nccl/libnccl.so.2", "80")


def test_compiler_and_cmake_find_what_wheels_name_otherwise(tmp_path):
    env = cuda_environment(cuda_of(tmp_path), tmp_path / "links")
    nccl = Path(env["HOROVOD_NCCL_HOME"])
    assert (nccl / "include/nccl.h").exists() and (nccl / "lib/libnccl.so").exists()
    for variable in ("LIBRARY_PATH", "CMAKE_LIBRARY_PATH"):
        folders = list(map(Path, env[variable].split(os.pathsep)))
        for name in ("libcudart.so", "libcudart_static.a"):
            assert any((folder / name).exists() for folder in folders)


def test_a_whole_toolkit_is_left_as_it_is(tmp_path):
    cuda = cuda_of(tmp_path)
    (cuda.home / "lib64").symlink_to("lib")
    env = cuda_environment(cuda, tmp_path / "links")
    assert "LIBRARY_PATH" not in env and "CMAKE_LIBRARY_PATH" not in env


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, "-j3"),
        ("", "-j3"),
        (" -- TORCH=torch", "-j3"),
        (" -j8 --jobserver-auth=3,4", "-j3"),
        ("-j1", "-j1"),
        (" -j1 -- TORCH=torch", " -j1 -- TORCH=torch"),
    ],
)
def test_below_make_there_are_no_more_compilers_than_fit(given, used, tmp_path, monkeypatch):
    if given is None:
        monkeypatch.delenv("MAKEFLAGS", raising=False)
    else:
        monkeypatch.setenv("MAKEFLAGS", given)
    mpi = Mpi(Path("/opt/mpi/bin/mpicc"), Path("/opt/mpi/lib/libmpi.so"), "Open MPI v5")
    build = Build(tmp_path, RECIPE, mpi, None, None)
    monkeypatch.setattr(build, "_jobs", lambda: 3)
    assert build._environment()["MAKEFLAGS"] == used


def test_only_the_environment_that_began_a_build_goes_on_with_it(tmp_path, monkeypatch):
    """CMake's cache names the environment's folders, which may be gone."""
    mpi = Mpi(Path("/opt/mpi/bin/mpicc"), Path("/opt/mpi/lib/libmpi.so"), "Open MPI v5")
    build = Build(tmp_path, RECIPE, mpi, None, None)
    compiled = build.folder / "CMakeCache.txt"
    for goes_on in (False, True):
        build._open_folder()
        assert compiled.exists() is goes_on
        compiled.touch()
    monkeypatch.setattr("sys.prefix", "/another/venv")
    build._open_folder()
    assert not compiled.exists()


def test_a_tmpdir_without_programs_is_named(monkeypatch):
    def run(command, **options):
        if command[0].endswith("probe"):
            raise PermissionError(13, "Permission denied", command[0])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("hpctrain.horovod_wheel.toolchain.shutil.which", lambda *words, **options: "/usr/bin/mpicc")
    monkeypatch.setattr("hpctrain.horovod_wheel.toolchain.subprocess.run", run)
    with pytest.raises(UserError, match="set TMPDIR"):
        find_mpi()


def wheel_in(folder: Path) -> Path:
    """Something in the place of a wheel."""
    folder.mkdir(exist_ok=True)
    path = folder / "horovod-0.28.1+key-py3-none-any.whl"
    path.write_bytes(b"a wheel")
    path.chmod(0o644)
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return build.own_folder()


def test_a_sound_wheel_is_taken_as_a_copy(tmp_path, own):
    wheel = wheel_in(tmp_path / "shared")
    with build.checked(wheel) as copy:
        assert copy != wheel and copy.name == wheel.name and copy.read_bytes() == wheel.read_bytes()
        assert copy.parent.stat().st_mode & 0o777 == 0o700
        wheel.write_bytes(b"another one")
        assert copy.read_bytes() != b"another one"
    assert not copy.exists()


def test_whose_wheels_are_taken(tmp_path):
    wheel = tmp_path / "horovod.whl"
    wheel.touch()

    def status(user, mode):
        return os.stat_result((mode, 1, 1, 1, user, user, 0, 0, 0, 0))

    for user in (0, 1000):
        build.require_trusted(wheel, status(user, 0o100644), user=1000)
    for user, mode, why in [
        (1_000_001, 0o100644, r"belongs to another user \(user 1000001\)"),
        (1000, 0o100664, "may be written by others"),
        (0, 0o100646, "may be written by others"),
    ]:
        with pytest.raises(UserError, match=why):
            build.require_trusted(wheel, status(user, mode), user=1000)


INSTALL = """
import sys
from pathlib import Path
from hpctrain.errors import UserError
from hpctrain.horovod_wheel import build
wheel = Path(sys.argv[1])
try:
    print(build.is_private(wheel.parent))
    with build.checked(wheel) as copy:
        print("taken")
except UserError as error:
    print(error.what)
"""


@pytest.mark.skipif(not as_somebody(), reason=f"{NOT_PERMITTED}only root can be somebody else")
def test_a_user_takes_nothing_that_a_third_one_put_into_a_shared_folder(tmp_path):
    def taken(wheel):
        command = [*as_somebody(), sys.executable, "-c", INSTALL, str(wheel)]
        env = {**os.environ, "HOME": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()

    wheel = wheel_in(tmp_path / "shared")
    (tmp_path / "shared").chmod(0o1777)
    assert taken(wheel) == ["False", "taken"], "root's"
    os.chown(wheel, SOMEBODY, SOMEBODY)
    assert taken(wheel) == ["False", "taken"], "the user's own"
    os.chown(wheel, 12345, 12345)
    assert "belongs to another user (user 12345), so it is not installed" in taken(wheel)[1]
    os.chown(wheel, 0, 0)
    wheel.chmod(0o666)
    assert "may be written by others" in taken(wheel)[1]
    wheel.unlink()
    os.mkfifo(wheel)
    assert "it is a pipe" in taken(wheel)[1]


def test_builds_lie_where_nobody_else_can_write(tmp_path, own):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    assert not build.is_private(shared)
    build.make_private(own)
    assert build.is_private(own)
    own.chmod(0o777)
    build.make_private(own)
    assert build.is_private(own)


@pytest.mark.slow
def test_a_prepared_build_in_a_shared_folder_is_not_gone_on_with(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "horovod-0.28.1.tar.gz").write_text("prepared")
    done = install_horovod(
        shared, XDG_CACHE_HOME=str(tmp_path / "cache"), PIP_INDEX_URL="file:///nonexistent", PIP_NO_INDEX="1"
    )
    assert done.returncode == 70 and "is not the sdist" not in done.stderr, "it downloads its own, or tries to"
    assert [path.name for path in shared.iterdir()] == ["horovod-0.28.1.tar.gz"]
