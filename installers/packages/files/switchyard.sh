#!/bin/sh
# Starts Switchyard: without arguments the window, else the command line.
root=$(dirname "$(readlink -f "$0")")
exec "$root/python/bin/python3" -I -X utf8 "$root/start.py" "$@"
