"""How our processes end."""

import subprocess
import sys

import pytest

THREAD = "import threading, time; threading.Thread(target=time.sleep, args=({},)).start(); print('said')\n"
LEAVE = "from hpctrain.system import python; python.THREAD_GRACE_S = 0.1; python.leave({})"


@pytest.mark.slow
@pytest.mark.parametrize(("code", "sleeps"), [(70, 600), (0, 0.3), (75, 0.3)])
def test_a_failed_process_does_not_wait_for_threads_that_the_task_has_left(code, sleeps):
    program = THREAD.format(sleeps) + LEAVE.format(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "said\n")


def test_a_failed_process_may_end_without_destructors():
    """As those of NCCL wait for other ranks. MPI's exit function is called, or mpirun would report a crash."""
    kept = "import atexit; atexit.register(print, 'finalized'); kept = type('', (), {'__del__': print})(); "
    at_once = "from hpctrain.system import python; python.AT_ONCE.set(); "
    for set_up, said in (("", "finalized\n\n"), (at_once, "finalized\n")):
        program = kept + set_up + LEAVE.format(70)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (70, said)


def test_a_process_without_destructors_still_finalizes_mpi():
    """An attribute of COMM_SELF is deleted by MPI_Finalize. Threads of a run that has not failed are waited for."""
    program = (
        "from mpi4py import MPI; key = MPI.Comm.Create_keyval(delete_fn=lambda *of: print('finalized', flush=True)); "
        "MPI.COMM_SELF.Set_attr(key, 1); import threading, time; "
        "threading.Thread(target=lambda: (time.sleep(0.3), print('waited for'))).start(); "
        "from hpctrain.system import python; python.AT_ONCE.set(); python.leave(75)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (75, "waited for\nfinalized\n")
