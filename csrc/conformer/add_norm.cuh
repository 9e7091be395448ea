// The residual of a module and the norms that follow it. One thread block per row.
#pragma once

#include "row_norm.cuh"

namespace megakernel::conformer {

// --- static asserts ---

static_assert(kBlockThreads % 32 == 0, "a block sum adds whole warps");
static_assert(kHidden % 8 == 0, "a row has whole vectors");

// --- shared memory ---

// RowSums (row_norm.cuh), one for each norm.
struct AddNormSharedMemory {
  RowSums out, next;
};

// --- warp roles ---

// All warps do the same. A thread has every kBlockThreads-th vector of a row.

// --- body ---

// The kernel. Reads x, y [rows, kHidden]; writes x if it changes, and h [rows, kHidden].
template <class Number>
DEVICE void add_norm(const AddNormParams& p, AddNormSharedMemory& shared) {
  trigger_dependent_grids();
  wait_for_prerequisite_grids();
  const int64_t offset = static_cast<int64_t>(block_idx()) * kHidden * sizeof(Number);
  char* const x = static_cast<char*>(p.x) + offset;
  RowPart<Number, kBlockThreads> row(x, thread_idx());
  if (p.y) row.add(static_cast<const char*>(p.y) + offset, p.scale);
  if (p.norm_out.weight) row.normalise_row(p.norm_out, BlockSum{shared.out});
  if (p.y || p.norm_out.weight) row.store(x);
  if (!p.norm_next.weight) return;
  row.normalise_row(p.norm_next, BlockSum{shared.next});
  row.store(static_cast<char*>(p.h) + offset);
}

}  // namespace megakernel::conformer
