// The alignment kernels as torch operators: argument checks, no device code.
#include <ATen/ATen.h>
#include <ATen/Dispatch_v2.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>

#include "launch.cuh"

namespace megakernel::align {
namespace {

using at::Tensor;

void check(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, "The alignment's ", what,
              " could not be launched: ", cudaGetErrorString(error), ".");
}

Type type_of(const Tensor& scores) {
  switch (scores.scalar_type()) {
    case at::kFloat:
      return Type::kFloat;
    case at::kBFloat16:
      return Type::kBfloat16;
    case at::kHalf:
      return Type::kHalf;
    default:
      TORCH_CHECK(false, "Scores must be float32, bfloat16 or float16, found ",
                  scores.scalar_type(), ".");
  }
}

// Whether every row begins at a multiple of `bytes`.
bool begins_on(const Tensor& t, int64_t bytes) {
  const int64_t size = t.element_size();
  const auto fits = [&](int dim) { return t.size(dim) == 1 || t.stride(dim) * size % bytes == 0; };
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0 && fits(0) && fits(1);
}

// Scores as the kernel reads them: adjacent cells, rows that do not overlap and begin at a multiple
// of four bytes. Copied if necessary.
Tensor readable(const Tensor& scores) {
  const bool apart = scores.size(1) == 1 || scores.stride(1) >= scores.size(2);
  const Tensor rows = scores.stride(2) == 1 && apart ? scores : scores.contiguous();
  return begins_on(rows, 4) ? rows : rows.to(at::kFloat).contiguous();
}

// Lengths on the device of the scores; an undefined tensor if there are none.
Tensor given(const std::optional<Tensor>& lengths, const Tensor& scores) {
  if (!lengths.has_value()) return {};
  TORCH_CHECK(lengths->sizes() == scores.sizes().slice(0, 1) &&
                  (lengths->scalar_type() == at::kInt || lengths->scalar_type() == at::kLong),
              "Lengths must be int32 or int64 [", scores.size(0), "].");
  return lengths->to(scores.device()).contiguous();
}

Lengths lengths(const Tensor& each, int64_t all) {
  const bool is_int64 = each.defined() && each.scalar_type() == at::kLong;
  return {each.defined() ? each.data_ptr() : nullptr, is_int64, static_cast<int>(all)};
}

// The bits of an element that make it nonzero: all but the sign of a floating-point number.
uint64_t nonzero_bits(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
    case at::kBFloat16:
      return 0x7FFF;
    case at::kFloat:
      return 0x7FFFFFFF;
    case at::kDouble:
      return 0x7FFFFFFFFFFFFFFF;
    default:
      TORCH_CHECK_VALUE(c10::isIntegralType(type, true),
                        "mask must be of bools, integers or floating-point numbers, found ", type,
                        ".");
      return ~uint64_t{0};
  }
}

// int32 [2, items]: tokens, then frames.
Tensor measured(const Tensor& mask, const Tensor& scores) {
  TORCH_CHECK(mask.device() == scores.device() && mask.sizes() == scores.sizes(), "A mask must be ",
              scores.sizes(), " beside the scores.");
  const Tensor lengths = at::empty({2, mask.size(0)}, scores.options().dtype(at::kInt));
  const MaskParams p{mask.data_ptr(),
                     mask.stride(0),
                     mask.stride(1),
                     mask.stride(2),
                     static_cast<int>(mask.size(0)),
                     static_cast<int>(mask.size(1)),
                     static_cast<int>(mask.size(2)),
                     static_cast<int>(mask.element_size()),
                     nonzero_bits(mask.scalar_type()),
                     lengths.data_ptr<int>()};
  check(launch(p, c10::cuda::getCurrentCUDAStream()), "mask");
  return lengths;
}

Tensor search(const Tensor& scores, const std::optional<Tensor>& text_lengths,
              const std::optional<Tensor>& frame_lengths, const std::optional<Tensor>& mask) {
  TORCH_CHECK(scores.dim() == 3, "Scores must be [items, tokens, frames], found ", scores.sizes(),
              ".");
  const c10::cuda::CUDAGuard guard(scores.device());
  const auto integers = scores.options().dtype(at::kInt);
  if (scores.numel() == 0) return at::zeros({scores.size(0), scores.size(1)}, integers);
  const Tensor rows = readable(scores);
  const Tensor text = given(text_lengths, rows), frames = given(frame_lengths, rows);
  const Tensor counted = mask.has_value() ? measured(*mask, rows) : Tensor();
  const Tensor durations = at::empty({rows.size(0), rows.size(1)}, integers);
  SearchParams p{};
  p.scores = rows.data_ptr();
  p.item_stride = rows.stride(0);
  p.row_stride = rows.size(1) == 1 ? (rows.size(2) + kStepColumns - 1) / kStepColumns * kStepColumns
                                   : rows.stride(1);
  p.num_items = static_cast<int>(rows.size(0));
  p.num_rows = static_cast<int>(rows.size(1));
  p.num_columns = static_cast<int>(rows.size(2));
  p.text_lengths = lengths(text, rows.size(1));
  p.frame_lengths = lengths(frames, rows.size(2));
  if (counted.defined()) {
    p.text_lengths.per_item = counted.data_ptr<int>();
    p.frame_lengths.per_item = counted.data_ptr<int>() + p.num_items;
  }
  p.durations = durations.data_ptr<int>();
  check(partition(p, type_of(rows)), "search");
  const Tensor workspace = at::empty({lay_out_workspace(p, nullptr).num_words}, integers);
  lay_out_workspace(p, reinterpret_cast<uint32_t*>(workspace.data_ptr<int>()));
  check(launch(p, type_of(rows), begins_on(rows, kStepColumns * rows.element_size()),
               c10::cuda::getCurrentCUDAStream()),
        "search");
  return durations;
}

Tensor path(const Tensor& durations, int64_t frames, at::ScalarType dtype) {
  TORCH_CHECK(
      durations.dim() == 2 && durations.scalar_type() == at::kInt && durations.is_contiguous(),
      "Durations must be contiguous int32 [items, tokens], found ", durations.scalar_type(), " ",
      durations.sizes(), ".");
  const c10::cuda::CUDAGuard guard(durations.device());
  const Tensor out =
      at::empty({durations.size(0), durations.size(1), frames}, durations.options().dtype(dtype));
  if (out.numel() == 0) return out;
  PathParams p{durations.data_ptr<int>(),
               static_cast<int>(durations.size(0)),
               static_cast<int>(durations.size(1)),
               static_cast<int>(frames),
               out.data_ptr(),
               static_cast<int>(out.element_size()),
               0};
  AT_DISPATCH_V2(dtype, "mas_path", AT_WRAP([&] {
                   const scalar_t one = static_cast<scalar_t>(1.0f);
                   memcpy(&p.one_bits, &one, sizeof(one));
                 }),
                 AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), at::kBool,
                 at::kHalf, at::kBFloat16, AT_EXPAND(AT_FLOAT8_TYPES));
  check(launch(p, c10::cuda::getCurrentCUDAStream()), "path");
  return out;
}

}  // namespace
}  // namespace megakernel::align

TORCH_LIBRARY_IMPL(megakernel_tts, CUDA, m) {
  m.impl("mas", &megakernel::align::search);
  m.impl("mas_path", &megakernel::align::path);
}
