// The streams of the devices: queues that run behind the host, by chance, in one thread.
//
//     host       x.add_(1)   y.copy_(x)    wait_event(e)   z.mul_(y)      .item()
//     stream 0   [ add_ ]    [ copy_ ]                                    now, up to here
//     stream 1                             [ until e ]     [ mul_ ]       when its turn comes
//
// A job is pushed by the host and runs later: whenever the host makes a call, a few jobs of any streams run, chosen by
// a seed. What one stream does without a wait for another may so come before it or after it. Jobs of one stream run in
// order. On the clock of the device each job takes a millisecond, after those before it and those that it waits for:
// times between events do not depend on chance, nor on the host. What the host needs to see runs at once, with all that
// it depends on. Without a seed every job runs when it is pushed; with the seed kLast none runs before the host needs it.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "memory.h"

namespace fake {

inline thread_local c10::StreamId current_streams[kDevices] = {};

// What an event was recorded for the last time: jobs that wait keep the version that they wait for.
struct Mark {
  std::atomic<bool> is_passed{false};
  int device = 0, stream = 0;  // where the job is that passes it; device -1: another thread passes it
  double ms = 0;               // when, on the clock of the device
};
struct Event {
  std::shared_ptr<Mark> last;
};

constexpr int64_t kAtOnce = -1, kLast = -2;
constexpr int kLines = 56, kQueues = kStreams + kLines;  // communicators have queues of their own, and no memory

// Of a thread that must not take Python's lock: others destroy what its jobs held.
inline thread_local bool leaves_jobs = false;

class Queues {
 public:
  void start(int64_t seed) {
    drain();
    Held held(*this);
    is_behind_ = seed != kAtOnce;
    is_last_ = seed == kLast;
    chance_.seed(static_cast<uint32_t>(seed));
    most_turns_ = int(chance_() % 3) * 3;
  }
  bool is_behind() const { return is_behind_; }

  void push(c10::DeviceIndex device, c10::StreamId stream, std::function<void()> run, double ms = 1) {
    Held held(*this);
    const double not_before = floors_[device][stream];
    if (!is_behind_) {
      tick(device, stream, not_before, ms);
      return run();  // the caller has it still: it is not destroyed here
    }
    queue(device, stream).push_back({std::move(run), nullptr, not_before, ms});
    advance();
  }

  std::shared_ptr<Mark> record(c10::DeviceIndex device, c10::StreamId stream) {
    Held held(*this);
    auto mark = std::make_shared<Mark>();
    mark->device = device;
    mark->stream = int(stream);
    const auto pass = [this, mark] {
      mark->ms = clocks_[mark->device][mark->stream];
      mark->is_passed = true;
    };
    push(device, stream, pass, 0);
    return mark;
  }

  void wait(c10::DeviceIndex device, c10::StreamId stream, std::shared_ptr<Mark> mark) {
    Held held(*this);
    if (mark->is_passed) {
      floors_[device][stream] = std::max(floors_[device][stream], mark->ms);
      return;
    }
    queue(device, stream).push_back({[] {}, std::move(mark), floors_[device][stream], 0});
    advance();
  }

  // A mark that another thread passes: a stream waits for what comes from other processes.
  std::shared_ptr<Mark> awaited() {
    auto mark = std::make_shared<Mark>();
    mark->device = -1;
    return mark;
  }
  void pass(const std::shared_ptr<Mark>& mark) {
    {
      Held held(*this);
      mark->is_passed = true;
    }
    { std::lock_guard<std::mutex> news(news_lock_); }
    news_.notify_all();
  }
  // The queue of a communicator.
  int new_line(c10::DeviceIndex device) {
    Held held(*this);
    if (free_lines_.empty()) free_lines_.push_back(num_lines_++);
    const int line = free_lines_.back();
    TORCH_CHECK(line < kLines, "more than ", kLines, " communicators at a time");
    free_lines_.pop_back();
    devices_of_lines_[line] = device;
    return kStreams + line;
  }
  void give_line(int line) {
    Held held(*this);
    free_lines_.push_back(line - kStreams);
  }

  // For the host that looks: time goes on.
  bool is_passed(const std::shared_ptr<Mark>& mark) {
    Held held(*this);
    if (!mark->is_passed && mark->device >= 0) pass_time(mark->device, mark->stream);
    return mark->is_passed;
  }
  bool is_empty(c10::DeviceIndex device, c10::StreamId stream) {
    Held held(*this);
    if (!queue(device, stream).empty()) pass_time(device, stream);
    return queue(device, stream).empty();
  }

  // For the host that waits.
  void finish(const std::shared_ptr<Mark>& mark) {
    Held held(*this);
    while (!mark->is_passed) mark->device < 0 ? hear(mark) : run_first(mark->device, mark->stream);
  }
  void finish(c10::DeviceIndex device, c10::StreamId stream) {
    Held held(*this);
    while (!queue(device, stream).empty()) run_first(device, stream);
  }
  void finish(c10::DeviceIndex device) {
    for (int stream = 0; stream < kQueues; ++stream) finish(device, stream);
  }
  void drain() {
    for (int device = 0; device < kDevices; ++device) finish(c10::DeviceIndex(device));
  }

  // What a stream can do by now: for a job that comes after all that does not wait for it.
  void run_all(c10::DeviceIndex device, c10::StreamId stream) {
    Held held(*this);
    auto& jobs = queue(device, stream);
    while (!jobs.empty() && !(jobs.front().after && !jobs.front().after->is_passed)) run_first(device, stream);
  }

  int64_t num_late() const { return num_late_; }

 private:
  struct Job {
    std::function<void()> run;
    std::shared_ptr<Mark> after;  // not before this has passed
    double not_before = 0, ms = 1;
  };

  // The lock. Jobs that have run are destroyed after it is given back: they hold tensors, a tensor that Python knows
  // takes Python's lock when it is let go, and the thread that has Python's lock may be waiting for this one.
  class Held {
   public:
    explicit Held(Queues& queues) : queues_(queues) {
      queues_.lock_.lock();
      ++queues_.num_held_;
    }
    ~Held() {
      std::vector<Job> done;
      if (--queues_.num_held_ == 0 && !leaves_jobs) done.swap(queues_.done_);
      queues_.lock_.unlock();
    }

   private:
    Queues& queues_;
  };

  std::deque<Job>& queue(int device, int64_t stream) { return queues_[device][stream]; }

  // Also where nothing runs by chance, or a host that looks again and again would wait for ever.
  void pass_time(int device, int64_t stream) {
    if (is_last_ && !is_running_) return run_first(device, stream, /*may_wait=*/false);
    advance();
  }

  void advance() {
    if (!is_behind_ || is_last_ || is_running_) return;
    // The devices are slow for a while, then quick: a job may come at once, or many calls later.
    if (chance_() % 8 == 0) most_turns_ = int(chance_() % 3) * 3;
    const int num_turns = int(chance_() % (most_turns_ + 1));
    for (int turn = 0; turn < num_turns; ++turn) {
      const int num_queues = kDevices * kStreams + num_lines_;
      const int at = int(chance_() % num_queues);
      // The next queue, from there on, that has something to do and can.
      for (int next = 0; next < num_queues; ++next) {
        const int chosen = (at + next) % num_queues, line = chosen - kDevices * kStreams;
        const int device = line < 0 ? chosen / kStreams : devices_of_lines_[line];
        const int stream = line < 0 ? chosen % kStreams : kStreams + line;
        auto& jobs = queue(device, stream);
        if (jobs.empty() || (jobs.front().after && !jobs.front().after->is_passed)) continue;
        run_first(device, stream);
        break;
      }
    }
  }

  void run_first(int device, int64_t stream, bool may_wait = true) {
    auto& jobs = queue(device, stream);
    if (const auto after = jobs.front().after; after && !after->is_passed) {
      if (after->device >= 0) return run_first(after->device, after->stream, may_wait);
      return may_wait ? hear(after) : void();
    }
    auto job = std::move(jobs.front());
    jobs.pop_front();
    const bool was_running = is_running_;
    is_running_ = true;
    ++num_late_;
    tick(device, stream, std::max(job.not_before, job.after ? job.after->ms : 0.0), job.ms);
    job.run();
    is_running_ = was_running;
    done_.push_back(std::move(job));
  }

  // Waits a while without the lock, however often this thread has it.
  void hear(const std::shared_ptr<Mark>& mark) {
    const int num_held = std::exchange(num_held_, 0);
    for (int each = 0; each < num_held; ++each) lock_.unlock();
    {
      std::unique_lock<std::mutex> news(news_lock_);
      news_.wait_for(news, std::chrono::milliseconds(20), [&] { return mark->is_passed.load(); });
    }
    for (int each = 0; each < num_held; ++each) lock_.lock();
    num_held_ = num_held;
  }

  void tick(int device, int64_t stream, double not_before, double ms) {
    clocks_[device][stream] = std::max(clocks_[device][stream], not_before) + ms;
  }

  std::recursive_mutex lock_;
  int num_held_ = 0;  // by the thread that has the lock
  std::vector<Job> done_;
  std::deque<Job> queues_[kDevices][kQueues];
  double clocks_[kDevices][kQueues] = {}, floors_[kDevices][kQueues] = {};
  std::mutex news_lock_;
  std::condition_variable news_;
  int num_lines_ = 0, devices_of_lines_[kLines] = {};
  std::vector<int> free_lines_;
  std::mt19937 chance_;
  std::atomic<bool> is_behind_{false};
  bool is_last_ = false;
  int most_turns_ = 0;
  bool is_running_ = false;
  std::atomic<int64_t> num_late_{0};
};

inline Queues& queues() {
  static Queues* all = new Queues;
  return *all;
}

}  // namespace fake
