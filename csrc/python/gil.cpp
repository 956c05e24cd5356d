#include "python/gil.hpp"

#include <dlfcn.h>
#include <unistd.h>
#include <unwind.h>

#include <cstdlib>
#include <exception>

#include "python/bindings.hpp"

// Frames of nanobind and of PyTorch may be on the stack of a daemon thread that Python ends: they call
// Python, or their destructors take the GIL. Python before 3.14 calls pthread_exit there, which unwinds the
// stack. The unwinding meets a destructor, and std::terminate aborts the process: SIGABRT in place of its
// exit code. Such a thread stops instead. Python 3.14 stops such threads by itself.
#if PY_VERSION_HEX < 0x030E0000

namespace {

using SetTerminate = std::terminate_handler (*)(std::terminate_handler);

// A frame's function starts at `address`.
struct FrameSearch {
  void* address;
  bool found;
};

_Unwind_Reason_Code compare_function(_Unwind_Context* frame, void* argument) {
  auto& search = *static_cast<FrameSearch*>(argument);
  int before_call = 0;
  const uintptr_t at = _Unwind_GetIPInfo(frame, &before_call);
  search.found =
      _Unwind_FindEnclosingFunction(reinterpret_cast<void*>(at - (before_call ? 0 : 1))) == search.address;
  return search.found ? _URC_END_OF_STACK : _URC_NO_REASON;
}

// An error may be in flight as well: PyTorch's destructors take the GIL while one is thrown. So the stack
// tells.
bool in_pthread_exit() {
  FrameSearch search{dlsym(RTLD_DEFAULT, "pthread_exit"), false};
  if (search.address != nullptr) _Unwind_Backtrace(compare_function, &search);
  return search.found;
}

// A C++ library has one handler. A wheel's module has a library of its own; PyTorch's frames use the
// process's.
template <int kLibrary>
struct TerminateHandler {
  static inline std::terminate_handler before = nullptr;

  // An error that nobody caught ends the process as before.
  [[noreturn]] static void stop_or_terminate() {
    while (in_pthread_exit()) pause();
    before();
    std::abort();
  }

  static void install(SetTerminate set) {
    if (before == nullptr) before = set(stop_or_terminate);
  }
};

// Nanobind catches everything that leaves a bound function. The unwinding of pthread_exit is no exception of
// C++, and nanobind would rethrow nothing: SIGSEGV.
void stop_at_no_exception(const std::exception_ptr& caught, void*) {
  while (!caught) pause();
  std::rethrow_exception(caught);
}

SetTerminate of_process() {
  void* const library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr
                            : reinterpret_cast<SetTerminate>(dlsym(library, "_ZSt13set_terminatePFvvE"));
}

}  // namespace

void stop_threads_at_the_end() {
  static const bool registered = (nanobind::register_exception_translator(stop_at_no_exception), true);
  (void)registered;
  TerminateHandler<0>::install(std::set_terminate);
  if (const SetTerminate set = of_process()) TerminateHandler<1>::install(set);
}

#else

void stop_threads_at_the_end() {}

#endif
