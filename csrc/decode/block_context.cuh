// Those who multiply, attend and draw: what frames and prompts have in common.
#pragma once

#include "shared_memory.cuh"

namespace megakernel {

// `Most` streams are compiled for: where it is one, the number of columns is a constant.
template <class M, int Most>
class Crew {
 protected:
  using Talker = typename M::Talker;
  using Predictor = typename M::Predictor;
  using R = Ring<M::slot, Shared<M, Most>::kDepth>;

  DEVICE Crew(const Params& p, Shared<M, Most>& s)
      : p_(p),
        s_(s.fixed),
        flow_{p,
              OwnPlaces<R, Most>(s.ring, s.fixed.fragments, s.fixed.sums),
              s.fixed.sums,
              s.fixed.fragments,
              s.fixed.attention,
              s.fixed.nearby,
              Held<R>(s.ring),
              PhaseTimer(s.fixed.times)},
        ring_(s.ring) {
    if (thread() < columns()) s_.streams[thread()] = p.streams[thread()];
    if (thread() < Most) s_.made[thread()] = 0;
    if (thread() < 2) s_.sums[thread()].gave_up = 0;
    if (thread() == 0) {
      s_.talker = p.talker, s_.predictor = p.predictor;
      share_out<Talker, typename M::TalkerHead>(s_.talker_shares);
      share_out<Predictor, typename M::PredictorHead>(s_.predictor_shares);
      s_.predictor_shares[kInputProjection] = Share::of(M::Project::units);
    }
    flow_.shares = s_.talker_shares;
    block_sync();
  }

  DEVICE int columns() const { return Most == 1 ? 1 : p_.columns; }

  DEVICE void begin_pass(int columns) {
    flow_.passing = columns;
    flow_.widened = 0;
    while (1 << flow_.widened < columns) ++flow_.widened;
  }

  // The next norm's vector, well before it is wanted.
  template <int Width>
  DEVICE void ask(const bf16* norm) {
    wait_for_own();  // who had no units of the last product has not waited for its vector
    s_.norm.template ask<Width>(norm);
  }

  // What each warp knows of a pass.
  DEVICE Column* columns_() { return s_.columns[thread() / 32]; }

  template <class Make>
  DEVICE void each_column(int count, Make make) {
    warp_sync();
    if (thread() % 32 < count) columns_()[thread() % 32] = make(thread() % 32);
    warp_sync();
  }

  // The copying warp learns that nobody reads its ring any more.
  DEVICE void close() {
    wait_for_own();
    block_sync();
    if (thread() == 0) *static_cast<volatile int*>(&ring_.stop) = 1;
    flow_.watch.close(p_.times);
  }

  const Params& p_;
  typename Shared<M, Most>::Fixed& s_;
  Flow<R, Most> flow_;

 private:
  template <class S, class Head>
  DEVICE static void share_out(Share* shares) {
    shares[kQkv] = Share::of(S::Qkv::units);
    shares[kOut] = Share::of(S::Out::units);
    shares[kGateUp] = Share::of(S::GateUp::units);
    shares[kDown] = Share::of(S::Down::units);
    shares[kHead] = Share::of(Head::units);
  }

  R& ring_;
};

// Whether this is the warp that copies weights; those beyond it were needed for their registers.
DEVICE bool copies() {
  give_registers();
  return thread() < kThreads + 32;
}

}  // namespace megakernel
