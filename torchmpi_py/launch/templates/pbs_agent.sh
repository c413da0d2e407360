#!/bin/sh
# Start an MPI's daemon on a host of a PBS job by pbs_tmrsh, in place of ssh:   pbs_agent.sh [-x] HOST COMMAND...
# pbs_tmrsh has none of ssh's options, and it starts programs without a shell. MPIs write their commands for a shell.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec pbs_tmrsh "$host" /bin/sh -c "$*"
