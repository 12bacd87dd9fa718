#!/usr/bin/env bash
# Installs megarl into .venv: tools/install/install.sh cpu|cuda [EXTRA ...]     (extras: smollm2, verifiers, wandb, mlflow)
# Finds a fitting Python and hands over to install.py, which says what it does.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
versions="3.11"
[ "${1:-}" = cuda ] && versions="3.11 3.12"

fits() { # a Python of version $2 with venv and pip to put into it
  "$1" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" >/dev/null 2>&1
}

for version in $versions; do
  for candidate in "python$version" "/usr/bin/python$version" python3; do
    if command -v "$candidate" >/dev/null && fits "$candidate" "$version"; then
      exec "$candidate" "$here/install.py" "$@"
    fi
  done
done
found=$(python3 --version 2>/dev/null || echo "no python3")
echo "install: needs Python ${versions// / or } with its venv module; found $found." >&2
echo "install: on Debian: apt-get install python3.11 python3.11-venv" >&2
exit 1
