// Fills the kernels' Params with random weights, without torch. Used by bench/kernel_timing.cu and
// by tests/sanitizer/launches.cu.
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "../csrc/decode/kernels.cu"

namespace megakernel {

struct RandomModelSizes {
  int num_talker_layers, num_predictor_layers;
  int num_slots;              // KV slots of the talker
  int num_positions;          // of a slot
  int max_frames;             // of a launch, for each stream
  int num_blocks;             // thread blocks of a launch
  int l2_resident_positions;  // positions of a talker layer that stay in the L2 cache
  uint64_t timeout_ns;
};

// Half the width of the uniform distributions; 0.035 gives weights a deviation of 0.02.
constexpr float kWeightRange = 0.035f, kNormRange = 0.17f, kCacheRange = 0.5f;
constexpr float kRopeTheta = 1e6f;

inline void check_cuda(cudaError_t error, const char* action) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s failed: %s.\n", action, cudaGetErrorString(error));
  exit(1);
}

template <class T>
T* device_copy(const std::vector<T>& values) {
  T* copy;
  check_cuda(cudaMalloc(&copy, values.size() * sizeof(T)), "Allocation");
  check_cuda(cudaMemcpy(copy, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
             "Copy to the device");
  return copy;
}

template <class T>
T* device_zeros(size_t count) {
  T* values;
  check_cuda(cudaMalloc(&values, count * sizeof(T)), "Allocation");
  check_cuda(cudaMemset(values, 0, count * sizeof(T)), "Clearing");
  return values;
}

template <class T>
T* pinned_zeros(size_t count) {
  T* values;
  check_cuda(cudaMallocHost(&values, count * sizeof(T)), "Allocation of pinned memory");
  memset(values, 0, count * sizeof(T));
  return values;
}

// values[i] is uniform in mean +- range; a multiplicative hash of i is the random generator.
static __global__ void fill_uniform(bf16* values, size_t count, float range, float mean,
                                    uint32_t seed) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    uint64_t bits = (i + 1) * 0x9E3779B97F4A7C15u + (static_cast<uint64_t>(seed) << 32);
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    const float unit = static_cast<float>(bits >> 40) * 0x1p-24f;
    values[i] = __float2bfloat16(mean + range * (2 * unit - 1));
  }
}

inline bf16* random_bf16(size_t count, float range, float mean = 0) {
  static uint32_t seed = 0;
  bf16* values;
  check_cuda(cudaMalloc(&values, count * sizeof(bf16)), "Allocation");
  fill_uniform<<<1024, 256>>>(values, count, range, mean, ++seed);
  check_cuda(cudaGetLastError(), "Filling");
  return values;
}

inline uint4* random_weights(size_t count) {
  return reinterpret_cast<uint4*>(random_bf16(count, kWeightRange));
}

// Elements of a packed matrix: whole steps of kStepK in K.
template <class Matrix>
constexpr size_t kPackedSize =
    size_t{Matrix::num_row_groups} * Matrix::num_steps * kRowGroupSize * kStepK;

// [positions, kHeadDim / 2]: cosine and sine.
inline std::vector<float2> rope_table(int positions) {
  std::vector<float2> table;
  for (int position = 0; position < positions; ++position) {
    for (int i = 0; i < kHeadDim / 2; ++i) {
      const float angle =
          static_cast<float>(position) * powf(kRopeTheta, -2.0f * static_cast<float>(i) / kHeadDim);
      table.push_back({cosf(angle), sinf(angle)});
    }
  }
  return table;
}

// A decoder stack, with `projection_size` elements of the input projection before its layers. The
// talker's slots have interleaved pages for all of their positions.
template <class S>
Network random_network(int num_layers, int slots, int positions, size_t projection_size) {
  const int pages = (positions + kPageSize - 1) / kPageSize;
  const int cached_positions = S::short_context ? positions : pages * kPageSize;
  const size_t layer_size = kPackedSize<typename S::Qkv> + kPackedSize<typename S::Out> +
                            kPackedSize<typename S::GateUp> + kPackedSize<typename S::Down>;
  const size_t cache_size =
      size_t{1} * num_layers * slots * S::num_kv_heads * cached_positions * kKvWidth;
  Network n{};
  n.weights = random_weights(projection_size + num_layers * layer_size);
  n.layer_norms = random_bf16(num_layers * (2 * S::hidden_size + 2 * kHeadDim), kNormRange, 1);
  n.num_layers = num_layers;
  n.final_norm = random_bf16(S::hidden_size, kNormRange, 1);
  n.keys = random_bf16(cache_size, kCacheRange);
  n.values = random_bf16(cache_size, kCacheRange);
  n.num_slots = slots, n.num_positions = positions;
  if (!S::short_context) {
    std::vector<int> page_table(slots * kMaxPages);
    for (int slot = 0; slot < slots; ++slot) {
      for (int i = 0; i < pages; ++i) page_table[slot * kMaxPages + i] = i * slots + slot;
    }
    n.page_table = device_copy(page_table);
  }
  n.rope_table = device_copy(rope_table(positions));
  n.eps = 1e-6f;
  return n;
}

constexpr WorkspaceOffsets kWorkspace = workspace_offsets<KernelModel>();

inline void set_exchange(ExchangeBuffers& buffers, const ExchangeOffsets& offsets,
                         uint32_t* workspace) {
  buffers.qkv = workspace + offsets.qkv;
  buffers.attention_partials = workspace + offsets.attention_partials;
  buffers.softmax_stats = workspace + offsets.softmax_stats;
  buffers.attention_output = workspace + offsets.attention_output;
  buffers.attention_residual = workspace + offsets.attention_residual;
  buffers.mlp_hidden = workspace + offsets.mlp_hidden;
  buffers.mlp_residual = workspace + offsets.mlp_residual;
  buffers.logits = workspace + offsets.logits;
}

inline void set_wide(WideBuffers& buffers, const WideOffsets& offsets, uint32_t* workspace) {
  buffers.attention_normed = workspace + offsets.attention_normed;
  buffers.mlp_normed = workspace + offsets.mlp_normed;
  buffers.attention_scales = workspace + offsets.attention_scales;
  buffers.mlp_scales = workspace + offsets.mlp_scales;
  buffers.cache_tags = workspace + offsets.cache_tags;
}

inline void set_workspace(Params& p, uint32_t* workspace) {
  set_exchange(p.talker.exchange, kWorkspace.talker, workspace);
  set_exchange(p.predictor.exchange, kWorkspace.predictor, workspace);
  set_wide(p.wide_talker, kWorkspace.wide_talker, workspace);
  set_wide(p.wide_predictor, kWorkspace.wide_predictor, workspace);
  p.predictor_input = workspace + kWorkspace.predictor_input;
  p.sampled_codes = workspace + kWorkspace.sampled_codes;
  p.non_finite = workspace + kWorkspace.non_finite;
  p.abort_flag = workspace + kWorkspace.abort_flag;
}

// All of Params but the streams, the prompt and its batches. No stream ends before its last frame:
// there is no end-of-speech id.
template <class M>
Params random_params(const RandomModelSizes& sizes) {
  using Talker = typename M::Talker;
  using Predictor = typename M::Predictor;
  Params p{};
  p.talker =
      random_network<Talker>(sizes.num_talker_layers, sizes.num_slots, sizes.num_positions, 0);
  p.predictor = random_network<Predictor>(sizes.num_predictor_layers, kMaxStreams, kNumCodeGroups,
                                          kPackedSize<typename M::InputProjection>);
  p.talker_head = random_weights(kPackedSize<typename M::TalkerHead>);
  p.predictor_heads = random_weights((kNumCodeGroups - 1) * kPackedSize<typename M::PredictorHead>);
  p.input_projection_bias = random_bf16(Predictor::hidden_size, kWeightRange);
  p.code_embedding = random_bf16(size_t{M::vocab_size} * Talker::hidden_size, kWeightRange);
  for (auto& table : p.group_embeddings) {
    table = random_bf16(size_t{M::num_codes} * Talker::hidden_size, kWeightRange);
  }
  p.pad_vector = random_bf16(Talker::hidden_size, kWeightRange);
  p.text_vectors = random_bf16(
      size_t{1} * sizes.num_slots * sizes.num_positions * Talker::hidden_size, kWeightRange);
  p.prompt_hidden = device_zeros<float>(sizes.num_slots * Talker::hidden_size);
  p.seen_codes = device_zeros<uint8_t>(sizes.num_slots * M::vocab_size);
  p.eos_id = -1;
  p.l2_resident_positions = sizes.l2_resident_positions;
  p.max_frames = sizes.max_frames;
  p.published_frames = pinned_zeros<PublishedFrame>(kMaxStreams * sizes.max_frames);
  p.num_published = pinned_zeros<unsigned>(kMaxStreams);
  p.stop_flags = pinned_zeros<unsigned>(kMaxStreams);
  p.failure = pinned_zeros<unsigned>(1);
  p.timeout_ns = sizes.timeout_ns;
  set_workspace(p, device_zeros<uint32_t>(kWorkspace.num_values));
  p.phase_times =
      device_zeros<uint64_t>(size_t{1} * sizes.num_blocks * kNumPhases * kNumPhaseIntervals);
  return p;
}

// The stream of a slot, whose next talker pass is at `position`; all its text is padding.
inline StreamParams stream_at(int slot, int position, int positions) {
  StreamParams s{};
  s.slot = slot;
  s.prompt_length = position, s.num_frames = 1;
  s.max_frames = positions;
  s.text_complete = 1;
  s.seed[0] = slot;
  s.repetition_penalty = 1.05f;
  s.talker = s.predictor = {.temperature = 0.9f, .top_k = 50, .top_p = 1.0f};
  return s;
}

// Sets the streams of a launch: of the slots from 0 on, at `position`.
inline void set_streams(Params& p, int num_streams, int position, int positions) {
  std::vector<StreamParams> streams;
  for (int slot = 0; slot < num_streams; ++slot) {
    streams.push_back(stream_at(slot, position, positions));
  }
  p.num_streams = num_streams;
  if (kIsWide) {
    p.wide_streams = device_copy(streams);
  } else {
    std::copy(streams.begin(), streams.end(), p.streams);
  }
}

// One prefill batch of a single slot: columns `first` to `first + count - 1` of the prompt array,
// at consecutive positions from `position` on.
inline PrefillBatch prefill_batch(int slot, int position, int first, int count, bool ends) {
  PrefillBatch batch{};
  batch.num_columns = count, batch.first_row = first;
  batch.prompt_end_mask = ends ? 1 << (count - 1) : 0;
  for (int c = 0; c < count; ++c) batch.columns[c] = {slot, position + c, 0};
  return batch;
}

// A kernel, and the columns for which it has shared memory.
struct Kernel {
  void (*function)(Params);
  int shared_bytes;
};

#ifdef MEGAKERNEL_WIDE_STREAMS
inline Kernel generate_kernel(int) { return {generate_wide, kSharedBytes<kWideStreams>}; }
#else
inline Kernel generate_kernel(int num_streams) {
  if (num_streams == 1) return {generate_single, kSharedBytes<1>};
  return {generate_streams, kSharedBytes<kMaxStreams>};
}

inline Kernel prefill_kernel(int num_columns) {
  if (num_columns <= kColumnCapacity<1>) return {prefill_small, kSharedBytes<1>};
  if (num_columns <= kMaxStreams) return {prefill_medium, kSharedBytes<kMaxStreams>};
  return {prefill_large, kSharedBytes<kMaxPrefillColumns>};
}
#endif

// Launches a kernel on the default stream, behind the clearing of the workspace, as the engine
// does. Does not wait.
inline void launch_kernel(const Kernel& kernel, Params& p, int num_blocks) {
  check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kernel.shared_bytes),
             "Reserving shared memory");
  const size_t workspace_bytes = sizeof(uint32_t) * kWorkspace.num_values;
  uint32_t* const workspace = p.talker.exchange.qkv - kWorkspace.talker.qkv;
  check_cuda(cudaMemsetAsync(workspace, 0xFF, workspace_bytes), "Clearing the workspace");
  void* arguments[] = {&p};
  check_cuda(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(kernel.function), dim3(num_blocks),
                                         dim3(kNumLaunchedThreads), arguments, kernel.shared_bytes,
                                         nullptr),
             "The launch");
}

#ifndef MEGAKERNEL_WIDE_STREAMS
// Launches prefill batches, consecutive ones of one kernel together. `batches` are those of `p`, on
// the host.
template <class Launched>
void launch_prefill(Params& p, const std::vector<PrefillBatch>& batches, int num_blocks,
                    Launched launched) {
  const int count = static_cast<int>(batches.size());
  const auto kernel_of = [&](int i) { return prefill_kernel(batches[i].num_columns); };
  for (int done = 0; done < count; done += p.num_prefill_batches) {
    int end = done + 1;
    while (end < count && kernel_of(end).function == kernel_of(done).function) ++end;
    p.num_prefill_batches = end - done;
    launch_kernel(kernel_of(done), p, num_blocks);
    launched();
    p.prefill_batches += p.num_prefill_batches;
  }
}
#endif

// Waits for all launches; exits if a thread block timed out.
inline void finish_launches(const Params& p) {
  check_cuda(cudaDeviceSynchronize(), "The launch");
  if (*p.failure == 0) return;
  const unsigned wait = *p.failure - 1;
  fprintf(stderr, "Thread block %u waited for the phase %u until the timeout.\n", wait / kNumPhases,
          wait % kNumPhases);
  exit(1);
}

}  // namespace megakernel
