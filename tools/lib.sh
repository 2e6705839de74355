# shellcheck shell=bash
# shellcheck disable=SC2034  # what looks unused is for the scripts that source this
# What every script in tools/ shares: where things live, how they talk, how they become root.

set -euo pipefail

# Whoever calls `make test` calls us from within make. Makefiles of others are not a part of ours: PostgreSQL's generates its
# headers only if it is the first one.
unset MAKELEVEL MAKEFLAGS MFLAGS

# Everything that is built or fetched lives outside the checkout, so that a fresh checkout is quick
# and so that the unprivileged user that runs test servers can reach it.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "$(id -u)" = 0 ]; then
    cache=${PAGEVAULT_CACHE:-/var/cache/pagevault}
else
    cache=${PAGEVAULT_CACHE:-$HOME/.cache/pagevault}
fi
mkdir -p "$cache"
chmod a+rx "$cache"

# cargo-pgrx keeps its list of servers here, not in the developer's own ~/.pgrx.
export PGRX_HOME=${PGRX_HOME:-$cache/pgrx}
export PATH=$cache/bin:${CARGO_HOME:-$HOME/.cargo}/bin:$PATH

# PostgreSQL refuses to run as root; this user runs the servers then.
server_user=pagevault

# Majors that pagevault supports, oldest first.
all_versions="15 16 17 18"

say() { printf '%s\n' "pagevault: $*" >&2; }
die() { say "$*"; exit 1; }

# as_root CMD...: runs CMD as root, through sudo when we are not.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "this step needs root and there is no sudo: $*"
    fi
}

# installed PACKAGE: is this Debian package there?
installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# apt_install REASON PACKAGE...: installs what is missing and says why. Without apt it only says it.
apt_install() {
    local reason=$1 missing=() package
    shift
    if ! command -v apt-get >/dev/null; then
        say "there is no apt here: see yourself to $* by the names of this system ($reason)"
        return
    fi
    for package; do
        installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    say "installing ${missing[*]} ($reason)"
    if [ -z "$(find /var/lib/apt/lists -maxdepth 1 -name '*_Packages*' -mtime -1 2>/dev/null)" ]; then
        as_root apt-get -qq update
    fi
    mkdir -p "$cache/log"
    progress "apt-get install" "$cache/log/apt.log" as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -y --no-install-recommends install "${missing[@]}"
}

# progress TEXT LOG CMD...: runs CMD with its output in LOG; a line every 15 s says it is alive,
# and when it fails the end of LOG is shown.
progress() {
    local text=$1 log=$2 start=$SECONDS pid
    shift 2
    say "$text ..."
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if [ $(((SECONDS - start) % 15)) -eq 14 ]; then
            say "  $text: $((SECONDS - start)) s, $(wc -l <"$log") lines of output"
        fi
    done
    if ! wait "$pid"; then
        tail -n 30 "$log" >&2
        die "$text failed; the whole output is in $log"
    fi
    say "$text: done in $((SECONDS - start)) s"
}

# as_server CMD...: runs CMD as the user that owns test servers: us, or server_user when we are root.
as_server() {
    if [ "$(id -u)" = 0 ]; then
        (cd / && setpriv --reuid "$server_user" --regid "$server_user" --clear-groups -- \
            env -u XDG_RUNTIME_DIR HOME=/nonexistent "$@")
    else
        "$@"
    fi
}

# server_dir DIR: makes an empty directory that only the server user can enter.
server_dir() {
    rm -rf "$1"
    mkdir -p "$1"
    chmod 700 "$1"
    if [ "$(id -u)" = 0 ]; then chown "$server_user:" "$1"; fi
}

# mirror: the archive this machine's own apt uses for its Debian release.
mirror() {
    local release
    release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    # shellcheck disable=SC2016  # apt-get expands these
    apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(SITE)' 'Created-By: Packages' |
        awk -v release="$release" '$1 == release && $2 == "main" { print $3; exit }'
}

# debian_source PACKAGE DIR SUITES...: unpacks the newest source of a package in these suites into DIR,
# as its authors published it.
debian_source() {
    local package=$1 into=$2 archive keyring=/usr/share/keyrings/debian-archive-keyring.gpg signed=""
    shift 2
    archive=$(mirror)
    [ -n "$archive" ] || die "apt on this machine names no Debian archive to fetch sources from"
    [ -r $keyring ] && signed="[signed-by=$keyring]"
    local state=$cache/postgresql/apt name suite
    name=$(IFS=-; echo "$*")
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$into.fetch"
    for suite; do
        echo "deb-src $signed $archive $suite main"
    done >"$state/sources-$name.list"
    local options=(-qq
        -o "Dir::Etc::sourcelist=$state/sources-$name.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::Lists=$state/lists" -o "Dir::Cache=$state/cache" -o APT::Sandbox::User=)
    apt-get "${options[@]}" update
    (cd "$into.fetch" && apt-get "${options[@]}" source --download-only "$package")
    rm -rf "$into"
    mkdir -p "$into"
    tar -C "$into" --strip-components=1 -xf "$into.fetch/${package}_"*.orig.tar.*
    rm -rf "$into.fetch"
}
