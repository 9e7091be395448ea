// The one generation kernel: frame > layer > phase. A frame is: the last frame's codes through the
// talker, code 0, fifteen codes of the predictor, and the word to the host.
#pragma once

#include "block_context.cuh"

namespace megakernel {

// Of at most so many streams.
template <class M, int MaxColumns>
class FrameGenerator : BlockContext<M, MaxColumns> {
  using Base = BlockContext<M, MaxColumns>;
  using typename Base::Predictor;
  using typename Base::Talker;

 public:
  DEVICE FrameGenerator(const Params& p, SharedMemory<M, MaxColumns>& s)
      : Base(p, s), reduction_(s.fixed.sample) {}

  // Frames until nobody goes on, or the launch has made its share.
  DEVICE void run() {
    for_each_stream([&](int c, StreamState& mine) {
      const Stream& s = s_.streams[c];
      mine.active =
          s.num_frames < s.max_frames && (s.num_frames <= s.num_text_vectors || s.text_complete);
      mine.starts_from_prompt = s.starts_from_prompt;
      mine.num_frames = s.num_frames;
      for (int g = 0; g < kNumCodeGroups; ++g) mine.codes[g] = static_cast<uint16_t>(s.codes[g]);
    });
    prefetch_next_norm(kNumCodeGroups - 1);
#pragma unroll 1
    for (int frame = 0; frame < p_.max_frames && any_active(); ++frame) {
      if (!generate_frame(frame)) break;
    }
    finish();
  }

 private:
  // The talker's pass, then the predictor's, a position each: position 0, the talker's hidden
  // state, makes no logits, position i those of codebook i. With one stream, 0 and 1 go together.
  DEVICE bool generate_frame(int frame) {
    begin_pass(columns());
#pragma unroll 1
    for (int pass = kTalkerPass; pass < kNumCodeGroups;
         pass += pass == kTalkerPass ? kFirstPassPositions<MaxColumns> : 1) {
      context_.row_groups = pass == kTalkerPass ? s_.talker_row_groups : s_.predictor_row_groups;
      if (pass == kNumCodeGroups - 1) poll_stop_flags();
      if (!(pass == kTalkerPass ? run_talker(frame) : run_predictor(pass)) || !run_head(pass))
        return false;
      prefetch_next_norm(pass);
      if (pass != 0) sample_code(pass == kTalkerPass ? 0 : pass);
    }
    return true;
  }

  static constexpr int kTalkerPass = -1;

  DEVICE bool run_head(int pass) {
    if (pass == kTalkerPass) return talker_head();
    // Keys and values of the pass are settled for who hears what it ends with: position 0 alone has
    // no logits, and some blocks may have no part of them.
    if (pass == 0 || warp_uniform(context_.row_groups[kHead].count) == 0) {
      wait_for_residual<Predictor::hidden_size, MaxColumns, MaxColumns>(
          p_, s_.predictor.exchange.mlp_residual, columns(), predictor_tags_, kDown,
          context_.timed_out(), [](int, int, int, float4) {}, [](int) {});
    }
    return pass == 0 || predictor_head(pass);
  }

  // The vector of the norm that the next pass begins with.
  DEVICE void prefetch_next_norm(int pass) {
    if (pass == kNumCodeGroups - 1)
      Base::template load_norm<Talker::hidden_size>(s_.talker.layer_norms);
    else
      Base::template load_norm<Predictor::hidden_size>(s_.predictor.layer_norms);
  }

  // Whether a pass is of two positions of one stream.
  DEVICE static bool is_two_position_pass(int pass) {
    return kFirstPassPositions<MaxColumns> == 2 && pass == 1;
  }

  // The layers of a network, whose tags are kept in a place of their own: a reference to it would
  // keep all of this in memory.
  template <class S, int N, class From>
  DEVICE bool run(const Network& n, EpochTags& tags, int columns, From from) {
    context_.tags = tags;
    const bool fine =
        run_layers<S, N>(context_, s_.residual_rows, s_.norm, n, pass_columns(), columns, from);
    tags = context_.tags;
    return fine;
  }

  // --- what a warp knows ---

  DEVICE StreamState* stream_states() { return s_.stream_states[thread_idx() / 32]; }
  template <class Act>
  DEVICE void for_each_stream(Act act) {
    if (thread_idx() % 32 < columns()) act(thread_idx() % 32, stream_states()[thread_idx() % 32]);
    sync_warp();
  }

  DEVICE bool any_active() {
    bool anyone = false;
    for (int c = 0; c < columns(); ++c) anyone |= stream_states()[c].active;
    return warp_uniform(anyone);
  }

  DEVICE bool any_talker_active() {
    bool anyone = false;
    for (int c = 0; c < columns(); ++c)
      anyone |= stream_states()[c].active && !stream_states()[c].starts_from_prompt;
    return warp_uniform(anyone);
  }

  // --- inputs ---

  DEVICE const bf16* embedding(int group, int code) const {
    const bf16* table = group == 0 ? p_.code_embedding : p_.group_embeddings[group - 1];
    return table + static_cast<size_t>(code) * Talker::hidden_size;
  }

  // The last frame's embeddings and its text vector; a first frame has none.
  DEVICE float4 next_input(int c, int k) {
    const StreamState& mine = stream_states()[c];
    const Stream& stream = s_.streams[c];
    const int text = mine.num_frames - 1;
    const size_t at = (static_cast<size_t>(stream.slot) * p_.talker.num_positions + max(text, 0));
    float4 rows[kNumCodeGroups];
#pragma unroll
    for (int g = 0; g < kNumCodeGroups; ++g) rows[g] = load_bf16x4(embedding(g, mine.codes[g]) + k);
    float4 x = rows[0];
#pragma unroll
    for (int g = 1; g < kNumCodeGroups; ++g) x = add(x, rows[g]);
    x = add(x,
            load_bf16x4((text < stream.num_text_vectors ? p_.text_vectors + at * Talker::hidden_size
                                                        : p_.pad_vector) +
                        k));
    return text < 0 ? float4{0, 0, 0, 0} : x;
  }

  // --- the talker ---

  DEVICE bool run_talker(int frame) {
    set_columns(columns(), [&](int c) {
      const StreamState& mine = stream_states()[c];
      const bool moves = mine.active && !mine.starts_from_prompt;
      const Stream& s = s_.streams[c];
      return Column{s.slot, moves ? s.prompt_length + mine.num_frames - 1 : 0, c, moves,
                    moves && p_.attention_capture.num_heads > 0 ? frame : -1};
    });
    if (!any_talker_active()) {
      Base::template load_norm<Talker::hidden_size>(s_.talker.final_norm);
      return true;
    }
    const auto input = [&](int c, int k) { return next_input(c, k); };
    begin_layers<Talker, MaxColumns, 1>(context_, s_.residual_rows, s_.norm, columns(), input);
    return run<Talker, MaxColumns>(s_.talker, talker_tags_, columns(), InputInPlace());
  }

  // What the talker ends with; of streams that begin, what their prompts did, which came as words,
  // too.
  DEVICE float4 talker_state(int c, int k) {
    const size_t slot = s_.streams[c].slot;
    const void* at = s_.talker.exchange.mlp_residual +
                     FloatExchangeLayout<Talker::hidden_size, MaxColumns>::index(c, k);
    if (stream_states()[c].starts_from_prompt)
      at = p_.prompt_hidden + slot * Talker::hidden_size + k;
    return untag(load_relaxed(static_cast<const uint4*>(at)));
  }

  DEVICE bool talker_head() {
    const bool any = any_talker_active();
    auto normed = [&](int, auto& sums) {
      if (any) {
        load_normed_residual<Talker::hidden_size, MaxColumns>(p_, s_.talker.exchange.mlp_residual,
                                                              s_.norm, columns(), talker_tags_,
                                                              kDown, s_.fragments, sums);
      }
      for (int c = 0; c < columns(); ++c) {
        if (!warp_uniform(stream_states()[c].starts_from_prompt)) continue;
        load_normed_input<Talker::hidden_size, 1>(context_, sums, s_.norm, c, c + 1,
                                                  [&](int c, int k) { return talker_state(c, k); });
      }
    };
    return head<typename M::TalkerHead>(s_.talker, talker_head_tags_, normed);
  }

  DEVICE bool predictor_head(int pass) {
    // Of two positions, the second has logits.
    const int last = is_two_position_pass(pass);
    const uint32_t* words =
        s_.predictor.exchange.mlp_residual +
        FloatExchangeLayout<Predictor::hidden_size, MaxColumns>::distance(last, 0);
    auto normed = [&](int, auto& sums) {
      load_normed_residual<Predictor::hidden_size, MaxColumns>(
          p_, words, s_.norm, columns(), predictor_tags_.from(last), kDown, s_.fragments, sums);
    };
    return head<typename M::PredictorHead>(s_.predictor, predictor_head_tags_, normed);
  }

  template <class Matrix, class Normed>
  DEVICE bool head(const Network& n, EpochTags& tags, Normed normed) {
    tags.advance(columns());
    auto logits = [&](const ProjectionResult& r, float sum, const auto& sums, bool there) {
      const float value = sum * rms_norm_scale<Matrix::k>(sums, r.column, n.eps);
      const int at = r.column * Matrix::rows + r.row_group * kRowGroupSize + r.row;
      store_relaxed_if(there, n.exchange.logits + at, tag_value(value, tags.of(r.column)));
    };
    return project<Matrix, MaxColumns>(context_, kHead, normed, logits);
  }

  // --- the code predictor ---

  DEVICE bool run_predictor(int pass) {
    return is_two_position_pass(pass) ? run_predictor<kColumnCapacity<MaxColumns>>(pass, 2)
                                      : run_predictor<MaxColumns>(pass, columns());
  }

  // Position 0 starts with the norm of what the talker ended with, position i with the embedding of
  // code i - 1.
  template <int N>
  DEVICE bool run_predictor(int pass, int count) {
    const bool two = is_two_position_pass(pass);
    set_columns(count, [&](int c) {
      return two ? Column{0, c, 0, true, -1} : Column{c, pass, c, true, -1};
    });
    const auto& talked_sums = context_.sums[context_.sums_idx ^ 1];  // of the talker's head
    const auto input = [&](int c, int k) {
      if (pass == 0 || (two && c == 0)) {
        const float scale = rms_norm_scale<Talker::hidden_size>(talked_sums, c, p_.talker.eps);
        return multiply(multiply(talker_state(c, k), scale), load_bf16x4(p_.talker.final_norm + k));
      }
      const int group = pass - 1;
      return load_bf16x4(embedding(group, stream_states()[two ? 0 : c].codes[group]) + k);
    };
    if constexpr (M::has_input_projection) {
      return project_input<N>(count, input) &&
             run<Predictor, N>(s_.predictor, predictor_tags_, count,
                               InputFromExchange{p_.predictor_input, project_tags_});
    } else {
      constexpr int kAtOnce = kInputVectorsAtOnce < N ? kInputVectorsAtOnce : N;
      begin_layers<Predictor, N, kAtOnce>(context_, s_.residual_rows, s_.norm, count, input);
      return run<Predictor, N>(s_.predictor, predictor_tags_, count, InputInPlace());
    }
  }

  // The talker's width to the predictor's.
  template <int N, class Input>
  DEVICE bool project_input(int count, Input input) {
    constexpr int kTalkerSize = Talker::hidden_size, kPredictorSize = Predictor::hidden_size;
    constexpr int kMaxAtOnce = N < 2 ? N : 2,
                  kAtOnce = kInputVectorsAtOnce < kMaxAtOnce ? kInputVectorsAtOnce : kMaxAtOnce;
    project_tags_.advance(count);
    auto plain = [&](int, auto&) {
      const ActivationWriter<MaxColumns> activations(s_.fragments);
      for_each_input<kTalkerSize, kAtOnce>(
          0, count, input,
          [&](int c, int i, int four, float4 v) { activations.store(c + i, four, v); }, [](int) {});
    };
    auto store = [&](const ProjectionResult& r, float sum, const auto&, bool there) {
      const int k = r.row_group * kRowGroupSize + r.row;
      const float value = sum + to_float(p_.input_projection_bias[k]);
      const uint32_t word = tag_value(value, project_tags_.of(r.column));
      store_relaxed_if(
          there,
          p_.predictor_input + FloatExchangeLayout<kPredictorSize, MaxColumns>::index(r.column, k),
          word);
      if (there)
        s_.residual_rows.at(context_.row_groups[kInputProjection], r.row_group, r.row, r.column) =
            value;
    };
    return project<typename M::InputProjection, N>(context_, kInputProjection, plain, store);
  }

  // --- codes ---

  // The last blocks draw: they have the least to multiply.
  DEVICE bool samples_stream(int c) const {
    return num_blocks() - 1 - c % num_blocks() == block_idx();
  }

  // Somebody draws for each stream, everybody hears it.
  DEVICE void sample_code(int codebook) {
    draw_tags_.advance(kMaxStreams);
    const uint32_t tag = draw_tags_.of(0);
#pragma unroll 1
    for (int c = 0; c < columns(); ++c) {
      if (!samples_stream(c)) continue;
      const bool goes = warp_uniform(stream_states()[c].active);
      const int code = goes ? sample_stream(c, codebook) : 0;
      // Everybody asks for its embedding next.
      if (thread_idx() * 64 < Talker::hidden_size)
        prefetch_l2(embedding(codebook, code) + thread_idx() * 64);
      context_.timer.lap(kSample, kSum);
      if (thread_idx() == 0) {
        const int over = goes && codebook == kNumCodeGroups - 1 ? find_end_reason(c) : kRunning;
        const bool on = goes && over == kRunning && has_text(s_.streams[c]);
        const uint32_t word = static_cast<uint32_t>(code) | static_cast<uint32_t>(on) << 12;
        store_relaxed(p_.sampled_codes + c, word | tag << 30);
        if (goes && codebook == kNumCodeGroups - 1) publish_frame(c, over, code);
      }
    }
    const int column = min(thread_idx() % 32, columns() - 1);  // each lane's
    const SpinTimeout timeout(p_, kSample, context_.timed_out());
    const uint32_t word = wait_for_value(p_.sampled_codes + column, tag, 30, timeout);
    for_each_stream([&](int, StreamState& mine) {
      mine.codes[codebook] = word >> 30 == tag ? word & 0xFFF : 0;
      if (codebook == kNumCodeGroups - 1) {
        mine.num_frames += mine.active;
        mine.starts_from_prompt = mine.starts_from_prompt && !mine.active;
        mine.active = mine.active && (word >> 12 & 1);
      }
    });
    context_.timer.lap(kSample, kWait);
  }

  // All threads of the block; a stream whose logits are not finite is told so at the frame's end.
  DEVICE int sample_stream(int c, int codebook) {
    const Stream& stream = s_.streams[c];
    const uint32_t* logits = codebook == 0
                                 ? p_.talker.exchange.logits + c * M::TalkerHead::rows
                                 : p_.predictor.exchange.logits + c * M::PredictorHead::rows;
    const uint32_t tag = (codebook == 0 ? talker_head_tags_ : predictor_head_tags_).of(c);
    int& timed_out = context_.timed_out();
    const int code = codebook == 0 ? sample_code0<M>(p_, stream, logits, tag, timed_out, reduction_)
                                   : sample_group_code<M>(p_, stream, codebook, logits, tag,
                                                          timed_out, reduction_);
    const int ids = codebook == 0 ? M::vocab_size : M::num_codes;
    if (code == ids && thread_idx() == 0) store_relaxed(p_.non_finite + c, 1);
    return code == ids ? 0 : code;
  }

  // One thread reads the host's flags well before they are needed.
  DEVICE void poll_stop_flags() {
    stop_mask_ = 0;
    for (int c = 0; c < columns(); ++c) {
      if (thread_idx() == 0 && samples_stream(c))
        stop_mask_ |= (load_host_flag(p_.stop_flags + c) != 0) << c;
    }
  }

  DEVICE bool has_text(const Stream& s) const {
    return s.num_frames + 1 <= s.num_text_vectors || s.text_complete;
  }

  DEVICE EndReason find_end_reason(int c) {
    const Stream& s = s_.streams[c];
    if (load_relaxed(p_.non_finite + c) == 1) return kNonFinite;
    if (stream_states()[c].codes[0] == p_.eos_id) return kEos;
    if (stop_mask_ >> c & 1) return kStopped;
    return s.num_frames + 1 >= s.max_frames ? kLength : kRunning;
  }

  DEVICE void publish_frame(int c, int over, int last) {
    PublishedFrame& frame = p_.published_frames[c * p_.max_frames + s_.num_made[c]];
    frame.end_reason = over;
    for (int g = 0; g < kNumCodeGroups; ++g) frame.codes[g] = stream_states()[c].codes[g];
    frame.codes[kNumCodeGroups - 1] = last;
    store_host_flag(p_.num_published + c, ++s_.num_made[c]);
    ++s_.streams[c].num_frames;
  }

  using Base::begin_pass, Base::finish, Base::columns, Base::pass_columns, Base::set_columns;
  using Base::context_, Base::p_, Base::s_;

  BlockReduction reduction_;
  EpochTags talker_tags_, predictor_tags_;  // of what their layers make
  EpochTags talker_head_tags_, predictor_head_tags_, project_tags_, draw_tags_;
  uint32_t stop_mask_ = 0;
};

// The first warps multiply, attend and draw, one copies weights.
template <class M, int MaxColumns>
DEVICE void generate_frames(const Params& p, SharedMemory<M, MaxColumns>& s) {
  s.ring.init();
  sync_all_threads();
  if (uniform_warp_idx() < kNumWarps) {
    raise_register_limit();
    FrameGenerator<M, MaxColumns>(p, s).run();
  } else if (is_copy_warp()) {
    bool talks = false;
    for (int c = 0; c < p.num_streams; ++c) {
      const Stream& stream = p.streams[c];
      talks |= !stream.starts_from_prompt && stream.num_frames < stream.max_frames &&
               (stream.num_frames <= stream.num_text_vectors || stream.text_complete);
    }
    constexpr int kNumPhaseParts = kNumFrameSegments<MaxColumns>;
    copy_weights<MaxColumns == 1>(s.ring, !talks, kNumPhaseParts * p.max_frames, [&](int i) {
      return frame_segment<M, MaxColumns>(p, i % kNumPhaseParts);
    });
  }
}

}  // namespace megakernel
