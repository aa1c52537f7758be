#!/bin/bash
# Everything that the lab needs on Debian 12 (amd64): packages, the guests' kernels, the host side of their vsock.
#
# Called by `make setup`; with the argument `demo` it leaves out the kernel with a mask of CPUs to avoid, which only tests need and
# which takes minutes to build; with `full` it makes a Debian root besides, for the slow tests. It says what it installs before it does
# so, and does nothing when all is there. Only the packages
# go into the system; the kernels and the tools go into the cache:
#   ${HINT_LAB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hint-broker}
# It is safe to interrupt it and to start it twice: results appear under their final name only when they are whole, and a
# lock lets one run at a time work.
set -euo pipefail

packages=(
    qemu-system-x86 # boots the guests
    seabios         # firmware of the KVM guests in a virtual host
    busybox-static  # their shell
    cpio            # packs their initramfs
    xz-utils        # unpacks their kernel modules
    mmdebstrap      # makes the root of guests with systemd
    util-linux      # chrt in the guest, setpriv and unshare on the host
    rt-tests        # hackbench
    socat           # talks vsock in the guest
    libvirt-daemon-system      # real libvirt, started by its test alone
    libvirt-daemon-driver-qemu # its driver
    libvirt-clients            # virsh
    dbus                       # libvirt's bus
    ca-certificates # crates.io over TLS
    gcc             # linker for Rust
    binutils        # strip, for programs that go into a virtual host
    libc6-dev       # also for static programs
    make            # front end of all this
    bc              # the next four build the kernel of tests/guest-kernel
    bison
    flex
    libelf-dev
)
kernel_meta=linux-image-6.12-cloud-amd64
vsock_crate=vhost-device-vsock
vsock_version=0.3.0

cache=${HINT_LAB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hint-broker}
kernel=$cache/kernel/current
build_kernel=$(cd "$(dirname "$0")" && pwd)/guest-kernel/build.sh
tools=$cache/tools
debian_root=$cache/debian-root/bookworm.cpio

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

check_machine() {
    local id='' version='' found
    if [ -r /etc/os-release ]; then
        id=$(. /etc/os-release && printf %s "${ID:-}")
        version=$(. /etc/os-release && printf %s "${VERSION_ID:-}")
    fi
    found="${id:-unknown} ${version:-} $(uname -m)"
    [ "$id" = debian ] && [ "$version" = 12 ] && [ "$(uname -m)" = x86_64 ] ||
        fail "the lab is made for Debian 12 on x86_64, and this is: $found." \
            "Build and unit tests need none of this: run 'make check'."
    command -v cargo >/dev/null ||
        fail "cargo was not found in PATH. Install a Rust toolchain (https://rustup.rs), then run 'make setup' again."
}

# Prints the names of the packages that are not installed.
missing_packages() {
    local package installed
    installed=" $(dpkg-query -W -f='${db:Status-Status} ${Package} ' "${packages[@]}" 2>/dev/null || true)"
    for package in "${packages[@]}"; do
        case $installed in
        *" installed $package "*) ;;
        *) printf '%s\n' "$package" ;;
        esac
    done
}

index_is_fresh=no
refresh_index() {
    [ "$index_is_fresh" = no ] || return 0
    index_is_fresh=yes
    if [ "$(id -u)" = 0 ]; then
        say "reading Debian's package index (apt-get update)"
        apt-get update -qq
    fi
}

install_packages() {
    local missing
    mapfile -t missing < <(missing_packages)
    [ ${#missing[@]} -gt 0 ] || return 0
    [ "$(id -u)" = 0 ] ||
        fail "these Debian packages are missing, and only root can install them: ${missing[*]}" \
            "Run as root:  apt-get update && apt-get install --no-install-recommends ${missing[*]}" \
            "Then run 'make setup' again."
    say "installing Debian packages: ${missing[*]}"
    refresh_index
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" </dev/null
}

kernel_is_there() {
    local image
    for image in "$kernel"/boot/vmlinuz-*; do
        [ -f "$image" ] && return 0
    done
    return 1
}

# The kernel is unpacked into the cache and never installed. Exact versions vanish from the index, so it asks the
# metapackage for the one of today; a kernel that is in the cache already stays.
fetch_kernel() {
    local package dir work
    ! kernel_is_there || return 0
    refresh_index
    package=$(apt-cache depends "$kernel_meta" 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-/ { print $2; exit }')
    [ -n "$package" ] ||
        fail "Debian's package index has no $kernel_meta: it is in bookworm-security." \
            "Check that /etc/apt/sources.list* names it and run 'apt-get update' as root."
    say "fetching the guests' kernel $package into $cache/kernel (not installed on this machine)"
    work=$cache/kernel/tmp
    rm -rf "$work"
    mkdir -p "$work/root"
    (cd "$work" && apt-get download -qq -o APT::Sandbox::User=root "$package")
    dpkg-deb -x "$work"/*.deb "$work/root"
    dir=$cache/kernel/$package
    rm -rf "$dir"
    mv "$work/root" "$dir"
    ln -s "$package" "$work/current"
    mv -T "$work/current" "$kernel"
    rm -rf "$work"
    kernel_is_there || fail "$package has no boot/vmlinuz-*: look into $dir."
}

# A small Debian with systemd, for guests that need one: only slow tests do.
debian_root_is_there() { [ "$for_what" != full ] || [ -f "$debian_root" ]; }

make_debian_root() {
    local work
    ! debian_root_is_there || return 0
    refresh_index
    say "making a Debian root with systemd in $debian_root (some minutes)"
    work=${debian_root%/*}/tmp
    rm -rf "$work"
    mkdir -p "$work/root"
    mmdebstrap --quiet --variant=minbase --include=systemd-sysv,dbus,irqbalance,kmod \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$work/root.tar"
    tar -C "$work/root" -xf "$work/root.tar" --exclude='./dev/*' --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*'
    (cd "$work/root" && find . -mindepth 1 | cpio --quiet -o -H newc -R 0:0) >"$work/root.cpio"
    mv "$work/root.cpio" "$debian_root"
    rm -rf "$work"
}

# The headers of that kernel, to build modules for it; they go into the system.
headers() { basename "$(readlink "$kernel")" | sed 's/^linux-image-/linux-headers-/'; }

headers_are_there() {
    [ "$for_what" = demo ] || [ "$(dpkg-query -W -f='${db:Status-Status}' "$(headers)" 2>/dev/null)" = installed ]
}

install_headers() {
    ! headers_are_there || return 0
    refresh_index
    if ! apt-cache show "$(headers)" >/dev/null 2>&1; then
        say "Debian's package index has no $(headers) any more: taking today's kernel"
        rm "$kernel"
        fetch_kernel
    fi
    [ "$(id -u)" = 0 ] ||
        fail "the Debian package $(headers) is missing, and only root can install it." \
            "Run as root:  apt-get install --no-install-recommends $(headers)" \
            "Then run 'make setup' again."
    say "installing the Debian package $(headers)"
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$(headers)" </dev/null
}

vsock_is_there() {
    [ -x "$tools/bin/$vsock_crate" ] && grep -qs "^\"$vsock_crate $vsock_version " "$tools/.crates.toml"
}

# The build folder stays until the build is whole, so that an interrupted build goes on where it was.
build_vsock() {
    ! vsock_is_there || return 0
    say "building $vsock_crate $vsock_version from crates.io into $tools (a few minutes)"
    env -u RUSTFLAGS -u CARGO_BUILD_TARGET CARGO_TARGET_DIR="$cache/build" PATH="$PATH:$tools/bin" \
        cargo install --locked --force --root "$tools" --version "$vsock_version" "$vsock_crate"
    vsock_is_there || fail "cargo install left no $vsock_crate $vsock_version in $tools/bin: look at its output above."
    rm -rf "$cache/build"
}

mask_kernel_is_there() { [ "$for_what" = demo ] || "$build_kernel" --find >/dev/null 2>&1; }

# The kernel with a mask of CPUs to avoid, from Debian's source.
build_mask_kernel() {
    ! mask_kernel_is_there || return 0
    refresh_index
    "$build_kernel"
}

all_is_there() {
    [ -z "$(missing_packages)" ] && kernel_is_there && headers_are_there && vsock_is_there && mask_kernel_is_there &&
        debian_root_is_there
}

for_what=${1:-all}
case $for_what in
all | demo | full) ;;
*) fail "usage: setup.sh [demo | full]" ;;
esac
check_machine
if ! all_is_there; then
    mkdir -p "$cache" || fail "cannot make the cache folder $cache: set HINT_LAB_CACHE to one that can be written."
    exec 9>"$cache/lock"
    flock -n 9 || {
        say "another set-up runs: waiting for it"
        flock 9
    }
    install_packages
    fetch_kernel
    install_headers
    build_vsock
    make_debian_root
    build_mask_kernel
fi
say "all is there (cache: $cache)"
