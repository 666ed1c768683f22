// The Machine of loss_rows.h on the host: every GPU thread is a thread, bulk copies are made by a thread of
// their own, late. For tests: under ThreadSanitizer a barrier that is missing is a race that it reports.

#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "loss_rows.h"

namespace smopd::cuda {

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulated GPU: %s\n", what);
  std::exit(1);
}

class ThreadBarrier {
 public:
  explicit ThreadBarrier(unsigned count) { pthread_barrier_init(&barrier_, nullptr, count); }
  ThreadBarrier(const ThreadBarrier&) = delete;
  ~ThreadBarrier() { pthread_barrier_destroy(&barrier_); }
  void wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

// An mbarrier of one arrival.
class CopyBarrier {
 public:
  void expect(int32_t bytes) {
    const std::lock_guard lock(mutex_);
    require(!arrived_, "two uses of a barrier in one phase");
    arrived_ = true;
    pending_ += bytes;
    finish();
  }
  void copied(int32_t bytes) {
    const std::lock_guard lock(mutex_);
    pending_ -= bytes;
    finish();
  }
  void wait(int32_t parity) {
    std::unique_lock lock(mutex_);
    complete_.wait(lock, [&] { return phase_ % 2 != parity; });
  }

 private:
  void finish() {
    if (!arrived_ || pending_ != 0) return;
    arrived_ = false;
    ++phase_;
    complete_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable complete_;
  bool arrived_ = false;
  int32_t pending_ = 0;
  int64_t phase_ = 0;
};

// Copies in order, on a thread of its own; until then the destination holds NaN.
class CopyEngine {
 public:
  CopyEngine() : thread_([this] { run(); }) {}
  ~CopyEngine() {
    push({});
    thread_.join();
  }
  void push_copy(void* to, const void* from, int32_t bytes, CopyBarrier& barrier) {
    std::memset(to, 0xff, size_t(bytes));
    push({to, from, bytes, &barrier});
  }

 private:
  struct Copy {
    void* to = nullptr;
    const void* from = nullptr;
    int32_t bytes = 0;
    CopyBarrier* barrier = nullptr;
  };

  void push(const Copy& copy) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(copy);
    waiting_.notify_one();
  }
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      waiting_.wait(lock, [&] { return !queue_.empty(); });
      const Copy copy = queue_.front();
      queue_.pop_front();
      lock.unlock();
      if (copy.barrier == nullptr) return;
      std::memcpy(copy.to, copy.from, size_t(copy.bytes));
      copy.barrier->copied(copy.bytes);
    }
  }

  std::mutex mutex_;
  std::condition_variable waiting_;
  std::deque<Copy> queue_;
  std::thread thread_;
};

template <int32_t kThreadsOfBlock, int32_t kSlots>
struct Emulated {
  using Barrier = CopyBarrier;

  static constexpr int32_t kThreads = kThreadsOfBlock;
  static constexpr int32_t kRing = kSlots;

  struct Block {
    alignas(16) Words ring[kRing * kThreads * kVectorsPerThread];
    Shared<Emulated> shared{};
    CopyEngine engine;
    ThreadBarrier barrier{kThreads};
    std::deque<ThreadBarrier> warps;
    double lanes[kThreads];

    Block() {
      for (int32_t i = 0; i < kThreads / kWarp; ++i) warps.emplace_back(kWarp);
    }
  };

  Block* blocks;
  ThreadBarrier* both;
  int32_t thread_index, block_index, cluster_index, cluster_count;

  int32_t thread() const { return thread_index; }
  int32_t rank() const { return block_index; }
  int32_t cluster() const { return cluster_index; }
  int32_t clusters() const { return cluster_count; }
  Block& block() const { return blocks[block_index]; }

  void sync_block() const { block().barrier.wait(); }
  void sync_cluster() const { both->wait(); }

  template <typename T>
  T* in_other_block(T* own) const {
    const ptrdiff_t place = reinterpret_cast<char*>(own) - reinterpret_cast<char*>(&block());
    return reinterpret_cast<T*>(reinterpret_cast<char*>(&blocks[block_index ^ 1]) + place);
  }

  template <typename T>
  T shuffle_xor(T value, int32_t mask) const {
    ThreadBarrier& warp = block().warps[thread_index / kWarp];
    block().lanes[thread_index] = value;
    warp.wait();
    const double other = block().lanes[thread_index ^ mask];
    warp.wait();
    return T(other);
  }

  void atomic_or(uint32_t& word, uint32_t bits) const { std::atomic_ref(word).fetch_or(bits); }
  void atomic_and(uint32_t& word, uint32_t bits) const { std::atomic_ref(word).fetch_and(bits); }

  void initialise(Barrier*, int32_t) const {}
  void expect(Barrier& barrier, int32_t bytes) const { barrier.expect(bytes); }
  void wait(Barrier& barrier, int32_t parity) const { barrier.wait(parity); }
  void load(void* to, const void* from, int32_t bytes, Barrier& barrier) const {
    const auto* begin = reinterpret_cast<const char*>(block().ring);
    const auto* place = static_cast<const char*>(to);
    require(place >= begin && place + bytes <= begin + sizeof(block().ring), "a copy outside the ring");
    require(uint64_t(to) % 16 == 0 && uint64_t(from) % 16 == 0 && bytes % 16 == 0, "a bulk copy is not aligned");
    block().engine.push_copy(to, from, bytes, barrier);
  }
  void store(Words* to, const Words& words) const {
    require(uint64_t(to) % sizeof(Words) == 0, "a vector store is not aligned");
    *to = words;
  }
};

// The grid, one cluster after the other.
template <typename Machine, bool kTwo, bool kEntropyGradient>
void run_grid(const Arguments& arguments, int32_t clusters) {
  require(arguments.support < Machine::kThreads, "a block has fewer threads than the target has slots");
  require(arguments.vocab <= Geometry<Machine>::capacity(), "the vocabulary is above the capacity");
  for (int32_t cluster = 0; cluster < clusters; ++cluster) {
    const auto blocks = std::make_unique<typename Machine::Block[]>(kBlocks);
    ThreadBarrier both(kBlocks * Machine::kThreads);
    std::vector<std::thread> threads;
    for (int32_t i = 0; i < kBlocks * Machine::kThreads; ++i) {
      threads.emplace_back([&, i] {
        Machine machine{blocks.get(), &both, i % Machine::kThreads, i / Machine::kThreads, cluster, clusters};
        auto& block = machine.block();
        loss_rows_block<Machine, kTwo, kEntropyGradient>(machine, arguments, block.shared, block.ring);
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

}  // namespace smopd::cuda
