#!/bin/sh
# Starts Switchyard: without arguments the window, else the command line. Nothing of the user's PATH is needed.
stop() {
    printf '%s\n' "$1" >&2
    if [ ! -t 2 ] && [ "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ]; then # from a desktop, where nobody reads that
        for tool in "zenity --error --no-markup --text" "kdialog --error" xmessage; do
            command -v "${tool%% *}" >/dev/null && $tool "$1" 2>/dev/null && break
        done
    fi
    exit 2
}
root=$(command -p readlink -f "$0")
root=${root%/*}
machine=$(command -p uname -m)
[ "$machine $(command -p getconf LONG_BIT)" = "@MACHINE@ 64" ] ||
    stop "This Switchyard is for 64-bit @MACHINE@ systems, and this is another ($machine): get the package for it."
glibc=$(command -p getconf GNU_LIBC_VERSION 2>/dev/null)
glibc=${glibc##* }
case ${glibc#2.} in
'' | *[!0-9]*) stop "Switchyard needs a Linux with glibc @GLIBC@ or newer; this one has another C library." ;;
esac
wanted=@GLIBC@
[ "${glibc#2.}" -ge "${wanted#2.}" ] ||
    stop "Switchyard needs glibc @GLIBC@ or newer, and this system has $glibc: use a newer version of the system."
[ -x "$root/python/bin/python3" ] && [ -f "$root/start.py" ] ||
    stop "Files of Switchyard are missing in $root: install it again; models and chats stay."
exec "$root/python/bin/python3" -I -X utf8 "$root/start.py" "$@"
