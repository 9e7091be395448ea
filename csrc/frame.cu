// The one generation kernel: frame > layer > phase. A frame is: the last frame's codes through the
// talker, code 0, fifteen codes of the predictor, and the word to the host.
#include "phases/draw.cuh"
#include "phases/layers.cuh"

namespace megakernel {

template <class M>
struct Shared {
  static constexpr int kHidden =
      M::Talker::hidden > M::Predictor::hidden ? M::Talker::hidden : M::Predictor::hidden;
  Residual<kHidden> residual;
  Draw draw;
  bool alive;
};

template <class M>
class Generation {
 public:
  using Talker = typename M::Talker;
  using Predictor = typename M::Predictor;

  DEVICE Generation(const Params& p, Shared<M>& s)
      : p_(p), s_(s), r_(s.residual), barrier_(p, s.alive) {
    for (unsigned& pair : r_.activations.registers) pair = 0;  // columns that nobody has
    block_sync();
  }

  // Frames until nobody goes on, or the launch has made its share.
  DEVICE void frames() {
    make_frames();
    barrier_.close();
  }

  // The prompt of one stream, as many positions at a time as there are columns.
  DEVICE void prompt() {
    run_prompt();
    barrier_.close();
  }

 private:
  DEVICE void make_frames() {
#pragma unroll 1
    for (int frame = 0; frame < p_.max_frames; ++frame) {
      if (!anyone_goes_on()) return;
      if (!talk() ||
          !run_head<Talker, M::vocab>(p_, p_.talker, p_.talker_head, M::vocab, r_, barrier_)) {
        return;
      }
      if (!each_column_draws(0)) return;
#pragma unroll 1
      for (int pass = 0; pass < kGroups; ++pass) {
        if (!predict(pass)) return;
        if (pass > 0 && !each_column_draws(pass)) return;
      }
    }
  }

  DEVICE void run_prompt() {
    const Stream& stream = p_.streams[0];
    Params chunk = p_;
    for (int start = 0; start < p_.prompt_length; start += kColumns) {
      chunk.columns = min(kColumns, p_.prompt_length - start);
      block_sync();
      if (thread() < chunk.columns) {
        r_.columns[thread()] = {stream.slot, start + thread(), 0, true};
      }
      const bf16* input = p_.prompt + static_cast<size_t>(start) * Talker::hidden;
      for (int i = thread(); i < chunk.columns * Talker::hidden; i += kThreads) {
        r_.x[i / Talker::hidden][i % Talker::hidden] = to_float(input[i]);
      }
      block_sync();
      if (!run_layers<Talker>(chunk, p_.talker, r_, barrier_)) return;
    }
    if (block() == 0) {
      float* out = p_.hidden + static_cast<size_t>(stream.slot) * Talker::hidden;
      for (int k = thread(); k < Talker::hidden; k += kThreads) out[k] = r_.x[chunk.columns - 1][k];
    }
  }

  DEVICE bool ready(const Stream& s) const {
    return !s.over && s.frames < s.max_frames && (s.frames <= s.fed || s.ended);
  }

  DEVICE bool anyone_goes_on() const {
    bool anyone = false;
    for (int c = 0; c < p_.columns; ++c) anyone |= ready(p_.streams[c]);
    return anyone;
  }

  // The talker on the sum of the last frame's embeddings and its text vector.
  DEVICE bool talk() {
    block_sync();
    if (thread() < p_.columns) {
      const Stream& s = p_.streams[thread()];
      const bool moves = ready(s) && !s.fresh;
      r_.columns[thread()] = {s.slot, moves ? s.prompt + s.frames - 1 : 0, thread(), moves};
    }
#pragma unroll 1
    for (int i = thread(); i < p_.columns * Talker::hidden; i += kThreads) {
      const int c = i / Talker::hidden, k = i % Talker::hidden;
      r_.x[c][k] = next_input(p_.streams[c], k);
    }
    block_sync();
    if (!run_layers<Talker>(p_, p_.talker, r_, barrier_)) return false;
#pragma unroll 1
    for (int i = thread(); i < p_.columns * Talker::hidden; i += kThreads) {
      const int c = i / Talker::hidden, k = i % Talker::hidden;
      const Stream& s = p_.streams[c];
      if (s.fresh) r_.x[c][k] = p_.hidden[static_cast<size_t>(s.slot) * Talker::hidden + k];
    }
    block_sync();
    return true;
  }

  DEVICE float next_input(const Stream& s, int k) const {
    const int text = s.frames - 1;
    if (text < 0) return 0;
    float sum = to_float(p_.code_embedding[static_cast<size_t>(s.codes[0]) * Talker::hidden + k]);
    for (int g = 1; g < kGroups; ++g) sum += group_embedding(g - 1, s.codes[g], k);
    const size_t at = (static_cast<size_t>(s.slot) * p_.talker.positions + text) * Talker::hidden;
    return rounded(rounded(sum) + to_float(text < s.fed ? p_.text[at + k] : p_.pad[k]));
  }

  DEVICE float group_embedding(int group, int code, int k) const {
    return to_float(p_.group_embeddings[group][static_cast<size_t>(code) * Talker::hidden + k]);
  }

  // Position `pass` of the predictor: the talker's hidden state, then the codes one by one.
  DEVICE bool predict(int pass) {
    if (pass > 0) {
#pragma unroll 1
      for (int i = thread(); i < p_.columns * Talker::hidden; i += kThreads) {
        const int c = i / Talker::hidden, k = i % Talker::hidden;
        const int code = load_shared_by_blocks(p_.drawn + c);
        r_.x[c][k] =
            pass == 1 ? to_float(p_.code_embedding[static_cast<size_t>(code) * Talker::hidden + k])
                      : group_embedding(pass - 2, code, k);
      }
    }
    block_sync();
    if (thread() < p_.columns) r_.columns[thread()] = {thread(), pass, thread(), true};
    block_sync();
    if constexpr (M::projected) {
      if (!project()) return false;
    }
    if (!run_layers<Predictor>(p_, p_.predictor, r_, barrier_)) return false;
    if (pass == 0) return true;
    constexpr size_t kHeadSize = static_cast<size_t>(M::codes) * Predictor::hidden / 8;
    return run_head<Predictor, M::codes>(
        p_, p_.predictor, p_.predictor_heads + (pass - 1) * kHeadSize, M::vocab, r_, barrier_);
  }

  // The talker's width to the predictor's.
  DEVICE bool project() {
    Product<Predictor::hidden, Talker::hidden> product(p_.project, 1);
    auto fill = [&](int begin, int end) {
      put(p_, r_.activations, begin, end, [&](int c, int k) { return r_.x[c][k]; });
    };
    auto take = [&](int tile, int, auto sum) {
      store(p_, p_.partial, Predictor::hidden, tile, sum);
    };
    product.run(r_.activations, s_.residual.sums, fill, take);
    if (!barrier_.wait(kProject)) return false;
#pragma unroll 1
    for (int i = thread(); i < p_.columns * Predictor::hidden; i += kThreads) {
      const int c = i / Predictor::hidden, k = i % Predictor::hidden;
      r_.x[c][k] =
          rounded(rounded(load_shared_by_blocks(p_.partial + i)) + to_float(p_.project_bias[k]));
    }
    block_sync();
    return true;
  }

  // Block c draws for column c, and after the last code sends the frame off.
  DEVICE bool each_column_draws(int codebook) {
#pragma unroll 1
    for (int c = block(); c < p_.columns; c += blocks()) {
      Stream& stream = p_.streams[c];
      const int code = codebook == 0 ? draw_first<M>(p_, stream, c, s_.draw)
                                     : draw_other<M>(p_, stream, c, codebook, s_.draw);
      block_sync();
      if (thread() == 0) {
        const bool finite = code < (codebook == 0 ? M::vocab : M::codes);
        p_.drawn[c] = finite ? code : 0;
        stream.broken |= !finite;
        if (ready(stream)) finish_code(stream, c, codebook, p_.drawn[c]);
      }
    }
    return barrier_.wait(kDraw);
  }

  DEVICE void finish_code(Stream& stream, int c, int codebook, int code) {
    stream.codes[codebook] = code;
    if (codebook < kGroups - 1) return;
    const bool stop = observe_host(p_.stop + c);
    if (stream.broken)
      stream.over = kBroken;
    else if (stream.codes[0] == p_.eos)
      stream.over = kEos;
    else if (stop)
      stream.over = kStopped;
    else if (stream.frames + 1 >= stream.max_frames)
      stream.over = kLength;
    stream.frames += 1;
    stream.fresh = 0;
    Published& frame = p_.frames[c * p_.max_frames + stream.made];
    frame.over = stream.over;
    for (int g = 0; g < kGroups; ++g) frame.codes[g] = stream.codes[g];
    publish(p_.published + c, ++stream.made);
  }

  const Params& p_;
  Shared<M>& s_;
  Residual<Shared<M>::kHidden>& r_;
  Barrier barrier_;
};

#ifndef MEGAKERNEL_EMULATOR

template <class M>
__global__ void __launch_bounds__(kThreads, 1) generate(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Generation<M>(p, *reinterpret_cast<Shared<M>*>(bytes)).frames();
}

template <class M>
__global__ void __launch_bounds__(kThreads, 1) prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Generation<M>(p, *reinterpret_cast<Shared<M>*>(bytes)).prompt();
}

#define MEGAKERNEL_ENTRY(name)                                                       \
  Entry {                                                                            \
    reinterpret_cast<void*>(generate<name>), reinterpret_cast<void*>(prefill<name>), \
        sizeof(Shared<name>), shape_of<name>()                                       \
  }

// The kernels of a model, in the order of `Models` in shapes.cuh.
Entry entry(int model) {
  static const Entry entries[] = {MEGAKERNEL_MODELS(MEGAKERNEL_ENTRY)};
  return entries[model];
}

#endif

}  // namespace megakernel
