// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace layer_test {

using indexshare::index_t;

/// Three threads that wait for work, as an engine's pool does: a call neither starts a thread nor
/// allocates.
class WorkerPool {
 public:
  static constexpr int workers = 3;

  WorkerPool() {
    for (int worker = 0; worker < workers; ++worker) {
      threads_[worker] = std::thread([this, worker] { loop(worker); });
    }
  }
  WorkerPool(WorkerPool const&) = delete;
  WorkerPool& operator=(WorkerPool const&) = delete;
  ~WorkerPool() {
    {
      std::lock_guard const lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  template <class F>
  void run(index_t count, F const& f) {
    auto const call = [](void const* body, index_t begin, index_t end, int worker) {
      (*static_cast<F const*>(body))(begin, end, worker);
    };
    std::unique_lock lock(mutex_);
    job_ = {count, &f, call};
    busy_ = workers;
    ++round_;
    wake_.notify_all();
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  struct Job {
    index_t count = 0;
    void const* body = nullptr;
    void (*call)(void const*, index_t, index_t, int) = nullptr;
  };

  void loop(int worker) {
    long seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
      if (stopping_) return;
      seen = round_;
      Job const job = job_;
      lock.unlock();
      index_t const begin = job.count * worker / workers;
      index_t const end = job.count * (worker + 1) / workers;
      if (begin < end) job.call(job.body, begin, end, worker);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job job_;
  long round_ = 0;
  int busy_ = 0;
  bool stopping_ = false;
  std::thread threads_[workers];
};

/// The pool as a ParallelFor.
struct PoolFor {
  WorkerPool* pool = nullptr;

  static constexpr int concurrency() noexcept { return WorkerPool::workers; }
  template <class F>
  void operator()(index_t count, F const& f) const {
    pool->run(count, f);
  }
};
static_assert(indexshare::ParallelFor<PoolFor>);

}  // namespace layer_test
