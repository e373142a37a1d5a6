#!/bin/sh
# Install llmgw on this machine as a service, and let it join a cluster. Run again: upgrade, or nothing to do.
#
#   LLMGW_SERVER=https://HOST:7800 LLMGW_JOIN=... LLMGW_SHA256=... sh join.sh [agent|router|server] [--dry-run] [--no-python]
#
# Where no Python will do, uv brings one below LLMGW_PREFIX; with --no-python the package to install is named instead.
#
#   LLMGW_SHA256       the hash that llmgw.pyz must have (64 hex digits): always needed
#   LLMGW_SERVER       the control plane (agent, router)
#   LLMGW_JOIN         the join string of `llmgw.pyz ctl token create`; or LLMGW_JOIN_FILE, a file that holds it
#   LLMGW_URL          where llmgw.pyz is loaded from (without: LLMGW_SERVER/llmgw.pyz)
#   LLMGW_KEY_PIN      base64 sha256 of the public key of that server, for curl --pinnedpubkey
#   LLMGW_FILE         an llmgw.pyz that is here already (no network)
#   LLMGW_PYTHON       the Python to use (without: the first that has all that is needed)
#   LLMGW_UV_URL, LLMGW_UV_SHA256   another archive of uv and its hash (without: the release on GitHub that is named below)
#   UV_PYTHON_INSTALL_MIRROR   where uv loads the Python from (without: GitHub); other settings of uv are its own, too
#   LLMGW_CONFIG       server.yaml of a server (without: /etc/llmgw/server.yaml, made when it is missing)
#   LLMGW_LISTEN       where a router listens (without: 0.0.0.0:7801)
#   LLMGW_PREFIX       where the program lies (without: /opt/llmgw)
#   LLMGW_ETC, LLMGW_STATE, LLMGW_SYSTEMD_DIR   (without: /etc/llmgw, /var/lib/llmgw, /etc/systemd/system)
#   LLMGW_NO_START=1   install, but start nothing
#   LLMGW_WAIT         seconds to wait for the control plane to know this machine (without: 120)
#
# Exit codes: 0 done, 64 usage, 65 wrong hash, 66 a file is missing, 69 no Python or no download,
#             70 llmgw does not run here, 75 started, but the control plane does not know it yet, 77 not root.
set -eu

# uv's static build, and what sha256sum says of it.
uv_version=0.12.9
uv_sha256_x86_64=aa4b1f8770910f7c7c543c7acc980e4270e52e70750c996acef813ea1c7c2912
uv_sha256_aarch64=7eb9bf48516448c9db6a9e436d8e747ac9c8a9cac74717160a29918249b080a6

say() { printf 'join.sh: %s\n' "$*" >&2; }

fail() {
    code=$1
    shift
    say "$@"
    exit "$code"
}

try() { printf '  try: %s\n' "$*" >&2; }

doing() {
    # In a dry run, only say what would be done.
    if [ -n "$dry" ]; then
        printf 'would: %s\n' "$*" >&2
    else
        "$@"
    fi
}

read_words() {
    role=agent dry='' print_unit='' no_python=''
    for word in "$@"; do
        case $word in
            agent | router | server) role=$word ;;
            --dry-run) dry=1 ;;
            --print-unit) print_unit=1 ;;
            --no-python) no_python=1 ;;
            -h | --help) sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0"; exit 0 ;;
            *) fail 64 "unknown word: $word (agent, router, server, --dry-run, --no-python)" ;;
        esac
    done
    prefix=${LLMGW_PREFIX:-/opt/llmgw} etc=${LLMGW_ETC:-/etc/llmgw} state=${LLMGW_STATE:-/var/lib/llmgw}
    units=${LLMGW_SYSTEMD_DIR:-/etc/systemd/system}
    sha256=$(printf '%s' "${LLMGW_SHA256:-}" | tr 'A-F' 'a-f')
    server=${LLMGW_SERVER:-}
    server=${server%/}
}

check_words() {
    case $sha256 in
        *[!0-9a-f]* | '') hash_is_missing ;;
    esac
    [ "${#sha256}" -eq 64 ] || hash_is_missing
    case $(uname -s) in
        Linux) ;;
        *) fail 64 "services are installed on Linux only; elsewhere run: sh ./llmgw.pyz $role" ;;
    esac
    [ "$role" = server ] || case $server in
        https://* | http://127.0.0.1:* | http://localhost:*) ;;
        '') fail 64 "LLMGW_SERVER is missing: the address of the control plane, https://HOST:7800" ;;
        *) fail 64 "LLMGW_SERVER: $server is not https://HOST:PORT" ;;
    esac
    if [ -n "${LLMGW_JOIN_FILE:-}" ] && [ ! -r "$LLMGW_JOIN_FILE" ]; then
        fail 66 "LLMGW_JOIN_FILE: there is no file $LLMGW_JOIN_FILE"
    fi
    if [ -z "$dry" ] && [ "$(id -u)" -ne 0 ] && [ -z "${LLMGW_PREFIX:-}" ]; then
        say "this installs a service and needs root"
        try "sudo --preserve-env=LLMGW_SERVER,LLMGW_JOIN,LLMGW_SHA256 sh join.sh $role"
        exit 77
    fi
}

hash_is_missing() {
    say "LLMGW_SHA256 is missing, or is no sha256: llmgw.pyz is never run unchecked"
    try "the line of llmgw.pyz ctl token create has it, and SHA256SUMS of the release"
    exit 64
}

find_python() {
    if look_for_python; then
        return
    fi
    say "no Python 3.9 or newer that has all that is needed${faults:-: none is installed}"
    if [ -z "$no_python" ] && [ -z "${LLMGW_PYTHON:-}" ]; then
        bring_python
        return
    fi
    # shellcheck source=/dev/null
    . /etc/os-release 2>/dev/null || true
    case " ${ID:-} ${ID_LIKE:-} " in
        *debian* | *ubuntu*) try "apt-get install -y python3" ;;
        *rhel* | *fedora* | *centos*) try "dnf install -y python3.11" ;;
        *suse*) try "zypper install python311" ;;
        *alpine*) try "apk add python3" ;;
        *) try "install python3, or name one with LLMGW_PYTHON" ;;
    esac
    exit 69
}

look_for_python() {
    faults=''
    for python in ${LLMGW_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 /usr/libexec/platform-python} \
        "$prefix"/python/cpython-*/bin/python3; do
        path=$(command -v "$python" 2>/dev/null) || continue
        if fault=$("$path" -I -c '
import sys
if sys.version_info < (3, 9):
    sys.exit("is Python %d.%d, 3.9 is needed" % sys.version_info[:2])
missing = []
for name in ("sqlite3", "ssl", "http.server", "tarfile", "json", "asyncio"):
    try:
        __import__(name)
    except ImportError:
        missing.append(name)
if missing:
    sys.exit("lacks " + " ".join(missing))
' 2>&1); then
            python=$path
            return 0
        fi
        faults="$faults
  $path: $fault"
    done
    return 1
}

bring_python() {
    # uv's hash stands in this file, those of the Pythons in uv.
    machine=$(uname -m)
    case $machine in
        x86_64) expected=$uv_sha256_x86_64 ;;
        aarch64 | arm64) machine=aarch64 expected=$uv_sha256_aarch64 ;;
        *) fail 69 "and none is brought for $machine: install python3, or name one with LLMGW_PYTHON" ;;
    esac
    expected=${LLMGW_UV_SHA256:-$expected}
    name=uv-$machine-unknown-linux-musl
    url=${LLMGW_UV_URL:-https://github.com/astral-sh/uv/releases/download/$uv_version/$name.tar.gz}
    if [ -n "$dry" ]; then
        doing load "$url", compare its sha256 with "$expected", and let it install a Python 3.12 in "$prefix/python"
        python=$prefix/python/cpython-3.12/bin/python3
        return
    fi
    say "uv brings a Python 3.12 (--no-python: it does not)"
    python=''
    work=$(mktemp -d "${TMPDIR:-/tmp}/llmgw-uv.XXXXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    load "$url" "$work/uv.tar.gz" || fail 69 "cannot load $url"
    found=$(hash_of "$work/uv.tar.gz")
    [ "$found" = "$expected" ] || fail 65 "$url has the sha256 $found, expected $expected; nothing was installed"
    tar -xzf "$work/uv.tar.gz" -C "$work" || fail 69 "cannot unpack $url"
    (umask 022 && HOME=$work UV_CACHE_DIR=$work/cache UV_NO_CONFIG=1 UV_PYTHON_INSTALL_DIR=$prefix/python \
        "$work/$name/uv" python install --no-bin --quiet 3.12 >&2) || {
        rm -rf "${prefix:?}/python"
        rmdir "$prefix" 2>/dev/null || true
        fail 69 "uv could not bring a Python: install python3, or name one with LLMGW_PYTHON"
    }
    rm -rf "$work"
    trap - EXIT
    look_for_python || fail 69 "the Python that uv brought does not run here:$faults"
}

hash_of() {
    if command -v sha256sum >/dev/null 2>&1; then
        sha256sum "$1" | cut -c1-64
    elif [ -z "$python" ]; then
        fail 69 "there is no sha256sum here to check $1 with"
    else
        "$python" -I -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$1"
    fi
}

load() {
    # load URL FILE [KEY_PIN], with whichever tool there is.
    if command -v curl >/dev/null 2>&1; then
        if [ -n "${3:-}" ]; then
            curl -fsS --retry 3 -k --pinnedpubkey "sha256//$3" -o "$2" "$1"
        else
            curl -fsS --retry 3 -L -o "$2" "$1"
        fi
    elif command -v wget >/dev/null 2>&1; then
        wget -q -O "$2" "$1"
    elif [ -z "$python" ]; then
        fail 69 "there is neither curl nor wget here to load $1 with"
    else
        "$python" -I -c 'import shutil, sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=60) as source, open(sys.argv[2], "wb") as out:
    shutil.copyfileobj(source, out)' "$1" "$2"
    fi
}

bring() {
    # Put the checked file in place under the name of its hash.
    file=$prefix/llmgw-$(printf '%s' "$sha256" | cut -c1-12).pyz
    if [ -f "$file" ] && [ "$(hash_of "$file")" = "$sha256" ]; then
        say "$file is here already"
        return
    fi
    url=${LLMGW_URL:-$server/llmgw.pyz}
    if [ -n "${LLMGW_FILE:-}" ]; then
        [ -r "$LLMGW_FILE" ] || fail 66 "LLMGW_FILE: there is no file $LLMGW_FILE"
        url=$LLMGW_FILE
    elif [ "$url" = /llmgw.pyz ]; then
        fail 64 "LLMGW_URL or LLMGW_FILE is missing: where llmgw.pyz comes from"
    fi
    if [ -n "$dry" ]; then
        doing install "$url" as "$file" after comparing its sha256 with "$sha256"
        return
    fi
    scratch=$(mktemp "${TMPDIR:-/tmp}/llmgw.XXXXXXXX")
    trap 'rm -f "$scratch" "$file.new"' EXIT
    trap 'exit 130' INT TERM
    if [ -n "${LLMGW_FILE:-}" ]; then
        cp "$LLMGW_FILE" "$scratch"
    else
        load "$url" "$scratch" "${LLMGW_KEY_PIN:-}" || fail 69 "cannot load $url"
    fi
    found=$(hash_of "$scratch")
    [ "$found" = "$sha256" ] || fail 65 "$url has the sha256 $found, expected $sha256; nothing was installed"
    mkdir -p "$prefix"
    chmod 755 "$prefix"
    cp "$scratch" "$file.new"
    chmod 755 "$file.new"
    version=$("$python" -I "$file.new" --version 2>&1) || fail 70 "llmgw does not run here: $version"
    mv "$file.new" "$file"
    say "installed $version as $file"
}

make_users() {
    [ "$(id -u)" -eq 0 ] || return 0
    case $role in
        agent) user=llmgw-engine ;;
        *) user=llmgw ;;
    esac
    if ! id "$user" >/dev/null 2>&1; then
        if command -v useradd >/dev/null 2>&1; then
            doing useradd --system --no-create-home --shell /usr/sbin/nologin "$user"
        elif command -v adduser >/dev/null 2>&1; then
            doing adduser -S -D -H "$user"
        else
            fail 69 "there is neither useradd nor adduser to make the user $user"
        fi
    fi
    if [ "$role" = agent ]; then
        for group in video render; do
            if grep -q "^$group:" /etc/group 2>/dev/null && command -v usermod >/dev/null 2>&1; then
                doing usermod -a -G "$group" "$user"
            fi
        done
    fi
}

put() {
    # put FILE MODE < text: whole or not at all; returns 1 when it was the same already.
    text=$(cat)
    if [ -f "$1" ] && [ "$(cat "$1")" = "$text" ]; then
        return 1
    fi
    if [ -n "$dry" ]; then
        doing write "$1"
        return 0
    fi
    mkdir -p "$(dirname "$1")"
    (umask 077 && printf '%s\n' "$text" > "$1.new")
    chmod "$2" "$1.new"
    mv "$1.new" "$1"
}

command_line() {
    # The words after the program; no secret is among them.
    case $role in
        agent) printf 'agent --server %s --data-dir %s/agent' "$server" "$state" ;;
        router) printf 'router --server %s --listen %s --data-dir %s/router' "$server" "${LLMGW_LISTEN:-0.0.0.0:7801}" "$state" ;;
        server) printf 'server --config %s --data-dir %s/server' "${LLMGW_CONFIG:-$etc/server.yaml}" "$state" ;;
    esac
    if [ "$role" != server ]; then
        printf ' --join-file %s/%s.join' "$etc" "$role"
    fi
}

unit() {
    # The unit of this role; the shipped files are made from the same text.
    cat <<UNIT
# Made by llmgw's join.sh; your own settings belong into a drop-in: systemctl edit llmgw-$role
[Unit]
Description=llmgw $role
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
WatchdogSec=120
ExecStart=$python -I $prefix/llmgw.pyz $(command_line)
Restart=always
RestartSec=2
EnvironmentFile=-$etc/$role.env
LimitNOFILE=1048576
RuntimeDirectory=llmgw-$role
RuntimeDirectoryPreserve=yes
Environment=SHIV_ROOT=%t/llmgw-$role
UMask=0027
ProtectKernelTunables=$([ "$role" = agent ] && echo no || echo yes)
ProtectKernelLogs=yes
ProtectClock=yes
ProtectHostname=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
UNIT
    if [ "$role" = agent ]; then
        cat <<UNIT
# Engines and gate outlive the agent: no PrivateTmp, no ProtectHome, and only the agent itself is ended.
KillMode=process
TasksMax=infinity
UNIT
    else
        cat <<UNIT
User=llmgw
ReadWritePaths=$state/$role
TimeoutStopSec=200
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
ProtectProc=invisible
ProcSubset=pid
RestrictNamespaces=yes
RestrictSUIDSGID=yes
MemoryDenyWriteExecute=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM
CapabilityBoundingSet=
RemoveIPC=yes
UNIT
    fi
    cat <<UNIT

[Install]
WantedBy=multi-user.target
UNIT
}

prepare() {
    # Folders, the join string (0600), a first server.yaml, the uninstaller.
    owner=root
    [ "$role" = agent ] || owner=llmgw
    if [ -n "$dry" ]; then
        doing make the folders "$state/$role" and "$etc"
    else
        mkdir -p "$state/$role" "$etc"
        # engines' user passes through the agent's folder; what is secret in it is closed by itself
        if [ "$role" = agent ]; then chmod 755 "$state"; else chmod 700 "$state/$role"; fi
        if [ "$(id -u)" -eq 0 ]; then chown "$owner" "$state/$role"; fi
    fi
    proxies=$(keep_proxies)
    if [ -n "$proxies" ]; then
        printf '%s\n' "$proxies" | put "$etc/$role.env" 600 || true
    fi
    if [ "$role" = server ] && [ -z "${LLMGW_CONFIG:-}" ] && [ ! -e "$etc/server.yaml" ]; then
        put "$etc/server.yaml" 644 <<'YAML' || true
# What the cluster should be; docs/configuration.md explains every key.
listen: 0.0.0.0:7800
YAML
    fi
    if [ "$role" != server ]; then
        if [ -n "${LLMGW_JOIN_FILE:-}" ]; then
            put "$etc/$role.join" 600 < "$LLMGW_JOIN_FILE" || true
        elif [ -n "${LLMGW_JOIN:-}" ]; then
            printf '%s\n' "$LLMGW_JOIN" | put "$etc/$role.join" 600 || true
        elif [ ! -e "$etc/$role.join" ] && [ ! -e "$(credential)" ]; then
            fail 64 "LLMGW_JOIN is missing: the string that llmgw.pyz ctl token create prints"
        fi
        if [ -z "$dry" ] && [ -e "$etc/$role.join" ] && [ "$(id -u)" -eq 0 ]; then chown "$owner" "$etc/$role.join"; fi
    fi
}

keep_proxies() {
    # What is said to this shell about proxies, the service must know too.
    for name in http_proxy https_proxy no_proxy; do
        value=$(eval "printf '%s' \"\${$name:-}\"")
        if [ -n "$value" ]; then printf '%s=%s\n' "$name" "$value"; fi
    done
}

credential() {
    if [ "$role" = agent ]; then printf '%s/agent/state/credential.json' "$state"; else printf '%s/%s/credential.json' "$state" "$role"; fi
}

start() {
    changed=''
    [ "$(readlink "$prefix/llmgw.pyz" 2>/dev/null || true)" = "$file" ] || changed=1
    if [ -n "$changed" ]; then
        doing ln -s "$file" "$prefix/.llmgw.pyz.new"
        doing mv -f "$prefix/.llmgw.pyz.new" "$prefix/llmgw.pyz"
    fi
    if ! command -v systemctl >/dev/null 2>&1 || { [ -z "${LLMGW_NO_START:-}" ] && ! is_booted; }; then
        say "there is no systemd here; start it like this, and again at each boot:"
        printf '  %s -I %s/llmgw.pyz %s\n' "$python" "$prefix" "$(command_line)" >&2
        return
    fi
    if unit | put "$units/llmgw-$role.service" 644; then
        changed=1
        if is_booted; then doing systemctl daemon-reload; fi
    fi
    if [ -n "${LLMGW_NO_START:-}" ]; then
        say "installed, not started: systemctl enable --now llmgw-$role"
        return
    fi
    doing systemctl enable "llmgw-$role.service"
    if [ -n "$changed" ]; then
        doing systemctl restart "llmgw-$role.service"
    elif systemctl is-active --quiet "llmgw-$role.service"; then
        say "llmgw-$role runs, and nothing of it has changed"
    else
        doing systemctl start "llmgw-$role.service"
    fi
    [ -n "$dry" ] || wait_for_it
}

is_booted() {
    # A container often has systemctl and no systemd that runs; sd_booted(3) looks here, too.
    [ -d "${LLMGW_SYSTEMD_RUN:-/run/systemd/system}" ]
}

wait_for_it() {
    case $role in
        agent) proof=$state/agent/state/desired.json ;;
        router) proof=$state/router/table.json ;;
        server) proof=$state/server/endpoint.json ;;
    esac
    left=${LLMGW_WAIT:-120}
    while [ ! -e "$proof" ]; do
        if [ "$left" -le 0 ]; then
            say "llmgw-$role was started, but the control plane does not know it yet"
            try "journalctl -u llmgw-$role -n 50"
            exit 75
        fi
        left=$((left - 1))
        sleep 1
    done
    if [ "$role" = agent ]; then
        name=$(sed -n 's/.*"name":"\([^"]*\)".*/\1/p' "$(credential)" 2>/dev/null || true)
        say "the control plane knows this node${name:+ as $name}: llmgw.pyz ctl nodes shows it"
    else
        say "llmgw-$role runs"
    fi
}

main() {
    read_words "$@"
    if [ -n "$print_unit" ]; then
        python=${LLMGW_PYTHON:-/usr/bin/python3}
        unit
        return
    fi
    check_words
    find_python
    bring
    make_users
    prepare
    start
}

main "$@"
