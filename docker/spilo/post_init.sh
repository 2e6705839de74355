#!/bin/bash
# SQL that sets keys up, and then Spilo's own script, whose extensions are encrypted then. Patroni runs this after it has
# made a cluster, and Spilo after each promotion and each major upgrade. The arguments are a role and a connection string.

setup=/etc/pagevault/setup.sql
if [ -f "$setup" ]; then
    PGOPTIONS="-c synchronous_commit=local" psql -XAtq -v ON_ERROR_STOP=1 -d "$2" -f "$setup" || exit
fi
exec /scripts/spilo_post_init.sh "$@"
