# shellcheck shell=bash
# shellcheck disable=SC2034  # scripts that source this use these variables
# Output of demonstrations: headings, remarks, and checks that stop them.

bold="" cyan="" red="" plain=""
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    bold=$'\e[1m' cyan=$'\e[36m' red=$'\e[31m' plain=$'\e[0m'
fi
step=0
# PAGEVAULT_DEMO_PAUSE: seconds before each heading, for recordings.
heading() {
    [ $step -eq 0 ] || sleep "${PAGEVAULT_DEMO_PAUSE:-0}"
    step=$((step + 1))
    printf '\n%s%2d. %s%s\n\n' "$bold" $step "$*" "$plain"
}
note() { printf '%s\n' "$*" | fold -s -w 92 | sed 's/ *$//; s/^/    /'; }
ok() { printf '    %sok%s  %s\n' "$bold" "$plain" "$*"; }
failure="a command failed"
fail() {
    failure=$*
    exit 1
}
# check WHAT EXPECTED ACTUAL: prints ok, or stops the demo.
check() {
    [ "$2" = "$3" ] || fail "$1: expected \"$2\", got \"$3\""
    ok "$1"
}
# shown COMMAND...: prints a shell command like a prompt.
shown() { printf '    %s$ %s%s\n' "$cyan" "$*" "$plain"; }
indent() { sed 's/^/    /'; }
