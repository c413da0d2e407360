#!/bin/sh
# Starts an MPI's daemon on a host of a PBS job by pbs_tmrsh, in place of ssh:   pbs_agent.sh [-x] HOST COMMAND...
# pbs_tmrsh knows none of ssh's options, and starts a program without a shell; the MPIs write their commands for one.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec pbs_tmrsh "$host" /bin/sh -c "$*"
