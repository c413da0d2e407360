#!/usr/bin/env bash
# Start a program with Open MPI's own mpirun, without torchmpirun:   launch/openmpi.sh train.py --epochs 5
#   NP=4          ranks (default: one per CPU)           BIND=none     do not bind ranks (default: core)
#   LOG_DIR=logs  each rank's output in logs/rank-R.log  PROFILE=prof  each rank's trace in prof/rank-R.json
#   PYTHON=...    the interpreter (default: python)      MPIRUN=...    the launcher (default: mpirun)
# MPIRUN_OPTIONS holds further options for mpirun, separated by spaces. For several hosts use openmpi_hostfile.sh.
set -euo pipefail

python=${PYTHON:-python}
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc would obey these two variables
np=${NP:-$cores}
wrap=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/torchmpi_py/launch/wrap.py

export OMPI_MCA_osc=${OMPI_MCA_osc:-^ucx}
if ((np >= cores)); then # waiting ranks must yield their cores
    export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-true}
fi
if ((EUID == 0)); then # root is often the only user of a container
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

options=(-n "$np" --map-by slot:OVERSUBSCRIBE --bind-to none)
options+=(${hostfile_options[@]+"${hostfile_options[@]}"}) # may be set by a script that sources this one
if [[ -n ${MPIRUN_OPTIONS:-} ]]; then
    read -ra more <<<"$MPIRUN_OPTIONS"
    options+=("${more[@]}")
fi
rank_options=(--bind "${BIND:-core}")
if [[ -n ${LOG_DIR:-} ]]; then rank_options+=(--log-dir "$LOG_DIR"); fi
if [[ -n ${PROFILE:-} ]]; then rank_options+=(--profile "$PROFILE"); fi

exec "${MPIRUN:-mpirun}" "${options[@]}" "$python" "$wrap" "${rank_options[@]}" "$@"
