#!/usr/bin/env bash
# Starts a one-machine SLURM cluster in a scratch folder, runs a sweep on it, and stops it: `make test-slurm`.
# Needs slurmctld, slurmd and munged (Debian: slurm-wlm, munge); installs them if they are missing and it runs as root.
# All daemons listen on 127.0.0.1 and are always stopped at the end. Usage: scripts/test_slurm.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
export PATH=$PATH:/usr/sbin:/sbin

say() { echo "test-slurm: $*" >&2; }

install_slurm() {
    command -v slurmctld slurmd munged sbatch srun > /dev/null && return
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        say "needs slurmctld, slurmd and munged; on Debian, as root: apt install slurm-wlm munge"
        exit 1
    fi
    say "installing Debian's slurm-wlm and munge"
    export DEBIAN_FRONTEND=noninteractive
    timeout 120 apt-get -qq update || say "apt-get update failed; trying with the lists that are there"
    timeout 300 apt-get -qq install --yes --no-install-recommends slurm-wlm munge > /dev/null < /dev/null
}

daemons=()
stop() {
    status=$?
    trap '' EXIT INT TERM HUP
    [ "$status" = 0 ] || tail -n 20 "$scratch"/log/* >&2 || true
    if [ ${#daemons[@]} = 3 ]; then # jobs first, as slurmd must end them
        timeout 10 scancel --quiet --full --signal=KILL --user="$(id -u)" || true
        timeout 10 scancel --quiet --user="$(id -u)" || true
        for _ in $(seq 40); do
            [ -n "$(timeout 10 squeue --noheader 2> /dev/null || true)" ] || break
            sleep 0.5
        done
    fi
    for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do
        kill "${daemons[i]}" 2> /dev/null || true
        for _ in $(seq 40); do
            kill -0 "${daemons[i]}" 2> /dev/null || break
            sleep 0.25
        done
        kill -KILL "${daemons[i]}" 2> /dev/null || true
    done
    for process in /proc/[0-9]*; do # processes that still run with this configuration
        if tr '\0' '\n' 2> /dev/null < "$process/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF"; then
            kill -KILL "${process#/proc/}" 2> /dev/null || true
        fi
    done
    rm -rf "$scratch"
    exit "$status"
}

configure() {
    local host ports
    host=$(hostname -s)
    ports=($("$python" - <<- 'PYTHON'
		import socket
		sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
		print(*(each.getsockname()[1] for each in sockets))
	PYTHON
    ))
    mkdir -p "$scratch"/{log,state,spool}
    head -c 1024 /dev/urandom > "$scratch/munge.key"
    chmod 600 "$scratch/munge.key"
    cat > "$SLURM_CONF" <<- CONF
		ClusterName=scratch
		SlurmctldHost=$host(127.0.0.1)
		SlurmctldPort=${ports[0]}
		SlurmdPort=${ports[1]}
		CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
		SlurmUser=$(id -un)
		SlurmdUser=$(id -un)
		AuthType=auth/munge
		# a requeued job waits until its old credential has expired
		AuthInfo=socket=$scratch/munge.socket,cred_expire=5
		StateSaveLocation=$scratch/state
		SlurmdSpoolDir=$scratch/spool
		SlurmctldPidFile=$scratch/slurmctld.pid
		SlurmdPidFile=$scratch/slurmd.pid
		SlurmctldLogFile=$scratch/log/slurmctld
		SlurmdLogFile=$scratch/log/slurmd
		ProctrackType=proctrack/linuxproc
		TaskPlugin=task/none
		MpiDefault=none
		SwitchType=switch/none
		JobAcctGatherType=jobacct_gather/none
		AccountingStorageType=accounting_storage/none
		SelectType=select/cons_tres
		SelectTypeParameters=CR_CPU
		SchedulerParameters=batch_sched_delay=1,sched_interval=3
		SlurmdParameters=config_overrides
		ReturnToService=2
		KillWait=30
		MinJobAge=3600
		MaxArraySize=2
		NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
		PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
	CONF
}

start() {
    munged --foreground --force --num-threads=1 --socket="$scratch/munge.socket" --key-file="$scratch/munge.key" \
        --pid-file="$scratch/munged.pid" --seed-file="$scratch/munged.seed" --log-file="$scratch/log/munged" 2> /dev/null &
    daemons+=($!)
    for _ in $(seq 60); do
        [ ! -S "$scratch/munge.socket" ] || break
        sleep 0.5
    done
    slurmctld -D > /dev/null 2>&1 &
    daemons+=($!)
    slurmd -D > /dev/null 2>&1 &
    daemons+=($!)
    for _ in $(seq 60); do
        case $(timeout 10 sinfo --noheader --format=%t 2> /dev/null) in idle*) return ;; esac
        sleep 0.5
    done
    say "the cluster does not come up"
    exit 1
}

install_slurm
scratch=$(mktemp -d)
chmod 755 "$scratch"
export SLURM_CONF=$scratch/slurm.conf
trap stop EXIT
trap 'exit 130' INT TERM HUP
configure
start
say "cluster of $(timeout 10 sinfo --noheader --format='%D node, %C CPUs (allocated/idle/other/total)') is up"
BITCYCLE_SCRATCH_CLUSTER=yes timeout --signal=INT --kill-after=30 2400 \
    "$python" -m pytest -n 0 -q --basetemp="$scratch/test" tests/slurm/sweep.py &
wait $! # so that signals are handled at once
