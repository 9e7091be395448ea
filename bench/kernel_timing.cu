// Times launches of `generate` and `prefill` of one model with random weights, without torch.
//
//   kernel_timing LAUNCHES L2_BYTES < jobs
//
// LAUNCHES is the number of timed launches of a job, L2_BYTES the L2 capacity for keys and values
// that stay resident (-1: a fifth of the cache, as the operators choose). A job is a line:
//
//   frames STREAMS POSITION FRAMES   a launch of so many frames from a talker position on
//   prompt POSITIONS                 a prompt, cut into segments as the backend cuts it
//   batch COLUMNS POSITION           one prefill batch of one stream
//
// For each job one line is printed: the median and the least of the times of a launch in
// milliseconds, and a checksum of its codes or hidden state. A job fails if launches differ in it,
// or if a stream made fewer frames.
// A program with MEGAKERNEL_WIDE_STREAMS has the wide kernel, and takes jobs of frames only.
// bench/kernel_timing.py compiles this program for a model and a GPU, and runs it.
#include <algorithm>
#include <functional>

#include "random_params.cuh"

using namespace megakernel;
using M = KernelModel;

constexpr int kPositions = kMaxSpans * kSpanSize, kMaxFrames = 256;
constexpr uint64_t kTimeoutNs = 2'000'000'000;
constexpr unsigned kDelayNs = 200'000;  // longer than the host takes to queue a launch

// Keeps the GPU busy while the host queues the launch behind it, so that events time the GPU alone.
static __global__ void delay() {
  uint64_t now, start;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < kDelayNs);
}

static uint64_t fnv1a(uint64_t hash, const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < num_bytes; ++i) hash = (hash ^ bytes[i]) * 0x100000001B3u;
  return hash;
}
constexpr uint64_t kEmptyHash = 0xCBF29CE484222325u;

class Timer {
 public:
  Timer(int num_launches, long l2_bytes) : num_launches_(num_launches) {
    int device, l2_size, num_sms;
    check_cuda(cudaGetDevice(&device), "Finding a GPU");
    check_cuda(cudaDeviceGetAttribute(&l2_size, cudaDevAttrL2CacheSize, device),
               "Reading the GPU attributes");
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
               "Reading the GPU attributes");
    const long position_bytes = 2L * M::Talker::num_kv_heads * kKvWidth * sizeof(bf16);
    const long resident = (l2_bytes < 0 ? l2_size / 5 : l2_bytes) / position_bytes;
    num_blocks_ = std::min(num_sms, KernelModel::max_blocks);
    params_ = random_params<M>({MEGAKERNEL_TALKER_LAYERS, MEGAKERNEL_PREDICTOR_LAYERS, kMaxStreams,
                                kPositions, kMaxFrames, num_blocks_, static_cast<int>(resident),
                                kTimeoutNs});
    check_cuda(cudaEventCreate(&start_), "Creating an event");
    check_cuda(cudaEventCreate(&end_), "Creating an event");
  }

  void frames(int num_streams, int position, int num_frames) {
    Params p = params_;
    set_streams(p, num_streams, position, kPositions);
    p.max_frames = num_frames;
    const Kernel kernel = generate_kernel(num_streams);
    run([&] { launch_kernel(kernel, p, num_blocks_); },
        [&] {
          check_num_frames(p);
          uint64_t hash = kEmptyHash;
          for (int i = 0; i < num_streams * num_frames; ++i) {
            hash = fnv1a(hash, p.published_frames[i].codes, sizeof(p.published_frames[i].codes));
          }
          return hash;
        });
  }

#ifndef MEGAKERNEL_WIDE_STREAMS
  // The first segment has kMaxStreams positions, each further one kMaxPrefillColumns.
  void prompt(int num_positions) {
    std::vector<PrefillBatch> batches;
    for (int begin = 0; begin < num_positions;) {
      const int count =
          std::min(begin == 0 ? kMaxStreams : kMaxPrefillColumns, num_positions - begin);
      batches.push_back(prefill_batch(0, begin, begin, count, begin + count == num_positions));
      begin += count;
    }
    prefill(batches, num_positions);
  }

  void batch(int num_columns, int position) {
    prefill({prefill_batch(0, position, 0, num_columns, true)}, num_columns);
  }
#endif

 private:
  // The time of a launch is divided by the frames that were requested.
  static void check_num_frames(const Params& p) {
    for (int c = 0; c < p.num_streams; ++c) {
      if (p.num_published[c] == static_cast<unsigned>(p.max_frames)) continue;
      fprintf(stderr, "Stream %d made %u of %d frames.\n", c, p.num_published[c], p.max_frames);
      exit(1);
    }
  }

#ifndef MEGAKERNEL_WIDE_STREAMS
  void prefill(const std::vector<PrefillBatch>& batches, int num_rows) {
    Params p = params_;
    bf16* const rows = random_bf16(size_t{1} * num_rows * M::Talker::hidden_size, kWeightRange);
    PrefillBatch* const device_batches = device_copy(batches);
    p.prompt_vectors = rows;
    run(
        [&] {
          p.prefill_batches = device_batches;
          launch_prefill(p, batches, num_blocks_, [] {});
        },
        [&] {
          std::vector<float> hidden(M::Talker::hidden_size);
          check_cuda(cudaMemcpy(hidden.data(), p.prompt_hidden, hidden.size() * sizeof(float),
                                cudaMemcpyDeviceToHost),
                     "Copy to the host");
          return fnv1a(kEmptyHash, hidden.data(), hidden.size() * sizeof(float));
        });
    check_cuda(cudaFree(rows), "Freeing memory");
    check_cuda(cudaFree(device_batches), "Freeing memory");
  }
#endif

  // One launch warms up, the others are timed.
  void run(const std::function<void()>& launch, const std::function<uint64_t()>& checksum) {
    std::vector<float> times_ms;
    uint64_t expected = 0;
    for (int i = 0; i <= num_launches_; ++i) {
      check_cuda(cudaMemset(params_.seen_codes, 0, size_t{kMaxStreams} * M::vocab_size),
                 "Clearing");
      memset(params_.num_published, 0, kMaxStreams * sizeof(unsigned));
      delay<<<1, 1>>>();
      check_cuda(cudaEventRecord(start_), "Recording an event");
      launch();
      check_cuda(cudaEventRecord(end_), "Recording an event");
      finish_launches(params_);
      float time_ms;
      check_cuda(cudaEventElapsedTime(&time_ms, start_, end_), "Timing");
      if (i > 0) times_ms.push_back(time_ms);
      const uint64_t found = checksum();
      if (i > 0 && found != expected) {
        fprintf(stderr, "Launch %d gave other results than the one before it.\n", i);
        exit(1);
      }
      expected = found;
    }
    std::sort(times_ms.begin(), times_ms.end());
    printf("%.5f %.5f %016llx\n", times_ms[times_ms.size() / 2], times_ms[0],
           static_cast<unsigned long long>(expected));
    fflush(stdout);
  }

  Params params_{};
  cudaEvent_t start_{}, end_{};
  int num_launches_, num_blocks_ = 0;
};

static void require(bool valid, const char* line) {
  if (valid) return;
  fprintf(stderr, "There is no such job, or its numbers are out of range: %s", line);
  exit(1);
}

int main(int num_arguments, char** arguments) {
  const int num_launches = num_arguments == 3 ? atoi(arguments[1]) : 0;
  if (num_launches < 1) {
    fprintf(stderr, "Usage: kernel_timing LAUNCHES L2_BYTES < jobs\n");
    return 1;
  }
  Timer timer(num_launches, atol(arguments[2]));
  char line[256];
  while (fgets(line, sizeof(line), stdin) != nullptr) {
    int a = 0, b = 0, c = 0;
    if (sscanf(line, "frames %d %d %d", &a, &b, &c) == 3) {
      require(
          1 <= a && a <= kMaxStreams && 1 <= b && 1 <= c && c <= kMaxFrames && b + c < kPositions,
          line);
      timer.frames(a, b, c);
#ifdef MEGAKERNEL_WIDE_STREAMS
    } else {
      require(false, line);
    }
#else
    } else if (sscanf(line, "prompt %d", &a) == 1) {
      require(1 <= a && a <= kPositions, line);
      timer.prompt(a);
    } else {
      const bool parsed = sscanf(line, "batch %d %d", &a, &b) == 2;
      require(parsed && 1 <= a && a <= kMaxPrefillColumns && 0 <= b && a + b <= kPositions, line);
      timer.batch(a, b);
    }
#endif
  }
  return 0;
}
