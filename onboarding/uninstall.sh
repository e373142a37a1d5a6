#!/bin/sh
# Take llmgw off this machine: services, program, users. Weights, engines, database and certificates stay, unless --purge.
#
#   sh uninstall.sh [agent|router|server]... [--purge] [--dry-run]     without a role: all
#
# The same LLMGW_PREFIX, LLMGW_ETC, LLMGW_STATE, LLMGW_SYSTEMD_DIR as for join.sh. Exit codes: 0 done, 64 usage, 77 not root.
set -eu

say() { printf 'uninstall.sh: %s\n' "$*" >&2; }

doing() {
    if [ -n "$dry" ]; then
        printf 'would: %s\n' "$*" >&2
    else
        "$@"
    fi
}

read_words() {
    roles='' purge='' dry=''
    for word in "$@"; do
        case $word in
            agent | router | server) roles="$roles $word" ;;
            --purge) purge=1 ;;
            --dry-run) dry=1 ;;
            *) say "unknown word: $word (agent, router, server, --purge, --dry-run)"; exit 64 ;;
        esac
    done
    roles=${roles:-agent router server}
    prefix=${LLMGW_PREFIX:-/opt/llmgw} etc=${LLMGW_ETC:-/etc/llmgw} state=${LLMGW_STATE:-/var/lib/llmgw}
    units=${LLMGW_SYSTEMD_DIR:-/etc/systemd/system}
    if [ -z "$dry" ] && [ "$(id -u)" -ne 0 ] && [ -z "${LLMGW_PREFIX:-}" ]; then
        say "this needs root"
        exit 77
    fi
}

end_service() {
    # $1: role. Engines and gate outlive an agent that is stopped: they are ended by what marks them.
    if command -v systemctl >/dev/null 2>&1 && [ -e "$units/llmgw-$1.service" ]; then
        doing systemctl disable --now "llmgw-$1.service" || true
    fi
    if [ "$1" = agent ]; then
        # shellcheck disable=SC2013
        for environ in $(grep -l -s -F "=$state/agent" /proc/[0-9]*/environ); do
            if tr '\0' '\n' < "$environ" 2>/dev/null | grep -q -x -e "LLMGW_GATE=$state/agent" -e "LLMGW_DATA_DIR_MARK=$state/agent"; then
                pid=${environ#/proc/}
                doing kill "${pid%/environ}" || true
            fi
        done
    fi
    doing rm -f "$units/llmgw-$1.service" "$etc/$1.join" "$etc/$1.env"
    if [ -n "$purge" ]; then
        doing rm -rf "${state:?}/$1"
        if [ "$1" = server ]; then doing rm -f "$etc/server.yaml"; fi
    elif [ -d "$state/$1" ]; then
        say "kept: $state/$1 (--purge removes it)"
    fi
}

end_program() {
    # The program goes with the last role that uses it.
    for role in agent router server; do
        if [ -e "$units/llmgw-$role.service" ] && [ -z "$dry" ]; then
            return 0
        fi
    done
    for path in "$prefix"/llmgw.pyz "$prefix"/llmgw-????????????.pyz; do
        if [ -e "$path" ] || [ -h "$path" ]; then doing rm -f "$path"; fi
    done
    if [ -d "$prefix/python" ]; then doing rm -rf "${prefix:?}/python"; fi      # which join.sh brought
    for folder in "$prefix" "$etc" "$state"; do
        if [ -d "$folder" ]; then doing rmdir "$folder" 2>/dev/null || true; fi
    done
    if [ "$(id -u)" -eq 0 ] && [ -n "$purge" ] && command -v userdel >/dev/null 2>&1; then
        for user in llmgw llmgw-engine; do
            if id "$user" >/dev/null 2>&1; then doing userdel "$user" || true; fi
        done
    fi
}

main() {
    read_words "$@"
    for role in $roles; do
        end_service "$role"
    done
    if command -v systemctl >/dev/null 2>&1; then doing systemctl daemon-reload; fi
    end_program
    say "done"
}

main "$@"
