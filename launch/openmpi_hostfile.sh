#!/usr/bin/env bash
# Start a program on several hosts with Open MPI:   HOSTFILE=hosts launch/openmpi_hostfile.sh train.py --epochs 5
#   HOSTFILE=hosts  lines of `host slots=4`              NP=8   ranks (default: the sum of the slots)
#   BIND, LOG_DIR, PROFILE, PYTHON, MPIRUN, MPIRUN_OPTIONS: as in openmpi.sh
# The program and Python must be at the same path on every host (a shared file system), and ssh must need no password.
# PYTHONPATH, the thread counts and all variables TORCHMPI* and MPI4PY_* are passed on to the other hosts.
set -euo pipefail

hostfile=${HOSTFILE:?is not set; write one host per line, such as alpha slots=4}
slots=$(awk '{ sub(/#.*/, "") } NF { n = 1; if (match($0, /slots *= *[0-9]+/)) { n = substr($0, RSTART, RLENGTH);
             sub(/.*= */, "", n) } total += n } END { print total + 0 }' "$hostfile")

hostfile_options=(--hostfile "$hostfile")
while IFS='=' read -r name _; do
    case $name in TORCHMPI* | MPI4PY_* | PYTHONPATH | OMP_NUM_THREADS | MKL_NUM_THREADS | OPENBLAS_NUM_THREADS)
        hostfile_options+=(-x "$name") ;;
    esac
done < <(env)

NP=${NP:-$slots}
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-true} # ranks often wait for other hosts
source "$(dirname "${BASH_SOURCE[0]}")/openmpi.sh" "$@"
