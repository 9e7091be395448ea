// A decoder stack, phase by phase:
//   qkv = W norm(x) | attention | out = W a | x += out, gate and up of norm(x), SiLU | down
// The residual x of every column lies in each block's shared memory; what a phase makes goes
// through the workspace, and a barrier stands before whoever reads it.
#pragma once

#include "../barrier.cuh"
#include "attend.cuh"
#include "product.cuh"

namespace megakernel {

enum Phase : int { kQkv, kAttend, kOut, kGateUp, kDown, kHead, kDraw, kProject };

// Shared by both stacks of a model.
template <int Hidden>
struct Residual {
  float x[kColumns][Hidden];
  Activations<kMostActivations> activations;
  Sums sums;
  Attention attention;
  Column columns[kColumns];
  float scale[kColumns];
};

// x += what the splits of the last product add up to.
template <class S, int Hidden>
DEVICE void add_partial(const Params& p, Residual<Hidden>& r, int splits) {
#pragma unroll 1
  for (int i = thread(); i < p.columns * S::hidden; i += kThreads) {
    const int c = i / S::hidden, k = i % S::hidden;
    float total = r.x[c][k];
#pragma unroll 1
    for (int split = 0; split < splits; ++split) {
      const size_t at = (static_cast<size_t>(split) * kColumns + c) * S::hidden + k;
      total += load_shared_by_blocks(p.partial + at);
    }
    r.x[c][k] = total;
  }
  block_sync();
}

// 1 / rms of each column, a warp a column.
template <class S, int Hidden>
DEVICE void measure(const Params& p, Residual<Hidden>& r, float eps) {
  const int c = thread() / 32;
  if (c < p.columns) {
    float sum = 0;
    for (int k = thread() % 32; k < S::hidden; k += 32) sum += r.x[c][k] * r.x[c][k];
    sum = warp_sum(sum);
    if (thread() % 32 == 0) r.scale[c] = rsqrtf(sum / S::hidden + eps);
  }
  block_sync();
}

template <int Hidden>
DEVICE float normed(const Residual<Hidden>& r, const bf16* weight, int c, int k) {
  return rounded(rounded(r.x[c][k] * r.scale[c]) * to_float(weight[k]));
}

// Activations [begin, end) of every column, two at a time.
template <int Capacity, class Value>
DEVICE void put(const Params& p, Activations<Capacity>& a, int begin, int end, Value value) {
  const int pairs = (end - begin) / 2;
#pragma unroll 1
  for (int i = thread(); i < p.columns * pairs; i += kThreads) {
    const int c = i / pairs, k = i % pairs * 2;
    a.put(c, k, value(c, begin + k), value(c, begin + k + 1));
  }
}

// Sixteen rows into `out` [columns, rows], each thread one.
template <class Sum>
DEVICE void store(const Params& p, float* out, int rows, int tile, Sum sum) {
  const int row = thread() / kColumns, c = thread() % kColumns;
  if (row < kTile && c < p.columns) {
    out[static_cast<size_t>(c) * rows + tile * kTile + row] = sum(row, c);
  }
}

template <class S, int Hidden>
DEVICE_CALL bool run_layers(const Params& p, const Network& n, Residual<Hidden>& r,
                            Barrier& barrier) {
#pragma unroll 1
  for (int l = 0; l < n.num_layers; ++l) {
    const Layer& w = n.layers[l];
    auto normed_by = [&](const bf16* weight) {
      return [&r, &p, weight](int begin, int end) {
        put(p, r.activations, begin, end, [&](int c, int k) { return normed(r, weight, c, k); });
      };
    };
    auto into = [&](float* out, int rows) {
      return [&p, out, rows](int tile, int, auto sum) { store(p, out, rows, tile, sum); };
    };
    auto into_partial = [&](int tile, int split, auto sum) {
      store(p, p.partial + static_cast<size_t>(split) * kColumns * S::hidden, S::hidden, tile, sum);
    };

    Product<S::qkv, S::hidden> qkv(w.qkv, 1);
    if (l > 0) {
      if (!barrier.wait(kDown)) return false;
      add_partial<S>(p, r, p.down_splits);
    }
    measure<S>(p, r, n.eps);
    qkv.run(r.activations, r.sums, normed_by(w.input_norm), into(p.qkv, S::qkv));
    if (!barrier.wait(kQkv)) return false;

    attend<S>(p, n, l, r.columns, r.attention);
    Product<S::hidden, S::queries> out(w.out, p.out_splits);
    if (!barrier.wait(kAttend)) return false;

    auto fill_attended = [&](int begin, int end) {
      put(p, r.activations, begin, end,
          [&](int c, int k) { return attended<S>(p, r.columns[c], c, k); });
    };
    out.run(r.activations, r.sums, fill_attended, into_partial);
    Product<2 * S::intermediate, S::hidden> gate_up(w.gate_up, 1);
    if (!barrier.wait(kOut)) return false;

    add_partial<S>(p, r, p.out_splits);
    measure<S>(p, r, n.eps);
    auto gated = [&](int tile, int, auto sum) {
      const int row = thread() / kColumns, c = thread() % kColumns;
      if (row < kTile / 2 && c < p.columns) {
        const float gate = rounded(sum(row, c)), up = rounded(sum(row + kTile / 2, c));
        const size_t at = static_cast<size_t>(c) * S::intermediate + tile * (kTile / 2) + row;
        p.middle[at] = gate / (1 + expf(-gate)) * up;
      }
    };
    gate_up.run(r.activations, r.sums, normed_by(w.post_norm), gated);
    Product<S::hidden, S::intermediate> down(w.down, p.down_splits);
    if (!barrier.wait(kGateUp)) return false;

    auto fill_middle = [&](int begin, int end) {
      put(p, r.activations, begin, end, [&](int c, int k) {
        return load_shared_by_blocks(p.middle + static_cast<size_t>(c) * S::intermediate + k);
      });
    };
    down.run(r.activations, r.sums, fill_middle, into_partial);
  }
  if (!barrier.wait(kDown)) return false;
  add_partial<S>(p, r, p.down_splits);
  return true;
}

// logits = W norm(x); x becomes norm(x), which the predictor starts from.
template <class S, int Rows, int Hidden>
DEVICE_CALL bool run_head(const Params& p, const Network& n, const uint4* weights, int stride,
                          Residual<Hidden>& r, Barrier& barrier) {
  Product<Rows, S::hidden> head(weights, 1);
  measure<S>(p, r, n.eps);
#pragma unroll 1
  for (int i = thread(); i < p.columns * S::hidden; i += kThreads) {
    const int c = i / S::hidden, k = i % S::hidden;
    r.x[c][k] = normed(r, n.norm, c, k);
  }
  block_sync();
  auto fill = [&](int begin, int end) {
    put(p, r.activations, begin, end, [&](int c, int k) { return r.x[c][k]; });
  };
  auto take = [&](int tile, int, auto sum) {
    const int row = thread() / kColumns, c = thread() % kColumns;
    if (row < kTile && c < p.columns) {
      p.logits[static_cast<size_t>(c) * stride + tile * kTile + row] = rounded(sum(row, c));
    }
  };
  head.run(r.activations, r.sums, fill, take);
  return barrier.wait(kHead);
}

}  // namespace megakernel
