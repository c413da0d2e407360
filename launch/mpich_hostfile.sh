#!/usr/bin/env bash
# Start a program on several hosts with MPICH or Intel MPI:   HOSTFILE=hosts launch/mpich_hostfile.sh train.py
#   HOSTFILE=hosts  lines of `host:4`, without comments  NP=8   ranks (default: the sum of the slots)
#   BIND, LOG_DIR, PROFILE, PYTHON, MPIEXEC, MPIEXEC_OPTIONS: as in mpich.sh
# The program and Python must be at the same path on every host (a shared file system), and ssh must need no password.
# mpiexec passes the whole environment on to the other hosts.
set -euo pipefail

hostfile=${HOSTFILE:?is not set; write one host per line, such as alpha:4}
slots=$(awk '{ sub(/#.*/, "") } NF { n = 1; if (match($1, /:[0-9]+$/)) n = substr($1, RSTART + 1)
             total += n } END { print total + 0 }' "$hostfile")

NP=${NP:-$slots}
hostfile_options=(-f "$hostfile")
export MPIR_CVAR_POLLS_BEFORE_YIELD=${MPIR_CVAR_POLLS_BEFORE_YIELD:-1000} # the default: each host has its own cores
source "$(dirname "${BASH_SOURCE[0]}")/mpich.sh" "$@"
