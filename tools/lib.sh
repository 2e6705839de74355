# shellcheck shell=bash
# shellcheck disable=SC2034  # scripts that source this use these variables
# Common parts of the scripts in tools/: paths, messages, running as root.

set -euo pipefail

# `make test` calls these scripts from within make. Other projects' makefiles must not inherit its
# variables: PostgreSQL's generates its headers only if it is the top-level make.
unset MAKELEVEL MAKEFLAGS MFLAGS

# Builds and downloads are outside the checkout, so that a new checkout starts quickly, and so that
# the unprivileged user of test servers can read them.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "$(id -u)" = 0 ]; then
    cache=${PAGEVAULT_CACHE:-/var/cache/pagevault}
else
    cache=${PAGEVAULT_CACHE:-$HOME/.cache/pagevault}
fi
mkdir -p "$cache"
chmod a+rx "$cache"

# cargo-pgrx's list of servers is here, not in the developer's ~/.pgrx.
export PGRX_HOME=${PGRX_HOME:-$cache/pgrx}
export PATH=$cache/bin:${CARGO_HOME:-$HOME/.cargo}/bin:$PATH

# PostgreSQL refuses to run as root; then this user runs the servers.
server_user=pagevault

# Cargo's directory for builds of the extension. Cargo works on one build in a directory at a time.
extension_target=${CARGO_TARGET_DIR:-$root/target}/extension

# With PAGEVAULT_FIPS=1: the flavour with a validated cryptographic module (docs/fips.md). Its
# programs are built apart from the ordinary ones, which have the same names.
flavour=${PAGEVAULT_FIPS:+-fips}
program_target=${CARGO_TARGET_DIR:-$root/target}${PAGEVAULT_FIPS:+/fips}

# Majors that pagevault supports, oldest first.
all_versions="15 16 17 18 19"

# All crates except the extension, for cargo. They are always built and tested together: cargo
# selects features of dependencies for the given packages, and rebuilds the dependencies for others.
whole=(--workspace --exclude pagevault)

# upstream_version: the version of the sources, which only Cargo.toml defines.
upstream_version() {
    sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$root/Cargo.toml"
}

# build_programs PROFILE: pagevault-keyring, and the library that it loads into PostgreSQL's own
# programs, into program_target.
build_programs() {
    if [ -z "$flavour" ]; then
        cargo build --profile "$1" --locked --package pagevault-keyring --package pagevault-preload
        return
    fi
    CARGO_TARGET_DIR=$program_target cargo build --profile "$1" --locked \
        --manifest-path "$root/keyring/validated/Cargo.toml" &&
    CARGO_TARGET_DIR=$program_target cargo build --profile "$1" --locked \
        --package pagevault-preload --features pagevault-preload/fips
}

# lint_whole: clippy for all of these. "All targets" are all but tests with `test = false`.
lint_whole() {
    cargo clippy --locked "${whole[@]}" --all-targets -- -D warnings
    cargo clippy --locked "${whole[@]}" --test '*' -- -D warnings
}

say() { printf '%s\n' "pagevault: $*" >&2; }
die() { say "$*"; exit 1; }

# as_root CMD...: runs CMD as root, with sudo if necessary.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "this step needs root and there is no sudo: $*"
    fi
}

# installed PACKAGE: is this Debian package installed?
installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# apt_install REASON PACKAGE...: installs missing packages and prints the reason. Without apt it
# only prints them.
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
    mkdir -p "$cache/log"
    if [ -z "$(find /var/lib/apt/lists -maxdepth 1 -name '*_Packages*' -mtime -1 2>/dev/null)" ]; then
        progress "apt-get update" "$cache/log/apt-update.log" apt_update
    fi
    # Wait for another apt process, such as unattended upgrades.
    progress "apt-get install" "$cache/log/apt.log" as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -y -o DPkg::Lock::Timeout=600 --no-install-recommends install "${missing[@]}"
}

# apt_update: apt-get can wait for dpkg's lock, but not for that of its lists.
apt_update() {
    local said waited=0
    until said=$(as_root env LC_ALL=C apt-get -qq update 2>&1); do
        printf '%s\n' "$said"
        case $said in *"Could not get lock"*) ;; *) return 1 ;; esac
        [ $waited -lt 600 ] || return 1
        sleep 2
        waited=$((waited + 2))
    done
}

# progress TEXT LOG CMD...: runs CMD with its output in LOG. Prints a line every 15 s, and the end
# of LOG if CMD fails.
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

# as_server CMD...: runs CMD as the user of test servers: the current one, or server_user if that is
# root.
as_server() {
    if [ "$(id -u)" = 0 ]; then
        (cd / && setpriv --reuid "$server_user" --regid "$server_user" --clear-groups -- \
            env -u XDG_RUNTIME_DIR HOME=/nonexistent "$@")
    else
        "$@"
    fi
}

# server_dir DIR: creates an empty directory that only the server user can access.
server_dir() {
    rm -rf "$1"
    mkdir -p "$1"
    chmod 700 "$1"
    if [ "$(id -u)" = 0 ]; then chown "$server_user:" "$1"; fi
}

# spread_clusters: sets the directory for clusters of tests. In memory, if there is plenty: tests
# create and remove files by the thousand, and need some 3 GB at once. On disk the clusters are far
# from each other. Beside thousands of files that were removed in the last minutes, ext4 takes
# several times as long to create others (recently_deleted, fs/ext4/ialloc.c). Other file systems do
# not know this flag.
spread_clusters() {
    export TMPDIR=$cache/tmp
    if has_memory_for_clusters; then TMPDIR=/dev/shm/pagevault-tests; fi
    mkdir -p "$TMPDIR"
    chmod 1777 "$TMPDIR"
    chattr +T "$TMPDIR" 2>/dev/null || true
}

# has_memory_for_clusters: whether /dev/shm is in memory, with 10 GiB free, of 14 GiB of the machine.
has_memory_for_clusters() {
    local gib=$((1024 * 1024)) memory room
    [ "$(stat -f -c %T /dev/shm 2>/dev/null)" = tmpfs ] || return
    memory=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)
    room=$(df --output=avail -k /dev/shm | tail -n 1)
    [ "${memory:-0}" -ge $((14 * gib)) ] && [ "${room:-0}" -ge $((10 * gib)) ]
}

# mirror: the archive that this machine's apt uses for its Debian release.
mirror() {
    local release
    release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    # shellcheck disable=SC2016  # apt-get expands these
    apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(SITE)' 'Created-By: Packages' |
        awk -v release="$release" '$1 == release && $2 == "main" { print $3; exit }'
}

# other_suites KIND SUITES...: sets `apt_options` so that apt-get uses only these suites of Debian:
# their sources (deb-src) or packages (deb). Of a package in several of them apt takes the newest
# version, but those of experimental only if no other suite has one, or with `preferred` set: the
# source package whose newest version is wanted. With `machine` set to aarch64 they are those of arm64.
other_suites() {
    local kind=$1 archive keyring=/usr/share/keyrings/debian-archive-keyring.gpg signed="" suite
    shift
    archive=$(mirror)
    [ -n "$archive" ] || die "apt on this machine names no Debian archive to fetch from"
    [ -r $keyring ] && signed="[signed-by=$keyring]"
    local name state
    name=$(IFS=-; echo "$kind-$*${machine:+-$machine}")
    state=$cache/postgresql/apt/$name
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
    for suite; do
        echo "$kind $signed $archive $suite main"
    done >"$state/sources.list"
    : >"$state/preferences"
    if [ -n "${preferred:-}" ]; then
        printf '%s\n' "Package: src:$preferred" "Pin: version *" "Pin-Priority: 990" >"$state/preferences"
    fi
    apt_options=(-qq
        -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::Etc::preferences=$state/preferences" -o Dir::Etc::preferencesparts=/dev/null
        -o "Dir::State::Lists=$state/lists" -o "Dir::Cache=$state/cache" -o APT::Sandbox::User=)
    [ -z "${machine:-}" ] || apt_options+=(-o APT::Architecture=arm64 -o APT::Architectures=arm64)
    apt-get "${apt_options[@]}" update
}

# debian_source PACKAGE DIR SUITES...: unpacks the newest source of a package in these suites into
# DIR, as published by its authors.
debian_source() {
    local package=$1 into=$2 apt_options
    shift 2
    other_suites deb-src "$@"
    mkdir -p "$into.fetch"
    (cd "$into.fetch" && apt-get "${apt_options[@]}" source --download-only "$package")
    rm -rf "$into"
    mkdir -p "$into"
    tar -C "$into" --strip-components=1 -xf "$into.fetch/${package}_"*.orig.tar.*
    rm -rf "$into.fetch"
}

# debian_package PACKAGE DIR SUITES...: unpacks the newest build of a package in these suites into
# DIR.
debian_package() {
    local package=$1 into=$2 apt_options
    shift 2
    other_suites deb "$@"
    rm -rf "$into"
    mkdir -p "$into"
    (cd "$into" && apt-get "${apt_options[@]}" download "$package")
    dpkg-deb -x "$into/${package}_"*.deb "$into"
}
