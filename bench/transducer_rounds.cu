// The loop of csrc/transducer/transduce.cuh as kernels of a CUDA graph, whose WHILE node repeats a
// round. bench/transducer_loops.py compares it with the loop in one launch.
//
//   begin;  while a stream has frames left: join, find, predict for each layer, project, next;  end
//
// The end of a kernel takes the place of a barrier. The search's state is kept in global memory:
// one copy before a round's tokens are found, and one after.
#include "transducer/kernels.cuh"

namespace megakernel::transducer {

constexpr int kSearchBytes = 4096;  // of a copy of the search's state
static_assert(sizeof(SearchState) <= kSearchBytes, "a copy of the search's state must fit");

struct RoundParams {
  TransducerParams transducer;
  unsigned char* search;  // [2, kSearchBytes]
  uint64_t condition;     // of the WHILE node
  int layer;              // for `predict`
};

// Copies the search's state of copy `copy` to shared memory.
static __device__ void load_search(const RoundParams& p, int copy, SearchState& search) {
  const auto* from = reinterpret_cast<const uint32_t*>(p.search + copy * kSearchBytes);
  auto* to = reinterpret_cast<uint32_t*>(&search);
  for (int i = thread_idx(); i < static_cast<int>(sizeof(SearchState) / 4); i += kNumThreads) {
    to[i] = from[i];
  }
  sync_all_threads();
}

// Copies block 0's state from shared memory.
static __device__ void store_search(const RoundParams& p, int copy, const SearchState& search) {
  if (block_idx() > 0) return;
  sync_all_threads();
  const auto* from = reinterpret_cast<const uint32_t*>(&search);
  auto* to = reinterpret_cast<uint32_t*>(p.search + copy * kSearchBytes);
  for (int i = thread_idx(); i < static_cast<int>(sizeof(SearchState) / 4); i += kNumThreads) {
    to[i] = from[i];
  }
}

// Lists the streams of the next round, and says whether there is one. Called by block 0.
static __device__ void prepare_round(const RoundParams& p, SearchState& search) {
  list_running(search);
  clear_keys(p.transducer.workspace.keys);
  store_search(p, 0, search);
  if (thread_idx() == 0) cudaGraphSetConditional(p.condition, search.num_running > 0);
}

template <class Number>
static __device__ void begin(const RoundParams& p, SharedMemory<Number>& shared) {
  load_states<Number>(p.transducer);
  if (block_idx() > 0) return;
  begin_search(p.transducer, shared.search);
  prepare_round(p, shared.search);
}

template <class Number>
static __device__ void join_round(const RoundParams& p, SharedMemory<Number>& shared) {
  load_search(p, 0, shared.search);
  join(p.transducer, shared, p.transducer.workspace.keys);
}

template <class Number>
static __device__ void find(const RoundParams& p, SharedMemory<Number>& shared) {
  load_search(p, 0, shared.search);
  find_tokens(p.transducer, p.transducer.workspace.keys, shared.search);
  write_confidence(p.transducer, shared.search);
  store_search(p, 1, shared.search);
}

template <class Number>
static __device__ void predict(const RoundParams& p, SharedMemory<Number>& shared) {
  load_search(p, 1, shared.search);
  if (shared.search.num_labelled > 0) predict_layer(p.transducer, shared, p.layer);
}

template <class Number>
static __device__ void project(const RoundParams& p, SharedMemory<Number>& shared) {
  load_search(p, 1, shared.search);
  if (shared.search.num_labelled > 0) project_output(p.transducer, shared);
}

// A launch of one block.
template <class Number>
static __device__ void next(const RoundParams& p, SharedMemory<Number>& shared) {
  SearchState& search = shared.search;
  load_search(p, 1, search);
  const int s = thread_idx();
  if (s < kMaxBatch && search.token[s] >= 0) search.buffer[s] = 1 - search.buffer[s];
  sync_all_threads();
  prepare_round(p, search);
}

template <class Number>
static __device__ void end(const RoundParams& p, SharedMemory<Number>& shared) {
  load_search(p, 0, shared.search);
  store_states<Number>(p.transducer, shared.search);
}

#define MEGAKERNEL_DEFINE_STEP(step, body, name, Number)              \
  extern "C" __global__ void __launch_bounds__(kNumThreads, 1)        \
      step##_##name(const __grid_constant__ RoundParams p) {          \
    extern __shared__ __align__(16) unsigned char bytes[];            \
    body<Number>(p, *reinterpret_cast<SharedMemory<Number>*>(bytes)); \
  }
#define MEGAKERNEL_DEFINE_STEPS(name, Number)            \
  MEGAKERNEL_DEFINE_STEP(begin, begin, name, Number)     \
  MEGAKERNEL_DEFINE_STEP(join, join_round, name, Number) \
  MEGAKERNEL_DEFINE_STEP(find, find, name, Number)       \
  MEGAKERNEL_DEFINE_STEP(predict, predict, name, Number) \
  MEGAKERNEL_DEFINE_STEP(project, project, name, Number) \
  MEGAKERNEL_DEFINE_STEP(next, next, name, Number)       \
  MEGAKERNEL_DEFINE_STEP(end, end, name, Number)
MEGAKERNEL_DEFINE_STEPS(float32, float)
MEGAKERNEL_DEFINE_STEPS(bfloat16, bf16)

extern "C" __device__ TransducerInfo transducer_info = make_transducer_info();

}  // namespace megakernel::transducer
