"""What launchers say, as they really said it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import Code
from hpctrain.launch.launcher_messages import deaths, left, lost_node, not_started, silent, silent_hosts
from hpctrain.run.first_cause import Death, Standing, first_cause
from hpctrain.system.quantities import numbers_in

OPEN_MPI_5 = """--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 12395 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPEN_MPI_4 = """--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
mpirun noticed that process rank 3 with PID 0 on node n2 exited on signal 11 (Segmentation fault).
"""
OPEN_MPI_CODE = """prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-12458@1,1]
   Exit code:    7
"""
OPEN_MPI_5_NODE = """--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-n1-12458@0,0] on node n1
  Remote daemon: [prterun-n1-12458@0,1] on node n2

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
the daemon itself. We cannot recover from this failure, and
therefore will terminate the job.
--------------------------------------------------------------------------
"""
OPEN_MPI_EARLY = """prterun has exited due to process rank 1 with PID 12478 on node vm exiting
improperly. There are three reasons this could occur:
"""
OPEN_MPI_ABORT = """MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[44898,1],1]
  Errorcode: 70
prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
"""
HYDRA = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 22997 RUNNING AT localhost
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_MPI_5, [Death(1, 12395, "vm", signal=9)]),
        (OPEN_MPI_4, [Death(3, None, "n2", signal=11)]),
        (OPEN_MPI_CODE, [Death(1, exit_code=7)]),
        (OPEN_MPI_EARLY, [Death(1, 12478, "vm")]),
        (OPEN_MPI_ABORT, []),
        (HYDRA, [Death(pid=22997, host="localhost", signal=9)]),
        ("srun: error: n1: task 1: Killed\n", [Death(1, host="n1", signal=9, standing=Standing.KILLED)]),
        ("srun: error: n2: tasks 2-3: Exited with exit code 7\n", [Death(r, host="n2", exit_code=7) for r in (2, 3)]),
        ("srun: error: n1: task 0: Out Of Memory\n", [Death(0, host="n1", out_of_memory=True)]),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)\n", [Death(0, host="n1", signal=11)]),
        ("", []),
    ],
)
def test_deaths_are_read_from_what_launchers_say(text, expected):
    assert deaths(text) == expected


def test_causes_read_as_sentences():
    assert [death.cause for death in deaths(OPEN_MPI_5 + OPEN_MPI_CODE + OPEN_MPI_EARLY)] == [
        "was killed by SIGKILL",
        "exited during the run without an error",
        "exited with code 7",
    ]


@pytest.mark.parametrize(
    ("death", "code"),
    [
        (Death(0, signal=9, out_of_memory=True), Code.OUT_OF_MEMORY),
        (Death(0, signal=9), Code.KILLED),
        (Death(0, exit_code=137), Code.KILLED),
        (Death(0, exit_code=3), Code.VANISHED),
        (Death(0), Code.VANISHED),
    ],
)
def test_what_launchers_say_has_a_code(death, code):
    assert death.code is code


def test_a_lost_node_is_told_from_a_dead_rank():
    slurm = "slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***\n"
    assert lost_node(slurm) == ""
    assert lost_node(slurm + "srun: error: Node failure on n2\n") == "n2"
    assert lost_node("PRTE has lost communication with a remote daemon.") == ""
    assert lost_node(OPEN_MPI_5_NODE) == "n2"
    said = (
        "A daemon failed to report back after being spawned. This could\n\n  Local host:    n1\n  Remote host:   n2\n"
    )
    assert lost_node("", said) == "n2" and lost_node("", "Remote host:   n2") is None
    assert lost_node(OPEN_MPI_5 + HYDRA) is None
    assert lost_node("lost connection to the tracking server; a node failure?") is None  # a rank's own words


def test_ranks_that_srun_could_not_start():
    text = (
        "srun: launch/slurm: launch_p_step_launch: StepId=2.1 aborted before step completely launched.\n"
        "srun: error: task 3 launch failed: Unspecified error\nsrun: error: task 2 launch failed: Unspecified error\n"
        "srun: error: n1: tasks 0-1: Killed\n"
    )
    assert not_started(text) == ([2, 3], "Unspecified error")
    assert not_started("srun: error: n1: task 0: Killed\n") == ([], "")


def test_ranks_of_a_node_that_srun_lost():
    text = (
        "srun: Job step aborted: Waiting up to 10 seconds for job step to finish.\n"
        "srun: error: n1: tasks 0-1: Exited with exit code 14\n"
    )
    assert silent(text, range(4)) == []
    assert silent(text + "srun: error: Timed out waiting for job step to complete\n", range(4)) == [2, 3]
    assert silent_hosts(text, {0: "n1", 1: "n1", 2: "n2", 3: "n2"}) == {"n2"}
    assert not silent_hosts(text, {0: "n1", 1: "n1", 2: "n1", 3: "n2"}), "and a rank of a node that was heard of"
    assert not silent_hosts(text, {0: "n1", 1: "n1"}) and not silent_hosts(text, {2: "n2", 3: "n2"})
    assert not silent_hosts(text.partition("\n")[2], {0: "n1", 1: "n1", 2: "n2"}), "srun does not wait yet"
    assert silent_hosts(text, {0: "n1", 1: "n1", 2: "n2", 3: "n3"}) == {"n2", "n3"}, "a switch took both"
    assert not silent_hosts(text, {0: "n1", 1: "n1"} | {rank: f"n{rank}" for rank in range(2, 20)}), "it is slow"


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True).map(sorted))
def test_lists_of_tasks_expand(tasks):
    assert numbers_in(",".join(map(str, tasks))) == tasks
    assert numbers_in(f"{tasks[0]}-{tasks[0] + 3}") == [tasks[0] + i for i in range(4)]


@given(st.text(max_size=300), st.sampled_from(["", OPEN_MPI_5, OPEN_MPI_4, OPEN_MPI_CODE]))
def test_any_text_before_a_message_changes_nothing(text, message):
    assert deaths(f"{text}\n{message}") == deaths(message)


def test_victims_that_srun_reports_first_are_no_culprits():
    text = (
        "srun: error: n2: task 2: Exited with exit code 14\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=4.1\n"
        "srun: error: n2: task 3: Killed\n"
        "srun: error: n1: tasks 0-1: Killed\n"
    )
    assert [death.standing for death in deaths(text)] == [Standing.REPORTED, *[Standing.SWEPT] * 3]
    assert first_cause(deaths(text)) == Death(3, signal=9, standing=Standing.SWEPT), "reported before the other node's"


def test_whom_mpi_ended_after_another_rank_is_no_culprit():
    text = (
        "srun: error: n1: task 0: Exited with exit code 14\n"
        "srun: error: n2: task 3: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=4.1\n"
        "srun: error: n1: task 1: Killed\n"
    )
    assert first_cause(deaths(text)) == Death(3, signal=9, standing=Standing.KILLED)


def test_a_rank_that_nothing_is_known_of_but_that_mpi_ended_it_is_no_cause():
    death = first_cause(deaths("srun: error: n1: task 0: Exited with exit code 14\n"))
    assert isinstance(death, Death)
    assert (death.rank, death.cause) == (0, "exited with code 14, as MPI does when another rank is lost")


def test_of_ranks_without_a_word_the_one_that_srun_does_not_report_left_with_exit_code_0():
    text = "srun: error: n2: tasks 2-3: Killed\nsrun: error: n1: task 0: Killed\n"
    assert left(text, [0, 1, 2, 3]) == [1]
    assert left(text, [0, 2]) == [], "rank 1 has said how it ended"
    assert left("", [0, 1]) == [], "srun reports nothing at all: nobody knows"
    gave_up = text + "srun: error: Timed out waiting for job step to complete\n"
    assert (left(gave_up, [0, 1]), silent(gave_up, [0, 1])) == ([], [1]), "its node is gone"


def test_whom_srun_killed_may_be_a_victim():
    text = "srun: error: n1: tasks 0-1: Killed\nsrun: error: n2: task 2: Segmentation fault\n"
    assert [death.standing for death in deaths(text)] == [Standing.KILLED, Standing.KILLED, Standing.REPORTED]
