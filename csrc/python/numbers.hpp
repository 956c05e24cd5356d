// Python's numbers as buffers of one element: `all_reduce(3.5)`.
#pragma once

#include <cstring>

#include "python/bindings.hpp"

constexpr Py_ssize_t kNumberBytes = 16;  // of the largest, a complex number

// Whether NumPy would make an array of one of these dtypes of it: bool, int64, float64 or complex128.
inline bool is_number(nanobind::handle object) {
  const PyTypeObject* const type = Py_TYPE(object.ptr());
  return type == &PyFloat_Type || type == &PyLong_Type || type == &PyBool_Type || type == &PyComplex_Type;
}

// Stores a number. Returns its dtype; nullopt: it is too large for an int64.
inline std::optional<unisono::DType> store_number(nanobind::handle number, void* memory) {
  using unisono::DType;
  const auto put = [&](const auto& value, DType dtype) {
    std::memcpy(memory, &value, sizeof value);
    return dtype;
  };
  PyObject* const given = number.ptr();
  if (PyFloat_CheckExact(given)) return put(PyFloat_AS_DOUBLE(given), DType::kF64);
  if (PyBool_Check(given)) return put(given == Py_True, DType::kBool);
  if (PyComplex_CheckExact(given)) return put(PyComplex_AsCComplex(given), DType::kC128);
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(given, &overflow);
  if (overflow != 0) return std::nullopt;
  return put(value, DType::kI64);
}

// The number that `store_number` or NumPy has stored.
inline nanobind::object load_number(unisono::DType dtype, const void* memory) {
  using unisono::DType;
  const auto get = [&](auto value) {
    std::memcpy(&value, memory, sizeof value);
    return value;
  };
  switch (dtype) {
    case DType::kBool:
      return nanobind::bool_(get(uint8_t{}) != 0);
    case DType::kF64:
      return nanobind::float_(get(double{}));
    case DType::kC128:
      return nanobind::steal(PyComplex_FromCComplex(get(Py_complex{})));
    default:
      return nanobind::int_(get(int64_t{}));
  }
}
