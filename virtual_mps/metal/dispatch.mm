// libdispatch, as far as Metal code uses it. dispatch_sync runs on the calling thread, as libdispatch's does; the first
// dispatch_async of a queue starts that queue's thread.
#include "dispatch.h"

#include <Block.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "errors.h"

namespace {
struct Object {
  std::atomic<int> references{1};
  virtual ~Object() = default;
  virtual bool removable() const { return true; }
};
}  // namespace

struct vmps_dispatch_queue : Object {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> pending;
  bool busy = false, started = false;
  const bool concurrent;
  std::thread::id owner;
  std::exception_ptr failure;  // of asynchronous work: given to whoever next waits for the queue

  explicit vmps_dispatch_queue(bool concurrent_ = false) : concurrent(concurrent_) {}

  bool removable() const override { return !started; }  // the thread of a queue never ends

  void run(const std::function<void()>& work) {
    if (concurrent) {
      rethrow_failure();
      return work();
    }
    if (owner == std::this_thread::get_id())
      vmps::assertion_failed("dispatch_sync", "called on a queue that the current thread already runs on (deadlock)");
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return !busy && pending.empty(); });
      busy = true;
    }
    owner = std::this_thread::get_id();
    struct Leave {
      vmps_dispatch_queue* queue;
      ~Leave() { queue->leave(); }
    } leave{this};
    rethrow_failure();
    work();
  }

  void rethrow_failure() {
    std::exception_ptr thrown;
    {
      std::lock_guard<std::mutex> lock(mutex);
      std::swap(thrown, failure);
    }
    if (!thrown) return;
    try {
      std::rethrow_exception(thrown);
    } catch (const std::exception& error) {
      vmps::assertion_failed("dispatch_async", std::string("an exception left an earlier block: ") + error.what());
    }
  }

  void run_alone(const std::function<void()>& work) {
    try {
      work();
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      failure = std::current_exception();
    }
  }

  void leave() {
    owner = {};
    {
      std::lock_guard<std::mutex> lock(mutex);
      busy = false;
    }
    changed.notify_all();
  }

  void append(std::function<void()> work) {
    if (concurrent) return std::thread([this, work = std::move(work)] { run_alone(work); }).detach();
    std::lock_guard<std::mutex> lock(mutex);
    pending.push_back(std::move(work));
    if (!started) {
      started = true;
      std::thread([this] { serve(); }).detach();
    }
    changed.notify_all();
  }

  void serve() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return !busy && !pending.empty(); });
        work = std::move(pending.front());
        pending.pop_front();
        busy = true;
      }
      owner = std::this_thread::get_id();
      run_alone(work);
      leave();
    }
  }
};

struct vmps_dispatch_data : Object {
  std::string bytes;
};

struct vmps_dispatch_semaphore : Object {
  std::mutex mutex;
  std::condition_variable changed;
  intptr_t value = 0;
};

namespace vmps {

const std::string& bytes_of(dispatch_data_t data) { return data->bytes; }
bool on_queue(dispatch_queue_t queue) { return queue->owner == std::this_thread::get_id(); }

}  // namespace vmps

extern "C" {

dispatch_queue_t dispatch_queue_create(const char*, dispatch_queue_attr_t attr) {
  return new vmps_dispatch_queue(attr == DISPATCH_QUEUE_CONCURRENT);
}

dispatch_queue_t dispatch_get_main_queue(void) {
  static auto* queue = new vmps_dispatch_queue;
  return queue;
}

dispatch_queue_t dispatch_get_global_queue(intptr_t, uintptr_t) {
  static auto* queue = new vmps_dispatch_queue(/*concurrent=*/true);
  return queue;
}

void dispatch_retain(void* object) { static_cast<Object*>(object)->references++; }

void dispatch_release(void* object) {
  auto* released = static_cast<Object*>(object);
  if (--released->references == 0 && released->removable()) delete released;
}

void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) {
  queue->run([&] {
    try {
      block();
    } catch (const vmps::MetalAssertion&) {
      throw;
    } catch (const std::exception& error) {
      vmps::assertion_failed("dispatch_sync", std::string("a C++ exception left the block: ") + error.what());
    }
  });
}

void dispatch_sync_f(dispatch_queue_t queue, void* context, dispatch_function_t work) {
  dispatch_sync(queue, ^{
    work(context);
  });
}

void dispatch_async(dispatch_queue_t queue, dispatch_block_t block) {
  auto copy = (dispatch_block_t)_Block_copy((const void*)block);
  queue->append([copy] {
    copy();
    _Block_release((const void*)copy);
  });
}

void dispatch_async_f(dispatch_queue_t queue, void* context, dispatch_function_t work) {
  queue->append([=] { work(context); });
}

void dispatch_once_f(dispatch_once_t* predicate, void* context, dispatch_function_t work) {
  static std::recursive_mutex mutex;
  auto& done = *reinterpret_cast<std::atomic<dispatch_once_t>*>(predicate);
  if (done) return;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (done) return;
  work(context);
  done = ~dispatch_once_t(0);
}

void dispatch_once(dispatch_once_t* predicate, dispatch_block_t block) {
  dispatch_once_f(predicate, &block, [](void* context) { (*static_cast<dispatch_block_t*>(context))(); });
}

dispatch_semaphore_t dispatch_semaphore_create(intptr_t value) {
  auto* semaphore = new vmps_dispatch_semaphore;
  semaphore->value = value;
  return semaphore;
}

intptr_t dispatch_semaphore_signal(dispatch_semaphore_t semaphore) {
  {
    std::lock_guard<std::mutex> lock(semaphore->mutex);
    semaphore->value++;
  }
  semaphore->changed.notify_one();
  return 0;
}

intptr_t dispatch_semaphore_wait(dispatch_semaphore_t semaphore, dispatch_time_t timeout) {
  using Clock = std::chrono::steady_clock;
  std::unique_lock<std::mutex> lock(semaphore->mutex);
  auto ready = [&] { return semaphore->value > 0; };
  if (timeout == DISPATCH_TIME_FOREVER)
    semaphore->changed.wait(lock, ready);
  else if (!semaphore->changed.wait_until(lock, Clock::time_point(std::chrono::nanoseconds(timeout)), ready))
    return 1;
  semaphore->value--;
  return 0;
}

dispatch_time_t dispatch_time(dispatch_time_t when, int64_t delta) {
  if (when == DISPATCH_TIME_FOREVER) return when;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return (when == DISPATCH_TIME_NOW ? std::chrono::nanoseconds(now).count() : when) + delta;
}

dispatch_data_t dispatch_data_create(const void* buffer, size_t size, dispatch_queue_t, dispatch_block_t destructor) {
  auto* data = new vmps_dispatch_data;
  data->bytes.assign(static_cast<const char*>(buffer), size);
  if (destructor) destructor();  // the bytes were copied, so the caller's are no longer needed
  return data;
}

size_t dispatch_data_get_size(dispatch_data_t data) { return data->bytes.size(); }
}
