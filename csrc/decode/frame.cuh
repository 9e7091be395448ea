// The generation kernel: frame > network > phase.
//
//   talker:     x = sum of the last frame's 16 code embeddings + a text vector;  h = layers(x)
//   head:       code 0 ~ sample(W_head norm(h))
//   predictor:  pass 0 with input norm(h), pass i with the embedding of code i - 1;
//               code i ~ sample(W_head_i norm(layers(.))), i = 1 to 15
//   publish:    the 16 codes go to the memory that the host reads.
// With one stream the predictor's passes 0 and 1 are one pass of two positions. If the talker is
// wider than the predictor, the phase `input_projection` precedes the predictor's layers.
#pragma once

#include "block_context.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kMaxStreams <= 32, "a lane updates a stream, and a mask has one bit per stream");

// --- shared memory ---

// `SharedMemory` of shared_memory.cuh, from the first frame of a launch to the last.

// --- warp roles ---

// Compute warps: all phases. Every warp has its own copy of the streams' states.
// Copy warp: all weights of a frame in the order of use, frame after frame (`frame_weights`).

// The compute warps' work, for at most `MaxColumns` streams. Stream c has column c of every pass.
// Functions that run phases return false after a timeout.
template <class M, int MaxColumns>
class FrameGenerator : BlockContext<M, MaxColumns> {
  using Base = BlockContext<M, MaxColumns>;
  using typename Base::Predictor;
  using typename Base::Talker;
  static_assert(M::vocab_size <= 1 << 12, "a sampled code has 12 bits");
  static_assert(Talker::hidden_size <= 64 * kNumThreads, "a thread prefetches one cache line");

 public:
  // Called by all compute threads.
  DEVICE FrameGenerator(const Params& p, SharedMemory<M, MaxColumns>& shared)
      : Base(p, shared), reduction_(shared.fixed.sample) {}

  // Generates frames until no stream is active or the launch has its maximum.
  DEVICE void run() {
    for_each_stream([&](int c, StreamState& state) {
      const StreamParams& s = s_.streams[c];
      state.active =
          s.num_frames < s.max_frames && (s.num_frames <= s.num_text_vectors || s.text_complete);
      state.starts_from_prompt = s.starts_from_prompt;
      state.num_frames = s.num_frames;
      for (int g = 0; g < kNumCodeGroups; ++g) state.codes[g] = static_cast<uint16_t>(s.codes[g]);
    });
    load_next_norm(kNumCodeGroups - 1);
#pragma unroll 1
    for (int frame = 0; frame < p_.max_frames && any_active(); ++frame) {
      if (!generate_frame(frame)) break;
    }
    finish();
  }

 private:
  static constexpr int kTalkerPass = -1;

  // Generates a frame: the talker's pass, then the predictor's passes 0 to 15.
  DEVICE bool generate_frame(int frame) {
    begin_pass(num_streams());
#pragma unroll 1
    for (int pass = kTalkerPass; pass < kNumCodeGroups;
         pass += pass == kTalkerPass ? kFirstPassPositions<MaxColumns> : 1) {
      context_.row_groups = pass == kTalkerPass ? s_.talker_row_groups : s_.predictor_row_groups;
      if (pass == kNumCodeGroups - 1) poll_stop_flags();
      if (!(pass == kTalkerPass ? run_talker(frame) : run_predictor(pass)) || !run_head(pass)) {
        return false;
      }
      load_next_norm(pass);
      if (pass != 0) sample_code(pass == kTalkerPass ? 0 : pass);
    }
    return true;
  }

  // Computes the logits of a pass, [streams, rows of the head]; pass 0 of the predictor has none.
  DEVICE bool run_head(int pass) {
    if (pass == kTalkerPass) return run_talker_head();
    // A thread block without rows of the head waits for the end of the layers here. The wait orders
    // the keys and values of this pass before the reads of the next pass.
    if (pass == 0 || warp_uniform(context_.row_groups[kHead].count) == 0) {
      wait_for_residual<Predictor::hidden_size, MaxColumns, MaxColumns>(
          p_, s_.predictor.exchange.mlp_residual, num_streams(), predictor_tags_, kDown,
          context_.timed_out(), [](int, int, int, float4) {}, [](int) {});
    }
    return pass == 0 || run_predictor_head(pass);
  }

  // Starts to load the weight of the first norm of the pass after `pass`.
  DEVICE void load_next_norm(int pass) {
    if (pass == kNumCodeGroups - 1) {
      Base::template load_norm<Talker::hidden_size>(s_.talker.layer_norms);
    } else {
      Base::template load_norm<Predictor::hidden_size>(s_.predictor.layer_norms);
    }
  }

  // Whether a pass consists of the positions 0 and 1 of one stream.
  DEVICE static bool has_two_positions(int pass) {
    return kFirstPassPositions<MaxColumns> == 2 && pass == 1;
  }

  // Runs the layers of a network. The tags are copied, because a reference into this object would
  // force all of it into local memory.
  template <class S, int NumColumns, class Source>
  DEVICE bool run_network(const Network& n, EpochTags& epoch_tags, int num_columns, Source source) {
    context_.epoch_tags = epoch_tags;
    const bool ok = run_layers<S, NumColumns>(context_, s_.residual, s_.norm, n, pass_columns(),
                                              num_columns, source);
    epoch_tags = context_.epoch_tags;
    return ok;
  }

  // --- the state of the streams ---

  // The warp's copy of the states, [streams].
  DEVICE StreamState* stream_states() { return s_.stream_states[thread_idx() / 32]; }

  // Calls act(stream, state) in one lane of every warp per stream.
  template <class Act>
  DEVICE void for_each_stream(Act act) {
    if (thread_idx() % 32 < num_streams()) {
      act(thread_idx() % 32, stream_states()[thread_idx() % 32]);
    }
    sync_warp();
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

  // --- the talker ---

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

  // The talker's pass, unless all streams start from their prompt. Reads talker_input [streams,
  // hidden], writes the talker's mlp_residual [streams, hidden].
  DEVICE bool run_talker(int frame) {
    set_columns(num_streams(), [&](int c) {
      const StreamState& state = stream_states()[c];
      const bool append = state.active && !state.starts_from_prompt;
      const StreamParams& s = s_.streams[c];
      return Column{s.slot, append ? s.prompt_length + state.num_frames - 1 : 0, c, append,
                    append && p_.attention_capture.num_heads > 0 ? frame : -1};
    });
    if (!any_talker_active()) {
      Base::template load_norm<Talker::hidden_size>(s_.talker.final_norm);
      return true;
    }
    const auto input = [&](int c, int k) { return talker_input(c, k); };
    begin_layers<Talker, MaxColumns, 1>(context_, s_.residual, s_.norm, num_streams(), input);
    return run_network<Talker, MaxColumns>(s_.talker, talker_tags_, num_streams(), InputInPlace());
  }

  // Elements k to k + 3 of column c of the talker's final residual [streams, hidden]. A stream that
  // starts from its prompt has the residual of the prefill.
  DEVICE float4 talker_hidden(int c, int k) {
    const size_t slot = s_.streams[c].slot;
    const void* at = s_.talker.exchange.mlp_residual +
                     FloatExchangeLayout<Talker::hidden_size, MaxColumns>::index(c, k);
    if (stream_states()[c].starts_from_prompt)
      at = p_.prompt_hidden + slot * Talker::hidden_size + k;
    return untag(load_relaxed(static_cast<const uint4*>(at)));
  }

  // Reads talker_hidden [streams, hidden], writes the talker's logits [streams, vocab].
  DEVICE bool run_talker_head() {
    const bool any = any_talker_active();
    auto load = [&](int, auto& sums) {
      if (any) {
        load_normed_residual<Talker::hidden_size, MaxColumns>(p_, s_.talker.exchange.mlp_residual,
                                                              s_.norm, num_streams(), talker_tags_,
                                                              kDown, s_.fragments, sums);
      }
      for (int c = 0; c < num_streams(); ++c) {
        if (!warp_uniform(stream_states()[c].starts_from_prompt)) continue;
        load_normed_input<Talker::hidden_size, 1>(
            context_, sums, s_.norm, c, c + 1, [&](int c, int k) { return talker_hidden(c, k); });
      }
    };
    return project_head<typename M::TalkerHead>(s_.talker, talker_head_tags_, load);
  }

  // logits = W norm(x): reads x [columns, Shape::k], writes exchange.logits [columns, Shape::rows].
  template <class Shape, class Load>
  DEVICE bool project_head(const Network& n, EpochTags& epoch_tags, Load load) {
    epoch_tags.advance(num_streams());
    auto store = [&](const ProjectionResult& r, float sum, const auto& sums, bool valid) {
      const float value = sum * rms_norm_scale<Shape::k>(sums, r.column, n.eps);
      const int at = r.column * Shape::rows + r.row_group * kRowGroupSize + r.row;
      store_relaxed_if(valid, n.exchange.logits + at, tag_value(value, epoch_tags.of(r.column)));
    };
    return project<Shape, MaxColumns>(context_, kHead, load, store);
  }

  // --- the code predictor ---

  // The predictor's pass `pass`.
  DEVICE bool run_predictor(int pass) {
    return has_two_positions(pass) ? run_predictor<kColumnCapacity<MaxColumns>>(pass, 2)
                                   : run_predictor<MaxColumns>(pass, num_streams());
  }

  // Reads the norm of talker_hidden, or the last code's embedding, [columns, talker hidden]. Writes
  // the predictor's mlp_residual [columns, predictor hidden].
  template <int NumColumns>
  DEVICE bool run_predictor(int pass, int num_columns) {
    const bool two_positions = has_two_positions(pass);
    set_columns(num_columns, [&](int c) {
      return two_positions ? Column{0, c, 0, true, -1} : Column{c, pass, c, true, -1};
    });
    const auto& head_sums = context_.sums[context_.sums_idx ^ 1];  // squares of the talker's head
    const auto input = [&](int c, int k) {
      if (pass == 0 || (two_positions && c == 0)) {
        const float scale = rms_norm_scale<Talker::hidden_size>(head_sums, c, p_.talker.eps);
        return multiply(multiply(talker_hidden(c, k), scale),
                        load_bf16x4(p_.talker.final_norm + k));
      }
      const int group = pass - 1;
      return load_bf16x4(embedding(group, stream_states()[two_positions ? 0 : c].codes[group]) + k);
    };
    if constexpr (M::has_input_projection) {
      return project_input<NumColumns>(num_columns, input) &&
             run_network<Predictor, NumColumns>(
                 s_.predictor, predictor_tags_, num_columns,
                 InputFromExchange{p_.predictor_input, input_projection_tags_});
    } else {
      constexpr int kBatch = kInputBatch<NumColumns>;
      begin_layers<Predictor, NumColumns, kBatch>(context_, s_.residual, s_.norm, num_columns,
                                                  input);
      return run_network<Predictor, NumColumns>(s_.predictor, predictor_tags_, num_columns,
                                                InputInPlace());
    }
  }

  // The phase `input_projection`: x = W input + bias, from input [columns, talker hidden] to
  // predictor_input, float layout [columns, predictor hidden].
  template <int NumColumns, class Input>
  DEVICE bool project_input(int num_columns, Input input) {
    constexpr int kInputSize = Talker::hidden_size, kOutputSize = Predictor::hidden_size;
    constexpr int kBatch = kInputBatch<(NumColumns < 2 ? NumColumns : 2)>;
    input_projection_tags_.advance(num_columns);
    auto load = [&](int, auto&) {
      const ActivationWriter<MaxColumns> activations(s_.fragments);
      for_each_input<kInputSize, kBatch>(
          0, num_columns, input,
          [&](int c, int i, int vector, float4 v) { activations.store(c + i, vector, v); },
          [](int) {});
    };
    auto store = [&](const ProjectionResult& r, float sum, const auto&, bool valid) {
      const int k = r.row_group * kRowGroupSize + r.row;
      const float value = sum + to_float(p_.input_projection_bias[k]);
      const uint32_t tagged = tag_value(value, input_projection_tags_.of(r.column));
      const int at = FloatExchangeLayout<kOutputSize, MaxColumns>::index(r.column, k);
      store_relaxed_if(valid, p_.predictor_input + at, tagged);
      if (valid) {
        s_.residual.at(context_.row_groups[kInputProjection], r.row_group, r.row, r.column) = value;
      }
    };
    return project<typename M::InputProjection, NumColumns>(context_, kInputProjection, load,
                                                            store);
  }

  // Reads the predictor's mlp_residual [columns, hidden], writes its logits [streams, codes].
  DEVICE bool run_predictor_head(int pass) {
    const int column = has_two_positions(pass);  // of two positions, the second has logits
    const uint32_t* residual =
        s_.predictor.exchange.mlp_residual +
        FloatExchangeLayout<Predictor::hidden_size, MaxColumns>::distance(column, 0);
    auto load = [&](int, auto& sums) {
      load_normed_residual<Predictor::hidden_size, MaxColumns>(p_, residual, s_.norm, num_streams(),
                                                               predictor_tags_.from(column), kDown,
                                                               s_.fragments, sums);
    };
    return project_head<typename M::PredictorHead>(s_.predictor, predictor_head_tags_, load);
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
    const int column = min(thread_idx() % 32, num_streams() - 1);
    const SpinTimeout timeout(p_, kSample, context_.timed_out());
    const uint32_t sampled = wait_for_value(p_.sampled_codes + column, tag, 30, timeout);
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
        stop_mask_ |= (load_host_flag(p_.stop_flags + c) != 0) << c;
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

  using Base::begin_pass, Base::finish, Base::num_streams, Base::pass_columns, Base::set_columns;
  using Base::context_, Base::p_, Base::s_;

  BlockReduction reduction_;
  EpochTags talker_tags_, predictor_tags_;
  EpochTags talker_head_tags_, predictor_head_tags_, input_projection_tags_, sample_tags_;
  uint32_t stop_mask_ = 0;
};

// --- body ---

// The kernel: compute warps, and one copy warp.
template <class M, int MaxColumns>
DEVICE void generate_frames(const Params& p, SharedMemory<M, MaxColumns>& shared) {
  shared.ring.init();
  sync_all_threads();
  if (uniform_warp_idx() < kNumWarps) {
    raise_register_limit();
    FrameGenerator<M, MaxColumns>(p, shared).run();
  } else if (is_copy_warp()) {
    bool talker_active = false;  // otherwise the first frame has no pass of the talker
    for (int c = 0; c < p.num_streams; ++c) {
      const StreamParams& s = p.streams[c];
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
