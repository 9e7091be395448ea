// Prompts: positions through the talker, pass by pass.
#pragma once

#include "block_context.cuh"

namespace megakernel {

// Of one prompt, or parts of several; a pass has as many columns as there is room for with so many
// streams.
template <class M, int Most>
class Prompts : Crew<M, Most> {
  using Base = Crew<M, Most>;
  using typename Base::Talker;

 public:
  DEVICE Prompts(const Params& p, Shared<M, Most>& s) : Base(p, s) {}

  // All passes, unless a block gives up.
  DEVICE void run() {
    begin_prompts();
    const bool lost = lost_before();
    bool fine = true;
#pragma unroll 1
    for (const Pass* next = p_.passes; fine && next < p_.passes + p_.num_passes; ++next) {
      const Pass& pass = *next;
      const int last = pass.columns - 1, columns = Most == 1 ? kRoom<Most> : last + 1;
      begin_pass(columns);
      Base::template ask<Talker::hidden>(s_.talker.norms);
      each_column(columns, [&](int c) {
        const Place& at = pass.places[min(c, last)];
        return Column{at.slot, at.position, c > last ? c : at.first, c <= last, -1};
      });
      const auto input = [&](int c, int k) {
        const size_t row = pass.row + min(c, last);
        return load_halves(p_.prompt + row * Talker::hidden + k);
      };
      start_with<Talker, kRoom<Most>, kSeveral>(flow_, s_.own, s_.norm, columns, input);
      fine = run_layers<Talker, kRoom<Most>>(flow_, s_.own, s_.norm, s_.talker, columns_(), columns,
                                             IsThere()) &&
             hear(pass, columns, lost);
    }
    close();
  }

 private:
  // Streams that begin have drawn nothing, and have no hidden state until their prompt's end.
  DEVICE void begin_prompts() {
#pragma unroll 1
    for (int i = 0; i < p_.num_passes; ++i) {
      const Pass& pass = p_.passes[i];
      forget_ends(pass);
      for (int c = block(); c < pass.columns; c += blocks()) {
        if (!(pass.ends >> c & 1)) continue;
        uint8_t* seen = p_.seen + static_cast<size_t>(pass.places[c].slot) * M::vocab;
        for (int id = thread(); id < M::vocab; id += kThreads) seen[id] = 0;
      }
    }
  }

  // Whether a launch was lost of which the host has not heard yet: nobody is to speak who builds
  // upon what it left of a prompt. The block that keeps ends asks: the bus answers one after
  // another, and all blocks would wait 0.13 ms.
  DEVICE bool lost_before() {
    if (block() == 0 && thread() == 0) s_.made[0] = observe_host(p_.failure) != 0;
    block_sync();
    return s_.made[0] != 0;
  }

  // All hear what a pass ends with, and so that its keys and values are settled; one block keeps
  // the hidden states of prompts that end. False if it was awaited in vain.
  DEVICE bool hear(const Pass& pass, int columns, bool lost) {
    take_words<Talker::hidden, kRoom<Most>, Most>(
        p_, s_.talker.words.down, columns, flow_.tags, kDown, flow_.gave_up(),
        [&](int c, int i, int four, float4 x) {
          if (!lost) keep_end(pass, c + i, four, x);
        },
        [](int) {});
    if (pass.ends == 0) return true;
    block_sync();
    const bool fine = flow_.gave_up() == 0;
    if (!fine) forget_ends(pass);
    return fine;
  }

  // Each thread has the same elements every time.
  DEVICE void keep_end(const Pass& pass, int c, int four, float4 state) {
    if (block() != 0 || !(pass.ends >> c & 1)) return;
    float* out = p_.hidden + static_cast<size_t>(pass.places[c].slot) * Talker::hidden;
    *reinterpret_cast<float4*>(out + Fours<Talker::hidden>::k(four)) = state;
  }

  DEVICE void forget_ends(const Pass& pass) {
    for (int c = 0; c < pass.columns; ++c) {
      for (int four = 0; four < Fours<Talker::hidden>::count; ++four) {
        if (Fours<Talker::hidden>::there(four)) keep_end(pass, c, four, {NAN, NAN, NAN, NAN});
      }
    }
  }

  using Base::begin_pass, Base::close, Base::columns_, Base::each_column;
  using Base::flow_, Base::p_, Base::s_;
};

template <class M, int Most>
DEVICE void run_prompts(const Params& p, Shared<M, Most>& s) {
  s.ring.init();
  all_sync();
  if (warp_number() < kWarps) {
    take_registers();
    Prompts<M, Most>(p, s).run();
  } else if (copies()) {
    fetch_weights<Most == 1>(s.ring, 0, p.num_passes,
                             [&](int) { return stack_segment<typename M::Talker>(p.talker); });
  }
}

}  // namespace megakernel
