// Matrix instructions of a warpgroup (wgmma), which sm_90a alone has, and a prefetch for kernels
// that use them.
//
// A warpgroup is four adjacent warps, the first of them a multiple of four. Together they issue one
// instruction. It multiplies 64 rows of A, in registers or in shared memory, by columns of B in
// shared memory; warp w has rows 16 w to 16 w + 15. It runs asynchronously: until `warpgroup_wait`
// has returned, the registers of A and of the sums must not be accessed, and shared memory must
// keep the operands.
#pragma once

#include "math.cuh"

#ifdef MEGAKERNEL_EMULATOR
#include "warpgroup.h"
#else

// Whether the architecture has the instructions; the macro is defined by the compiler for sm_90a.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS
#endif

#ifdef MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

namespace megakernel {

// A [64 rows, 16] or B [16, columns] of half-precision numbers in shared memory, without a swizzle.
// Core matrices of eight rows or columns, each with eight adjacent numbers of K, have 128
// contiguous bytes: row after row, or column after column. They may begin at any 16 bytes.
class MatrixDescriptor {
 public:
  DEVICE MatrixDescriptor() : bits_(0) {}
  // `k_stride` bytes from a core matrix to the one of the next eight numbers of K, `stride` to the
  // one of the next eight rows or columns; multiples of 16. PTX calls them leading and stride
  // dimension byte offset.
  DEVICE MatrixDescriptor(const void* shared, int k_stride, int stride)
      : bits_(static_cast<uint64_t>(shared_address(shared) >> 4) |
              static_cast<uint64_t>(k_stride >> 4) << 16 |
              static_cast<uint64_t>(stride >> 4) << 32) {}

  // The same matrix `bytes` further on, a multiple of 16.
  DEVICE MatrixDescriptor operator+(int bytes) const {
    MatrixDescriptor moved = *this;
    moved.bits_ += bytes >> 4;
    return moved;
  }
  DEVICE uint64_t bits() const { return bits_; }

 private:
  uint64_t bits_;
};

// Precedes instructions that read shared memory which was not written by bulk copies. Follows the
// synchronisation with the threads that wrote it.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Precedes the first instruction after the warpgroup has accessed registers of A or of sums.
DEVICE void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of instructions.
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the warpgroup's groups are incomplete.
template <int kPending>
DEVICE void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Fetches `bytes` from global memory into L2, a multiple of 16. One thread calls it.
DEVICE void prefetch_l2_bulk(const void* at, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes));
}
// Keeps the compiler from moving accesses to sums to before this. Follows a wait.
template <int kSize>
DEVICE void pin_sums(float (&sums)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define MEGAKERNEL_SUMS_8(i)                                                                 \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
      "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define MEGAKERNEL_SUMS_32(i)                                                \
  MEGAKERNEL_SUMS_8(i), MEGAKERNEL_SUMS_8(i + 8), MEGAKERNEL_SUMS_8(i + 16), \
      MEGAKERNEL_SUMS_8(i + 24)
#define MEGAKERNEL_REGISTERS_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MEGAKERNEL_REGISTERS_32 \
  MEGAKERNEL_REGISTERS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MEGAKERNEL_REGISTERS_48 \
  MEGAKERNEL_REGISTERS_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MEGAKERNEL_REGISTERS_64 \
  MEGAKERNEL_REGISTERS_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MEGAKERNEL_REGISTERS_96                                                   \
  MEGAKERNEL_REGISTERS_64                                                         \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, " \
  "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, "   \
  "%94, %95"
// Operands: the sums, then the four registers of A, the descriptor of B, whether sums are added to.
#define MEGAKERNEL_WARPGROUP_MMA(columns, registers, a0, a1, a2, a3, b_, add_, ...)            \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #add_                                        \
               ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 {" registers \
               "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_ ", p, 1, 1, 0; }"          \
               : __VA_ARGS__                                                                   \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b.bits()),                        \
                 "r"(static_cast<uint32_t>(adds)))

// sums = A B, or sums += A B if `adds`; 96 columns. A lane has the registers of mma_m16n8k16_f16
// for the 16 rows of its warp: those of A, and for columns 8 i to 8 i + 7 the sums 4 i to 4 i + 3.
// The sums are the bits of mma_m16n8k16_f16.
DEVICE void warpgroup_mma_f16(float (&sums)[48], uint4 a, MatrixDescriptor b, bool adds) {
  MEGAKERNEL_WARPGROUP_MMA(96, MEGAKERNEL_REGISTERS_48, 48, 49, 50, 51, 52, 53,
                           MEGAKERNEL_SUMS_32(0), MEGAKERNEL_SUMS_8(32), MEGAKERNEL_SUMS_8(40));
}

#undef MEGAKERNEL_WARPGROUP_MMA
// Operands: the sums, then the descriptors of A and B, whether sums are added to.
#define MEGAKERNEL_WARPGROUP_MMA_SHARED(columns, registers, a_, b_, add_, ...)                 \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #add_                                        \
               ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 {" registers \
               "}, %" #a_ ", %" #b_ ", p, 1, 1, 0, 0; }"                                       \
               : __VA_ARGS__                                                                   \
               : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<uint32_t>(adds)))

// The same with A in shared memory, and 32, 64, 96, 128 or 192 columns.
template <int kSize>
DEVICE void warpgroup_mma_f16(float (&sums)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                              bool adds) {
  static_assert(kSize == 16 || kSize == 32 || kSize == 48 || kSize == 64 || kSize == 96,
                "a size of below");
  if constexpr (kSize == 16) {
    MEGAKERNEL_WARPGROUP_MMA_SHARED(32, MEGAKERNEL_REGISTERS_16, 16, 17, 18, MEGAKERNEL_SUMS_8(0),
                                    MEGAKERNEL_SUMS_8(8));
  } else if constexpr (kSize == 32) {
    MEGAKERNEL_WARPGROUP_MMA_SHARED(64, MEGAKERNEL_REGISTERS_32, 32, 33, 34, MEGAKERNEL_SUMS_32(0));
  } else if constexpr (kSize == 48) {
    MEGAKERNEL_WARPGROUP_MMA_SHARED(96, MEGAKERNEL_REGISTERS_48, 48, 49, 50, MEGAKERNEL_SUMS_32(0),
                                    MEGAKERNEL_SUMS_8(32), MEGAKERNEL_SUMS_8(40));
  } else if constexpr (kSize == 64) {
    MEGAKERNEL_WARPGROUP_MMA_SHARED(128, MEGAKERNEL_REGISTERS_64, 64, 65, 66, MEGAKERNEL_SUMS_32(0),
                                    MEGAKERNEL_SUMS_32(32));
  } else {
    MEGAKERNEL_WARPGROUP_MMA_SHARED(192, MEGAKERNEL_REGISTERS_96, 96, 97, 98, MEGAKERNEL_SUMS_32(0),
                                    MEGAKERNEL_SUMS_32(32), MEGAKERNEL_SUMS_32(64));
  }
}

#undef MEGAKERNEL_WARPGROUP_MMA_SHARED
#undef MEGAKERNEL_REGISTERS_96
#undef MEGAKERNEL_REGISTERS_64
#undef MEGAKERNEL_REGISTERS_48
#undef MEGAKERNEL_REGISTERS_32
#undef MEGAKERNEL_REGISTERS_16
#undef MEGAKERNEL_SUMS_32
#undef MEGAKERNEL_SUMS_8

}  // namespace megakernel

#endif

#endif
