"""A SLURM cluster of two nodes on this machine, for one test, with nothing but its own daemons."""

import contextlib
import getpass
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

NODES = ("n0", "n1")
# Nobody is authenticated: whoever reaches the ports of this machine may submit jobs. A job that
# goes back into the queue waits until its credential has expired, for two minutes by default.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
KillWait=20
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""


def is_installed():
    return all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "scontrol")))


@contextlib.contextmanager
def start_cluster(monkeypatch):
    """Starts the daemons, and lets SLURM's programs find them; ends all of it after the block."""
    # Not a folder of pytest's, whose long names do not fit into the addresses of Unix sockets.
    folder = pathlib.Path(tempfile.mkdtemp())
    for name in ("state", *NODES):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=socket.gethostname(), ports=free_ports(3), user=getpass.getuser(), folder=folder
        )
    )
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    daemons = []
    try:
        for command in commands:
            with (folder / f"{'-'.join(command)}.log").open("w") as log:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
        wait_until(lambda: ask("sinfo", "-h", "-o", "%D %T") == "2 idle", log=folder)
        yield
    finally:
        subprocess.run(["scancel", "--full", "--signal=KILL", "--me"], capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)
        shutil.rmtree(folder)


def ask(*command):
    """What a program of SLURM's says."""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def wait_until(holds, *, timeout=120, log=None):
    """Waits, and shows the ends of log files if it waits in vain."""
    end = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > end:
            files = [] if log is None else sorted(log.glob("*.log"))
            raise TimeoutError("\n".join(file.read_text()[-2000:] for file in files))
        time.sleep(0.1)


def free_ports(count):
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("localhost", 0))
        return [probe.getsockname()[1] for probe in probes]
