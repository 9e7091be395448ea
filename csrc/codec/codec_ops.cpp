// The codec's kernels as torch operators: what is asked for is checked here; no device code.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "arguments.cuh"
#include "launch.cuh"

namespace megakernel::codec {
namespace {

using Tensors = at::TensorList;
using Integers = at::IntArrayRef;

// Their addresses; null for what has no elements.
std::vector<void*> addresses(Tensors tensors) {
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

void check_lists(const char* name, Tensors tensors, Integers numbers, size_t num_tensors,
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

void embed(Tensors tensors, Integers numbers) {
  check_lists("embed", tensors, numbers, kNumEmbedTensors, kNumEmbedNumbers);
  launch_checked("embed", embed_of(addresses(tensors).data(), numbers.data()), tensors[0]);
}

void product(Tensors tensors, Integers numbers, double eps) {
  check_lists("product", tensors, numbers, kNumProductTensors, kNumProductNumbers);
  const Product p = product_of(addresses(tensors).data(), numbers.data(), eps);
  TORCH_CHECK(p.in.channels % 32 == 0 && p.columns % 8 == 0,
              "A product takes multiples of 32 channels and of 8 columns, found ", p.in.channels,
              " and ", p.columns, ".");
  TORCH_CHECK(p.in.planes == 1 || p.in.planes == 2, "Rows have one or two planes.");
  TORCH_CHECK(p.taps == 1 || p.in.past != nullptr, "A convolution needs the rows before it.");
  TORCH_CHECK(tensors[kProductWeights].nbytes() ==
                  static_cast<size_t>(2 * p.columns * p.taps * p.in.channels),
              "The weights do not fit ", p.columns, " columns, ", p.taps, " taps and ",
              p.in.channels, " channels.");
  launch_checked("product", p, tensors[0]);
}

void attend(Tensors tensors, Integers numbers) {
  check_lists("attend", tensors, numbers, kNumAttendTensors, kNumAttendNumbers);
  const Attend p = attend_of(addresses(tensors).data(), numbers.data());
  TORCH_CHECK(p.head == 16 || p.head == 32 || p.head == 64,
              "Attention is compiled for heads of 16, 32 and 64 channels, found ", p.head, ".");
  launch_checked("attend", p, tensors[0]);
}

void depthwise(Tensors tensors, Integers numbers, double eps) {
  check_lists("depthwise", tensors, numbers, kNumDepthwiseTensors, kNumDepthwiseNumbers);
  const Depthwise p = depthwise_of(addresses(tensors).data(), numbers.data(), eps);
  TORCH_CHECK(p.in.planes == 2 && p.in.channels <= 2 * kMostPairs * kBlockThreads,
              "The depthwise convolution takes two planes of at most ",
              2 * kMostPairs * kBlockThreads, " channels.");
  launch_checked("depthwise", p, tensors[0]);
}

void remember(Tensors tensors, Integers numbers) {
  const size_t layers = numbers.size() / kNumRowNumbers;
  check_lists("remember", tensors, numbers, kRememberLayers + 2 * layers,
              1 + kNumRowNumbers * layers);
  TORCH_CHECK(layers <= kMostHistories, "There is room for ", kMostHistories, " histories.");
  const auto at = addresses(tensors);
  launch_checked("remember", remember_of(at.data(), numbers.data(), static_cast<int>(layers)),
                 tensors[0]);
}

}  // namespace
}  // namespace megakernel::codec

TORCH_LIBRARY_FRAGMENT(megakernel_tts, m) {
  m.def("codec_embed(Tensor(a!)[] tensors, int[] numbers) -> ()");
  m.def("codec_product(Tensor(a!)[] tensors, int[] numbers, float eps) -> ()");
  m.def("codec_attend(Tensor(a!)[] tensors, int[] numbers) -> ()");
  m.def("codec_depthwise(Tensor(a!)[] tensors, int[] numbers, float eps) -> ()");
  m.def("codec_remember(Tensor(a!)[] tensors, int[] numbers) -> ()");
}

TORCH_LIBRARY_IMPL(megakernel_tts, CUDA, m) {
  m.impl("codec_embed", &megakernel::codec::embed);
  m.impl("codec_product", &megakernel::codec::product);
  m.impl("codec_attend", &megakernel::codec::attend);
  m.impl("codec_depthwise", &megakernel::codec::depthwise);
  m.impl("codec_remember", &megakernel::codec::remember);
}
