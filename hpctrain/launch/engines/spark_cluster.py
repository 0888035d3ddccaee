"""Ranks on a Spark cluster: a barrier stage whose tasks run `hpctrain node` on their executors' machines."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.config.sections import Config
from hpctrain.errors import UserError, requires
from hpctrain.launch.engines import fitting, runners
from hpctrain.launch.runners import ticket
from hpctrain.run.folder import RunDir
from hpctrain.system.address import require_answer

LEAVING_S = 3.0
"""Timeout for tasks to end after the run: tasks of a stage that Spark has restarted may never begin."""


def fit(
    config: Config | Mapping[str, Any] | str | Path,
    dataframe: Any = None,
    *,
    argument: str = "data",
    fresh: bool = False,
    report: fitting.Report | None = None,
) -> fitting.RunResult:
    """Trains on the executors of this Spark program and waits for the end.

    All executors must see the run folder and the Python environment under the same paths.

    Args:
        config: a Config from ``load_config``, the path of a run file, or a dict with the content of one. It sets the
            number of executors (``launch.nodes``) and of ranks on each (``launch.ranks_per_node``).
        dataframe: training data. Written once, in row order, as Parquet to ``table`` in the run folder; calls that
            resume the run do not write it again.
        argument: name of the task's argument that gets the path of that folder, which ``open_dataset`` reads.
        fresh: put existing checkpoints aside, write the data again, and start from the beginning.
        report: called with the metrics of each evaluation and its ``step``. If it raises, the run stops with a
            checkpoint.

    Raises:
        UserError: something must be corrected first, or pyspark is missing.
        NoRequeue: another attempt is pointless.
        RunFailed: the run failed otherwise, or Spark did not start the tasks within ``launch.node_wait_s``.
    """
    config = fitting.read(config)
    if dataframe is not None:
        table = RunDir.of(config.name, config.run_dir).path / "table"
        if fresh or not (table / "_SUCCESS").exists():
            dataframe.write.mode("overwrite").parquet(table.as_uri())
        config = dataclasses.replace(config, task_args=config.task_args | {argument: str(table)})
    return fitting.fit(config, invited, fresh, report)


@contextlib.contextmanager
def invited(config: Config, made: ticket.Ticket) -> Iterator[Callable[[], str]]:
    """See ``runners.Invite``. Uses this process's Spark session, or a new one configured by ``spark-defaults.conf``.

    Raises:
        UserError: pyspark is missing, or the session uses Spark Connect.
    """
    with requires("pyspark", "spark"):
        from py4j.protocol import Py4JError
        from pyspark import SparkConf, SparkContext
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    try:
        SparkContext._ensure_initialized()  # without a JVM, SparkConf does not know spark-defaults.conf
        master = str(SparkConf().get("spark.master"))
        if master.startswith("spark://") and not SparkSession.getActiveSession():  # Spark would try for minutes
            addresses = master.removeprefix("spark://").split(",")
            require_answer("launch.engine is spark: its master", addresses, "start it, or correct spark.master")
        new = SparkSession.builder.appName(f"hpctrain {config.name}")
        for name, value in (("interval", "1s"), ("maxFailures", int(config.launch.node_wait_s))):  # by default 15 s
            new = new.config(f"spark.scheduler.barrier.maxConcurrentTasksCheck.{name}", value)
        session = SparkSession.getActiveSession() or new.getOrCreate()
        context = session.sparkContext
    except (PySparkException, Py4JError) as error:
        what = f"launch.engine is spark: {str(getattr(error, 'java_exception', error)).strip().splitlines()[0]}"
        raise UserError(what, "see whether the cluster runs; use a session without Spark Connect") from error
    count = config.launch.nodes + config.launch.spare_nodes
    tag = f"hpctrain-{uuid.uuid4().hex}"
    said: list[str] = []

    def work() -> None:
        context.addJobTag(tag)
        try:
            barrier = context.parallelize(range(count), count).barrier()
            said.extend(barrier.mapPartitions(partial(_serve, made)).collect())
        except Exception as error:
            text = str(getattr(error, "java_exception", error)).strip()
            said.append((text.splitlines() or [type(error).__name__])[0])

    thread = threading.Thread(target=work, name="barrier stage", daemon=True)
    thread.start()
    try:
        yield lambda: said[0] if said else ""
        thread.join(LEAVING_S)
    finally:
        context.cancelJobsWithTag(tag)
        thread.join()


def _serve(made: ticket.Ticket, _: Iterator[int]) -> list[str]:
    """Runs one task; returns a message about how its node ended."""
    from pyspark import BarrierTaskContext

    hosts = BarrierTaskContext.get().allGather(socket.gethostname())
    if twice := {host for host in hosts if hosts.count(host) > 1}:
        return [f"Spark has placed two tasks on {twice.pop()}: set spark.task.cpus to the cores of an executor"]
    return [f"hpctrain node has ended on {socket.gethostname()} with exit code {runners.serve(made)}"]
