#!/bin/sh
# Installs lvsd from the tarball of its static programs, after a check of the tarball's SHA-256 sum against the one in this script.
#
#   sh install.sh [--from URL-OR-DIRECTORY] [--prefix DIRECTORY]     by default from the release's page into /usr/local
#   sh install.sh --remove [--prefix DIRECTORY]
#
# It enables and starts nothing. Where lvsd runs already, it is restarted, and the dataplane continues with its connections.
set -eu
version=@VERSION@
from=@REPOSITORY@/releases/download/v@VERSION@
sum_x86_64=@SUM_x86_64@
sum_aarch64=@SUM_aarch64@

fail() { echo "install.sh: $*" >&2; exit 1; }
prefix=/usr/local remove=
while [ $# -gt 0 ]; do
    case $1 in
    --from) from=${2:?--from needs a URL or a directory}; shift 2 ;;
    --prefix) prefix=${2:?--prefix needs a directory}; shift 2 ;;
    --remove) remove=yes; shift ;;
    *) fail "unknown argument $1: see the first lines of this script" ;;
    esac
done
case $prefix in /*) ;; *) fail "--prefix $prefix: the directory must be absolute" ;; esac
under_systemd() { [ -d /run/systemd/system ] && command -v systemctl > /dev/null; }

if [ -n "$remove" ]; then
    [ -f "$prefix/share/lvsd/files" ] || fail "$prefix/share/lvsd/files is missing: lvsd is not installed in $prefix"
    if under_systemd; then systemctl disable --now lvsd.service lvs-dataplane.service || true; fi
    cat "$prefix/share/lvsd/files" | while read -r file; do rm -f "$prefix/$file"; done
    directories=$(sort -r "$prefix/share/lvsd/directories" 2> /dev/null || true)
    rm -f "$prefix/share/lvsd/files" "$prefix/share/lvsd/directories"
    for directory in $directories; do rmdir "$prefix/$directory" 2> /dev/null || true; done
    if under_systemd; then systemctl daemon-reload || true; fi
    echo "removed from $prefix; /etc/lvsd and /var/lib/lvsd are left, if they exist"
    exit
fi

case $(uname -m) in
x86_64) arch=x86_64 sum=$sum_x86_64 ;;
aarch64 | arm64) arch=aarch64 sum=$sum_aarch64 ;;
*) fail "there is no tarball for $(uname -m): build from source" ;;
esac
case $sum in *@*) fail "this script has no checksum for $arch: the release has no tarball for it; build from source" ;; esac
name=lvsd-$version-$arch-linux
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $from in
*://*)
    if command -v curl > /dev/null; then curl -fsSL -o "$work/tarball" "$from/$name.tar.gz" || fail "cannot fetch $from/$name.tar.gz"
    elif command -v wget > /dev/null; then wget -q -O "$work/tarball" "$from/$name.tar.gz" || fail "cannot fetch $from/$name.tar.gz"
    else fail "curl or wget is needed to fetch $from/$name.tar.gz"; fi ;;
*) cp "$from/$name.tar.gz" "$work/tarball" || fail "cannot read $from/$name.tar.gz" ;;
esac
echo "$sum  $work/tarball" | sha256sum -c > /dev/null 2>&1 ||
    fail "$name.tar.gz has another checksum than $sum: nothing was installed; fetch it again, and report it if that does not help"

# Everything is unpacked and complete before the first file is replaced.
tar -xzf "$work/tarball" -C "$work"
sed -i "s|/usr/local/bin/|$prefix/bin/|g" "$work/$name"/lib/systemd/system/*.service "$work/$name"/lib/systemd/system/*/*.conf "$work/$name"/share/doc/lvsd/*/*.conf
# Directories that did not exist are listed, so that --remove removes them and no others.
make_directory() {
    [ -d "$prefix/$1" ] && return
    make_directory "$(dirname "$1")" && mkdir "$prefix/$1" && echo "$1" >> "$work/directories"
}
new=$work/$name/share/lvsd/files
mkdir -p "$prefix"
while read -r file; do
    # By a rename, because the old program may be running.
    make_directory "$(dirname "$file")" && cp -p "$work/$name/$file" "$prefix/$file.new" && mv "$prefix/$file.new" "$prefix/$file" ||
        fail "cannot write $prefix/$file"
done < "$new"
if [ -f "$prefix/share/lvsd/files" ]; then
    grep -vxFf "$new" "$prefix/share/lvsd/files" | while read -r file; do rm -f "$prefix/$file"; done
fi
cp "$new" "$prefix/share/lvsd/files"
[ ! -f "$work/directories" ] || cat "$work/directories" >> "$prefix/share/lvsd/directories"
if under_systemd; then
    systemctl daemon-reload || true
    systemctl try-restart lvsd.service || true
fi
echo "lvsd $version is in $prefix; next: lvsd init /etc/lvsd/lvsd.toml, then systemctl enable --now lvsd"
echo "for scripts that call ipvsadm: ln -s $prefix/bin/lvsadm $prefix/sbin/ipvsadm"
