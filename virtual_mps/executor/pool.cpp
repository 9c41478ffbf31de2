#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace vmps {
namespace {

using Clock = std::chrono::steady_clock;
// A grid that the launching thread ends within this time is not worth waking the helpers for, which costs about as
// much.
constexpr auto kAlone = std::chrono::microseconds(20);

// Each worker may come to hold 64 MiB of stacks, if kernels have that many local variables.
constexpr int kMostThreads = 16;

class Grid {
 public:
  explicit Grid(const Launch& launch) : launch_(launch) {
    const unsigned* n = launch.grid.threadgroups;
    total_ = uint64_t{n[0]} * n[1] * n[2];
    if (launch.order && total_) launch.order->start_walk(total_);
  }

  // Runs one threadgroup that nobody runs yet; false when there is none.
  bool step(Worker& worker) {
    uint64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= total_) return false;
    if (launch_.order) i = launch_.order->walk(i);
    const unsigned* n = launch_.grid.threadgroups;
    const unsigned at[3] = {unsigned(i % n[0]), unsigned(i / n[0] % n[1]), unsigned(i / n[0] / n[1])};
    std::string failure = worker.run(launch_, at);
    if (!failure.empty()) fail(at, failure);
    return true;
  }

  bool more() const { return next_.load(std::memory_order_relaxed) < total_; }
  std::string failure() const { return failure_; }

 private:
  void fail(const unsigned at[3], const std::string& failure) {
    next_.store(total_, std::memory_order_relaxed);  // the rest is not run
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = "threadgroup (" + std::to_string(at[0]) + ", " + std::to_string(at[1]) + ", " + std::to_string(at[2]) +
               "): " + failure;
  }

  const Launch& launch_;
  uint64_t total_;
  std::atomic<uint64_t> next_{0};
  std::mutex mutex_;
  std::string failure_;
};

// Workers are large (stacks for 1024 lanes), so they outlive their use and go to whoever comes next.
class WorkerStore {
 public:
  std::unique_ptr<Worker> take() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        auto worker = std::move(idle_.back());
        idle_.pop_back();
        return worker;
      }
    }
    return std::make_unique<Worker>();
  }
  void give_back(std::unique_ptr<Worker> worker) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(worker));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> idle_;
};

// Wherever other work is about, Linux wakes a helper on the processor of the thread that wakes it, and there the two
// would take turns. Without that processor to choose it runs beside it.
void stay_away_from(int processor) {
  cpu_set_t allowed;
  if (processor < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  CPU_CLR(static_cast<unsigned>(processor), &allowed);
  if (CPU_COUNT(&allowed) > 0) sched_setaffinity(0, sizeof allowed, &allowed);
}

class Helpers {
 public:
  explicit Helpers(unsigned count) {
    const int here = sched_getcpu();
    for (unsigned i = 0; i < count; i++)
      std::thread([this, here] {
        stay_away_from(here);
        serve();
      }).detach();
  }

  // Only one grid at a time has the helpers; any other runs on the thread that launched it.
  bool join(Grid& grid) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (grid_) return false;
    grid_ = &grid;
    work_.notify_all();
    return true;
  }
  void leave() {
    std::unique_lock<std::mutex> lock(mutex_);
    grid_ = nullptr;
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void serve() try {
    Worker worker;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return grid_ && grid_->more(); });
      Grid& grid = *grid_;
      busy_++;
      lock.unlock();
      while (grid.step(worker)) {
      }
      lock.lock();
      if (--busy_ == 0) done_.notify_all();
    }
  } catch (const std::bad_alloc&) {
    // No memory for its stacks: the others do the work.
  }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  Grid* grid_ = nullptr;
  unsigned busy_ = 0;
};

struct Threads {
  WorkerStore workers;
  Helpers helpers;
  Threads() : helpers(helper_count()) {}
  static unsigned helper_count() {
    const char* asked = std::getenv("VIRTUAL_MPS_THREADS");
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const int threads = asked ? std::atoi(asked) : cores < kMostThreads ? cores : kMostThreads;
    return threads > 1 ? static_cast<unsigned>(threads - 1) : 0;
  }
};

// Never destroyed: helpers may still wait when the process exits. A forked child has none of the threads, and may have
// inherited a locked mutex, so it starts afresh.
Threads* threads = nullptr;
std::once_flag at_fork;
std::mutex* start_mutex = new std::mutex;

Threads& the_threads() {
  std::call_once(at_fork, [] {
    pthread_atfork(nullptr, nullptr, [] {
      threads = nullptr;
      start_mutex = new std::mutex;
    });
  });
  std::lock_guard<std::mutex> lock(*start_mutex);
  if (!threads) threads = new Threads;
  return *threads;
}

}  // namespace

std::string run_grid(const Launch& launch) {
  Threads& all = the_threads();
  Grid grid(launch);
  auto worker = all.workers.take();
  const bool alone = launch.instruments || launch.order;
  bool joined = false;
  const Clock::time_point start = Clock::now();
  while (grid.step(*worker))
    if (!alone && !joined && grid.more() && Clock::now() - start > kAlone) joined = all.helpers.join(grid);
  if (joined) all.helpers.leave();
  all.workers.give_back(std::move(worker));
  return grid.failure();
}

}  // namespace vmps
