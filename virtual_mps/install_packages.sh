#!/bin/sh
# Installs the Debian and Ubuntu packages that virtual_mps needs and this machine lacks, for the given Python, and others
# by name, each with a command that tells whether it is there: install_packages.sh [PYTHON [PACKAGE:COMMAND]...]. Where it
# cannot, it names the command and fails.
set -eu

python=${1:-python3}
[ $# = 0 ] || shift
version=$("$python" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}")')
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')

missing=""
need() { # PACKAGE COMMAND...: the package is missing unless the command succeeds
  package=$1
  shift
  "$@" >/dev/null 2>&1 || missing="$missing $package"
}
need clang-19 command -v "${VIRTUAL_MPS_CLANG:-clang++-19}"
need g++ sh -c 'ls /usr/include/c++/*/vector' # clang uses GCC's C++ library
need gobjc sh -c 'ls /usr/lib/gcc/*/*/include/objc/runtime.h'
need libgnustep-base-dev test -e /usr/include/GNUstep/Foundation/Foundation.h
need "$version-dev" test -e "$headers/Python.h"
need "$version-venv" "$python" -c 'import ensurepip'
# Lanes change stacks by hand-written code on x86-64, and by Boost.Context elsewhere.
[ "$(uname -m)" = x86_64 ] || need libboost-context-dev ls /usr/include/boost/context/detail/fcontext.hpp
for other in "$@"; do
  need "${other%%:*}" command -v "${other#*:}"
done

[ -n "$missing" ] || exit 0

install="apt-get install -y --no-install-recommends$missing"
fail() {
  echo "virtual_mps: $1. As an administrator, run:  $install" >&2
  exit 1
}
command -v apt-get >/dev/null || fail "packages are missing, named here as Debian names them, and apt-get is not there"
as_root=""
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || fail "packages are missing, and this user may not install them"
  as_root=sudo
fi
echo "virtual_mps: installing$missing" >&2
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -q >&2 || true # lists of before may do
# shellcheck disable=SC2086 # a list of words
$as_root $install >&2 || fail "apt-get failed (clang-19 is in Debian 12 and Ubuntu 24.04, for older ones at https://apt.llvm.org)"
