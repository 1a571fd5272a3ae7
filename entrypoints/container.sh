#!/bin/sh
# Start of every image: places for caches, the image's own target, then `sol`. It decides nothing else.
#
#   docker run IMAGE                     what the image is for: its benchmark (sol-verify: help)
#   docker run IMAGE VERB [OPTION ...]   a verb of sol; verbs that want a target get the image's own
#   docker run IMAGE shell [-c COMMAND]  a shell in the same surroundings
set -eu

identity=$(sha256sum /opt/sol/image/image.json | cut -c1-64)
# An image cannot know the digest it was pulled by. Whoever starts it may say so; otherwise its content digest stands for it.
export SOL_IMAGE_DIGEST="${SOL_IMAGE_DIGEST:-sha256:$identity}"
export USER=sol LOGNAME=sol # no name belongs to an arbitrary --user
umask 022

if [ -n "${SOL_TARGET:-}" ]; then
    place=/caches/$SOL_TARGET-$(uname -m)-$(printf %.12s "$identity")
    if ! mkdir -p "$place/home" "$place/tmp" 2>/dev/null || ! [ -w "$place/tmp" ]; then
        echo "sol: /caches is not writable for user $(id -u):$(id -g)" >&2
        echo "needed: one writable volume for HOME and for what Triton, inductor, CUDA and Python compile" >&2
        echo "try: docker run -v sol-caches:/caches ... (of another user's volume: docker volume rm sol-caches)" >&2
        exit 10
    fi
    export HOME="$place/home" TMPDIR="$place/tmp" XDG_CACHE_HOME="$place/home/.cache"
    export TRITON_CACHE_DIR="$place/triton" TVM_FFI_CACHE_DIR="$place/tvm-ffi"
    export TORCHINDUCTOR_CACHE_DIR="$place/inductor" CUDA_CACHE_PATH="$place/cuda" PYTHONPYCACHEPREFIX="$place/python"
    for built in triton tvm-ffi; do # what was compiled with the image; whole or not there
        if [ -d "/opt/sol/kernels/$built" ] && [ ! -d "$place/$built" ]; then
            copy=$(mktemp -d "$place/.$built.XXXXXX")
            cp -r "/opt/sol/kernels/$built/." "$copy"
            mv -T "$copy" "$place/$built" 2>/dev/null || rm -rf "$copy" # another container was faster
        fi
    done
    # Weights in a volume of their own, if one is given; a synthetic checkpoint may as well lie among the caches.
    if [ -z "${SOL_CACHE:-}" ]; then
        if grep -q ' /weights ' /proc/self/mounts; then SOL_CACHE=/weights; else SOL_CACHE=/caches/checkpoints; fi
        export SOL_CACHE
    fi
else
    export HOME="${TMPDIR:-/tmp}"
fi

verb=${1:-}
if [ "$verb" = shell ]; then
    shift
    exec /bin/bash "$@"
fi
if [ -n "${SOL_TARGET:-}" ]; then
    case $verb in
        benchmark | doctor | fetch | print | synth)
            shift
            case ${1:-} in '' | -*) set -- "$SOL_TARGET" "$@" ;; esac
            set -- "$verb" "$@"
            ;;
    esac
fi
# A signing key arrives as a secret, never as an environment variable or a layer.
case $verb in
    benchmark | sign)
        case " $* " in
            *" --key"* | *" --help "* | *" --no-sign "*) ;;
            *) [ ! -s /run/secrets/signing_key ] || set -- "$@" --key /run/secrets/signing_key ;;
        esac
        ;;
esac
exec /opt/sol/venv/bin/sol "$@"
