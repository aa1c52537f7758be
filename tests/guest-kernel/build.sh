#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# The lab's guest kernel with a mask of CPUs to avoid: Debian's linux-source-6.12, our change to its scheduler (mask/), a small
# configuration (kernel.config).
#
#   build.sh          builds it, unless it is in the cache
#   build.sh --find   prints the path of the image; fails when it is not in the cache
#
# Called by tests/setup.sh, which installs what it needs. The image is kept under the hash of this folder's files, so that each change
# of them makes another one, and under the version of Debian's package. That version vanishes from Debian's index when
# the next one comes: an image in the cache stays, also when there is a newer package.
# It is safe to interrupt it and to start it twice: the image appears under its name only when it is whole.
set -euo pipefail

package=linux-source-6.12
here=$(cd "$(dirname "$0")" && pwd)
cache=${HINT_LAB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hint-broker}/guest-kernel
inputs=(build.sh kernel.config mask/apply.sh mask/avoid.c mask/avoid.h mask/avoid_push.c)

say() { printf 'guest kernel: %s\n' "$*"; }
fail() {
    printf 'guest kernel: %s\n' "$@" >&2
    exit 1
}

hash=$(cd "$here" && sha256sum "${inputs[@]}" | sha256sum | cut -c 1-16)

# Prints the image's path if it is in the cache.
find_image() {
    local image
    for image in "$cache"/*-"$hash"/bzImage; do
        [ ! -f "$image" ] || { printf '%s\n' "$image"; return 0; }
    done
    return 1
}

# Debian's candidate of today.
source_version() {
    apt-cache show --no-all-versions "$package" 2>/dev/null | awk '$1 == "Version:" { print $2; exit }'
}

# The sources of graphics drivers are a third of the tree, and nothing here uses them; their Kconfig files stay.
unpack() {
    local deb=$1 to=$2
    mkdir -p "$to"
    dpkg-deb --fsys-tarfile "$deb" | tar -xO "./usr/src/$package.tar.xz" |
        tar -xJ -C "$to" --strip-components=1 --exclude='*/drivers/gpu/drm/*.[ch]'
}

# Every line of kernel.config must be in the configuration that came of it.
check_config() {
    local found=$1 lost
    lost=$(grep '^CONFIG_' "$here/kernel.config" | grep -vxFf "$found" || true)
    [ -z "$lost" ] || fail "these lines of kernel.config did not come out, for a dependency or a name that changed:" "$lost"
}

# Names and times are not part of the image, so that equal inputs give equal images.
run_make() {
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u ARCH -u CROSS_COMPILE LC_ALL=C \
        KBUILD_BUILD_USER=hint KBUILD_BUILD_HOST=lab KBUILD_BUILD_TIMESTAMP="$built_at" \
        make --silent -C "$work/source" O="$work/out" "$@"
}

build() {
    local version deb dir
    version=$(source_version)
    [ -n "$version" ] ||
        fail "Debian's package index has no $package: it is in bookworm-security." \
            "Check that /etc/apt/sources.list* names it and run 'apt-get update' as root."
    dir=$cache/$version-$hash
    say "building it from $package $version into $dir (153 MB to fetch; 2 GB of space and a few minutes while it builds)"
    rm -rf "$work"
    mkdir -p "$work"
    (cd "$work" && apt-get download -qq -o APT::Sandbox::User=root "$package=$version")
    deb=$(echo "$work"/*.deb)
    built_at=$(dpkg-deb --fsys-tarfile "$deb" | tar -tv --full-time "./usr/src/$package.tar.xz" | awk '{ print $4, $5 }')
    unpack "$deb" "$work/source"
    rm "$deb"
    "$here/mask/apply.sh" "$work/source"
    run_make KCONFIG_ALLCONFIG="$here/kernel.config" allnoconfig
    check_config "$work/out/.config"
    run_make -j"$(nproc)" bzImage
    mkdir "$work/image"
    cp "$work/out/arch/x86/boot/bzImage" "$work/out/.config" "$work/image"
    rm -rf "$dir"
    mv "$work/image" "$dir"
    rm -rf "$work"
    say "built $(find_image)"
}

case ${1:-} in
--find) find_image || fail "no image with the hash $hash in $cache: run 'make setup'" ;;
'')
    if ! find_image >/dev/null; then
        mkdir -p "$cache"
        exec 8>"$cache/lock"
        flock -n 8 || {
            say "another build runs: waiting for it"
            flock 8
        }
        # The other build may have made it.
        work=$cache/tmp
        find_image >/dev/null || build
    fi
    ;;
*) fail "usage: build.sh [--find]" ;;
esac
