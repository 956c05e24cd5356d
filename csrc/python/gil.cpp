#include "python/gil.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>

#include "python/bindings.hpp"

// Frames of nanobind and of PyTorch may be on the stack of a daemon thread that Python ends: they call
// Python, or their destructors take the GIL. So the end reaches std::terminate there, too, and aborts the
// process: SIGABRT in place of its exit code. Python 3.14 stops such threads by itself.
#if PY_VERSION_HEX < 0x030E0000

#if PY_VERSION_HEX < 0x030D0000
extern "C" int _Py_IsFinalizing(void);
#define Py_IsFinalizing _Py_IsFinalizing
#endif

namespace {

std::terminate_handler before = nullptr;

// An uncaught error, and any end in the main thread, still calls the previous handler.
[[noreturn]] void stop_or_terminate() {
  const bool ended_by_python = !std::current_exception() && Py_IsFinalizing() && gettid() != getpid();
  while (ended_by_python) pause();
  before();
  std::abort();
}

}  // namespace

// A wheel's module has a C++ library of its own; PyTorch's frames use the process's.
void stop_threads_at_the_end() {
  if (before != nullptr) return;
  using Set = std::terminate_handler (*)(std::terminate_handler);
  const auto of_process = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "_ZSt13set_terminatePFvvE"));
  before = (of_process != nullptr ? of_process : std::set_terminate)(stop_or_terminate);
}

#else

void stop_threads_at_the_end() {}

#endif
