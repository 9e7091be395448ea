// The kernel as torch operators: what is asked for is checked here, with sentences; no device code.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "params.cuh"

namespace megakernel {
namespace {

using at::Tensor;

// The order of the lists that the operators take.
enum Weights {
  kTalkerLayers,
  kPredictorLayers,
  kTalkerNorm,
  kPredictorNorm,
  kTalkerHead,
  kPredictorHeads,
  kCodeEmbedding,
  kGroupEmbeddings,
  kPad,
  kTurns,
  kProject,
  kProjectBias,
  kNumWeights
};
enum Memory {
  kKeys,
  kValues,
  kPredictorKeys,
  kPredictorValues,
  kText,
  kHidden,
  kSeen,
  kStreams,
  kWorkspace,
  kCounters,
  kNumMemory
};
enum Mailbox { kFrames, kPublished, kStop, kFailure, kNumMailbox };

template <class T>
T* pointer(const Tensor& t, at::ScalarType type, const char* name) {
  TORCH_CHECK(t.is_contiguous() && t.scalar_type() == type, name, " must be contiguous, of type ",
              type, "; found ", t.scalar_type(), " with strides ", t.strides(), ".");
  return static_cast<T*>(t.data_ptr());
}

const bf16* half(const Tensor& t, const char* name) {
  return pointer<const bf16>(t, at::kBFloat16, name);
}

// Floats of the workspace, one buffer after another.
struct Workspace {
  float* next;
  float* end;

  float* take(int64_t count) {
    float* at = next;
    next += count;
    TORCH_CHECK(next <= end, "The workspace is too small; it is sized by workspace_floats.");
    return at;
  }
};

int64_t widest(const Shape& s, int which) { return std::max(s.talker[which], s.predictor[which]); }

struct Plan {
  int out_splits, down_splits;
};

// Enough units for every multiprocessor, and stretches of K that fit the activations.
Plan plan(const Shape& s, int blocks) {
  const int tiles = std::max<int>(s.talker[0], s.predictor[0]) / 16;
  auto splits = [&](int64_t k) {
    const int fit = static_cast<int>((k + kMostActivations - 1) / kMostActivations);
    const int busy = std::max(1, blocks / tiles);
    const int most = static_cast<int>(k / 16 / kWarps);  // a tile a warp at least
    return std::max(fit, std::min({busy, most, kMostSplits}));
  };
  return {splits(widest(s, 1) * kHeadDim), splits(widest(s, 3))};
}

int64_t workspace_floats(int64_t model) {
  const Shape s = entry(model).shape;
  const int64_t qkv = (widest(s, 1) + 2 * widest(s, 2)) * kHeadDim;
  const int64_t heads = widest(s, 1);
  return kColumns * (qkv + kMaxSpans * heads * (kHeadDim + 2) + kMostSplits * widest(s, 0) +
                     widest(s, 3) + s.codes + kControl + 1);
}

Network network(const Tensor& layers, const Tensor& norm, const Tensor& keys, const Tensor& values,
                const Tensor& turns, double eps) {
  TORCH_CHECK(keys.dim() == 5 && keys.sizes() == values.sizes(),
              "keys and values must be [layers, slots, kv heads, positions, 128].");
  TORCH_CHECK(
      layers.dim() == 2 && layers.size(1) == sizeof(Layer) / 8 && layers.size(0) == keys.size(0),
      "layers must be [", keys.size(0), ", ", sizeof(Layer) / 8, "] addresses.");
  TORCH_CHECK(turns.size(0) >= keys.size(3), "turns must cover ", keys.size(3), " positions.");
  return {pointer<const Layer>(layers, at::kLong, "layers"),
          static_cast<int>(layers.size(0)),
          half(norm, "norm"),
          pointer<bf16>(keys, at::kBFloat16, "keys"),
          pointer<bf16>(values, at::kBFloat16, "values"),
          static_cast<int>(keys.size(1)),
          static_cast<int>(keys.size(3)),
          pointer<const float2>(turns, at::kFloat, "turns"),
          static_cast<float>(eps)};
}

Params params(int64_t model, at::TensorList w, at::TensorList m, at::TensorList mail, int64_t eos,
              double eps, int blocks) {
  TORCH_CHECK(0 <= model && model < kModels, "There is no model ", model, ".");
  TORCH_CHECK(w.size() == kNumWeights && m.size() == kNumMemory && mail.size() == kNumMailbox,
              "The lists have ", w.size(), ", ", m.size(), " and ", mail.size(), " tensors.");
  for (const Tensor& t : m) TORCH_CHECK(t.is_cuda(), "The memory must be on a GPU.");
  for (const Tensor& t : mail) TORCH_CHECK(t.is_pinned(), "The mailbox must be pinned.");
  const Shape s = entry(model).shape;
  const Plan splits = plan(s, blocks);
  Params p{};
  p.talker = network(w[kTalkerLayers], w[kTalkerNorm], m[kKeys], m[kValues], w[kTurns], eps);
  p.predictor = network(w[kPredictorLayers], w[kPredictorNorm], m[kPredictorKeys],
                        m[kPredictorValues], w[kTurns], eps);
  p.talker_head = reinterpret_cast<const uint4*>(half(w[kTalkerHead], "head"));
  p.predictor_heads = reinterpret_cast<const uint4*>(half(w[kPredictorHeads], "heads"));
  p.code_embedding = half(w[kCodeEmbedding], "code embedding");
  p.group_embeddings =
      pointer<const bf16* const>(w[kGroupEmbeddings], at::kLong, "group embeddings");
  p.pad = half(w[kPad], "pad");
  if (s.talker[0] != s.predictor[0]) {
    p.project = reinterpret_cast<const uint4*>(half(w[kProject], "project"));
    p.project_bias = half(w[kProjectBias], "bias");
  }
  p.text = half(m[kText], "text");
  p.hidden = pointer<float>(m[kHidden], at::kFloat, "hidden");
  p.seen = pointer<uint8_t>(m[kSeen], at::kByte, "seen");
  p.eos = static_cast<int>(eos);
  p.streams = reinterpret_cast<Stream*>(pointer<uint8_t>(m[kStreams], at::kByte, "streams"));
  p.columns = static_cast<int>(m[kStreams].size(0));
  TORCH_CHECK(m[kStreams].dim() == 2 && m[kStreams].size(1) == sizeof(Stream),
              "streams must be [columns, ", sizeof(Stream), "] bytes.");
  TORCH_CHECK(1 <= p.columns && p.columns <= kColumns, "One launch takes 1 to ", kColumns,
              " streams, found ", p.columns, ".");
  p.out_splits = splits.out_splits;
  p.down_splits = splits.down_splits;
  p.frames = reinterpret_cast<Published*>(pointer<int>(mail[kFrames], at::kInt, "frames"));
  p.published = reinterpret_cast<unsigned*>(pointer<int>(mail[kPublished], at::kInt, "published"));
  p.stop = reinterpret_cast<unsigned*>(pointer<int>(mail[kStop], at::kInt, "stop"));
  p.failure = reinterpret_cast<unsigned*>(pointer<int>(mail[kFailure], at::kInt, "failure"));
  float* floats = pointer<float>(m[kWorkspace], at::kFloat, "workspace");
  Workspace work{floats, floats + m[kWorkspace].numel()};
  const int64_t heads = widest(s, 1);
  p.qkv = work.take(kColumns * (heads + 2 * widest(s, 2)) * kHeadDim);
  p.attended = work.take(kColumns * kMaxSpans * heads * kHeadDim);
  p.weight = work.take(kColumns * kMaxSpans * heads * 2);
  p.partial = work.take(kColumns * kMostSplits * widest(s, 0));
  p.middle = work.take(kColumns * widest(s, 3));
  p.logits = work.take(kColumns * (s.codes + kControl));
  p.drawn = reinterpret_cast<int*>(work.take(kColumns));
  unsigned* counters =
      reinterpret_cast<unsigned*>(pointer<int>(m[kCounters], at::kInt, "counters"));
  p.barrier = counters;
  p.epoch = counters + 32;  // lines of their own
  p.given_up = counters + 64;
  p.patience = 2'000'000'000;
  return p;
}

void launch(void* kernel, const Entry& e, Params& p, int blocks) {
  auto check = [](cudaError_t error, const char* what) {
    TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error), ".");
  };
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(e.shared_bytes)),
        "This GPU has too little shared memory a block for the model");
  void* arguments[] = {&p};
  check(cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(kThreads), arguments, e.shared_bytes,
                                    c10::cuda::getCurrentCUDAStream()),
        "The kernel could not be launched with one block a multiprocessor");
}

int blocks_here() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

void generate(int64_t model, at::TensorList weights, at::TensorList memory, at::TensorList mailbox,
              int64_t eos, double eps, int64_t max_frames) {
  const c10::cuda::CUDAGuard guard(memory[0].device());
  const int blocks = blocks_here();
  Params p = params(model, weights, memory, mailbox, eos, eps, blocks);
  p.max_frames = static_cast<int>(max_frames);
  const int64_t room = mailbox[kFrames].numel() * 4 / sizeof(Published);
  TORCH_CHECK(0 < max_frames && max_frames * p.columns <= room, "The mailbox has room for ", room,
              " frames, asked for ", max_frames, " of ", p.columns, " streams.");
  const Entry e = entry(model);
  launch(e.generate, e, p, blocks);
}

void prefill(int64_t model, at::TensorList weights, at::TensorList memory, at::TensorList mailbox,
             int64_t eos, double eps, const Tensor& prompt) {
  const c10::cuda::CUDAGuard guard(memory[0].device());
  const int blocks = blocks_here();
  Params p = params(model, weights, memory, mailbox, eos, eps, blocks);
  const Entry e = entry(model);
  TORCH_CHECK(prompt.dim() == 2 && prompt.size(1) == e.shape.talker[0],
              "The prompt must be [positions, ", e.shape.talker[0], "], found ", prompt.sizes());
  TORCH_CHECK(prompt.size(0) <= p.talker.positions, "A prompt of ", prompt.size(0),
              " does not fit ", p.talker.positions, " positions.");
  p.prompt = half(prompt, "prompt");
  p.prompt_length = static_cast<int>(prompt.size(0));
  launch(e.prefill, e, p, blocks);
}

std::vector<int64_t> shape(int64_t model) {
  TORCH_CHECK(0 <= model && model < kModels, "There is no model ", model, ".");
  const Shape s = entry(model).shape;
  std::vector<int64_t> out(s.talker, s.talker + 4);
  out.insert(out.end(), s.predictor, s.predictor + 4);
  out.push_back(s.codes);
  return out;
}

int64_t models() { return kModels; }

}  // namespace
}  // namespace megakernel

TORCH_LIBRARY(megakernel_tts, m) {
  m.def("models() -> int", &megakernel::models);
  m.def("shape(int model) -> int[]", &megakernel::shape);
  m.def("workspace_floats(int model) -> int", &megakernel::workspace_floats);
  m.def(
      "generate(int model, Tensor[] weights, Tensor(a!)[] memory, Tensor(b!)[] mailbox, int eos, "
      "float eps, int max_frames) -> ()");
  m.def(
      "prefill(int model, Tensor[] weights, Tensor(a!)[] memory, Tensor(b!)[] mailbox, int eos, "
      "float eps, Tensor prompt) -> ()");
}

TORCH_LIBRARY_IMPL(megakernel_tts, CUDA, m) {
  m.impl("generate", &megakernel::generate);
  m.impl("prefill", &megakernel::prefill);
}
