#!/usr/bin/env bash
# Start a program with MPICH's or Intel MPI's mpiexec, without torchmpirun:   launch/mpich.sh train.py --epochs 5
#   NP=4          ranks (default: one per CPU)           BIND=none     do not bind ranks (default: core)
#   LOG_DIR=logs  each rank's output in logs/rank-R.log  PROFILE=prof  each rank's trace in prof/rank-R.json
#   PYTHON=...    the interpreter (default: python)      MPIEXEC=...   the launcher (default: mpiexec)
# MPIEXEC_OPTIONS holds further options for mpiexec, separated by spaces. For several hosts use mpich_hostfile.sh.
set -euo pipefail

python=${PYTHON:-python}
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc would obey these two variables
np=${NP:-$cores}
wrap=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/torchmpi_py/launch/wrap.py

export I_MPI_PIN=${I_MPI_PIN:-0}
if ((np >= cores)); then # waiting ranks must yield their cores
    export MPIR_CVAR_POLLS_BEFORE_YIELD=${MPIR_CVAR_POLLS_BEFORE_YIELD:-1} I_MPI_THREAD_YIELD=${I_MPI_THREAD_YIELD:-2}
fi

options=(-n "$np")
options+=(${hostfile_options[@]+"${hostfile_options[@]}"}) # may be set by a script that sources this one
if [[ -n ${MPIEXEC_OPTIONS:-} ]]; then
    read -ra more <<<"$MPIEXEC_OPTIONS"
    options+=("${more[@]}")
fi
rank_options=(--bind "${BIND:-core}")
if [[ -n ${LOG_DIR:-} ]]; then rank_options+=(--log-dir "$LOG_DIR"); fi
if [[ -n ${PROFILE:-} ]]; then rank_options+=(--profile "$PROFILE"); fi

exec "${MPIEXEC:-mpiexec}" "${options[@]}" "$python" "$wrap" "${rank_options[@]}" "$@"
