"""Files of a bed's hosts, with names in braces to be filled in: what a host runs first, and settings of daemons."""

# The first process of a host: its mounts, its name, its daemons. It waits for ever, and so takes in orphans.
INIT = """\
set -eu
hostname {name}
ip link set lo up
mkdir -p {home}/tmp
mount -t tmpfs -o mode=1777 tmpfs {home}/tmp
{shares}
mount --rbind {home}/tmp /tmp
mount -t tmpfs -o mode=1777,size=50% tmpfs /dev/shm
mount --bind {home}/boot_id /proc/sys/kernel/random/boot_id
mount --bind {bed}/etc_hosts /etc/hosts
mount --bind {bed}/ssh_config /etc/ssh/ssh_config
/usr/sbin/sshd -f {bed}/sshd_config -E {home}/sshd.log -o PidFile={home}/sshd.pid
{slurm}
touch {home}/ready
while :; do sleep 3600 & wait $! || true; done
"""

SLURM_INIT = """\
mount -t tmpfs tmpfs /sys/fs/cgroup
mount --bind {bed}/slurm /etc/slurm
{controller}
slurmd -N {name}
"""

SSHD = """\
Port 22
HostKey {bed}/host_key
AuthorizedKeysFile {bed}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
AcceptEnv *
MaxStartups 200
"""

SSH = """\
Host *
    IdentityFile {bed}/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    BatchMode yes
"""

SLURM = """\
ClusterName=bed
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={bed}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
StateSaveLocation={bed}/slurm/state
SlurmdSpoolDir={bed}/slurm/spool.%n
SlurmctldPidFile={bed}/slurm/ctld.pid
SlurmdPidFile={bed}/slurm/d.%n.pid
SlurmctldLogFile={bed}/slurm/ctld.log
SlurmdLogFile={bed}/slurm/d.%n.log
JobRequeue=1
KillWait=10
InactiveLimit=0
MinJobAge=300
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
