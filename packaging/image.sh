#!/bin/sh
# Runs a step of the container images. packaging/Dockerfile and Dockerfile.ray call these steps, and .ci/container
# runs them on a machine without Docker.
set -eu
case "$1" in
install) # install SOURCE PREFIX EXTRAS: installs kukri from a folder into an environment of its own
    python3 -m venv "$3"
    "$3/bin/pip" install --no-cache-dir --quiet --disable-pip-version-check -c "$2/.ci/constraints.txt" "$2[$4]"
    ;;
user) # creates the user who runs kukri, and the folder of models and compiled kernels
    useradd --system --create-home --uid 10001 kukri
    mkdir /models
    chown kukri /models
    ;;
*)
    echo "image.sh: no step is called '$1': use install or user" >&2
    exit 2
    ;;
esac
