#!/usr/bin/env bash
# Prints what a plain `pip install .` (or, with an argument, `pip install ".[media]"`) adds to a fresh virtual environment.
#
#   scripts/install_size.sh [EXTRA]
#
# In MB of 10^6 bytes of disk blocks, byte code included. Needs a package index; leaves nothing behind.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
megabytes() { du -sk "$scratch/env" | awk '{ printf "%.0f", $1 * 1024 / 1e6 }'; }

"${SOL_PYTHON:-python3}" -m venv "$scratch/env"
before=$(megabytes)
"$scratch/env/bin/python" -m pip install --quiet --disable-pip-version-check "$root${1:+[$1]}"
after=$(megabytes)
echo "pip install .${1:+[$1]}: $((after - before)) MB"
du -sk "$scratch"/env/lib/python*/site-packages/* | sort -rn | head -n 8 |
    awk '{ name = $2; sub(/.*\//, "", name); printf "  %5.0f MB  %s\n", $1 * 1024 / 1e6, name }'
