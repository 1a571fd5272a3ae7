#!/usr/bin/env bash
# Prints what the images weigh and how long they take: sizes, a second build with a warm cache, the start of `sol verify`.
#
#   scripts/image_figures.sh [OPTION of build_image.py ...]    for example: --local-base --wheels DIR
#
# Builds sol-cpu and sol-verify in the engine that `docker` talks to. Nothing here is a test: a busy machine is slow.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
narrow=(--rm --read-only --cap-drop ALL --network none --user 12345:12345)

seconds() { # command ...
    local begun=$EPOCHREALTIME ended
    "$@" >/dev/null 2>&1
    ended=$EPOCHREALTIME
    awk "BEGIN { printf \"%.2f s\", $ended - $begun }"
}

printf 'first build (as far as nothing is cached)  %s\n' "$(seconds "$root/scripts/build_image.py" cpu verify "$@")"
printf 'second build, warm cache                   %s  (at most 30 s)\n' \
    "$(seconds "$root/scripts/build_image.py" cpu verify "$@")"
for target in cpu verify; do
    size=$(docker run --rm --user 0 --network none --entrypoint du "sol-$target" -sxk / 2>/dev/null | cut -f1)
    limit=$([ $target = cpu ] && echo 3600 || echo 500)
    awk "BEGIN { printf \"sol-%-7s uncompressed                   %.0f MB  (at most $limit MB)\n\", \"$target\", $size * 1024 / 1e6 }"
done
docker run "${narrow[@]}" sol-verify verify --help >/dev/null
for _ in 1 2 3; do
    printf 'sol-verify: docker run ... verify --help   %s\n' "$(seconds docker run "${narrow[@]}" sol-verify verify --help)"
done
printf 'sol-verify: an empty container             %s\n' \
    "$(seconds docker run "${narrow[@]}" --entrypoint /bin/true sol-verify)"
printf 'sol-verify: sol verify --help inside       '
docker run "${narrow[@]}" --entrypoint /bin/bash sol-verify -c \
    'b=$EPOCHREALTIME; sol verify --help >/dev/null; e=$EPOCHREALTIME; awk "BEGIN { printf \"%.2f s  (at most 1 s)\n\", $e - $b }"'
