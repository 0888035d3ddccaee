"""Recipes in env/recipes, and files for citing and reporting: of this version, well-formed, and true to setup.cfg."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

import hpctrain
from tests.support.mpi import PATIENCE_S
from tests.unit.test_package import requirements

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "env/recipes"
OTHER_NAMES = {"isal": "python-isal", "PyYAML": "pyyaml"}
"""Of conda-forge."""


def recipe(pattern: str) -> Path:
    (found,) = RECIPES.glob(pattern)
    return found


def conda() -> dict[str, Any]:
    text = jinja2.Template(recipe("meta.yaml").read_text(), undefined=jinja2.StrictUndefined).render(PYTHON="python")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def easyconfig() -> dict[str, Any]:
    """Easyconfigs are Python."""
    return runpy.run_path(str(recipe("*.eb")))


def test_each_says_whether_it_was_built():
    told = {path.name: path.read_text().splitlines()[0] for path in RECIPES.iterdir() if path.is_file()}
    assert len(told) == 6
    assert [
        name for name, line in told.items() if not re.match(r"(#|--) (Built|Loaded|Linted \(.+\), not built)", line)
    ] == []


@pytest.mark.parametrize(
    "path",
    [*sorted(RECIPES.iterdir()), ROOT / "CITATION.cff", ROOT / "docs/installation.md"],
    ids=lambda path: path.name,
)
def test_each_is_of_this_version(path):
    named = re.findall(
        r"""(?:hpctrain[-: /]|(?<!-)\bversion\b[ =("':]{1,4})(\d+\.\d+\.\d+(?:\.dev\d+)?)""", path.read_text()
    )
    assert set(named) == {hpctrain.__version__}


def test_the_conda_recipe_asks_for_what_setup_cfg_does():
    found = conda()
    assert (found["package"]["name"], found["package"]["version"]) == ("hpctrain", hpctrain.__version__)
    wanted = [line.partition(";")[0].strip() for extra, line in requirements() if extra == ""]
    plain = [re.sub(r"^([\w-]+)>=", lambda match: f"{OTHER_NAMES.get(match[1], match[1])} >=", line) for line in wanted]
    assert found["requirements"]["run"] == ["python >=3.11", *plain]


def test_the_spack_package_asks_for_what_setup_cfg_does():
    tree = ast.parse(recipe("package.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "depends_on"]
    asked = {str(ast.literal_eval(call.args[0])).lower() for call in calls}
    for extra, line in requirements():
        if extra in ("", "torch", "mpi"):
            name, _, version = line.partition(";")[0].strip().lower().partition(">=")
            if name == "isal":  # Spack's is too old; without it zlib computes checksums
                continue
            assert f"py-{name}@{version}:" in asked


def test_the_easyconfig_has_what_easybuild_asks_for():
    found = easyconfig()
    mandatory = {"easyblock", "name", "version", "homepage", "description", "toolchain", "moduleclass"}
    assert mandatory <= found.keys()
    toolchain = found["toolchain"]
    assert recipe("*.eb").stem == f"{found['name']}-{found['version']}-{toolchain['name']}-{toolchain['version']}"


def test_the_module_file_runs():
    """By Lua, where there is one; Lmod's functions are stood in for."""
    text = recipe("hpctrain.lua").read_text()
    called = set(re.findall(r"(?m)^(\w+)\(", text))
    assert called == {"help", "whatis", "conflict", "prepend_path", "setenv", "unsetenv"}
    assert f'local version = "{hpctrain.__version__}"' in text
    if lua := shutil.which("lua5.4") or shutil.which("lua"):
        stand_ins = "function pathJoin(...) return table.concat({...}, '/') end\n"
        stand_ins += "".join(f"function {name}(...) print('{name}', ...) end\n" for name in called)
        done = subprocess.run(
            [lua, "-"], input=stand_ins + text, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        assert f"prepend_path\tPATH\t/apps/hpctrain/{hpctrain.__version__}/bin" in done.stdout


def test_images_begin_with_a_system_and_copy_what_is_there():
    definition, dockerfile = recipe("hpctrain.def").read_text(), recipe("Dockerfile").read_text()
    assert re.search(r"(?m)^Bootstrap: docker\nFrom: (\S+)$", definition)[1] in dockerfile
    files = re.search(r"(?ms)^%files\n(.*?)^$", definition)[1]
    pairs = [line.split() for line in files.splitlines()]
    # Apptainer copies the first word of a line to the second, and ignores others
    assert pairs == [[source, f"/opt/source/{source}"] for source, *_ in pairs if (ROOT / source).exists()]
    copied = [words.split()[:-1] for words in re.findall(r"(?m)^COPY (.*)$", dockerfile)]
    assert sorted(source for sources in copied for source in sources) == sorted(source for source, _ in pairs)
    # Docker keeps links as they are: what hpctrain/ links to must be there
    links = [path.resolve() for path in (ROOT / "hpctrain").rglob("*") if path.is_symlink()]
    assert links and {path.relative_to(ROOT).parts[0] for path in links} <= {source for source, _ in pairs}
    post = re.search(r"(?ms)^%post\n(.*?)^$", definition)[1].replace("/opt/venv/bin/", "")
    built = re.findall(r"(?:RUN|&&) ((?:python3|pip|hpctrain install).*?)(?: \\)?$", dockerfile, re.M)
    assert len(built) == 4
    assert [command for command in built if command not in post] == []
    for section in ("%post", "%environment", "%test", "%runscript"):
        assert f"\n{section}\n" in definition
    # an image cannot be written to, and doctor asks for a run folder that can
    assert re.search(r"(?m)^%test\n    cd /tmp$", definition)


def test_every_test_that_security_names_is_there():
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)`", text)
    assert len(named) > 12
    assert [path for path in named if not (ROOT / path).is_file()] == []
