// The ways from C++ into Python: a thread takes the GIL back, or runs Python code. Python before 3.14 ends a
// daemon thread there while the interpreter ends: pthread_exit unwinds the stack, and a C++ frame on it may
// call std::terminate, release a Python object without the GIL, or crash if the module has a C++ library of
// its own, as wheels have. Such a thread stops here, before any other frame is unwound.
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

// As PyObject_Vectorcall.
PyObject* unisono_call(PyObject* function, PyObject* const* arguments, size_t count, PyObject* keywords) {
  PyObject* volatile result = NULL;
  pthread_cleanup_push(stop, NULL);
  result = PyObject_Vectorcall(function, arguments, count, keywords);
  pthread_cleanup_pop(0);
  return result;
}

// As PyObject_VectorcallMethod, without keywords; arguments[0] is the object.
PyObject* unisono_call_method(PyObject* name, PyObject* const* arguments, size_t count) {
  PyObject* volatile result = NULL;
  pthread_cleanup_push(stop, NULL);
  result = PyObject_VectorcallMethod(name, arguments, count, NULL);
  pthread_cleanup_pop(0);
  return result;
}

// As PyIter_Next.
PyObject* unisono_next(PyObject* iterator) {
  PyObject* volatile result = NULL;
  pthread_cleanup_push(stop, NULL);
  result = PyIter_Next(iterator);
  pthread_cleanup_pop(0);
  return result;
}

// As PyObject_GetAttrString, for a property.
PyObject* unisono_get_attribute(PyObject* object, const char* name) {
  PyObject* volatile result = NULL;
  pthread_cleanup_push(stop, NULL);
  result = PyObject_GetAttrString(object, name);
  pthread_cleanup_pop(0);
  return result;
}
