# shellcheck shell=bash
# shellcheck disable=SC2154  # variables of lib.sh
# Building for another processor or C library. After lib.sh.

# compile_for TARGET COMPILER ARCHIVER: from now on cargo builds for TARGET, with this C compiler.
compile_for() {
    local target=$1 name=${1//-/_} sysroot
    sysroot=$("$root/tools/rust-std" "$target")
    export CARGO_BUILD_TARGET=$target
    export "CC_$name=$2" "AR_$name=$3"
    export "CARGO_TARGET_${name^^}_LINKER=$2"
    export "CARGO_TARGET_${name^^}_RUSTFLAGS=--sysroot $sysroot"
    export "CARGO_TARGET_${name^^}_RUSTDOCFLAGS=--sysroot $sysroot" # tests in documentation
}

# compile_for_aarch64: the same for aarch64, by Debian's cross compiler. What is built runs emulated.
compile_for_aarch64() {
    apt_install "to compile for aarch64" gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    compile_for aarch64-unknown-linux-gnu aarch64-linux-gnu-gcc aarch64-linux-gnu-ar
    export BINDGEN_EXTRA_CLANG_ARGS_aarch64_unknown_linux_gnu="-isystem /usr/aarch64-linux-gnu/include"
    emulate_aarch64
}

# compile_for_musl: the same for musl. A library that programs load is linked with musl dynamically,
# and with libgcc_s, which unwinds: Debian has it for glibc only, but under the name and with the
# symbols that it has for musl. What that one needs of glibc is not looked for. A program finds it where
# servers that bring their libraries have it, or where the system has it.
# What is of musl comes first: the server's own libraries may be beside glibc. Headers of libraries that
# those of the server include (GSSAPI, OpenSSL, ICU) come after musl's.
compile_for_musl() {
    local own=/usr/lib/x86_64-linux-musl home=$cache/musl
    local others="-idirafter /usr/include -idirafter /usr/include/x86_64-linux-gnu"
    apt_install "to compile for musl" musl musl-dev musl-tools
    compile_for x86_64-unknown-linux-musl musl-gcc ar
    mkdir -p "$home"
    ln -sfn "$(gcc -print-file-name=libgcc_s.so.1)" "$home/libgcc_s.so.1"
    export CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUSTFLAGS+=" -L native=$own -L native=$home"
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUSTFLAGS+=" -C target-feature=-crt-static"
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUSTFLAGS+=" -C link-arg=-Wl,--allow-shlib-undefined"
    # shellcheck disable=SC2016  # the loader expands it
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUSTFLAGS+=' -C link-arg=-Wl,-rpath,$ORIGIN/../lib'
    export CFLAGS_x86_64_unknown_linux_musl=$others
    export BINDGEN_EXTRA_CLANG_ARGS_x86_64_unknown_linux_musl="-nostdlibinc \
-isystem ${own/lib/include} $others"
}

# emulate_aarch64: has the kernel run programs for aarch64 by QEMU until the machine is started again.
# They find their C library. Not by bookworm's QEMU 7.2: its /proc/self/maps shows no code as
# executable.
emulate_aarch64() {
    local formats=/proc/sys/fs/binfmt_misc home=$cache/qemu-user
    [ "$(uname -m)" != aarch64 ] || return 0
    apt_install "libraries of emulated programs" libc6-arm64-cross libgcc-s1-arm64-cross
    export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
    if [ ! -x "$home/qemu-aarch64" ]; then
        progress "fetching QEMU" "$cache/log/qemu-user.log" debian_package qemu-user "$home" trixie
        mv "$home/usr/bin/qemu-aarch64" "$home/"
        rm -r "${home:?}/usr" "$home"/*.deb
    fi
    [ -e $formats/register ] || as_root mount -t binfmt_misc binfmt_misc $formats
    [ -e $formats/pagevault-aarch64 ] || aarch64_format "$home/qemu-aarch64" | as_root tee $formats/register >/dev/null
}

# aarch64_format PROGRAM: the kernel's rule (Documentation/admin-guide/binfmt-misc.rst) for ELF files
# for aarch64. PROGRAM is opened once (F), so that it is found in containers and by other users too.
aarch64_format() {
    local magic='\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xb7\0'
    local mask='\xff\xff\xff\xff\xff\xff\xff\0\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    printf '%s' ":pagevault-aarch64:M::${magic//\\0/\\x00}:${mask//\\0/\\x00}:$1:OPF"
}
