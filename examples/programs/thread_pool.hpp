// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace programs {

/// A plain thread pool, as an engine would own one. The calling thread works too.
class ThreadPool {
 public:
  explicit ThreadPool(int threads) : size_(std::max(threads, 1)) {
    for (int worker = 1; worker < size_; ++worker) {
      threads_.emplace_back([this, worker] { serve(worker); });
    }
  }
  ~ThreadPool() {
    {
      std::lock_guard const lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  ThreadPool(ThreadPool const&) = delete;
  ThreadPool& operator=(ThreadPool const&) = delete;

  int size() const { return size_; }

  /// Runs job(worker) once on every thread and waits for all.
  template <class Job>
  void on_every_thread(Job const& job) {
    {
      std::lock_guard const lock(mutex_);
      context_ = &job;
      call_ = [](void const* context, int worker) { (*static_cast<Job const*>(context))(worker); };
      busy_ = size_ - 1;
      ++round_;
    }
    wake_.notify_all();
    job(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void serve(int worker) {
    std::int64_t seen = 0;
    for (;;) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
      if (stopping_) return;
      seen = round_;
      auto const call = call_;
      auto const* const context = context_;
      lock.unlock();
      call(context, worker);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  int size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  void (*call_)(void const*, int) = nullptr;
  void const* context_ = nullptr;
  std::int64_t round_ = 0;
  int busy_ = 0;
  bool stopping_ = false;
};

/// The pool as the library's ParallelFor: pieces are taken from a counter, so that rows of
/// different lengths spread.
struct PoolFor {
  ThreadPool* pool = nullptr;

  int concurrency() const noexcept { return pool == nullptr ? 1 : pool->size(); }

  template <class F>
  void operator()(indexshare::index_t count, F const& f) const noexcept {
    if (count <= 0) return;
    if (concurrency() == 1) {
      f(indexshare::index_t{0}, count, 0);
      return;
    }
    indexshare::index_t const pieces =
        std::min<indexshare::index_t>(count, indexshare::index_t{concurrency()} * 8);
    std::atomic<indexshare::index_t> next{0};
    pool->on_every_thread([&](int worker) {
      for (indexshare::index_t piece = next++; piece < pieces; piece = next++) {
        f(count * piece / pieces, count * (piece + 1) / pieces, worker);
      }
    });
  }
};
static_assert(indexshare::ParallelFor<PoolFor>);

}  // namespace programs
