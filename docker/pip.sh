#!/bin/sh
# Installs locked wheels into an environment: pip.sh PYTHON ARGUMENT...
#
# Every requirement of a file must carry its hash. Where the build context `wheels` holds wheels no index is asked.
set -eu
python=$1
shift
if [ -s /run/secrets/ca_bundle ]; then
    export PIP_CERT=/run/secrets/ca_bundle
fi
case ${1:-} in
    -r) set -- --require-hashes --only-binary :all: "$@" ;;
    *) set -- --no-index "$@" ;;
esac
if ls /wheels/*.whl >/dev/null 2>&1; then
    set -- --no-index --find-links /wheels "$@"
fi
# pip runs in the environment's Python, whose byte code would hold the time of this build.
export PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_RETRIES=5
exec /build/pip/bin/python -m pip --python "$python" install --quiet --no-deps --no-compile "$@"
