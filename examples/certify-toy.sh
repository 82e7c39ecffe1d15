#!/usr/bin/env bash
# What a vendor outside this repository does: install accelbridge and a plugin from their wheels, in an environment of
# their own and an empty folder, and certify the plugin. LEVEL=core is the default.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

build() { "$repository/.venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
  --no-build-isolation --wheel-dir "$folder/wheels" "$1"; }
build "$repository"
build "$repository/examples/accelbridge-toy"

"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check -c "$repository/constraints.txt" "$folder"/wheels/*.whl
mkdir "$folder/empty"
cd "$folder/empty"
"$folder/venv/bin/accelbridge" conform certify --backend toy --level "${LEVEL:-core}" --out report
"$folder/venv/bin/accelbridge" conform verify report
