// The codec's kernels as torch operators: argument checks, no device code.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "arguments.cuh"
#include "launch.cuh"

namespace megakernel::codec {
namespace {

using Integers = at::IntArrayRef;

// Addresses of the tensors; null for tensors without elements.
std::vector<void*> addresses(at::TensorList tensors) {
  std::vector<void*> at;
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK(t.numel() == 0 || t.is_cuda() || t.is_pinned(),
                "The codec's tensors must be on a GPU or pinned.");
    TORCH_CHECK(t.numel() == 0 || reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0,
                "The codec's tensors must begin on 16 bytes.");
    at.push_back(t.numel() == 0 ? nullptr : t.data_ptr());
  }
  return at;
}

void check_lists(const char* name, at::TensorList tensors, Integers numbers, size_t num_tensors,
                 size_t num_numbers) {
  TORCH_CHECK(tensors.size() == num_tensors && numbers.size() == num_numbers, name, " takes ",
              num_tensors, " tensors and ", num_numbers, " numbers, found ", tensors.size(),
              " and ", numbers.size(), ".");
}

template <class P>
void launch_checked(const char* name, const P& p, const at::Tensor& frames) {
  TORCH_CHECK(frames.is_cuda() && frames.scalar_type() == at::kInt && frames.dim() == 2 &&
                  frames.size(1) == kFrameInts && frames.is_contiguous(),
              "frames must be int32 [frames, ", kFrameInts, "] on a GPU, found ", frames.sizes());
  const c10::cuda::CUDAGuard guard(frames.device());
  const cudaError_t error = launch(p, c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(error == cudaSuccess, "The codec's ", name,
              " could not be launched: ", cudaGetErrorString(error), ".");
}

void embed(at::TensorList tensors, Integers numbers) {
  check_lists("embed", tensors, numbers, kNumEmbedTensors, kNumEmbedNumbers);
  launch_checked("embed", embed_params(addresses(tensors).data(), numbers.data()), tensors[0]);
}

void project(at::TensorList tensors, Integers numbers, double eps) {
  check_lists("project", tensors, numbers, kNumProjectionTensors, kNumProjectionNumbers);
  const ProjectionParams p = projection_params(addresses(tensors).data(), numbers.data(), eps);
  TORCH_CHECK(p.input.num_channels % 32 == 0 && p.num_columns % 8 == 0,
              "A product takes multiples of 32 channels and of 8 columns, found ",
              p.input.num_channels, " and ", p.num_columns, ".");
  TORCH_CHECK(p.input.num_planes == 1 || p.input.num_planes == 2,
              "Activations have one or two planes.");
  TORCH_CHECK(p.num_taps == 1 || p.input.history != nullptr,
              "A convolution needs the rows before it.");
  TORCH_CHECK(tensors[kProjectionWeights].nbytes() ==
                  static_cast<size_t>(2 * p.num_columns * p.num_taps * p.input.num_channels),
              "The weights do not fit ", p.num_columns, " columns, ", p.num_taps, " taps and ",
              p.input.num_channels, " channels.");
  launch_checked("project", p, tensors[0]);
}

void attend(at::TensorList tensors, Integers numbers) {
  check_lists("attend", tensors, numbers, kNumAttentionTensors, kNumAttentionNumbers);
  const AttentionParams p = attention_params(addresses(tensors).data(), numbers.data());
  TORCH_CHECK(p.head_dim == 16 || p.head_dim == 32 || p.head_dim == 64,
              "Attention is compiled for heads of 16, 32 and 64 channels, found ", p.head_dim, ".");
  launch_checked("attend", p, tensors[0]);
}

void depthwise(at::TensorList tensors, Integers numbers, double eps) {
  check_lists("depthwise", tensors, numbers, kNumDepthwiseTensors, kNumDepthwiseNumbers);
  const DepthwiseParams p = depthwise_params(addresses(tensors).data(), numbers.data(), eps);
  TORCH_CHECK(
      p.input.num_planes == 2 && p.input.num_channels <= 2 * kMaxChannelPairs * kBlockThreads,
      "The depthwise convolution takes two planes of at most ",
      2 * kMaxChannelPairs * kBlockThreads, " channels.");
  launch_checked("depthwise", p, tensors[0]);
}

void update_state(at::TensorList tensors, Integers numbers) {
  const size_t layers = numbers.size() / kNumActivationNumbers;
  check_lists("update_state", tensors, numbers, kStateUpdateLayers + 2 * layers,
              1 + kNumActivationNumbers * layers);
  TORCH_CHECK(layers <= kMaxHistories, "There is room for ", kMaxHistories, " histories.");
  const auto at = addresses(tensors);
  launch_checked("update_state",
                 state_update_params(at.data(), numbers.data(), static_cast<int>(layers)),
                 tensors[0]);
}

}  // namespace
}  // namespace megakernel::codec

TORCH_LIBRARY_FRAGMENT(megakernel_tts, m) {
  m.def("codec_embed(Tensor(a!)[] tensors, int[] numbers) -> ()");
  m.def("codec_project(Tensor(a!)[] tensors, int[] numbers, float eps) -> ()");
  m.def("codec_attend(Tensor(a!)[] tensors, int[] numbers) -> ()");
  m.def("codec_depthwise(Tensor(a!)[] tensors, int[] numbers, float eps) -> ()");
  m.def("codec_update_state(Tensor(a!)[] tensors, int[] numbers) -> ()");
}

TORCH_LIBRARY_IMPL(megakernel_tts, CUDA, m) {
  m.impl("codec_embed", &megakernel::codec::embed);
  m.impl("codec_project", &megakernel::codec::project);
  m.impl("codec_attend", &megakernel::codec::attend);
  m.impl("codec_depthwise", &megakernel::codec::depthwise);
  m.impl("codec_update_state", &megakernel::codec::update_state);
}
