#!/usr/bin/env bash
# Sets up what `make demo` and `make test` need: ffmpeg, and a virtual environment with the locked CPU environment.
#
#   SOL_VENV    folder of the virtual environment (default: .venv in the checkout)
#   SOL_PYTHON  the Python to build it with (default: the first of python3.11, python3.12, python3.13, python3 that fits)
#
# Does only what is missing, so it may be run again at any time. Whatever changes the environment runs under a lock beside it
# and between `incomplete` being written and removed: a run that was killed is started over by the next one, from pip's cache.
# Exit codes: 0 ready, 10 something is missing that only the user can provide (said on standard error), 130 interrupted.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
image=$root/images/cpu
venv=${SOL_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
state=$venv/.setup # what is installed, as fingerprints of what asked for it
log=$state/log

# A pip that is told elsewhere to install into the user's home, or another environment's modules, would break this one.
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_REQUIREMENT
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONNOUSERSITE=1

say() { printf '[setup %d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

fail() { # finding, need, remedy, ...
    printf '\n' >&2
    printf '%s\n' "$@" >&2
    exit 10
}

# What the log says went wrong: its last errors, or simply its end.
why() { grep -E '^ *(ERROR|E):' "$log" | tail -n 4 || tail -n 5 "$log"; }

child='' pulse=''
stop() {
    [ -z "$child" ] || kill "$child" 2>/dev/null || true
    [ -z "$pulse" ] || kill "$pulse" 2>/dev/null || true
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Run a command with its output in the log and a sign of life every 15 seconds.
quietly() { # label, command ...
    local label=$1 status=0
    shift
    say "$label"
    (
        exec 9>&- # a sleeping pulse must not hold the lock
        while sleep 15 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do say "$label: still going"; done
    ) &
    pulse=$!
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    wait "$child" || status=$?
    child=''
    kill "$pulse" 2>/dev/null || true
    wait "$pulse" 2>/dev/null || true
    pulse=''
    return $status
}

thrice() { # label, command ...
    local label=$1 attempt
    shift
    quietly "$label" "$@" && return 0
    for attempt in 2 3; do
        sleep "$attempt"
        quietly "$label: attempt $attempt of 3" "$@" && return 0
    done
    return 1
}

# ---------------------------------------------------------------- system packages

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo -n "$@"
    fi
}

# Whether packages can be installed here without asking anybody for a password.
may_apt() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }
}

apt_install() { # package ...
    as_root apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 update &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 \
            install -y --no-install-recommends "$@"
}

has_ffmpeg() {
    local encoders
    command -v ffmpeg >/dev/null && command -v ffprobe >/dev/null || return 1
    encoders=$(ffmpeg -hide_banner -encoders 2>/dev/null </dev/null) || return 1
    [[ $encoders == *libx264* ]]
}

need_ffmpeg() {
    has_ffmpeg && return 0
    local line='sudo apt-get update && sudo apt-get install -y --no-install-recommends ffmpeg'
    local found
    found="found: $(command -v ffmpeg || echo 'no ffmpeg'), $(command -v ffprobe || echo 'no ffprobe') on PATH"
    may_apt || fail "ffmpeg with libx264, and ffprobe, are not installed ($found)." \
        "SGLang writes the video with the one and checks it with the other." "Type: $line"
    thrice "ffmpeg, with apt-get" apt_install ffmpeg ||
        fail "apt-get could not install ffmpeg; from $log:" "$(why)" "Type: $line"
    has_ffmpeg || fail "ffmpeg was installed, but the one on PATH still has no libx264 or no ffprobe ($found)." \
        "SGLang writes H.264 with libx264." "Put Debian's /usr/bin in front of the other one on PATH, and run this again."
}

# ---------------------------------------------------------------- Python

fits() { # command: whether it runs, and is CPython 3.11 to 3.13
    "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13) and sys.implementation.name == "cpython"))' \
        2>/dev/null </dev/null
}

python_package() { # the Python of this system's own archive that fits
    local codename=''
    [ ! -r /etc/os-release ] || codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    case $codename in
        bookworm | jammy) echo python3.11 ;;
        trixie | plucky | questing) echo python3.13 ;;
        *) echo python3.12 ;;
    esac
}

find_python() { # sets `python`
    local candidate package
    if [ -n "${SOL_PYTHON:-}" ]; then
        fits "$SOL_PYTHON" || fail "SOL_PYTHON=$SOL_PYTHON does not run, or is not CPython 3.11 to 3.13." \
            "The locked wheels exist for those versions only." "Name another one, or unset SOL_PYTHON."
        python=$SOL_PYTHON
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        # found is not enough: version managers leave names on PATH that refuse to run
        if command -v "$candidate" >/dev/null && fits "$candidate"; then
            python=$candidate
            return
        fi
    done
    package=$(python_package)
    fail "No CPython 3.11, 3.12 or 3.13 on PATH (looked for python3.11, python3.12, python3.13, python3)." \
        "The locked wheels exist for those versions only." "Type: sudo apt-get install -y $package $package-venv"
}

need_venv_module() { # Debian and Ubuntu ship venv without the pip that it puts into an environment
    local package
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return 0
    package=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv
    may_apt || fail "$python cannot make virtual environments: its ensurepip module is missing." \
        "It comes with the package $package." \
        "Type: sudo apt-get update && sudo apt-get install -y --no-install-recommends $package"
    thrice "$package, with apt-get" apt_install "$package" ||
        fail "apt-get could not install $package; from $log:" "$(why)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python still has no ensurepip module after $package was installed." \
            "It is probably not the system's own Python ($(command -v "$python"))." \
            "Set SOL_PYTHON to a complete Python, for example SOL_PYTHON=/usr/bin/python3."
}

# ---------------------------------------------------------------- the environment

# For `quietly` alone: exec puts pip itself in the child's place, so that stopping the child stops pip.
# Without byte code: compiling all of it takes longer than installing it, and Python compiles what it imports by itself.
pip_install() { exec "$venv/bin/python" -m pip install --no-deps --no-compile "$@"; }
pip_locked() { pip_install --require-hashes --only-binary :all: "$@"; }

# "version sha256 index" of the torch wheel that image.toml pins for a Python on this machine.
torch_pin() { # python
    "$1" - "$image/image.toml" <<'PYTHON'
import platform, sys, tomllib

pins = tomllib.load(open(sys.argv[1], "rb"))["torch"]
tag = "cp%d%d" % sys.version_info[:2]
ending = f"-{tag}-{tag}-manylinux_2_28_{platform.machine()}.whl"
for wheel in pins["wheels"]:
    if wheel["file"].endswith(ending):
        print(pins["version"], wheel["sha256"], pins["index"])
        break
else:
    sys.exit(f"torch {pins['version']} has no wheel that ends in {ending}")
PYTHON
}

fingerprint() { # what the environment was made from; $1 the torch pin
    { printf '%s\n' "$venv" "$1" && cat "$image/requirements.lock"; } | sha256sum | cut -d' ' -f1
}

stamped() { # name, value
    [ -r "$state/$1" ] && [ "$(cat "$state/$1")" = "$2" ]
}

stamp() { # name, value; complete or not there
    printf '%s\n' "$2" >"$state/.$1" && mv -f "$state/.$1" "$state/$1"
}

sound() { # whether the environment is finished and made from today's lock
    local pin
    [ -e "$state/environment" ] && [ ! -e "$state/incomplete" ] && fits "$venv/bin/python" || return 1
    pin=$(torch_pin "$venv/bin/python" 2>/dev/null) && stamped environment "$(fingerprint "$pin")"
}

own_folder() {
    if [ -e "$venv" ] && [ ! -e "$state" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv exists and was not made by this script." "It would have to be emptied." \
            "Remove it, or set SOL_VENV to another folder."
    fi
    mkdir -p "$state"
}

make_environment() {
    local pin version sha256 index cuda
    find_python
    : >"$state/incomplete"
    rm -f "$state/environment" "$state/dev" "$state/project" "$log"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .setup -exec rm -rf {} +
    need_venv_module
    pin=$(torch_pin "$python") || fail "PyTorch $pin: no CPU build for $("$python" -V) on $(uname -m)." \
        "Needed: CPython 3.11 to 3.13 on x86_64 or aarch64."
    read -r version sha256 index <<<"$pin"

    quietly "virtual environment in $venv, $("$python" -V)" "$python" -m venv "$venv" ||
        fail "the virtual environment could not be made; from $log:" "$(why)"

    # The local version +cpu and the hash cannot be satisfied by a CUDA build, wherever pip looks.
    printf 'torch==%s --hash=sha256:%s\n' "$version" "$sha256" >"$state/torch.txt"
    quietly "torch $version, from where pip is set up to look" pip_locked -r "$state/torch.txt" ||
        thrice "torch $version, from $index" pip_locked --index-url "$index" -r "$state/torch.txt" ||
        fail "torch $version could not be installed; from $log:" "$(why)" \
            "Needed: the wheel with SHA-256 $sha256, from $index or from an index that pip knows." \
            "Behind a proxy or mirror: pip config set global.extra-index-url URL, and run this again."

    thrice "$(grep -c '==' "$image/requirements.lock") locked packages" pip_locked -r "$image/requirements.lock" ||
        fail "the locked packages could not be installed; from $log:" "$(why)" \
            "Check the network and the free disk space (3 GB are needed), and run this again."

    cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda)' 2>>"$log") ||
        fail "torch was installed but does not import; from $log:" "$(why)"
    [ "$cuda" = None ] || fail "torch in $venv is built for CUDA $cuda." "The CPU target runs PyTorch's CPU build, $version." \
        "Something on this machine replaces the pinned wheel: look at 'pip config list', and run this again."
    stamp environment "$(fingerprint "$pin")"
    rm -f "$state/incomplete"
}

install_dev() {
    local digest
    digest=$(sha256sum <"$image/requirements-dev.lock")
    stamped dev "$digest" && return 0
    : >"$state/incomplete"
    thrice "$(grep -c '==' "$image/requirements-dev.lock") tools for tests" pip_locked -r "$image/requirements-dev.lock" ||
        fail "the test tools could not be installed; from $log:" "$(why)"
    stamp dev "$digest"
    rm -f "$state/incomplete"
}

install_project() {
    local digest
    digest=$({ printf '%s\n' "$root" && cat "$root/pyproject.toml"; } | sha256sum)
    stamped project "$digest" && return 0
    : >"$state/incomplete"
    quietly "the sol command" pip_install --no-build-isolation --editable "$root" ||
        fail "the project itself could not be installed; from $log:" "$(why)"
    stamp project "$digest"
    rm -f "$state/incomplete"
}

command -v flock >/dev/null || fail "flock is missing." "Two set-ups at once would spoil each other." \
    "It is part of util-linux: sudo apt-get install -y util-linux"
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
if ! flock -n 9; then
    say "another set-up of $venv is running: waiting for it"
    flock 9
fi

own_folder
need_ffmpeg
sound || make_environment
install_dev
install_project
say "ready: $venv"
