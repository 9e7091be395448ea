// The streams of a launch: their states, the sampling of their codes, and their publication. The
// base of the generation kernels.
#pragma once

#include "block_context.cuh"

namespace megakernel {

// The streams of a launch, [streams].
DEVICE const StreamParams* stream_params(const Params& p) {
  return kIsWide ? p.wide_streams : p.streams;
}

// For at most `MaxColumns` streams. Stream c has column c of every pass.
template <class M, int MaxColumns>
class StreamContext : protected BlockContext<M, MaxColumns> {
  using Base = BlockContext<M, MaxColumns>;
  static_assert(M::vocab_size <= 1 << 12, "a sampled code has 12 bits");
  static_assert(M::Talker::hidden_size <= 64 * kNumThreads, "a thread prefetches one cache line");

 protected:
  using typename Base::Predictor;
  using typename Base::Talker;

  // Called by all compute threads.
  DEVICE StreamContext(const Params& p, SharedMemory<M, MaxColumns>& shared)
      : Base(p, shared), reduction_(shared.fixed.sample) {
    if (thread_idx() < num_streams()) s_.streams[thread_idx()] = stream_params(p)[thread_idx()];
    sync_compute_threads();
  }

  // Streams of the launch. A prefill has none: its `Params::num_streams` is that of another launch.
  DEVICE int num_streams() const { return MaxColumns == 1 ? 1 : p_.num_streams; }

  // --- the state of the streams ---

  // The warp's copy of the states, [streams]; a wide kernel has a single copy.
  DEVICE StreamState* stream_states() { return s_.stream_states[kIsWide ? 0 : thread_idx() / 32]; }

  // Calls act(stream, state) in one thread per stream and copy of the states.
  template <class Act>
  DEVICE void for_each_stream(Act act) {
    if constexpr (kIsWide) {
      sync_compute_threads();
      if (thread_idx() < num_streams()) act(thread_idx(), stream_states()[thread_idx()]);
      sync_compute_threads();
    } else {
      if (thread_idx() % 32 < num_streams()) {
        act(thread_idx() % 32, stream_states()[thread_idx() % 32]);
      }
      sync_warp();
    }
  }

  // Sets the states to those at the beginning of the launch.
  DEVICE void begin_streams() {
    for_each_stream([&](int c, StreamState& state) {
      const StreamParams& s = s_.streams[c];
      state.active =
          s.num_frames < s.max_frames && (s.num_frames <= s.num_text_vectors || s.text_complete);
      state.starts_from_prompt = s.starts_from_prompt;
      state.num_frames = s.num_frames;
      for (int g = 0; g < kNumCodeGroups; ++g) state.codes[g] = static_cast<uint16_t>(s.codes[g]);
    });
  }

  // Whether a stream is active.
  DEVICE bool any_active() {
    bool any = false;
    for (int c = 0; c < num_streams(); ++c) any |= stream_states()[c].active;
    return warp_uniform(any);
  }

  // Whether a stream needs a pass of the talker.
  DEVICE bool any_talker_active() {
    bool any = false;
    for (int c = 0; c < num_streams(); ++c) {
      any |= stream_states()[c].active && !stream_states()[c].starts_from_prompt;
    }
    return warp_uniform(any);
  }
  // Sets the columns of the talker's pass for a frame of the launch.
  DEVICE void set_talker_columns(int frame) {
    set_columns(num_streams(), [&](int c) {
      const StreamState& state = stream_states()[c];
      const bool append = state.active && !state.starts_from_prompt;
      const StreamParams& s = s_.streams[c];
      return Column{s.slot, append ? s.prompt_length + state.num_frames - 1 : 0, c,
                    append && p_.attention_capture.num_heads > 0 ? frame : -1, append};
    });
  }

  // --- the input of the talker ---

  // The embedding of a code, [talker hidden].
  DEVICE const bf16* embedding(int group, int code) const {
    const bf16* table = group == 0 ? p_.code_embedding : p_.group_embeddings[group - 1];
    return table + static_cast<size_t>(code) * Talker::hidden_size;
  }

  // Elements k to k + 3 of column c of the talker's input [streams, hidden]: the sum of the
  // embeddings of the last frame's codes, in order, and the text vector; 0 for a first frame.
  DEVICE float4 talker_input(int c, int k) {
    const StreamState& state = stream_states()[c];
    const StreamParams& stream = s_.streams[c];
    const int text = state.num_frames - 1;
    const size_t row = (static_cast<size_t>(stream.slot) * p_.talker.num_positions + max(text, 0));
    float4 rows[kNumCodeGroups];
#pragma unroll
    for (int g = 0; g < kNumCodeGroups; ++g) {
      rows[g] = load_bf16x4(embedding(g, state.codes[g]) + k);
    }
    float4 x = rows[0];
#pragma unroll
    for (int g = 1; g < kNumCodeGroups; ++g) x = add(x, rows[g]);
    const bf16* text_vector = text < stream.num_text_vectors
                                  ? p_.text_vectors + row * Talker::hidden_size
                                  : p_.pad_vector;
    x = add(x, load_bf16x4(text_vector + k));
    return text < 0 ? float4{0, 0, 0, 0} : x;
  }

  // --- codes ---

  // Whether this thread block samples for stream c: one of the last, with the fewest row groups.
  DEVICE bool samples_stream(int c) const {
    return num_blocks() - 1 - c % num_blocks() == block_idx();
  }

  // The phase `sample`: one thread block samples each stream's code from exchange.logits [streams,
  // rows]. All thread blocks wait for sampled_codes [streams].
  DEVICE void sample_code(int codebook) {
    sample_tags_.advance(kMaxStreams);
    const uint32_t tag = sample_tags_.of(0);
#pragma unroll 1
    for (int c = 0; c < num_streams(); ++c) {
      if (!samples_stream(c)) continue;
      const bool active = warp_uniform(stream_states()[c].active);
      const int code = active ? sample_stream(c, codebook) : 0;
      // Every thread block reads the code's embedding next.
      if (thread_idx() * 64 < Talker::hidden_size) {
        prefetch_l2(embedding(codebook, code) + thread_idx() * 64);
      }
      context_.timer.lap(kSample, kRest);
      if (thread_idx() == 0) {
        const int end_reason =
            active && codebook == kNumCodeGroups - 1 ? find_end_reason(c) : kRunning;
        const bool continues = active && end_reason == kRunning && has_next_text(s_.streams[c]);
        const uint32_t sampled = static_cast<uint32_t>(code) | static_cast<uint32_t>(continues)
                                                                   << 12;
        store_relaxed(p_.sampled_codes + c, sampled | tag << 30);
        if (active && codebook == kNumCodeGroups - 1) publish_frame(c, end_reason, code);
      }
    }
    const int column = min(thread_idx() % kStreamThreads, num_streams() - 1);
    const SpinTimeout timeout(p_, kSample, context_.timed_out());
    uint32_t sampled = 0;
    if (!kIsWide || warp_uniform(thread_idx() < kStreamThreads)) {
      sampled = wait_for_value(p_.sampled_codes + column, tag, 30, timeout);
    }
    for_each_stream([&](int, StreamState& state) {
      state.codes[codebook] = sampled >> 30 == tag ? sampled & 0xFFF : 0;
      if (codebook == kNumCodeGroups - 1) {
        state.num_frames += state.active;
        state.starts_from_prompt = state.starts_from_prompt && !state.active;
        state.active = state.active && (sampled >> 12 & 1);
      }
    });
    context_.timer.lap(kSample, kWait);
  }

  // Samples a code of stream c from its logits [rows]. Logits that are not finite end the stream.
  DEVICE int sample_stream(int c, int codebook) {
    const StreamParams& stream = s_.streams[c];
    const uint32_t* logits = codebook == 0
                                 ? p_.talker.exchange.logits + c * M::TalkerHead::rows
                                 : p_.predictor.exchange.logits + c * M::PredictorHead::rows;
    const uint32_t tag = (codebook == 0 ? talker_head_tags_ : predictor_head_tags_).of(c);
    int& timed_out = context_.timed_out();
    const int code = codebook == 0 ? sample_code0<M>(p_, stream, logits, tag, timed_out, reduction_)
                                   : sample_group_code<M>(p_, stream, codebook, logits, tag,
                                                          timed_out, reduction_);
    const int num_ids = codebook == 0 ? M::vocab_size : M::num_codes;
    if (code == num_ids && thread_idx() == 0) store_relaxed(p_.non_finite + c, 1);
    return code == num_ids ? 0 : code;
  }

  // --- the host ---

  // Reads the host's stop_flags [streams] before `find_end_reason` needs them: a read takes long.
  DEVICE void poll_stop_flags() {
    stop_mask_ = 0;
    for (int c = 0; c < num_streams(); ++c) {
      if (thread_idx() == 0 && samples_stream(c)) {
        stop_mask_ |= static_cast<StreamMask>(load_host_flag(p_.stop_flags + c) != 0) << c;
      }
    }
  }

  // Why stream c ends with this frame, if it does. Called by thread 0 of the sampling block.
  DEVICE EndReason find_end_reason(int c) {
    const StreamParams& s = s_.streams[c];
    if (load_relaxed(p_.non_finite + c) == 1) return kNonFinite;
    if (stream_states()[c].codes[0] == p_.eos_id) return kEos;
    if (stop_mask_ >> c & 1) return kStopped;
    return s.num_frames + 1 >= s.max_frames ? kLength : kRunning;
  }

  // Writes published_frames [streams, max_frames] of stream c, then num_published [streams].
  DEVICE void publish_frame(int c, int end_reason, int last_code) {
    PublishedFrame& frame = p_.published_frames[c * p_.max_frames + s_.num_published[c]];
    frame.end_reason = end_reason;
    for (int g = 0; g < kNumCodeGroups; ++g) frame.codes[g] = stream_states()[c].codes[g];
    frame.codes[kNumCodeGroups - 1] = last_code;
    store_host_flag(p_.num_published + c, ++s_.num_published[c]);
    ++s_.streams[c].num_frames;
  }
  using Base::context_, Base::p_, Base::s_;
  using Base::set_columns;

  EpochTags talker_head_tags_, predictor_head_tags_;

 private:
  // Threads that wait for the code of a stream each.
  static constexpr int kStreamThreads = kIsWide ? (MaxColumns + 31) / 32 * 32 : 32;
  using StreamMask = std::conditional_t<kIsWide, uint64_t, uint32_t>;
  static_assert(MaxColumns <= 8 * static_cast<int>(sizeof(StreamMask)), "a stream has a bit");

  BlockReduction reduction_;
  EpochTags sample_tags_;
  StreamMask stop_mask_ = 0;
};

// A generation kernel: compute warps, which run a `Generator`, and one copy warp.
template <class Generator, class M, int MaxColumns>
DEVICE void run_generation(const Params& p, SharedMemory<M, MaxColumns>& shared) {
  shared.ring.init();
  sync_all_threads();
  if (uniform_warp_idx() < kNumWarps) {
    raise_register_limit();
    Generator(p, shared).run();
  } else if (is_copy_warp()) {
    bool talker_active = false;  // otherwise the first frame has no pass of the talker
    for (int c = 0; c < p.num_streams; ++c) {
      const StreamParams& s = stream_params(p)[c];
      talker_active |= !s.starts_from_prompt && s.num_frames < s.max_frames &&
                       (s.num_frames <= s.num_text_vectors || s.text_complete);
    }
    constexpr int kNumRanges = kNumFrameRanges<MaxColumns>;
    copy_weights<MaxColumns == 1>(
        shared.ring, !talker_active, kNumRanges * p.max_frames,
        [&](int i) { return frame_weights<M, MaxColumns>(p, i % kNumRanges); });
  }
}

}  // namespace megakernel
