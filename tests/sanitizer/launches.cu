// Launches each kernel of a small model, for compute-sanitizer: of one stream, of several, and of
// prompts. Weights are noise; it is told what went wrong, and nothing is printed otherwise.
#include <stdio.h>
#include <string.h>

#include <random>
#include <vector>

#include "../../csrc/decode/kernels.cuh"
#include "../../csrc/decode/prefill_launch.cuh"
#include "../../csrc/workspace.cuh"

using namespace megakernel;
using M = ModelTinyWide;  // whose talker is wider, so that its state is projected

constexpr int kBlocks = 8;  // fewer than a GPU takes: the tools need time for each
constexpr int kLayers = 2, kFrames = 2, kPositions = 256, kPrompt = 140;  // two spans

static void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s\n", cudaGetErrorString(error));
  exit(1);
}

template <class T>
static T* uploaded(const std::vector<T>& values) {
  T* there;
  check(cudaMalloc(&there, values.size() * sizeof(T)));
  check(cudaMemcpy(there, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return there;
}

template <class T>
static T* zeros(size_t count) {
  return uploaded(std::vector<T>(count));
}

template <class T>
static T* pinned(size_t count) {
  T* there;
  check(cudaMallocHost(&there, count * sizeof(T)));
  memset(there, 0, count * sizeof(T));
  return there;
}

static bf16* noise(size_t count, float scale, float middle = 0) {
  static std::mt19937 generator;
  std::uniform_real_distribution<float> draw(middle - scale, middle + scale);
  std::vector<bf16> values(count);
  for (bf16& value : values) value = __float2bfloat16(draw(generator));
  return uploaded(values);
}

// Numbers of a matrix as it is packed.
template <class Matrix>
constexpr size_t kPacked = size_t{Matrix::units} * Matrix::steps * kUnit * kStep;

template <class S>
static Network network(int slots, int positions, size_t before) {
  const size_t layer = kPacked<typename S::Qkv> + kPacked<typename S::Out> +
                       kPacked<typename S::GateUp> + kPacked<typename S::Down>;
  const size_t kept = size_t{kLayers} * slots * S::kv_heads * positions * kKept;
  Network n{};
  n.weights = reinterpret_cast<uint4*>(noise(before + kLayers * layer, 0.05f));
  n.norms = noise(kLayers * (2 * S::hidden + 2 * kHeadDim), 0.1f, 1);
  n.norm = noise(S::hidden, 0.1f, 1);
  n.num_layers = kLayers, n.slots = slots, n.positions = positions, n.eps = 1e-6f;
  n.keys = noise(kept, 0.5f), n.values = noise(kept, 0.5f);
  n.turns = uploaded(std::vector<float2>(positions * kHeadDim / 2, float2{0.6f, 0.8f}));
  return n;
}

static Params params() {
  using Talker = M::Talker;
  using Predictor = M::Predictor;
  Params p{};
  p.talker = network<Talker>(kColumns, kPositions, 0);
  p.predictor = network<Predictor>(kColumns, kGroups, kPacked<M::Project>);
  p.remembered = kPrompt + 1;  // the first layer's stay
  p.talker_head = reinterpret_cast<uint4*>(noise(kPacked<M::TalkerHead>, 0.05f));
  p.predictor_heads =
      reinterpret_cast<uint4*>(noise((kGroups - 1) * kPacked<M::PredictorHead>, 0.05f));
  p.project_bias = noise(Predictor::hidden, 0.1f);
  p.code_embedding = noise(M::vocab * Talker::hidden, 0.5f);
  for (auto& table : p.group_embeddings) table = noise(M::codes * Talker::hidden, 0.5f);
  p.pad = noise(Talker::hidden, 0.5f);
  p.text = noise(kColumns * kPositions * Talker::hidden, 0.5f);
  p.hidden = zeros<float>(kColumns * Talker::hidden);
  p.seen = zeros<uint8_t>(kColumns * M::vocab);
  p.eos = -1;
  for (int c = 0; c < kColumns; ++c) {
    Stream& s = p.streams[c];
    s.slot = c, s.prompt = kPrompt, s.frames = 1, s.max_frames = kPositions, s.ended = 1;
    s.seed[0] = c, s.penalty = 1.05f, s.talker = s.predictor = {0.9f, 50, 1.0f};
  }
  p.max_frames = kFrames;
  p.frames = pinned<Published>(kColumns * kFrames);
  p.published = pinned<unsigned>(kColumns);
  p.stop = pinned<unsigned>(kColumns);
  p.failure = pinned<unsigned>(3);
  p.patience = uint64_t{60} * 1'000'000'000;  // the tools are slow
  lay_out(p, shape_of<M>(), zeros<uint32_t>(workspace_words(shape_of<M>())));
  p.times = zeros<uint64_t>(kBlocks * kPhases * kParts);
  return p;
}

static void launch(const Kernel& kernel, Params& p) {
  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kernel.shared_bytes)));
  check(cudaMemset(p.talker.words.qkv, 0xFF, sizeof(uint32_t) * workspace_words(shape_of<M>())));
  void* arguments[] = {&p};
  check(cudaLaunchCooperativeKernel(kernel.function, dim3(kBlocks), dim3(kLaunched), arguments,
                                    kernel.shared_bytes, nullptr));
  check(cudaDeviceSynchronize());
  if (p.failure[0] == 0) return;
  fprintf(stderr, "Block %u waited in vain at phase %u.\n", p.failure[1], p.failure[2]);
  exit(1);
}

static void make_frames(const Kernel& kernel, Params& p, int streams) {
  p.columns = streams;
  launch(kernel, p);
  for (int c = 0; c < streams; ++c) {
    if (p.published[c] == kFrames) continue;
    fprintf(stderr, "Stream %d of %d has %u frames of %d.\n", c, streams, p.published[c], kFrames);
    exit(1);
  }
}

// Passes of every size; one goes on with the slot of the one before.
static void begin_prompts(const Entry& e, Params& p) {
  const int columns[] = {kWide, kColumns, 2, 1};
  std::vector<Pass> passes(4);
  int all = 0;
  for (int i = 0; i < 4; ++i) {
    Pass& pass = passes[i];
    pass.columns = columns[i];
    pass.ends = 1 << (columns[i] - 1);
    for (int c = 0; c < columns[i]; ++c) pass.places[c] = {i / 2, kPrompt + all + c, 0};
    all += columns[i];
  }
  p.prompt = noise(all * M::Talker::hidden, 0.5f);
  p.passes = uploaded(passes);
  each_run(p, passes.data(), 4, [&](Size size) { launch(e.prefill[size], p); });
}

int main(int count, char** arguments) {
  const Entry e = entry_of<M>();
  Params p = params();
  const char* what = count == 2 ? arguments[1] : "";
  if (strcmp(what, "one") == 0) {
    make_frames(e.generate_one, p, 1);
  } else if (strcmp(what, "several") == 0) {
    make_frames(e.generate, p, kColumns);
  } else if (strcmp(what, "prompts") == 0) {
    begin_prompts(e, p);
  } else {
    fprintf(stderr, "Say what to launch: one, several or prompts.\n");
    return 1;
  }
  return 0;
}
