#!/bin/sh
# Installs Switchyard for this user, without administrator's rights. The archive that holds this file runs it.
# Every step can be repeated: after a kill, run the same file again.
set -eu
here=$(dirname "$(readlink -f "$0")")
version=@VERSION@
stop() {
    printf '%s\n' "$1" >&2
    exit 2
}
case $(uname -m) in
@MACHINE@) ;;
*) stop "This package is for 64-bit @MACHINE@ systems, and this is $(uname -m): get the one for it." ;;
esac
[ "$(getconf LONG_BIT 2>/dev/null)" != 32 ] ||
    stop "This package is for 64-bit systems, and this one's programs are of 32 bits: install a 64-bit system."
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
[ -n "$glibc" ] || stop "Switchyard needs a Linux with glibc @GLIBC@ or newer; this one has another C library."
[ "$(printf '%s\n' @GLIBC@ "$glibc" | sort -V | head -n 1)" = @GLIBC@ ] ||
    stop "Switchyard needs glibc @GLIBC@ or newer, and this system has $glibc: it runs from Debian 12 and Ubuntu 24.04 on."
[ "${HOME:-}" ] && [ -d "$HOME" ] || stop "HOME does not name a folder: set it to your home folder, and start again."
data=${XDG_DATA_HOME:-$HOME/.local/share}
program=$data/switchyard-program
bin=$HOME/.local/bin
mkdir -p "$program" "$bin" "$data/applications" "$data/icons/hicolor/scalable/apps" "$data/mime/packages" 2>/dev/null ||
    stop "$data or $bin cannot be written to: give yourself the right to, and start again."
need=$(du -sk "$here/program" | cut -f1)
free=$(df -Pk "$program" | tail -n 1 | awk '{print $4}')
[ "$free" -gt "$((need + need / 10))" ] ||
    stop "The disk of $program has $((free / 1024)) MB free, and Switchyard takes $((need / 1024)): free some space, and start again."

# Under way in a folder of its own: a kill or a full disk leaves the version that is there as it is.
rm -rf "$program"/*.partial "$program/current.new"
previous=$(readlink "$program/current" 2>/dev/null || true)
place=$version
again=1
while [ -e "$program/$place" ]; do # the same version, to repair it, or one of which a kill left no trace
    again=$((again + 1))
    place=$version-$again
done
cp -R "$here/program" "$program/$place.partial" || {
    rm -rf "$program/$place.partial"
    stop "Switchyard could not be copied to $program (is the disk full?): nothing was changed."
}
mv "$program/$place.partial" "$program/$place"
ln -s "$place" "$program/current.new"
mv -T "$program/current.new" "$program/current"
for other in "$program"/*/; do
    name=$(basename "$other")
    case $name in
    "$place" | current) ;;
    "$version" | "$version"-*) rm -rf "$program/$name" ;;
    "$previous") ;; # the version before this one stays, to go back to
    *) rm -rf "$program/$name" ;;
    esac
done

ln -sfn "$program/current/switchyard" "$bin/switchyard"
ln -sfn "$program/current/uninstall" "$bin/switchyard-uninstall"
# Exec's quoting: in double quotes, with what is special there after a backslash.
quoted=$(printf '%s' "$program/current/switchyard" | sed 's/[\\"`$]/\\&/g; s/\\/\\\\/g; s/%/%%/g')
replace=$(printf '"%s"' "$quoted" | sed 's/[\\&|]/\\&/g')
sed "s|@EXEC@|$replace|" "$program/current/desktop/switchyard.desktop" >"$data/applications/switchyard.desktop"
cp "$program/current/desktop/switchyard.svg" "$data/icons/hicolor/scalable/apps/switchyard.svg"
cp "$program/current/desktop/switchyard-mime.xml" "$data/mime/packages/switchyard.xml"
for update in "update-desktop-database $data/applications" "update-mime-database $data/mime"; do
    command -v "${update%% *}" >/dev/null && "${update%% *}" "${update#* }" >/dev/null 2>&1 || true
done
# Of the system, whose package manager brings them: a .run cannot.
missing=$("$program/current/python/bin/python3" -I -c '
import ctypes, sys
files, packages = [], []
for file, _, package in (pair.partition(":") for pair in sys.argv[1:]):
    try:
        ctypes.CDLL(file)
    except OSError:
        files.append(file), packages.append(package)
if files:
    print(f"The window needs libraries that this system lacks: {chr(44).join(files)}")
    print(f"On Debian and Ubuntu: sudo apt install {chr(32).join(packages)}")
' @LIBRARIES@) || true
printf '%s\n' "Switchyard $version is installed: it is among your programs, and the command is $bin/switchyard." \
    "To remove it: $bin/switchyard-uninstall"
case ":$PATH:" in *":$bin:"*) ;; *) printf '%s\n' "($bin is not on your PATH; a new login may change that.)" ;; esac
[ -z "$missing" ] || printf '%s\n' "$missing" >&2
