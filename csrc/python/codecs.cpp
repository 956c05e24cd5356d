// Binds the kernels of codecs, of reductions, and of Adam with compressed state.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>

#include "kernels/copy.hpp"
#include "kernels/reduce.hpp"
#include "python/bindings.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

const KernelTable& table_of(const std::string& isa) {
  if (isa.empty()) return kernels();
  for (const KernelTable* table : all_kernels())
    if (isa == table->isa) return *table;
  throw nb::value_error("this processor has no such instruction set");
}

const CodecKernels& codec_of(int codec, size_t block, const std::string& isa) {
  if (codec < 0 || static_cast<size_t>(codec) >= kCodecCount) throw nb::value_error("no such codec");
  check_block(static_cast<CodecFormat>(codec), block);
  return table_of(isa).codecs[static_cast<size_t>(codec)];
}

size_t encode_values(int codec, size_t block, Address out, Address in, size_t numel, bool stochastic,
                     uint64_t seed, uint64_t first, const std::string& isa) {
  const CodecKernels& kernels = codec_of(codec, block, isa);
  const GilRelease no_gil;
  return kernels.encode(reinterpret_cast<void*>(out), reinterpret_cast<const float*>(in), numel,
                        {block, stochastic, seed, first});
}

void decode_values(int codec, size_t block, Address out, Address in, size_t numel, bool accumulate,
                   const std::string& isa) {
  const CodecKernels& kernels = codec_of(codec, block, isa);
  const GilRelease no_gil;
  (accumulate ? kernels.accumulate : kernels.decode)(reinterpret_cast<float*>(out),
                                                     reinterpret_cast<const void*>(in), numel, block);
}

bool reduce_values(size_t dtype, size_t op, Address out, const std::vector<Address>& in, size_t numel,
                   double divisor, const std::string& isa) {
  if (dtype >= kDTypeCount || op >= kReduceOpCount) throw nb::value_error("no such dtype or operation");
  const ReduceKernel kernel = table_of(isa).reduce[dtype][op];
  if (kernel == nullptr || in.empty()) return false;
  std::vector<const void*> from;
  for (const Address each : in) from.push_back(reinterpret_cast<const void*>(each));
  const GilRelease no_gil;
  kernel(reinterpret_cast<void*>(out), from.data(), from.size(), numel, {divisor});
  return true;
}

size_t adam_step(Address parameter, Address gradient, Address mean, Address variance, size_t numel,
                 AdamStep step, const std::string& isa) {
  const KernelTable& table = table_of(isa);
  const GilRelease no_gil;
  return table.adam(reinterpret_cast<float*>(parameter), reinterpret_cast<const float*>(gradient),
                    reinterpret_cast<uint16_t*>(mean), reinterpret_cast<uint16_t*>(variance), numel, step);
}

}  // namespace

void check_block(CodecFormat codec, size_t block) {
  if (has_blocks(codec) ? block == 0 || block % 16 != 0 || block > kMostBlock : block != 0)
    throw std::invalid_argument("the codec has no blocks of this size");
}

size_t first_negative(const float* values, size_t numel) {
  const auto negative = [](float value) { return value < 0; };
  constexpr size_t kLook = 1024;
  for (size_t first = 0; first < numel; first += kLook) {
    const size_t count = std::min(kLook, numel - first);
    bool found = false;
    for (size_t i = 0; i < count; ++i) found |= negative(get(values + first + i));
    for (size_t i = first; found; ++i)
      if (negative(get(values + i))) return i;
  }
  return numel;
}

void bind_codecs(nb::module_& m) {
  m.def(
      "first_negative",
      [](Address values, size_t numel) {
        return first_negative(reinterpret_cast<const float*>(values), numel);
      },
      nb::arg("values"), nb::arg("numel"), "The index of the first f32 below zero, or `numel`.");
  m.def(
      "codecs",
      [] {
        return std::vector<std::tuple<std::string, size_t>>{
#define X(enumerator, name, bits, blocks) {name, bits},
            UNISONO_CODECS(X)
#undef X
        };
      },
      "Codecs as (name, bits of a code); a codec's number is its index in this list.");
  m.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (const KernelTable* table : all_kernels()) names.emplace_back(table->isa);
        return names;
      },
      "The instruction sets whose kernels this processor can run, the slowest first.");
  m.def(
      "copy",
      [](Address out, Address in, size_t nbytes, bool nontemporal, const std::string& isa) {
        const KernelTable& table = table_of(isa);
        (nontemporal ? table.copy_nontemporal : table.copy)(reinterpret_cast<void*>(out),
                                                            reinterpret_cast<const void*>(in), nbytes);
      },
      nb::arg("out"), nb::arg("in_"), nb::arg("nbytes"), nb::arg("nontemporal"), nb::arg("isa") = "",
      "Copies bytes between addresses.");
  m.def("reduce", &reduce_values, nb::arg("dtype"), nb::arg("op"), nb::arg("out"), nb::arg("in_"),
        nb::arg("numel"), nb::arg("divisor") = 1.0, nb::arg("isa") = "",
        "Reduces arrays of one dtype, given by their addresses; False: the operation has no meaning for it.");
  m.def("codec_encode", &encode_values, nb::arg("codec"), nb::arg("block"), nb::arg("out"), nb::arg("in_"),
        nb::arg("numel"), nb::arg("stochastic"), nb::arg("seed"), nb::arg("first"), nb::arg("isa") = "",
        "Encodes f32; returns the number of values, or the index of the first that the format refuses.");
  m.def("codec_decode", &decode_values, nb::arg("codec"), nb::arg("block"), nb::arg("out"), nb::arg("in_"),
        nb::arg("numel"), nb::arg("accumulate"), nb::arg("isa") = "", "Decodes into f32, or adds to it.");
  m.def(
      "adam",
      [](Address parameter, Address gradient, Address mean, Address variance, size_t numel, float beta1,
         float beta2, float eps, float decay, float shrink, float rate, float root_correction,
         bool stochastic_mean, uint64_t seed, uint64_t first, const std::string& isa) {
        return adam_step(
            parameter, gradient, mean, variance, numel,
            {beta1, beta2, eps, decay, shrink, rate, root_correction, stochastic_mean, seed, first}, isa);
      },
      nb::arg("parameter"), nb::arg("gradient"), nb::arg("mean"), nb::arg("variance"), nb::arg("numel"),
      nb::kw_only(), nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"), nb::arg("decay"), nb::arg("shrink"),
      nb::arg("rate"), nb::arg("root_correction"), nb::arg("stochastic_mean"), nb::arg("seed"),
      nb::arg("first") = 0, nb::arg("isa") = "",
      "One step of Adam, mean in 1-6-9, variance in 0-6-10; returns how many of them were too large.");
}
