#!/usr/bin/env bash
# Starts SLURM on this host, runs examples/slurm/ on two nodes of it, and prints a
# table of what was tried. Arguments are backends, by default all:
#
#   bash shell/engines/slurm.sh
#   bash shell/engines/slurm.sh torch
#
# Needs root, as the daemons run in namespaces of their own: nothing of the host is
# changed, no port of it is used, and the daemons end with this script.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need "munged slurmctld slurmd srun ip openssl" "slurm-wlm munge iproute2 openssl"
need_python
apart=(unshare --mount --pid --net --fork --kill-child --mount-proc)
if [ "${KERAS_TP_NAMESPACES:-}" != 1 ]; then
    if ! "${apart[@]}" true; then
        echo "skipped: namespaces cannot be made here, which needs root"
        exit 0
    fi
    folder=$(mktemp -d /tmp/keras_tp_slurm.XXXXXX)
    trap 'rm -rf "$folder"' EXIT
    KERAS_TP_NAMESPACES=1 SLURM_FOLDER=$folder PYTHON=$PYTHON \
        "${apart[@]}" bash shell/engines/slurm.sh "$@"
    exit
fi
folder=$SLURM_FOLDER
chmod 755 "$folder"
mkdir "$folder"/{munge,state,spool.node1,spool.node2}

# Each node has an address of its own.
ip link set lo up
for number in 1 2 254; do
    ip address add 10.77.0.$number/32 dev lo
done
cat >"$folder/hosts" <<END
127.0.0.1 localhost
10.77.0.1 node1
10.77.0.2 node2
10.77.0.254 $(hostname)
END
mount --bind "$folder/hosts" /etc/hosts

openssl rand -out "$folder/munge.key" 1024
chmod 600 "$folder/munge.key"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munge/pid" --seed-file="$folder/munge/seed" \
    --log-file="$folder/munge/log"
export SLURM_CONF=$folder/slurm.conf
cat >"$SLURM_CONF" <<END
ClusterName=here
SlurmctldHost=$(hostname)(10.77.0.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
StateSaveLocation=$folder/state
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmdLogFile=$folder/slurmd.%n.log
SlurmdSpoolDir=$folder/spool.%n
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=node1 NodeHostname=node1 NodeAddr=10.77.0.1 Port=6818 CPUs=4
NodeName=node2 NodeHostname=node2 NodeAddr=10.77.0.2 Port=6819 CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
END
slurmctld
slurmd -N node1
slurmd -N node2
for _ in $(seq 60); do
    [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" != 2 ] || break
    sleep 1
done
sinfo
"$PYTHON" -m integration_tests.engines slurm "$@"
