# shellcheck shell=bash
# shellcheck disable=SC2154  # root and server_user are those of lib.sh
# For scripts that run PostgreSQL's own suites with everything encrypted: all catalogs, all
# relations, WAL, temporary data. Sourced after lib.sh.

# encrypted_template BIN HOME [ARG...]: HOME/template, a data directory to be copied instead of
# running initdb, which gets the arguments; HOME/keys, its key file; HOME/suite, a copy of
# tests/recovery, because the user that runs the servers may be unable to read the checkout.
encrypted_template() {
    local bin=$1 home=$2
    shift 2
    cp -r "$root/tests/recovery" "$home/suite"
    if [ "$(id -u)" = 0 ]; then chown -R "$server_user:" "$home/suite"; fi
    as_server mkdir -p "$home/tmp"
    as_server "$bin/pagevault-keyring" file create "$home/keys" --key main
    as_server "$bin/initdb" -D "$home/template" -A trust --no-sync "$@" >"$home.initdb" ||
        die "initdb failed; $home.initdb"
    as_server env PAGEVAULT_BIN="$bin" PAGEVAULT_KEYS="$home/keys" TMPDIR="$home/tmp" \
        "$home/suite/encrypt" "$home/template" || die "the template could not be encrypted"
}
