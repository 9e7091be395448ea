// The kernel as torch operators: what is asked for is checked here, with sentences; no device code.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "../workspace.cuh"
#include "prefill_launch.cuh"

namespace megakernel {
namespace {

using at::Tensor;

// The order of the lists that the operators take.
enum Weights {
  kTalkerStack,
  kPredictorStack,
  kTalkerNorms,
  kPredictorNorms,
  kTalkerNorm,
  kPredictorNorm,
  kTalkerHead,
  kPredictorHeads,
  kCodeEmbedding,
  kGroupEmbeddings,
  kPad,
  kTurns,
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
  kWorkspace,
  kScores,
  kTimes,
  kNumMemory
};
enum Mailbox { kFrames, kPublished, kStop, kFailure, kNumMailbox };

template <class T>
T* pointer(const Tensor& t, at::ScalarType type, const char* name) {
  TORCH_CHECK(t.is_contiguous() && t.scalar_type() == type, name, " must be contiguous, of type ",
              type, "; found ", t.scalar_type(), " with strides ", t.strides(), ".");
  return static_cast<T*>(t.data_ptr());
}

const bf16* bf16_pointer(const Tensor& t, const char* name) {
  return pointer<const bf16>(t, at::kBFloat16, name);
}

const uint4* packed(const Tensor& t, const char* name) {
  return reinterpret_cast<const uint4*>(bf16_pointer(t, name));
}

int64_t workspace_size(int64_t model) { return workspace_words(entry(model).shape); }

// As words that give their two lowest bits to a tag.
std::vector<int64_t> logits_of(int64_t model) {
  const LogitsOffsets at = logits_at(entry(model).shape);
  return {at.talker, at.predictor};
}

Network network(const Tensor& stack, const Tensor& norms, const Tensor& norm, const Tensor& keys,
                const Tensor& values, const Tensor& turns, double eps) {
  TORCH_CHECK(keys.dim() == 5 && keys.size(3) % kPageSize == 0 && keys.size(4) == kKvWidth &&
                  keys.numel() == values.numel(),
              "keys must be [layers, slots, kv heads, positions, ", kKvWidth,
              "], values as many, and the positions a multiple of ", kPageSize, ".");
  TORCH_CHECK(turns.size(0) >= keys.size(3), "turns must cover ", keys.size(3), " positions.");
  return {packed(stack, "stack"),
          bf16_pointer(norms, "norms"),
          static_cast<int>(keys.size(0)),
          bf16_pointer(norm, "norm"),
          pointer<bf16>(keys, at::kBFloat16, "keys"),
          pointer<bf16>(values, at::kBFloat16, "values"),
          static_cast<int>(keys.size(1)),
          static_cast<int>(keys.size(3)),
          pointer<const float2>(turns, at::kFloat, "turns"),
          static_cast<float>(eps),
          {}};
}

// Positions of a talker's layer whose keys and values take a fifth of the second-level cache: the
// rest is for what passes through it.
int l2_resident_positions(const Shape& s) {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device);
  const int position = 2 * s.talker[2] * kKvWidth * static_cast<int>(sizeof(bf16));
  return bytes / 5 / position;
}

Params params(int64_t model, at::TensorList w, at::TensorList m, at::TensorList mail, int64_t eos,
              double eps, int64_t patience) {
  TORCH_CHECK(0 <= model && model < kNumModels, "There is no model ", model, ".");
  TORCH_CHECK(w.size() == kNumWeights && m.size() == kNumMemory && mail.size() == kNumMailbox,
              "The lists have ", w.size(), ", ", m.size(), " and ", mail.size(), " tensors.");
  for (const Tensor& t : m) TORCH_CHECK(t.is_cuda(), "The memory must be on a GPU.");
  for (const Tensor& t : mail) {
    TORCH_CHECK(t.is_pinned() || t.is_cuda(), "The mailbox must be pinned, or on a GPU.");
  }
  const Shape s = entry(model).shape;
  Params p{};
  p.talker = network(w[kTalkerStack], w[kTalkerNorms], w[kTalkerNorm], m[kKeys], m[kValues],
                     w[kTurns], eps);
  p.predictor = network(w[kPredictorStack], w[kPredictorNorms], w[kPredictorNorm],
                        m[kPredictorKeys], m[kPredictorValues], w[kTurns], eps);
  p.talker_head = packed(w[kTalkerHead], "head");
  p.predictor_heads = packed(w[kPredictorHeads], "heads");
  p.code_embedding = bf16_pointer(w[kCodeEmbedding], "code embedding");
  TORCH_CHECK(w[kGroupEmbeddings].is_cpu() && w[kGroupEmbeddings].numel() == kNumCodeGroups - 1,
              "The group embeddings must be ", kNumCodeGroups - 1, " addresses on the host, found ",
              w[kGroupEmbeddings].numel(), " on ", w[kGroupEmbeddings].device(), ".");
  std::memcpy(p.group_embeddings,
              pointer<const int64_t>(w[kGroupEmbeddings], at::kLong, "group embeddings"),
              sizeof(p.group_embeddings));
  p.pad_vector = bf16_pointer(w[kPad], "pad");
  p.input_projection_bias = bf16_pointer(w[kProjectBias], "bias");
  p.text_vectors = bf16_pointer(m[kText], "text");
  p.prompt_hidden = pointer<float>(m[kHidden], at::kFloat, "hidden");
  p.seen_codes = pointer<uint8_t>(m[kSeen], at::kByte, "seen");
  p.eos_id = static_cast<int>(eos);
  p.l2_resident_positions = l2_resident_positions(s);
  p.published_frames =
      reinterpret_cast<PublishedFrame*>(pointer<int>(mail[kFrames], at::kInt, "frames"));
  p.num_published =
      reinterpret_cast<unsigned*>(pointer<int>(mail[kPublished], at::kInt, "published"));
  p.stop_flags = reinterpret_cast<unsigned*>(pointer<int>(mail[kStop], at::kInt, "stop"));
  p.failure = reinterpret_cast<unsigned*>(pointer<int>(mail[kFailure], at::kInt, "failure"));
  TORCH_CHECK(m[kWorkspace].numel() == workspace_words(s), "The workspace must have ",
              workspace_words(s), " words.");
  lay_out(p, s, reinterpret_cast<uint32_t*>(pointer<int>(m[kWorkspace], at::kInt, "workspace")));
  p.phase_times = reinterpret_cast<uint64_t*>(pointer<int64_t>(m[kTimes], at::kLong, "times"));
  TORCH_CHECK(patience >= 0, "The patience is ", patience, " ns; it must not be negative.");
  p.timeout_ns = static_cast<uint64_t>(patience);
  return p;
}

// Who speaks, told by the host. They travel with the launch's own arguments: a copy to the GPU
// would take its time before each launch.
void take_streams(Params& p, const Tensor& streams) {
  TORCH_CHECK(streams.is_cpu() && streams.dim() == 2 && streams.size(1) == sizeof(Stream),
              "The streams must be [columns, ", sizeof(Stream), "] bytes on the host, found ",
              streams.sizes(), " on ", streams.device(), ".");
  TORCH_CHECK(1 <= streams.size(0) && streams.size(0) <= kMaxStreams, "One launch takes 1 to ",
              kMaxStreams, " streams, found ", streams.size(0), ".");
  p.num_streams = static_cast<int>(streams.size(0));
  std::memcpy(p.streams, pointer<uint8_t>(streams, at::kByte, "streams"), streams.nbytes());
  for (int c = 0; c < p.num_streams; ++c) {
    TORCH_CHECK(0 <= p.streams[c].slot && p.streams[c].slot < p.talker.num_slots,
                "There is no slot ", p.streams[c].slot, " among ", p.talker.num_slots, ".");
  }
}

// Which heads are watched, each as layer * heads + head, and where their scores go.
AttentionCapture attention_capture(const Params& p, const Shape& s, at::IntArrayRef heads,
                                   const Tensor& scores) {
  AttentionCapture w{};
  w.num_heads = static_cast<int>(heads.size());
  TORCH_CHECK(heads.size() <= kMaxCapturedHeads, "At most ", kMaxCapturedHeads,
              " heads can be watched, found ", heads.size(), ".");
  for (size_t i = 0; i < heads.size(); ++i) {
    const int64_t there = static_cast<int64_t>(p.talker.num_layers) * s.talker[1];
    TORCH_CHECK(0 <= heads[i] && heads[i] < there, "There is no head ", heads[i], " among ", there,
                ".");
    w.heads[i] = static_cast<int>(heads[i]);
  }
  w.scores = pointer<float>(scores, at::kFloat, "scores");
  const int64_t wanted =
      static_cast<int64_t>(p.num_streams) * p.max_frames * w.num_heads * p.talker.num_positions;
  TORCH_CHECK(scores.numel() >= wanted, "The scores need room for ", wanted, " numbers, found ",
              scores.numel(), ".");
  return w;
}

// Whether the passes name places that there are, and a column for every row.
void check_passes(const Tensor& passes, const Network& talker, int64_t rows) {
  constexpr int64_t kInts = sizeof(PrefillBatch) / sizeof(int);
  TORCH_CHECK(passes.is_cpu() && passes.dim() == 2 && passes.size(1) == kInts,
              "The passes must be [passes, ", kInts, "] on the host, found ", passes.sizes(),
              " on ", passes.device(), ".");
  const PrefillBatch* at =
      reinterpret_cast<const PrefillBatch*>(pointer<int>(passes, at::kInt, "passes"));
  int64_t columns = 0;
  for (int64_t i = 0; i < passes.size(0); ++i) {
    TORCH_CHECK(1 <= at[i].num_columns && at[i].num_columns <= kMaxPrefillColumns,
                "A pass takes 1 to ", kMaxPrefillColumns, " columns, found ", at[i].num_columns,
                ".");
    TORCH_CHECK(at[i].first_row == columns, "Pass ", i, " must begin with row ", columns,
                " of the prompt, found ", at[i].first_row, ".");
    columns += at[i].num_columns;
    for (int c = 0; c < at[i].num_columns; ++c) {
      const PrefillColumn& place = at[i].columns[c];
      TORCH_CHECK(0 <= place.slot && place.slot < talker.num_slots && 0 <= place.position &&
                      place.position < talker.num_positions && 0 <= place.first_column &&
                      place.first_column <= c,
                  "There is no position ", place.position, " of slot ", place.slot, " among ",
                  talker.num_slots, " slots of ", talker.num_positions,
                  " positions, or no first column ", place.first_column, " for column ", c, ".");
    }
  }
  TORCH_CHECK(columns == rows, "The passes have ", columns, " columns and the prompt ", rows,
              " rows.");
}

// One a multiprocessor, as far as every block finds work.
int blocks(const Entry& e) {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  constexpr int kMaxRows =
      kMaxResidualRowGroups * kRowGroupSize;  // of the residual, for which a block has room
  const int least = (std::max(e.shape.talker[0], e.shape.predictor[0]) + kMaxRows - 1) / kMaxRows;
  TORCH_CHECK(count >= least, "The model needs a GPU of ", least, " multiprocessors, found ", count,
              ".");
  return std::min(count, e.shape.max_blocks);
}

void launch(const Kernel& kernel, const Entry& e, Params& p, const Tensor& workspace) {
  auto check = [](cudaError_t error, const char* what) {
    TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error), ".");
  };
  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kernel.shared_bytes)),
        "This GPU has too little shared memory a block for the model");
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  check(cudaMemsetAsync(workspace.data_ptr(), 0xFF, workspace.nbytes(), stream),
        "The workspace could not be cleared");
  void* arguments[] = {&p};
  check(cudaLaunchCooperativeKernel(kernel.function, dim3(blocks(e)), dim3(kNumLaunchedThreads),
                                    arguments, kernel.shared_bytes, stream),
        "The kernel could not be launched with one block a multiprocessor");
}

void generate(int64_t model, at::TensorList weights, at::TensorList memory, at::TensorList mailbox,
              int64_t eos, double eps, int64_t patience, const Tensor& streams, int64_t max_frames,
              at::IntArrayRef watched) {
  const c10::cuda::CUDAGuard guard(memory[0].device());
  Params p = params(model, weights, memory, mailbox, eos, eps, patience);
  take_streams(p, streams);
  p.max_frames = static_cast<int>(max_frames);
  const int64_t room = mailbox[kFrames].numel() * 4 / sizeof(PublishedFrame);
  TORCH_CHECK(0 < max_frames && max_frames * p.num_streams <= room, "The mailbox has room for ",
              room, " frames, asked for ", max_frames, " of ", p.num_streams, " streams.");
  const Entry e = entry(model);
  p.attention_capture = attention_capture(p, e.shape, watched, memory[kScores]);
  launch(p.num_streams == 1 ? e.generate_one : e.generate, e, p, memory[kWorkspace]);
}

void prefill(int64_t model, at::TensorList weights, at::TensorList memory, at::TensorList mailbox,
             int64_t eos, double eps, int64_t patience, const Tensor& prompt,
             const Tensor& passes) {
  const c10::cuda::CUDAGuard guard(memory[0].device());
  Params p = params(model, weights, memory, mailbox, eos, eps, patience);
  const Entry e = entry(model);
  TORCH_CHECK(prompt.is_cpu() && prompt.dim() == 2 && prompt.size(1) == e.shape.talker[0],
              "The prompt must be [columns, ", e.shape.talker[0], "] on the host, found ",
              prompt.sizes(), " on ", prompt.device(), ".");
  check_passes(passes, p.talker, prompt.size(0));
  // One copy of both; from pinned memory, or the host would wait for it.
  const auto bytes = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  const Tensor sent = at::empty({static_cast<int64_t>(prompt.nbytes() + passes.nbytes())}, bytes);
  uint8_t* const to = sent.mutable_data_ptr<uint8_t>();
  std::memcpy(to, bf16_pointer(prompt, "prompt"), prompt.nbytes());
  std::memcpy(to + prompt.nbytes(), passes.const_data_ptr(), passes.nbytes());
  const Tensor there = sent.to(memory[0].device(), /*non_blocking=*/true);
  p.prompt_vectors = reinterpret_cast<const bf16*>(there.const_data_ptr());
  p.prefill_batches =
      reinterpret_cast<const PrefillBatch*>(there.const_data_ptr<uint8_t>() + prompt.nbytes());
  for_each_run(p, reinterpret_cast<const PrefillBatch*>(passes.const_data_ptr()),
               static_cast<int>(passes.size(0)),
               [&](PrefillSize size) { launch(e.prefill[size], e, p, memory[kWorkspace]); });
}

// Until an event has happened: looks for it so long, then sleeps. Torch calls operators without
// Python's lock, and a core that somebody else wants is his between two looks.
void wait(int64_t event, int64_t nanoseconds) {
  const cudaEvent_t awaited = reinterpret_cast<cudaEvent_t>(event);
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds);
  cudaError_t found = cudaEventQuery(awaited);
  while (found == cudaErrorNotReady && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
    found = cudaEventQuery(awaited);
  }
  if (found == cudaErrorNotReady) {
    cudaGetLastError();  // which it was not
    found = cudaEventSynchronize(awaited);
  }
  TORCH_CHECK(found == cudaSuccess, "The launch failed: ", cudaGetErrorString(found), ".");
}

std::vector<int64_t> shape(int64_t model) {
  TORCH_CHECK(0 <= model && model < kNumModels, "There is no model ", model, ".");
  const Shape s = entry(model).shape;
  std::vector<int64_t> out(s.talker, s.talker + 4);
  out.insert(out.end(), s.predictor, s.predictor + 4);
  for (int number :
       {s.num_codes, s.stage_steps, kMaxRowGroups, kMaxStreams, kMaxPrefillColumns, kKvWidth})
    out.push_back(number);
  return out;
}

int64_t models() { return kNumModels; }

int64_t blocks_of(int64_t model) { return blocks(entry(model)); }

}  // namespace
}  // namespace megakernel

TORCH_LIBRARY(megakernel_tts, m) {
  m.def("models() -> int", &megakernel::models);
  m.def("shape(int model) -> int[]", &megakernel::shape);
  m.def("workspace_words(int model) -> int", &megakernel::workspace_size);
  m.def("logits_at(int model) -> int[]", &megakernel::logits_of);
  m.def("blocks(int model) -> int", &megakernel::blocks_of);
  m.def("wait(int event, int nanoseconds) -> ()", &megakernel::wait);
  m.def(
      "generate(int model, Tensor[] weights, Tensor(a!)[] memory, Tensor(b!)[] mailbox, int eos, "
      "float eps, int patience, Tensor streams, int max_frames, int[] watched) -> ()");
  m.def(
      "prefill(int model, Tensor[] weights, Tensor(a!)[] memory, Tensor(b!)[] mailbox, int eos, "
      "float eps, int patience, Tensor prompt, Tensor passes) -> ()");
}

TORCH_LIBRARY_IMPL(megakernel_tts, CUDA, m) {
  m.impl("generate", &megakernel::generate);
  m.impl("prefill", &megakernel::prefill);
}

// Nothing is returned, so that fake tensors need nothing either.
TORCH_LIBRARY_IMPL(megakernel_tts, Meta, m) {
  using at::TensorList;
  m.impl("generate", [](int64_t, TensorList, TensorList, TensorList, int64_t, double, int64_t,
                        const at::Tensor&, int64_t, at::IntArrayRef) {});
  m.impl("prefill", [](int64_t, TensorList, TensorList, TensorList, int64_t, double, int64_t,
                       const at::Tensor&, const at::Tensor&) {});
}
