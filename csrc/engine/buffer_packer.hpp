// Several buffers as one: packed before a collective, and unpacked after it. For many small buffers this
// costs less than one collective for each.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/executor.hpp"

namespace unisono {

class BufferPacker {
 public:
  BufferPacker() = default;
  BufferPacker(std::vector<BufferExtent> pieces, size_t item) : pieces_(std::move(pieces)), item_(item) {
    for (const BufferExtent& piece : pieces_) {
      numel_ += piece.numel;
      shape_ = (shape_ ^ piece.numel) * 0x100000001b3ULL;
    }
    memory_ = std::make_unique_for_overwrite<unsigned char[]>(numel_ * item_);
  }

  unsigned char* data() const { return memory_.get(); }
  size_t numel() const { return numel_; }
  uint64_t shape() const { return shape_; }  // a hash of the pieces' sizes
  void gather() const {
    each([](unsigned char* packed, unsigned char* piece, size_t nbytes) {
      std::memcpy(packed, piece, nbytes);
    });
  }
  void scatter() const {
    each([](unsigned char* packed, unsigned char* piece, size_t nbytes) {
      std::memcpy(piece, packed, nbytes);
    });
  }

 private:
  template <class Move>
  void each(Move move) const {
    unsigned char* packed = memory_.get();
    for (const BufferExtent& piece : pieces_) {
      const size_t nbytes = piece.numel * item_;
      if (nbytes > 0) move(packed, piece.data, nbytes);
      packed += nbytes;
    }
  }

  std::vector<BufferExtent> pieces_;
  size_t item_ = 1;
  size_t numel_ = 0;
  uint64_t shape_ = 0;
  std::unique_ptr<unsigned char[]> memory_;
};

}  // namespace unisono
