"""A real Grid Engine on hosts with separate networks, from Debian's gridengine-master, -exec and -client."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.support.command import wait_for
from tests.support.mpi import PATIENCE_S
from tests.support.netns import Network

PROGRAMS = Path("/usr/lib/gridengine")
SHARED = Path("/usr/share/gridengine")
BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {cell}/default/common;{cell}/spool
binary_path {programs}
qmaster_spool_dir {cell}/spool
security_mode none
listener_threads 1
worker_threads 1
scheduler_threads 1
"""
CONFIGURATION = {"execd_spool_dir": "{cell}/hosts", "min_uid": "0", "min_gid": "0", "load_report_time": "00:00:01"}
"""Root may submit jobs, and lost hosts are detected within seconds."""
CONFIGURATION |= {"max_unheard": "00:00:04"}
SCHEDULE = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
SCHEDULE |= {"job_load_adjustments": "NONE", "queue_sort_method": "seqno"}
ENVIRONMENT = """\
pe_name mpi
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule 1
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""
"""Parallel environment: one slot per host, where qrsh starts processes."""


def missing() -> bool:
    """Whether this machine lacks Grid Engine."""
    return not all((PROGRAMS / name).exists() for name in ("sge_qmaster", "sge_execd", "qsub"))


def start(network: Network, folder: Path) -> dict[str, str]:
    """Start Grid Engine on all hosts, with the master on the first; return the environment for its commands.

    Its processes end with the hosts.
    """
    cell = folder / "cell"
    for each in ("default/common", "spool/job_scripts", "hosts", "bin", "utilbin"):
        (cell / each).mkdir(parents=True)
    (cell / "util").symlink_to(SHARED / "util")
    for each in ("bin", "utilbin"):
        (cell / each / "lx-amd64").symlink_to(PROGRAMS)
    (cell / "default/common/act_qmaster").write_text(f"{network.names[0]}\n")
    (cell / "default/common/bootstrap").write_text(BOOTSTRAP.format(cell=cell, programs=PROGRAMS))
    own = {"SGE_ROOT": str(cell), "SGE_CELL": "default", "SGE_ARCH": "lx-amd64"}
    own |= {"SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}
    own |= {"LD_LIBRARY_PATH": str(PROGRAMS)}

    def begun(host: int, script: str) -> subprocess.Popen[str]:
        words = network.on(host, "sh", "-ec", script)
        return subprocess.Popen(
            words, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def done(script: subprocess.Popen[str]) -> tuple[int, str]:
        said = script.communicate(timeout=PATIENCE_S)[0]
        return script.returncode, said

    def do(*scripts: subprocess.Popen[str]) -> str:
        ends = [done(each) for each in scripts]
        assert not any(code for code, _ in ends), ends
        return ends[0][1]

    def written(name: str, text: str, **values: str) -> Path:
        """Write a configuration file with some keys changed."""
        for key, value in values.items():
            text = re.sub(rf"(?m)^{key} .*", f"{key} {value.format(cell=cell)}", text)
        (cell / name).write_text(text)
        return cell / name

    defaults = written("configuration", (SHARED / "default-configuration").read_text(), **CONFIGURATION)
    tables = {"configuration": defaults, "managers": "root"}
    tables |= {"complexes": SHARED / "util/resources/centry", "usersets": SHARED / "util/resources/usersets"}
    lines = [f"{PROGRAMS}/spoolinit classic libspoolc '{cell}/default/common;{cell}/spool' init"]
    lines += [f"{PROGRAMS}/spooldefaults {kind} {source}" for kind, source in tables.items()]
    do(begun(0, "\n".join([*lines, f"{PROGRAMS}/sge_qmaster"])))
    wait_for("answer of the master", lambda: done(begun(0, "qconf -sh"))[0] == 0)  # a daemon before it listens
    lines = [f"qconf -ah {','.join(network.names[1:])}", f"qconf -as {','.join(network.names)}"]
    do(begun(0, "\n".join([*lines, f"qconf -Ap {written('mpi', ENVIRONMENT)}"])))
    schedule = written("schedule", do(begun(0, "qconf -ssconf")), **SCHEDULE)
    queue = {"qname": "all.q", "hostlist": " ".join(network.names), "load_thresholds": "NONE", "pe_list": "mpi"}
    queue |= {"slots": "8", "rerun": "TRUE", "notify": "00:00:30"}
    order, scratch = ["9"], ["/tmp"]
    for at, name in enumerate(network.names):
        own_scratch = cell / "tmp" / name  # in a shared one, a lost host removes the job's folder of the others
        own_scratch.mkdir(parents=True)
        order.append(f"[{name}={at}]")
        scratch.append(f"[{name}={own_scratch}]")
    queue |= {"seq_no": ",".join(order), "tmpdir": ",".join(scratch)}
    of_all = written("queue", do(begun(0, "qconf -sq")), **queue)
    do(*(begun(host, f"{PROGRAMS}/sge_execd") for host in range(len(network.names))))
    do(begun(0, f"qconf -Msconf {schedule}\nqconf -Aq {of_all}"))
    wait_for("hosts", lambda: do(begun(0, "qstat -f")).count("lx-amd64 ") >= len(network.names))
    return {name: value for name, value in own.items() if name != "LD_LIBRARY_PATH"}
