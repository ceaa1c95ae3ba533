#!/bin/sh
# Removes Switchyard for this user. It asks about models and chats; --models and --chats (or --keep-models and
# --keep-chats) answer beforehand, and without a terminal both stay.
set -eu
root=$(dirname "$(readlink -f "$0")")
"$root/python/bin/python3" -I -X utf8 "$root/uninstall.py" "$@"
data=${XDG_DATA_HOME:-$HOME/.local/share}
program=$(dirname "$root")
rm -f "$HOME/.local/bin/switchyard" "$HOME/.local/bin/switchyard-uninstall" "$data/applications/switchyard.desktop" \
    "$data/icons/hicolor/scalable/apps/switchyard.svg" "$data/mime/packages/switchyard.xml"
for update in "update-desktop-database $data/applications" "update-mime-database $data/mime"; do
    command -v "${update%% *}" >/dev/null && "${update%% *}" "${update#* }" >/dev/null 2>&1 || true
done
# Lists that desktops made of ours alone.
ls "$data/mime/packages"/* >/dev/null 2>&1 || rm -rf "$data/mime"
ls "$data/applications"/*.desktop >/dev/null 2>&1 || rm -f "$data/applications/mimeinfo.cache"
for folder in applications icons/hicolor/scalable/apps icons/hicolor/scalable icons/hicolor icons; do
    rmdir "$data/$folder" 2>/dev/null || true
done
rmdir "$HOME/.local/bin" 2>/dev/null || true
rm -rf "$program"
echo "Switchyard is removed."
