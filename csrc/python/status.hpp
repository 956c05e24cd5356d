// Python's `Status`: describes a message that has arrived.
#pragma once

#include "python/bindings.hpp"

struct Status {
  int source, tag;
  uint64_t numel, nbytes;
  uint32_t form;

  static Status of(int source, int tag, uint32_t form, uint64_t nbytes) {
    const auto dtype = static_cast<unisono::DType>(unisono::dtype_of_form(form));
    return {source, unisono::plain_tag(tag), nbytes / unisono::itemsize(dtype), nbytes, form};
  }
  bool operator==(const Status&) const = default;
};

void bind_status(nanobind::module_& m);
