#!/usr/bin/env bash
# A Docker engine that can build these images, for machines that have none: continuous integration and development.
#
#   scripts/docker_engine.sh start     use the engine that is there, or set one up and start it
#   scripts/docker_engine.sh env       the lines that make a shell talk to it: eval "$(scripts/docker_engine.sh env)"
#   scripts/docker_engine.sh base      import a minimal Debian as local/debian:bookworm (for machines that cannot pull)
#   scripts/docker_engine.sh stop      end the engine that `start` started; --purge removes its images as well
#
#   SOL_ENGINE_DIR  where its programs, images and socket lie (default: /var/tmp/sol-docker-engine)
#
# An engine that is reachable already is taken as it is. Otherwise this needs root and Debian or Ubuntu with apt-get: Debian 13's
# engine 26.1 is unpacked below SOL_ENGINE_DIR (nothing of it is installed) and runs beside the system's runc. It keeps images in
# containerd's store, without which BuildKit cannot rewrite timestamps. Every step is skipped when it is done already.
# Exit codes: 0 ready, 10 no engine can be had here (the reason on standard error).
set -euo pipefail

dir=${SOL_ENGINE_DIR:-/var/tmp/sol-docker-engine}
socket=$dir/docker.sock
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mirror=${SOL_DEBIAN_MIRROR:-http://deb.debian.org/debian}
base=local/debian:bookworm
epoch=1767225600 # 2026-01-01: the base's own time; any fixed one would do

refuse() { # reason, remedy
    printf '%s\n' "$@" >&2
    exit 10
}
say() { printf '[engine] %s\n' "$*" >&2; }
running() { [ -S "$socket" ] && docker_ info >/dev/null 2>&1; }
docker_() { DOCKER_HOST=unix://$socket DOCKER_CONFIG=$dir/config "$dir/programs/usr/bin/docker" "$@"; }
export DEBIAN_FRONTEND=noninteractive
apt_() { as_root apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@"; }

reachable() { command -v docker >/dev/null && docker info >/dev/null 2>&1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

need() { # program, package
    command -v "$1" >/dev/null || missing+=("$2")
}

install_helpers() { # program ... (the package has the same name)
    local missing=() program
    for program in "$@"; do need "$program" "$program"; done
    [ -r "$keyring" ] || missing+=(debian-archive-keyring)
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    apt_ update && apt_ install -y --no-install-recommends "${missing[@]}" >/dev/null ||
        refuse "apt-get could not install ${missing[*]}." "Install them, or Docker itself, and try again."
}

unpack_engine() {
    [ ! -e "$dir/programs/.complete" ] || return 0
    local apt=$dir/apt
    say "unpacking Debian 13's Docker engine below $dir"
    rm -rf "$apt" "$dir/programs"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs" "$dir/programs"
    echo "deb [signed-by=$keyring] $mirror trixie main" >"$apt/sources.list"
    local options=(-o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$apt/lists"
        -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root)
    apt_ "${options[@]}" update || refuse "Debian's archive cannot be reached: $mirror" "Set SOL_DEBIAN_MIRROR to a mirror."
    (cd "$apt/debs" && apt_ "${options[@]}" download docker.io containerd docker-cli docker-buildx docker-compose) ||
        refuse "the Docker packages of Debian 13 could not be downloaded from $mirror."
    local package
    for package in "$apt"/debs/*.deb; do dpkg-deb -x "$package" "$dir/programs"; done
    mkdir -p "$dir/config/cli-plugins"
    cp "$dir"/programs/usr/libexec/docker/cli-plugins/* "$dir/config/cli-plugins/"
    rm -rf "$apt"
    : >"$dir/programs/.complete"
}

start() {
    if running; then
        say "running: $socket"
        return 0
    fi
    if reachable; then # a second one beside it would fight over the same bridge
        docker buildx version >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 ||
            refuse "the Docker engine here has no buildx or no compose." "Install both plugins."
        [[ $(docker info --format '{{.DriverStatus}}') == *io.containerd.snapshotter* ]] ||
            refuse "the Docker engine here does not keep images in containerd's store, so it cannot rewrite timestamps." \
                'Put {"features": {"containerd-snapshotter": true}} into /etc/docker/daemon.json and restart it.'
        say "using the engine that is here: $(docker info --format '{{.ServerVersion}}')"
        return 0
    fi
    [ "$(id -u)" = 0 ] || refuse "no Docker engine is reachable, and starting one needs root." \
        "Start Docker, or run this as root."
    command -v apt-get >/dev/null || refuse "no Docker engine is reachable, and apt-get is not here to set one up." \
        "Install Docker with buildx and compose."
    [ "$(uname -m)" = x86_64 ] || [ "$(uname -m)" = aarch64 ] || refuse "no engine is packaged for $(uname -m)."
    install_helpers iptables runc
    unpack_engine
    echo '{"features": {"containerd-snapshotter": true}}' >"$dir/daemon.json"
    say "starting dockerd, log in $dir/log"
    PATH=$dir/programs/usr/bin:$dir/programs/usr/sbin:$PATH setsid "$dir/programs/usr/sbin/dockerd" --config-file "$dir/daemon.json" \
        --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/docker.pid" -H "unix://$socket" \
        >"$dir/log" 2>&1 </dev/null &
    local waited
    for waited in $(seq 60); do
        if running; then
            say "ready after $waited s"
            return 0
        fi
        kill -0 $! 2>/dev/null || break
        sleep 1
    done
    stop
    refuse "dockerd does not start here; the end of $dir/log:" "$(tail -n 3 "$dir/log")"
}

stop() {
    local pid
    pid=$(cat "$dir/docker.pid" 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null || return 0
    while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
}

import_base() {
    if docker_client image inspect $base >/dev/null 2>&1; then
        say "$base is there"
        return 0
    fi
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null || refuse "making a base image needs root, or sudo without a password."
    install_helpers mmdebstrap
    mkdir -p "$dir"
    say "making $base with mmdebstrap"
    local exclude=() folder
    for folder in doc man locale info; do exclude+=("--dpkgopt=path-exclude=/usr/share/$folder/*"); done
    as_root env SOURCE_DATE_EPOCH=$epoch mmdebstrap --quiet --variant=minbase --include=ca-certificates "${exclude[@]}" bookworm \
        "$dir/base.tar" "$mirror" || refuse "mmdebstrap could not make a base from $mirror."
    docker_client import "$dir/base.tar" $base >/dev/null
    as_root rm -f "$dir/base.tar"
}

docker_client() { if running; then docker_ "$@"; else docker "$@"; fi; }

case ${1:-} in
    start) start ;;
    env)
        if running; then
            printf 'export DOCKER_HOST=%q DOCKER_CONFIG=%q PATH=%q:"$PATH"\n' "unix://$socket" "$dir/config" "$dir/programs/usr/bin"
        fi
        ;;
    base) import_base ;;
    stop)
        stop
        [ "${2:-}" != --purge ] || rm -rf "$dir"
        ;;
    *)
        sed -n '2,8p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
