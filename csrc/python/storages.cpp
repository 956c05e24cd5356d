#include "python/storages.hpp"

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace nb = nanobind;

namespace {

// Where the flag is: the offset of the pointer in a storage's Python object, and that of the flag behind it.
// unisono.torch_internals.storages finds them; -1: it did not.
struct StorageOffsets {
  int pointer = -1, flag = -1;
  PyTypeObject* type = nullptr;  // of a storage; kept for ever
};

// Not a guarded static: this runs Python code, which may release the GIL, and another thread would then wait
// for the guard while it holds the GIL. Two threads that both run it get the same result.
StorageOffsets places() {
  static std::atomic<const StorageOffsets*> kept = nullptr;
  if (const StorageOffsets* const known = kept.load(std::memory_order_acquire)) return *known;
  const nb::object at = nb::module_::import_("unisono.torch_internals.storages").attr("places")();
  const nb::object type = nb::module_::import_("torch").attr("UntypedStorage");
  const auto* const found = new StorageOffsets{nb::cast<int>(at[0]), nb::cast<int>(at[1]),
                                               reinterpret_cast<PyTypeObject*>(type.ptr())};  // never freed
  const StorageOffsets* first = nullptr;
  if (kept.compare_exchange_strong(first, found, std::memory_order_acq_rel)) {
    type.inc_ref();
    return *found;
  }
  delete found;
  return *first;
}

unsigned char* flag_of(nb::handle storage) {
  const StorageOffsets at = places();
  if (at.flag < 0 || PyObject_TypeCheck(storage.ptr(), at.type) == 0) return nullptr;
  const auto* const object = reinterpret_cast<const unsigned char*>(storage.ptr());
  unsigned char* const behind = *reinterpret_cast<unsigned char* const*>(object + at.pointer);
  return behind == nullptr ? nullptr : behind + at.flag;
}

// How many calls hold each storage that was resizable.
class StorageHolders {
 public:
  // False: the storage is not resizable anyway.
  bool add(unsigned char* flag) {
    const std::scoped_lock held(lock_);
    const auto [entry, first] = counts_.try_emplace(flag, 0);
    if (first && std::atomic_ref(*flag).exchange(0) == 0) {
      counts_.erase(entry);
      return false;
    }
    ++entry->second;
    return true;
  }
  void remove(unsigned char* flag) {
    const std::scoped_lock held(lock_);
    const auto entry = counts_.find(flag);
    if (entry == counts_.end() || --entry->second > 0) return;
    std::atomic_ref(*flag).store(1);
    counts_.erase(entry);
  }

 private:
  std::mutex lock_;
  std::unordered_map<unsigned char*, uint32_t> counts_;
};

StorageHolders& holders() {
  static auto* const all = new StorageHolders;  // never destroyed: a work may end at exit
  return *all;
}

// The storage of a tensor; invalid: the object is none. What has the buffer protocol, as NumPy's arrays, is
// none.
nb::object storage_of(nb::handle object) {
  static InternedName name{"untyped_storage"};
  if (object.is_none() || PyObject_CheckBuffer(object.ptr()) != 0) return {};
  nb::object found = nb::steal(unisono_call_method(name.get(), std::array{object.ptr()}.data(), 1));
  if (!found.is_valid()) PyErr_Clear();
  return found;
}

}  // namespace

void StorageHold::add(nb::handle kept) {
  if (!kept.is_valid() || kept.is_none()) return;
  if (PyTuple_CheckExact(kept.ptr()) || PyList_CheckExact(kept.ptr())) {
    const bool list = PyList_CheckExact(kept.ptr());
    for (Py_ssize_t i = 0; i < length_of(kept.ptr()); ++i)
      add(list ? list_item(kept.ptr(), i) : nb::borrow(PyTuple_GET_ITEM(kept.ptr(), i)));
    return;
  }
  nb::object storage = storage_of(kept);
  if (!storage.is_valid()) return;
  for (const StorageReference& one : held_)
    if (one.storage.is(storage)) return;
  unsigned char* flag = flag_of(storage);
  if (flag != nullptr && !holders().add(flag)) flag = nullptr;
  held_.push_back({std::move(storage), flag});
}

StorageHold::~StorageHold() {
  for (const StorageReference& one : held_)
    if (one.resizable != nullptr) holders().remove(one.resizable);
}

void bind_storages(nb::module_& m) {
  nb::class_<StorageHold>(m, "StorageHold", "Keeps the memory of PyTorch's tensors in place while it exists.")
      .def(
          "__init__",
          [](StorageHold* self, nb::handle kept) { new (self) StorageHold(std::initializer_list{kept}); },
          nb::arg("kept"), "A tensor, or a tuple or list of them; other objects have no storage.");
}
