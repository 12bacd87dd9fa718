"""A Slurm of this machine alone: munged, slurmctld and two slurmd, in a folder of their own, ended with it."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2")
GPUS_PER_NODE = 2
"""Plain files play the GPUs: Slurm hands them out and counts them, nothing opens them"""
START_S = 30.0
HIDDEN_ON = "n2"
"""This node sees nothing in the folder `hidden` that the other sees"""
HIDE = 'mount -t tmpfs none "$0" && exec "$@"'

CONFIG = """
ClusterName={cluster}
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=pmix
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=300
KillWait=30
OverTimeLimit=5
MinJobAge=600
JobRequeue=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
PartitionName=low Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=180
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=8000 Gres=gpu:{gpus}"
GRES = "NodeName={name} Name=gpu File={root}/gpu[0-{last}]"


def find_missing() -> list[str]:
    """Programs of Slurm and munge that are not installed."""
    return [name for name in PROGRAMS if find_program(name) is None]


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass
class MiniSlurm:
    root: Path
    daemons: dict[str, subprocess.Popen] = field(default_factory=dict)
    """by name: munged, slurmctld, and the nodes"""

    @property
    def cluster(self) -> str:
        """Of its own, as are the job ids: what a job leaves on this machine must not be taken for another Slurm's."""
        return f"mini{os.getpid()}"

    @property
    def environment(self) -> dict[str, str]:
        """For commands that speak to this Slurm."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return inherited | {"SLURM_CONF": str(self.root / "slurm.conf")}

    def call(self, *command: str, check: bool = True, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command of Slurm's. Raises AssertionError with what it said where it failed and `check` is set."""
        done = subprocess.run(
            [find_program(command[0]) or command[0], *command[1:]],
            env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
        return done

    def start(self) -> None:
        host = socket.gethostname().split(".")[0]
        self.root.chmod(0o700)
        for name in ("state", "hidden", *(f"spool-{node}" for node in NODES)):
            (self.root / name).mkdir()
        for index in range(GPUS_PER_NODE):
            (self.root / f"gpu{index}").touch()
        ports = find_free_ports(1 + len(NODES))
        lines = [
            NODE.format(name=name, host=host, port=port, gpus=GPUS_PER_NODE)
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        config = CONFIG.format(
            host=host,
            cluster=self.cluster,
            first_job=1000 + os.getpid() % 900_000,
            controller_port=ports[0],
            user=getpass.getuser(),
            root=self.root,
            nodes="\n".join(lines),
        )
        (self.root / "slurm.conf").write_text(config)
        gres = [GRES.format(name=name, root=self.root, last=GPUS_PER_NODE - 1) for name in NODES]
        (self.root / "gres.conf").write_text("\n".join(gres) + "\n")
        # Named, since finding out by itself asks systemd; nothing uses it: linuxproc tracks the processes.
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._start_munge()
        self._launch("slurmctld", "slurmctld", "-D", "-i")
        for name in NODES:
            self.start_node(name)
        self.wait_idle(START_S)

    def _start_munge(self) -> None:
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        # Root may own its files only with --force; the socket's folder is closed to others, which it warns of.
        files = {"key-file": key, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={self.root / file}" for name, file in files.items()]
        self._launch("munged", "munged", "--foreground", "--force", f"--seed-file={self.root}/munge.seed", *options)
        wait_until(lambda: (self.root / "munge.socket").exists(), START_S, "munged's socket")

    def start_node(self, name: str) -> None:
        before = ("unshare", "--mount", "sh", "-c", HIDE, str(self.root / "hidden")) if name == HIDDEN_ON else ()
        self._launch(name, *before, find_program("slurmd") or "slurmd", "-D", "-N", name)

    def lose_node(self, name: str) -> None:
        """What runs on the node ends at once, as when its machine does, and Slurm is told."""
        log = str(self.root / f"slurmd-{name}.log")
        for process in [self.daemons.pop(name), *find_step_daemons(log), *self.find_tasks(name)]:
            process.kill()
        self.call("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def find_tasks(self, node: str) -> list[psutil.Process]:
        mine = {"SLURM_CLUSTER_NAME": self.cluster, "SLURMD_NODENAME": node}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if mine.items() <= process.environ().items():
                    found.append(process)
        return found

    def _launch(self, key: str, program: str, *arguments: str) -> None:
        with (self.root / f"{key}.out").open("ab") as log:
            self.daemons[key] = subprocess.Popen(
                [find_program(program) or program, *arguments],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait_idle(self, deadline_s: float) -> None:
        """Until every node is idle."""

        def are_idle() -> bool:
            for key, daemon in self.daemons.items():
                assert daemon.poll() is None, f"{key} has ended:\n{self.read_logs()}"
            done = self.call("sinfo", "-h", "-N", "-o", "%t", check=False)
            return done.returncode == 0 and set(done.stdout.split()) == {"idle"}

        wait_until(are_idle, deadline_s, "idle nodes", self.read_logs)

    def stop(self) -> None:
        """End every daemon; what is left of the jobs is killed."""
        for process in [each for name in NODES for each in self.find_tasks(name)]:
            process.kill()
        for key in reversed(list(self.daemons)):
            end_process(self.daemons.pop(key))

    def read_logs(self, num_lines: int = 15) -> str:
        logs = sorted([*self.root.glob("*.log"), *self.root.glob("*.out")])
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) for log in logs
        )


def find_step_daemons(log: str) -> list[psutil.Process]:
    """The slurmstepd that write to this node's log."""
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] == "slurmstepd" and any(file.path == log for file in process.open_files()):
                found.append(process)
    return found


def end_process(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


@contextlib.contextmanager
def running_slurm(root: Path) -> Iterator[MiniSlurm]:
    slurm = MiniSlurm(root)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def find_free_ports(num: int) -> list[int]:
    """Ports that nobody listens on, as the kernel gives them."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(
    holds: Callable[[], bool], deadline_s: float, what: str, explain: Callable[[], str] = lambda: ""
) -> None:
    """Raises AssertionError that says what was waited for."""
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s:g} s\n{explain()}"
        time.sleep(0.2)
