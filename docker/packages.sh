#!/bin/sh
# Installs packages of the base's own archive, from the dated snapshot in APT_SNAPSHOT where one is named, and leaves behind
# nothing that differs from one build to the next: no lists, logs, linker or font caches.
set -eu

ca=/run/secrets/ca_bundle
if [ -s "$ca" ]; then
    printf 'Acquire::https::CaInfo "%s";\n' "$ca" >/etc/apt/apt.conf.d/99-build-ca
fi
if [ -n "${APT_SNAPSHOT:-}" ]; then
    . /etc/os-release
    mkdir -p /tmp/apt-kept
    mv /etc/apt/sources.list /etc/apt/sources.list.d /tmp/apt-kept/ 2>/dev/null || true
    mkdir -p /etc/apt/sources.list.d
    case $ID in
        debian)
            at="[check-valid-until=no] http://snapshot.debian.org/archive"
            printf 'deb %s main\n' "$at/debian/$APT_SNAPSHOT $VERSION_CODENAME" \
                "$at/debian/$APT_SNAPSHOT $VERSION_CODENAME-updates" \
                "$at/debian-security/$APT_SNAPSHOT $VERSION_CODENAME-security" >/etc/apt/sources.list
            ;;
        ubuntu)
            for suite in "$VERSION_CODENAME" "$VERSION_CODENAME-updates" "$VERSION_CODENAME-security"; do
                echo "deb [check-valid-until=no] http://snapshot.ubuntu.com/ubuntu/$APT_SNAPSHOT $suite main universe"
            done >/etc/apt/sources.list
            ;;
        *) echo "no dated snapshot is known for $ID" >&2 && exit 1 ;;
    esac
fi

export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o Acquire::Retries=3 update
apt-get -qq -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 install -y --no-install-recommends "$@" >/dev/null

if [ -d /tmp/apt-kept ]; then
    rm -rf /etc/apt/sources.list /etc/apt/sources.list.d
    mv /tmp/apt-kept/* /etc/apt/
fi
rm -rf /etc/apt/apt.conf.d/99-build-ca /tmp/apt-kept /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb \
    /var/cache/ldconfig/aux-cache /var/cache/fontconfig/* /var/cache/debconf/*-old /var/lib/dpkg/*-old /var/log/apt /var/log/*.log
find / -xdev -name __pycache__ -type d -path '/usr/*' -prune -exec rm -rf {} +
