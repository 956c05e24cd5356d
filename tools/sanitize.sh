#!/usr/bin/env bash
# Build the native module with a sanitizer, in an environment of its own, and run the tests under it.
#
#   tools/sanitize.sh address|thread [pytest arguments, default: tests]
#   tools/sanitize.sh calls [pytest arguments, default: the tests of calls and threads]
#   tools/sanitize.sh virtual [how many random programs, default: 1000]
#
# `virtual`: the library of virtual GPUs, in the environment of `make test`, which has PyTorch.
# The address run covers everything; the thread run leaves out tests that need PyTorch, whose own threads
# are not instrumented. PyTorch is not installed here: our code is what is looked at.
#
# `calls`: under TSan too, on a CPython without a GIL, whose threads are in the bindings at the same time. It is
# $FREE_THREADED, or python3.14t of PATH. One that was configured with `--with-thread-sanitizer` shows most: TSan
# then knows CPython's locks. With another one the suppressions of `thread` hide what lies below CPython's frames.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-}
case $kind in
  address) library=asan ;;
  thread) library=tsan ;;
  calls) library=tsan ;;
  virtual)
    for programs in "fuzz.py ${2:-1000} 0" mistakes.py; do
      # shellcheck disable=SC2086  # a program and its arguments
      .venv/bin/python tests/virtual/sanitized.py tests/virtual/$programs
    done
    exit
    ;;
  *) echo "usage: $0 address|thread|calls [pytest arguments], or virtual [programs]" >&2; exit 2 ;;
esac
shift

python=${PYTHON:-python3}
cxx=${CXX:-g++}
venv=.venv-$kind
build=build-$kind
sanitizer=$kind
suppressions=$PWD/tools/tsan.supp

if [ "$kind" = calls ]; then
  python=${FREE_THREADED:-python3.14t}
  asked='import sysconfig as s; print(s.get_config_var("Py_GIL_DISABLED"), s.get_config_var("CONFIG_ARGS"))'
  case $(setarch -R "$python" -c "$asked" 2>&1) in
    1*--with-thread-sanitizer*) suppressions=$PWD/tools/tsan-free-threaded.supp ;;
    1*) echo "note: $python was not configured with --with-thread-sanitizer: fewer races are found" >&2 ;;
    *) echo "error: $python is no CPython without a GIL. FREE_THREADED=/path/to/python3.14t names one" >&2; exit 2 ;;
  esac
  sanitizer=thread
  [ $# -gt 0 ] || set -- tests/conformance/test_{shared_groups,messages_of_threads,lifetimes,repeated_calls}.py \
    tests/conformance/test_{messages,objects,coalesced}.py
fi

if [ ! -f "$venv/.created" ]; then
  setarch -R "$python" tools/preflight.py
  setarch -R "$python" -m venv "$venv"
  setarch -R "$venv/bin/python" -m pip install --quiet scikit-build-core nanobind typing_extensions cmake ninja
  touch "$venv/.created"
fi
TSAN_OPTIONS=report_bugs=0 setarch -R "$venv/bin/python" -m pip install --quiet --no-build-isolation -e '.[test]' \
  -C build-dir="$build" -C cmake.define.UNISONO_SANITIZE="$sanitizer" -C install.strip=false

export LD_PRELOAD
# libstdc++ beside it: Python is no C++ program, and the sanitizer looks for __cxa_throw when it starts.
LD_PRELOAD="$("$cxx" -print-file-name="lib$library.so") $("$cxx" -print-file-name=libstdc++.so.6)"
# Python itself never frees everything, so leaks are looked for by the tests' own fixture instead.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:exitcode=66:second_deadlock_stack=1:suppressions=$suppressions
# The sanitizer must see each Python allocation, not pymalloc's arenas. A Python without a GIL has its own.
[ "$kind" = calls ] || export PYTHONMALLOC=malloc
export UNISONO_SANITIZED=$sanitizer

# TSan needs its shadow memory where address-space randomisation may have put something else.
# Everything is slower here: the time limits of single tests are widened.
exec setarch -R "$venv/bin/python" -m pytest -o timeout=600 -o faulthandler_timeout=500 "$@"
