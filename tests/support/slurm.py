"""A Slurm cluster for tests: munged, slurmctld and a slurmd on each of two hosts in network namespaces.

All of it is in one folder, none of it in /etc, and nothing is left when it ends.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosts
import started

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue")
CONF = """
ClusterName=test
SlurmctldHost=host0({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""


def why_not() -> str:
    """What this machine lacks; empty when it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in NEEDED if not shutil.which(name, path=path)]
    if missing:
        return f"Slurm is not here ({', '.join(missing)}): apt-get install slurm-wlm munge"
    return hosts.why_not()


class Cluster:
    """The cluster and its commands."""

    def __init__(self, net: hosts.Network, folder: Path) -> None:
        self.net = net
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *argv: str, timeout: float = 90, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host, as a user would."""
        done: subprocess.CompletedProcess[str] = self.net[0].run(
            argv, env={**self.environ, **environ}, timeout=timeout, stdin=subprocess.DEVNULL
        )
        return done

    def start(self, *argv: str) -> subprocess.Popen[str]:
        return self.net[0].start(argv, env=self.environ, stdin=subprocess.DEVNULL)

    def steps(self) -> list[str]:
        """Command lines of the processes on the hosts that are not Slurm's own."""
        found = []
        for node in self.net:
            for pid in node.processes():
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                    if line and not line.startswith("slurm") and "slurmscriptd" not in line:
                        found.append(line)
        return found

    def left_behind(self) -> list[str]:
        """The leaks of jobs: processes, and files in the /dev/shm of each host."""
        files = [
            f"{node.name}: {name}"
            for node in self.net
            for name in os.listdir(f"/proc/{node.pid}/root/dev/shm")
        ]
        return self.steps() + files + self.run("squeue", "-h").stdout.splitlines()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Two hosts of four processors each, idle."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    sbin = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    with contextlib.ExitStack() as stack:
        names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid",
                 "log-file": "munged.log", "seed-file": "seed"}  # fmt: skip
        munged = [
            *started.MORTAL,
            "munged",
            "--foreground",
            "--force",
            *(f"--{k}={folder / v}" for k, v in names.items()),
        ]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.end_with(stack, subprocess.Popen(munged, env=sbin, **quiet))
        net = stack.enter_context(hosts.hosts(2))
        started.name_hosts(net, folder)
        nodes = "\n".join(f"NodeName={each.name} NodeAddr={each.address} CPUs=4" for each in net)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, address=net[0].address, nodes=nodes))
        made = Cluster(net, folder)
        for node, argv in [
            (net[0], ["slurmctld", "-D", "-i"]),
            *((each, ["slurmd", "-D", "-N", each.name]) for each in net),
        ]:
            log = stack.enter_context((folder / f"{argv[0]}-{node.name}.log").open("w"))
            options: dict[str, Any] = {"env": made.environ, "stdout": log, "stderr": log}
            started.end_with(stack, node.start([*started.MORTAL, *argv], stdin=subprocess.DEVNULL, **options))
        hosts.wait_until(lambda: made.run("sinfo", "-h", "-o", "%n %T").stdout.count("idle") == 2, 40)
        yield made
