#pragma once

#include <vector>

#include "python/bindings.hpp"

// Keeps the memory of PyTorch's tensors in place while an asynchronous call uses it.
//
// A tensor may get another storage (`t.data = ...`, `t.set_(...)`), so this holds the storage itself. A
// storage may be resized, which frees its memory, so it is not resizable meanwhile: PyTorch raises.
class StorageHold {
 public:
  StorageHold() = default;
  // Tensors, and the items of tuples and lists of them; other objects have no storage.
  explicit StorageHold(std::initializer_list<nanobind::handle> kept) {
    for (const nanobind::handle one : kept) add(one);
  }
  StorageHold(StorageHold&& other) noexcept = default;
  StorageHold& operator=(StorageHold&& other) noexcept {
    std::swap(held_, other.held_);
    return *this;
  }
  ~StorageHold();

  // Never lets them go.
  void leak() {
    for (StorageReference& one : held_) one.storage.release();
    held_.clear();
  }

 private:
  struct StorageReference {
    nanobind::object storage;
    unsigned char* resizable;  // the flag in PyTorch's object; null: do not change it
  };
  void add(nanobind::handle kept);

  std::vector<StorageReference> held_;
};
