#!/usr/bin/env bash
# A job for PBS or Torque:   torchmpirun --template pbs > job.pbs
#                            qsub -v PROGRAM="train.py --epochs 5" job.pbs
#   TORCHMPIRUN=.venv/bin/torchmpirun  the launcher (default: torchmpirun)   OPTIONS="--log-dir logs"  its options
#   END_AFTER=3420  seconds after which the ranks get SIGTERM, so that they save before the walltime (default: never)
# torchmpirun reads the hosts from PBS_NODEFILE, starts one rank per mpiprocs (Torque: ppn), and connects to the hosts
# by pbs_tmrsh if it is there, else by ssh.
#PBS -N torchmpi
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l walltime=01:00:00
#PBS -j oe
set -euo pipefail

cd "${PBS_O_WORKDIR:-.}"
read -ra program <<<"${PROGRAM:?is not set; write qsub -v PROGRAM=\"train.py --epochs 5\"}"
read -ra options <<<"${OPTIONS:-}"
limit=()
if [[ -n ${END_AFTER:-} ]]; then limit=(timeout --signal=TERM "$END_AFTER"); fi

exec ${limit[@]+"${limit[@]}"} "${TORCHMPIRUN:-torchmpirun}" ${options[@]+"${options[@]}"} "${program[@]}"
