// The alignment's kernels as torch operators: what is asked for is checked here; no device code.
#include <ATen/ATen.h>
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

// Whether every row does.
bool begins_on(const Tensor& t, int64_t bytes) {
  const int64_t size = t.element_size();
  const auto fits = [&](int dim) { return t.size(dim) == 1 || t.stride(dim) * size % bytes == 0; };
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0 && fits(0) && fits(1);
}

// The kernel reads rows whose cells lie side by side and which begin on four bytes.
Tensor readable(const Tensor& scores) {
  const Tensor rows = scores.stride(2) == 1 ? scores : scores.contiguous();
  return begins_on(rows, 4) ? rows : rows.to(at::kFloat).contiguous();
}

Lengths lengths(const std::optional<Tensor>& given, const Tensor& scores, int dim) {
  const int all = static_cast<int>(scores.size(dim));
  if (!given.has_value()) return {nullptr, false, all};
  TORCH_CHECK(given->device() == scores.device() && given->is_contiguous() &&
                  given->sizes() == scores.sizes().slice(0, 1) &&
                  (given->scalar_type() == at::kInt || given->scalar_type() == at::kLong),
              "Lengths must be int32 or int64 [", scores.size(0), "] beside the scores.");
  return {given->data_ptr(), given->scalar_type() == at::kLong, all};
}

Tensor search(const Tensor& scores, const std::optional<Tensor>& text_lengths,
              const std::optional<Tensor>& frame_lengths) {
  TORCH_CHECK(scores.dim() == 3 && scores.numel() > 0,
              "Scores must be [items, tokens, frames] and not empty, found ", scores.sizes(), ".");
  const c10::cuda::CUDAGuard guard(scores.device());
  const Tensor rows = readable(scores);
  const Tensor durations = at::empty({rows.size(0), rows.size(1)}, rows.options().dtype(at::kInt));
  Search p{};
  p.scores = rows.data_ptr();
  p.item_stride = rows.stride(0);
  p.row_stride = rows.stride(1);
  p.items = static_cast<int>(rows.size(0));
  p.rows = static_cast<int>(rows.size(1));
  p.columns = static_cast<int>(rows.size(2));
  p.text = lengths(text_lengths, rows, 1);
  p.frames = lengths(frame_lengths, rows, 2);
  p.durations = durations.data_ptr<int>();
  check(cut(p, type_of(rows)), "search");
  const Tensor workspace = at::empty({lay_out(p, nullptr).words}, durations.options());
  lay_out(p, reinterpret_cast<uint32_t*>(workspace.data_ptr<int>()));
  check(launch(p, type_of(rows), begins_on(rows, kStep * rows.element_size()),
               c10::cuda::getCurrentCUDAStream()),
        "search");
  return durations;
}

Tensor path(const Tensor& durations, int64_t frames, at::ScalarType dtype) {
  TORCH_CHECK(durations.dim() == 2 && durations.scalar_type() == at::kInt &&
                  durations.is_contiguous() && durations.numel() > 0 && frames > 0,
              "Durations must be contiguous int32 [items, tokens] and not empty, found ",
              durations.scalar_type(), " ", durations.sizes(), " of ", frames, " frames.");
  const Tensor one = at::ones({1}, dtype);
  TORCH_CHECK(one.element_size() <= 8, "A path of ", dtype, " cannot be written.");
  const c10::cuda::CUDAGuard guard(durations.device());
  const Tensor out =
      at::empty({durations.size(0), durations.size(1), frames}, durations.options().dtype(dtype));
  Path p{durations.data_ptr<int>(),
         static_cast<int>(durations.size(0)),
         static_cast<int>(durations.size(1)),
         static_cast<int>(frames),
         out.data_ptr(),
         static_cast<int>(one.element_size()),
         0};
  memcpy(&p.one, one.data_ptr(), one.element_size());
  check(launch(p, c10::cuda::getCurrentCUDAStream()), "path");
  return out;
}

}  // namespace
}  // namespace megakernel::align

TORCH_LIBRARY_FRAGMENT(megakernel_tts, m) {
  m.def("align_search(Tensor scores, Tensor? text_lengths, Tensor? frame_lengths) -> Tensor");
  m.def("align_path(Tensor durations, int frames, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(megakernel_tts, CUDA, m) {
  m.impl("align_search", &megakernel::align::search);
  m.impl("align_path", &megakernel::align::path);
}
