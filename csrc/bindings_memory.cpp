// Memory for arrays that other ranks read where they are.
#include <nanobind/ndarray.h>

#include "arena.hpp"
#include "bindings.hpp"

namespace nb = nanobind;

namespace {

struct Pages {
  std::shared_ptr<unisono::Arena> arena;
  void* data;
  size_t nbytes;
  ~Pages() { arena->give_back(data, nbytes); }
};

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// The arena keeps what it gave until the array and all views of it are gone.
Bytes shared_bytes(size_t nbytes) {
  std::shared_ptr<unisono::Arena> arena = unisono::Arena::own();
  void* const data = arena->take(nbytes);
  auto pages = std::unique_ptr<Pages>(new Pages{std::move(arena), data, nbytes});
  const nb::capsule owner(pages.get(), [](void* kept) noexcept { delete static_cast<Pages*>(kept); });
  pages.release();
  return Bytes(data, {nbytes}, owner);
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def(
      "shared_bytes", &shared_bytes, nb::arg("nbytes"),
      "Zeros in memory that other ranks of this host can map; OSError where the system has no such memory.");
}
