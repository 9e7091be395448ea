// Shared memory of a thread block, and how activations get there.
#pragma once

#include "search.cuh"
#include "tiles.cuh"

namespace megakernel::transducer {

template <class Number>
struct alignas(16) SharedMemory {
  uint32_t activations[kColumnCapacity<Number>][kColumnWords<Number>];
  Plane planes[kNumWarps][kMaxPlanes];  // products (tiles.cuh)
  SearchState search;
};

// Stores `value(i, vector)`, vectors of the columns first .. first + count, to the activations. All
// threads take part.
template <class Number, class Value>
DEVICE void fill_activations(SharedMemory<Number>& shared, int first, int count, Value value) {
  constexpr int kVectors = kHidden / kVectorSize<Number>;
  for (int i = thread_idx(); i < count * kVectors; i += kNumThreads) {
    const int column = i / kVectors, vector = i % kVectors;
    reinterpret_cast<uint4*>(shared.activations[first + column])[vector] = value(column, vector);
  }
}

// Vector `vector` of row `row` of an array [rows, kHidden] that other thread blocks wrote.
template <class Number>
DEVICE uint4 load_vector(const void* data, int64_t row, int vector) {
  return load_l2(static_cast<const uint4*>(data) + row * (kHidden / kVectorSize<Number>)+vector);
}
// Element `unit` of row `row` of such an array.
template <class Number>
DEVICE void store_element(void* data, int64_t row, int unit, float value) {
  static_cast<Number*>(data)[row * kHidden + unit] = to_number<Number>(value);
}

// The bias of a row. It is read before the row's sum is there.
template <class Number>
DEVICE float read_bias(const Weights& weights, int row) {
  return read_number<Number>(weights.bias, row);
}
// A linear layer's output from its sum, with torch's roundings.
template <class Number>
DEVICE float add_bias(float sum, float bias) {
  return round_to<Number>(round_to<Number>(sum) + bias);
}

}  // namespace megakernel::transducer
