// One communicator of the strict backend: the members' processes, connected by sockets, and a queue of its own.
//
//     host            start(op) ... start(op) ... wait(op): its stream waits, the host goes on ...... .item()
//     its stream      [ ... makes x ][ read what is given, poison what is taken ] ........ [ wait: until it has landed ]
//     thread          says to all who take part what the operation is, hears what theirs is: equal, or refused;
//                     exchanges, when the stream has come so far
//     queue           [ until the stream has come so far ][ until all came ][ land: write what came ]
//
// One operation is in flight at a time, in the order of calls. Where the device runs behind its host, `land` comes as
// late as it can, behind all that its stream can do before: who has not waited reads poison. What is given must then be as it was, and nobody may have written what
// is taken: else memory was used before it was free.
#pragma once

#include <ATen/ATen.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "queues.h"

namespace fake {

using Clock = std::chrono::steady_clock;

// What Python asks for. Refusals stay until it has: as on CUDA, an error of the device ends all that follows.
class Ledger {
 public:
  void add(const std::string& text) {
    std::lock_guard<std::mutex> held(lock_);
    all_.push_back(text);
  }
  std::vector<std::string> take() {
    std::lock_guard<std::mutex> held(lock_);
    return std::exchange(all_, {});
  }
  // How many bytes of each kind of operation went to other ranks.
  void sent(const std::string& name, size_t num_bytes) {
    std::lock_guard<std::mutex> held(lock_);
    bytes_[name] += int64_t(num_bytes);
  }
  std::vector<std::pair<std::string, int64_t>> bytes() {
    std::lock_guard<std::mutex> held(lock_);
    return {bytes_.begin(), bytes_.end()};
  }
  std::string first() {
    std::lock_guard<std::mutex> held(lock_);
    return all_.empty() ? "" : all_.front();
  }

 private:
  std::mutex lock_;
  std::vector<std::string> all_;
  std::map<std::string, int64_t> bytes_;
};
inline Ledger& ledger() {
  static Ledger* all = new Ledger;
  return *all;
}

// Whether what NCCL would hang on hangs here, until somebody aborts it or the watchdog comes, and is not refused.
inline std::atomic<bool> does_hang{false};

// Memory that travels from or to a rank, which may be this one.
struct Part {
  int peer;
  char* at;  // where kernels see it
  size_t num_bytes;
  std::string what;  // "5 x Float"

  static Part of(int peer, const at::Tensor& tensor) {
    auto* seen = tensor.numel() > 0 ? static_cast<char*>(memory().seen(tensor.data_ptr())) : nullptr;
    return {peer, seen, size_t(tensor.nbytes()), c10::str(tensor.numel(), " x ", tensor.scalar_type())};
  }
};

struct Operation {
  std::string name;  // "ALLREDUCE"
  std::string same;  // what all who take part say alike
  int64_t number = 0;
  bool is_message = false;
  std::vector<Part> given, taken;
  std::optional<Part> total, own;  // of a sum: where it goes, and this rank's term; those of others are taken nowhere
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
  at::ScalarType dtype = at::kByte;

  std::string read;   // the bytes of `given` and `own`
  std::map<int, std::string> came_from;
  std::string sum;
  std::string fault;
  bool has_come = false, is_late = false;
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;  // of the call
  std::shared_ptr<Mark> called, came, ended;

  std::set<int> peers(int rank, int size) const {
    std::set<int> all;
    if (!is_message) for (int peer = 0; peer < size; ++peer) all.insert(peer);
    for (const auto& each : given) all.insert(each.peer);
    for (const auto& each : taken) all.insert(each.peer);
    all.erase(rank);
    return all;
  }
  // What is written, and not read as well.
  std::vector<Part> rooms() const {
    auto all = taken, read = given;
    if (total) all.push_back(*total);
    if (own) read.push_back(*own);
    all.erase(
        std::remove_if(all.begin(), all.end(), [&](const Part& each) {
          return each.at == nullptr || std::any_of(read.begin(), read.end(), [&](const Part& other) {
            return each.at < other.at + other.num_bytes && other.at < each.at + each.num_bytes;
          });
        }),
        all.end());
    return all;
  }
  static std::string list(const std::vector<Part>& parts, int peer) {
    std::string text;
    for (const auto& each : parts) if (each.peer == peer) text += (text.empty() ? "" : ", ") + each.what;
    return text;
  }
  std::string title() const { return c10::str(name, " #", number, same.empty() ? "" : " (" + same + ")"); }
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::string name, int rank, int size, c10::Device device, std::chrono::milliseconds timeout)
      : name_(std::move(name)), rank_(rank), size_(size), device_(device), timeout_(timeout), sockets_(size, -1),
        inbox_(size), line_(queues().new_line(device.index())) {}
  ~Communicator() {
    for (int each : sockets_) if (each >= 0) close(each);
    queues().give_line(line_);
  }
  c10::Device device() const { return device_; }

  // Returns when all members have come, as `ncclCommInitRank` does.
  void connect(const c10::intrusive_ptr<c10d::Store>& store, const std::string& uuid);
  void start(const std::shared_ptr<Operation>& operation);

  // Of the host: its stream waits, the host only where devices run at once.
  void wait(const std::shared_ptr<Operation>& operation) {
    if (operation->is_late)
      queues().wait(device_.index(), current_streams[device_.index()], operation->ended);
    else
      queues().finish(operation->ended);
    raise(operation->fault);
    raise(ledger().first());
  }
  void abort() {
    std::deque<std::shared_ptr<Operation>> dropped;
    {
      std::lock_guard<std::mutex> held(lock_);
      if (error_.empty()) error_ = c10::str("NCCL communicator was aborted on rank ", rank_, ".");
      is_aborted_ = true;
      dropped.swap(waiting_);
    }
    news_.notify_all();
    for (const auto& each : dropped) queues().pass(each->came);
  }
  // Gives back what it holds, when all operations have ended.
  void shutdown() {
    const auto deadline = Clock::now() + timeout_;
    {
      std::unique_lock<std::mutex> held(lock_);
      const bool is_idle = news_.wait_until(held, deadline, [&] { return waiting_.empty(); });
      is_closed_ = true;
      if (!is_idle) {
        error_ = c10::str(name_, ": shut down while ", waiting_.front()->title(), " was in flight on rank ", rank_);
        ledger().add(error_);
      }
    }
    if (!error_.empty()) abort();
    news_.notify_all();
    queues().finish(device_.index(), line_);
  }

 private:
  static void raise(const std::string& fault) {
    if (!fault.empty()) C10_THROW_ERROR(DistBackendError, fault);
  }
  void run();
  std::string carry_out(Operation& operation);
  std::string exchange(const std::map<int, std::string>& out, std::map<int, std::string>& in, const Operation& operation);
  std::string difference(const Operation& operation, const std::map<int, std::string>& theirs) const;
  std::string header(const Operation& operation, int peer) const;
  static void land(Operation& operation);
  static void read(Operation& operation);
  static void add_up(Operation& operation, int rank, int size);

  const std::string name_;
  const int rank_, size_;
  const c10::Device device_;
  const std::chrono::milliseconds timeout_;
  std::vector<int> sockets_;
  std::vector<std::string> inbox_;
  const int line_;
  std::mutex lock_;
  std::condition_variable news_;
  std::deque<std::shared_ptr<Operation>> waiting_;  // the first is in flight
  std::string error_;
  std::atomic<bool> is_aborted_{false};
  bool is_closed_ = false;
  int64_t num_started_ = 0;
};

}  // namespace fake
