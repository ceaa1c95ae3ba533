#!/bin/sh
# Starts Switchyard.app: without arguments the window, else the command line.
stop() {
    printf '%s\n' "$1" >&2
    [ -t 2 ] || osascript -e 'on run sentence' -e 'display alert "Switchyard" message item 1 of sentence' -e 'end run' "$1" >/dev/null 2>&1
    exit 2
}
root=$(cd "$(dirname "$0")/../Resources" && pwd -P)
[ "$(uname -m)" = arm64 ] || stop "Switchyard needs a Mac with an Apple processor (M1 or newer)."
system=$(sw_vers -productVersion)
[ "${system%%.*}" -ge 14 ] || stop "Switchyard needs macOS 14 or newer, and this Mac has $system: update it first."
[ -x "$root/python/bin/python3" ] && [ -f "$root/start.py" ] ||
    stop "Files of Switchyard are missing in $root: put Switchyard.app into Applications again; models and chats stay."
exec "$root/python/bin/python3" -I -X utf8 "$root/start.py" "$@"
