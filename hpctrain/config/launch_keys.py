"""Keys of how ranks are started: on this machine, by schedulers."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from hpctrain.config.section import AboveZero, Natural, NotNegative, Positive, Section, WrongValue
from hpctrain.errors import UserError


class SlurmConfig(Section, key="launch.slurm"):
    """What the job asks of Slurm. Empty fields are left to the site profile, then to the site."""

    profile: str = "generic"
    """Site profile: a name, or a path to a TOML file."""
    account: str | None = None
    """Account to charge."""
    partition: str | None = None
    """Partition, or several separated by commas."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features."""
    reservation: str | None = None
    """Reservation."""
    licenses: str | None = None
    """Licences, such as matlab:1."""
    mail_user: str | None = None
    """Address for mail."""
    mail_type: str | None = None
    """Events that send mail, such as END,FAIL."""
    comment: str | None = None
    """Text that the queue shows with the job."""
    begin: str | None = None
    """Earliest start, such as now+1hour or 2027-01-31T18:00."""
    time: str | None = None
    """Time limit of one attempt, as Slurm writes it: 30 (minutes), 01:30:00, 2-12:00:00."""
    time_min: str | None = None
    """Shortest acceptable time limit, if that starts the job earlier."""
    memory: str | None = None
    """Memory: '4G' for each node, '2G/cpu' for each core, '16G/gpu' for each GPU, '0' for all of the node."""
    exclusive: bool | None = None
    """Do not share the nodes with other jobs."""
    gpus_per_node: Positive | None = None
    """GPUs of each node; one rank each unless launch.ranks_per_node says otherwise."""
    gpu_type: str | None = None
    """GPU model, if the site requires it."""
    gpu_request: Literal["gres", "gpus-per-node", "gpus-per-task"] | None = None
    """Option by which the site's GPUs are requested."""
    cpus_per_rank: Positive | None = None
    """Cores of each rank."""
    cpu_bind: str | None = None
    """Value of srun's --cpu-bind: cores, none, or masks of the site."""
    mpi: str | None = None
    """Value of srun's --mpi: pmix, pmix_v4, pmi2, cray_shasta."""
    srun_options: tuple[str, ...] = ()
    """More options of srun."""
    mpirun_options: tuple[str, ...] = ()
    """More options of mpirun."""
    wrap: tuple[str, ...] = ()
    """Command prefix of each rank: apptainer exec --nv image.sif. The image needs hpctrain."""
    scratch: str | None = None
    """Node-local folder that stage-in copies to; $NAME at its beginning is expanded on the node."""
    exclude: tuple[str, ...] = ()
    """Hosts to exclude."""
    bad_nodes: Literal["run", "shared", "off"] = "run"
    """Exclude nodes that break attempts: those found by this run, by all your runs with shared, or none."""
    requeue: bool | None = None
    """Requeue the job if it stops before the end of the run; false if the site forbids it (see submit --chain)."""
    max_requeues: Natural = 20
    """Starts of the job beyond the first, whoever requeued it, after which the run ends; resume resets the count."""
    signal_s: Positive | None = None
    """Seconds before the time limit at which the job is asked to stop; by default from measured step and save times."""
    extra: tuple[str, ...] = ()
    """More directives, as written in a script: --nice=100."""
    skip: tuple[str, ...] = ()
    """Directives to omit, by name: --mem; with ``extra``, to replace."""


Engine = Literal["local", "hosts", "slurm", "pbs", "lsf", "gridengine", "flux", "runners"]


class LaunchConfig(Section, key="launch"):
    """How ranks are started."""

    nodes: Positive = 1
    """Nodes."""
    min_nodes: Positive | None = None
    """Number of nodes on which the run continues in the same job if others are lost; by default it needs all nodes."""
    spare_nodes: Natural = 0
    """Additional nodes of the job, or the last of ``hosts``, that wait to replace lost ones."""
    engine: Engine | None = None
    """Where ranks run: with a batch system, on all hosts of its job; with runners, on the first ``nodes`` on which
    hpctrain node runs. By default hpctrain submit takes slurm, and hpctrain run takes ``hosts``, or local: this
    machine."""
    ticket: str | None = None
    """For runners: file by which hpctrain node finds this run; by default HPCTRAIN_NODE_KEY and _ADDRESS are used."""
    node_wait_s: NotNegative = 600.0
    """Longest wait in seconds for the nodes of runners to join, and for lost hosts to return if too few are left."""
    hosts: tuple[str, ...] = ()
    """Machines on which hpctrain run starts the ranks, without a scheduler; by default only this one."""
    remote_shell: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}"
    """Command that runs a command line on one of ``hosts``. The command line is appended as one argument, or replaces
    {command} as words that need no quotes, for programs that start others without a shell."""
    ranks_per_node: Positive | None = None
    """Ranks on each node; by default launch.slurm.gpus_per_node, else one."""
    launcher: Literal["auto", "srun", "mpirun"] = "auto"
    """What starts the ranks inside a Slurm job."""
    command: tuple[str, ...] = ()
    """Program to run on every rank instead of a task. If it exits with 75, it is run again."""
    convention: Literal["auto", "torch", "tensorflow", "mpi"] = "auto"
    """Environment variables for the program of command: torchrun's (RANK, MASTER_ADDR, ...), TF_CONFIG, both, or only
    MPI's."""
    stop_signal: Literal["TERM", "USR1", "USR2", "INT"] = "TERM"
    """Signal that asks the program of command to stop."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for every rank."""
    modules: tuple[str, ...] = ()
    """Environment modules that the job loads."""
    setup: tuple[str, ...] = ()
    """Shell lines to run in the job before the launch, copied verbatim."""
    stage_in: tuple[str, ...] = ()
    """Files and folders to copy to node-local scratch, once per node; task_args that name one get the copy's path."""
    stage_environment: bool | None = None
    """Also copy the Python environment there; the default on 32 or more nodes: imports from a shared disk are slow."""
    preflight: bool = True
    """Check ranks, hosts, devices, folders and an allreduce before the launch in a Slurm job; measure GPUs, links."""
    max_failures: Natural | None = None
    """Failures in a row without a new checkpoint after which a run is not restarted; lost nodes do not count. By
    default 3; for launch.command under hpctrain run 0, so that its first failure ends it."""
    stop_grace_s: AboveZero = 60.0
    """Seconds from a stop request, and from the last growth of the final checkpoint, until ranks are ended."""
    directives: tuple[str, ...] = ()
    """More directives of the job script under pbs, lsf, gridengine and flux, as written there: '-pe mpi 8'."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """What the job asks of Slurm."""

    def failures_allowed(self, in_job: bool) -> int:
        """``max_failures``, or its default: outside a job, a plain command may not be meant to run twice."""
        default = 0 if self.command and not in_job else 3
        return default if self.max_failures is None else self.max_failures

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts and (len(set(self.hosts)) < len(self.hosts) or self.spare_nodes >= len(self.hosts)):
            raise UserError("launch.hosts names a host twice, or only spare ones", "name each host once")
        if self.engine and (self.engine == "hosts") != bool(self.hosts):
            raise UserError(f"launch.engine is {self.engine}, launch.hosts {list(self.hosts)}", "correct one of them")
        if self.stage_environment and self.slurm.wrap:
            what = "launch.stage_environment has no use with launch.slurm.wrap"
            raise WrongValue("launch.stage_environment", what, "leave it out: an image is one file")
        if "{host}" not in self.remote_shell:
            raise UserError("launch.remote_shell does not say where", "write {host} where the name of a host belongs")
