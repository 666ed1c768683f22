// The Machine of loss_rows.h on a GPU of compute capability 9.0: clusters, bulk copies, mbarriers, in PTX.
// Never run so far: see loss_rows.h.

#pragma once

#include <cstdint>

#include "loss_rows.h"

namespace smopd::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

struct Hopper {
  using Barrier = uint64_t;

  static constexpr int32_t kThreads = 512;
  static constexpr int32_t kRing = 13;  // slots of 16 KiB: what 227 KiB of shared memory hold beside Shared

  __device__ __forceinline__ int32_t thread() const { return int32_t(threadIdx.x); }
  __device__ __forceinline__ int32_t rank() const { return int32_t(blockIdx.x) % kBlocks; }
  __device__ __forceinline__ int32_t cluster() const { return int32_t(blockIdx.x) / kBlocks; }
  __device__ __forceinline__ int32_t clusters() const { return int32_t(gridDim.x) / kBlocks; }

  __device__ __forceinline__ void sync_block() const { __syncthreads(); }

  // Every thread of both blocks. Orders their accesses to each other's shared memory.
  __device__ __forceinline__ void sync_cluster() const {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
  }

  // The same place in the other block's shared memory, as a generic address.
  template <typename T>
  __device__ __forceinline__ T* in_other_block(T* own) const {
    uint64_t other;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(uint64_t(own)), "r"(rank() ^ 1));
    return reinterpret_cast<T*>(other);
  }

  template <typename T>
  __device__ __forceinline__ T shuffle_xor(T value, int32_t mask) const {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }

  __device__ __forceinline__ void atomic_or(uint32_t& word, uint32_t bits) const { atomicOr(&word, bits); }
  __device__ __forceinline__ void atomic_and(uint32_t& word, uint32_t bits) const { atomicAnd(&word, bits); }

  // One thread's arrival completes a phase, together with the bytes that it announces.
  __device__ __forceinline__ void initialise(Barrier* barriers, int32_t count) const {
    for (int32_t i = 0; i < count; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + i)) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copies' own view of the barriers
  }

  __device__ __forceinline__ void expect(Barrier& barrier, int32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
                 "r"(bytes)
                 : "memory");
  }

  // Device memory to this block's shared memory; both addresses and the size are multiples of 16.
  __device__ __forceinline__ void load(void* to, const void* from, int32_t bytes, Barrier& barrier) const {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
  }

  // Until the phase of this parity is complete. Each thread waits for itself, so that it sees the copy.
  __device__ __forceinline__ void wait(const Barrier& barrier, int32_t parity) const {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n\t.reg .pred complete;\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, complete;\n\t}"
          : "=r"(done)
          : "r"(shared_address(&barrier)), "r"(parity)
          : "memory");
    }
  }

  __device__ __forceinline__ void store(Words* to, const Words& words) const {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
  }
};

}  // namespace smopd::cuda
