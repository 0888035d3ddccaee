"""A run in the queue of Grid Engine, whose commands are stand-ins: they run the script, again after exit code 99."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from hpctrain.launch.engines.jobs import submissions
from hpctrain.run.folder import RunDir
from tests.support import netns
from tests.support.command import endings, hpctrain, last_words, wait_for, write_run

pytestmark = [pytest.mark.world_size(2)]

QSUB = """#!/bin/sh
cat > {folder}/script
log=$(sed -n 's/^#[$] -o //p' {folder}/script)
export JOB_ID=4711 PE_HOSTFILE={folder}/hosts
(
  echo r > {folder}/state
  while :; do
    setsid --wait {agent} {first} 'echo $$ > {folder}/job; exec bash {folder}/script'
    code=$?
    echo $code >> {folder}/codes
    [ $code = 99 ] || break
  done
  echo > {folder}/state
) >> "$log" 2>&1 < /dev/null &
echo 4711
"""
QSTAT = """#!/bin/sh
if [ "$1" = -j ]; then sed -n 's/^#[$] -o /stdout_path_list: /p' {folder}/script; exit; fi
read state < {folder}/state && [ "$state" ] && echo "4711 0.5 r user $state 11/25/2026"
exit 0
"""
QRSH = """#!/bin/sh
[ "$1 $2 $3" = "-inherit -nostdin -V" ] || exit 2
shift 3
exec {agent} "$@"
"""
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["PMIX_RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
again = (folder / f"began-{rank}").exists()
(folder / f"began-{rank}").touch()
while not again:
    time.sleep(0.02)
"""


def test_a_job_that_is_told_of_its_end_runs_again_on_its_hosts_and_finishes(
    network: netns.Network, tmp_path: Path
) -> None:
    commands = {"folder": tmp_path, "agent": network.folder / "agent", "first": network.addresses[0]}
    for name, text in (("qsub", QSUB), ("qstat", QSTAT), ("qrsh", QRSH)):
        (tmp_path / name).write_text(text.format(**commands))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hosts").write_text("".join(f"{address} 1 all.q UNDEFINED\n" for address in network.addresses[:2]))
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = {"engine": "gridengine", "nodes": 2, "command": [sys.executable, "program.py", str(tmp_path)]}
    write_run(tmp_path, launch=launch)
    env = {"PATH": f"{tmp_path}:/usr/sbin:/sbin:/usr/bin:/bin", **netns.INTERFACES}
    hpctrain("submit", "run.yaml", cwd=tmp_path, env=env)
    run = RunDir(tmp_path / "runs" / "run")
    assert [each.job for each in submissions(run)] == ["4711"]
    wait_for("ranks", lambda: all((tmp_path / f"began-{rank}").exists() for rank in range(2)))
    assert "job 4711 RUNNING" in hpctrain("status", "run.yaml", cwd=tmp_path, env=env).stdout
    os.killpg(int((tmp_path / "job").read_text()), signal.SIGUSR2)  # what -notify asks for
    wait_for("end of the job", lambda: not (tmp_path / "state").read_text().strip())
    said = (run.logs / "job.out").read_text()
    assert (tmp_path / "codes").read_text().split() == ["99", "0"], said
    assert [endings(run.path, attempt) for attempt in (1, 2)] == [["stop_requested"] * 2, ["completed"] * 2], said
    assert [word["host"] for word in last_words(run.path, 2)] == list(network.names[:2])
