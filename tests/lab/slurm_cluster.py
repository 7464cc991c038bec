"""A real Slurm in a folder: munged, slurmctld and two slurmd on this machine, without systemd, cgroups or a database.

A requeued job waits until its old credential has expired, two minutes by default: hence `cred_expire`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
SYSTEM = ("/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/bin", "/usr/local/sbin")

NODES = ("node1", "node2")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=20
SlurmdTimeout=5
ReturnToService=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1_port} CPUs=1 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node2_port} CPUs=1 State=UNKNOWN
PartitionName=low Nodes=node[1-2] Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE State=UP OverSubscribe=NO
PartitionName=high Nodes=node[1-2] MaxTime=60 PriorityTier=2 PreemptMode=OFF State=UP OverSubscribe=NO
"""


def missing() -> str:
    """What keeps a cluster from being started here; empty where nothing does."""
    search = os.pathsep.join((os.environ.get("PATH", ""), *SYSTEM))
    absent = [name for name in PROGRAMS if shutil.which(name, path=search) is None]
    return f"needs {', '.join(absent)} (Debian: slurm-wlm)" if absent else ""


class Cluster:
    """Its daemons, by their process ids; `environment` is what every command of Slurm needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        ports = {f"{name}_port": _free_port() for name in ("ctld", *NODES)}
        user = "root" if os.getuid() == 0 else os.environ.get("USER", str(os.getuid()))
        host = socket.gethostname().split(".")[0]
        conf = CONF.format(host=host, user=user, folder=folder, **ports)
        (folder / "slurm.conf").write_text(conf)
        path = os.pathsep.join((os.environ.get("PATH", ""), *SYSTEM))
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """All daemons, until the node is idle."""
        files = [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self._spawn("munged", "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        _wait(lambda: (self.folder / "munge.socket").exists(), "munged opened no socket", self)
        self._spawn("slurmctld", "slurmctld", "-D", "-c")
        _wait(lambda: self.run("scontrol", "ping").returncode == 0, "slurmctld does not answer", self)
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """The node's daemon, until the node may be used."""
        self._spawn(node, "slurmd", "-D", "-N", node)
        _wait(lambda: self.state(node) in ("idle", "mix", "alloc"), f"{node} does not come up", self)

    def state(self, node: str) -> str:
        """idle, alloc, down, ... as sinfo says it."""
        return self.run("sinfo", "--noheader", "--format=%t", f"--nodes={node}").stdout.split("\n")[0]

    def kill_node(self, node: str) -> None:
        """As if its power had been cut: the daemon and all that it runs are gone at once."""
        daemon = self.daemons.pop(node)
        for pid in [daemon.pid, *_processes(self.folder / f"slurmd-{node}.log")]:
            _kill(pid)
        daemon.wait()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of Slurm."""
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | self.environment)

    def stop(self) -> None:
        """End everything that was started here."""
        for node in NODES:
            if node in self.daemons:
                self.kill_node(node)
        for daemon in reversed(list(self.daemons.values())):
            daemon.terminate()
            daemon.wait(20)

    def _spawn(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                [shutil.which(program, path=self.environment["PATH"]) or program, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
            )


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def _processes(log: Path) -> list[int]:
    """The daemons of a node's steps, which leave slurmd's family but keep its log open, and all that they started."""
    parents: dict[int, int] = {}
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            is_step = (process / "comm").read_text().strip() == "slurmstepd"
            if is_step and any(file.resolve() == log.resolve() for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _wait(done, complaint: str, cluster: Cluster, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end or any(daemon.poll() is not None for daemon in cluster.daemons.values()):
            logs = "".join(path.read_text()[-1500:] for path in sorted(cluster.folder.glob("*.[lo][ou][gt]")))
            raise RuntimeError(f"{complaint}\n{logs}")
        time.sleep(0.2)
