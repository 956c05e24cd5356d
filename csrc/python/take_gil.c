// Takes the GIL back. Python before 3.14 ends a daemon thread that asks for the GIL while the interpreter
// ends: pthread_exit unwinds the stack, and a C++ frame on it may call std::terminate, or crash if the module
// has a C++ library of its own, as wheels have. Such a thread stops here, before any other frame is unwound.
// In C, because the handler of this macro then needs no C++ library.
#include <Python.h>
#include <pthread.h>
#include <unistd.h>

static void stop(void* unused) {
  (void)unused;
  for (;;) pause();
}

void unisono_take_gil(PyThreadState* state) {
  pthread_cleanup_push(stop, NULL);
  PyEval_RestoreThread(state);
  pthread_cleanup_pop(0);
}
