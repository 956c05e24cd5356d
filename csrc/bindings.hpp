// What the two files of the bindings share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

using Address = uintptr_t;

void bind_engine(nanobind::module_& m);
