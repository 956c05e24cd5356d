// The owner of a file descriptor.
#pragma once

#include <unistd.h>

#include <utility>
#include <vector>

namespace unisono {

// Closes its descriptor; -1: it has none.
class FileDescriptor {
 public:
  explicit FileDescriptor(int number = -1) : number_(number) {}
  ~FileDescriptor() { reset(); }
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    reset();
    number_ = std::exchange(other.number_, -1);
    return *this;
  }

  operator int() const { return number_; }
  void reset() {
    if (number_ >= 0) close(std::exchange(number_, -1));
  }

 private:
  int number_;
};

using FileDescriptors = std::vector<FileDescriptor>;

}  // namespace unisono
