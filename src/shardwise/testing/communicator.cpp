// See communicator.h.
#include "communicator.h"

#include <c10/core/InferenceMode.h>
#include <sys/un.h>

#include <sstream>

namespace fake {
namespace {

constexpr int kLookMs = 20;

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

sockaddr_un address_of(const std::string& name, socklen_t* size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // abstract: it leaves no file
  *size = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

std::string joined(const std::vector<int>& ranks) {
  std::string text;
  for (int each : ranks) text += (text.empty() ? "" : ", ") + std::to_string(each);
  return text;
}

}  // namespace

void Communicator::connect(const c10::intrusive_ptr<c10d::Store>& store, const std::string& uuid) {
  static std::atomic<int> num_made{0};
  std::random_device chance;
  const std::string own = c10::str("fake-device-", getpid(), "-", num_made++, "-", chance());
  socklen_t length;
  auto address = address_of(own, &length);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  TORCH_CHECK(
      bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(listener, size_) == 0,
      "no socket for a communicator");
  store->set(c10::str(name_, "/", rank_), bytes_of(uuid + " " + own));
  const auto deadline = Clock::now() + timeout_;
  std::vector<std::string> names(size_), uuids(size_);
  std::vector<int> missing;
  for (int peer = 0; peer < size_; ++peer) {
    const auto key = c10::str(name_, "/", peer);
    bool is_there;
    while (!(is_there = store->check({key})) && Clock::now() < deadline && !is_aborted_)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (!is_there) {
      missing.push_back(peer);
      continue;
    }
    std::istringstream words(text_of(store->get(key)));
    words >> uuids[peer] >> names[peer];
  }
  if (!missing.empty()) {
    close(listener);
    raise(c10::str(
        "[", rank_, "] is setting up NCCL communicator '", name_, "' of ", size_, " ranks, but ranks ", joined(missing),
        is_aborted_ ? " had not come when it was aborted" : c10::str(" did not come in ", timeout_.count(), " ms")));
  }
  for (int peer = 0; peer < size_; ++peer)
    for (int other = 0; other < peer; ++other)
      if (uuids[peer] == uuids[other]) {
        close(listener);
        raise(c10::str(
            "ncclInvalidUsage: Duplicate GPU detected : rank ", peer, " and rank ", other, " both on device ", uuids[peer]));
      }
  for (int count = 0; count < size_ - 1; ++count) {
    int made, peer;
    if (count < rank_) {
      peer = count;
      auto there = address_of(names[peer], &length);
      made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      TORCH_CHECK(::connect(made, reinterpret_cast<sockaddr*>(&there), length) == 0, "rank ", peer, " is gone");
      TORCH_CHECK(::send(made, &rank_, sizeof rank_, MSG_NOSIGNAL) == sizeof rank_, "rank ", peer, " is gone");
    } else {
      pollfd look{listener, POLLIN, 0};
      while (poll(&look, 1, kLookMs) == 0)
        if (is_aborted_ || Clock::now() > deadline) {
          close(listener);
          raise(c10::str("[", rank_, "] NCCL communicator '", name_, "': some rank did not connect"));
        }
      made = accept(listener, nullptr, nullptr);
      TORCH_CHECK(recv(made, &peer, sizeof peer, MSG_WAITALL) == sizeof peer, "a rank is gone");
    }
    fcntl(made, F_SETFL, O_NONBLOCK);
    sockets_[peer] = made;
  }
  close(listener);
  std::thread([self = shared_from_this()] { self->run(); }).detach();
}

void Communicator::start(const std::shared_ptr<Operation>& operation) {
  initialize();  // not in a fork
  raise(ledger().first());
  const auto device = device_.index();
  const auto stream = current_streams[device];
  auto& op = *operation;
  op.stream = stream;
  {
    std::lock_guard<std::mutex> held(lock_);
    raise(error_);
    TORCH_CHECK(!is_closed_, "NCCL communicator '", name_, "' was used after it was shut down on rank ", rank_);
    op.number = num_started_++;
    op.is_late = queues().is_behind();
    queues().push(device, stream, [operation] { read(*operation); }, 0);
    op.called = queues().record(device, stream);
    op.came = op.ended = queues().awaited();
    if (op.is_late) {
      queues().wait(device, line_, op.called);
      queues().wait(device, line_, op.came);
      queues().push(device, line_, [operation] { land(*operation); });
      op.ended = queues().record(device, line_);
    }
    waiting_.push_back(operation);
  }
  news_.notify_all();
}

void Communicator::run() {
  leaves_jobs = true;
  while (true) {
    std::shared_ptr<Operation> operation;
    {
      std::unique_lock<std::mutex> held(lock_);
      news_.wait(held, [&] { return !waiting_.empty() || is_closed_ || is_aborted_; });
      if (waiting_.empty()) return;
      operation = waiting_.front();
    }
    const auto fault = carry_out(*operation);
    {
      std::lock_guard<std::mutex> held(lock_);
      if (is_aborted_ || waiting_.empty()) return;
      operation->fault = fault;
      operation->has_come = fault.empty();
      if (fault.empty() && !operation->is_late) land(*operation);
      waiting_.pop_front();
      if (!fault.empty()) ledger().add(error_ = fault);
    }
    queues().pass(operation->came);
    news_.notify_all();
    if (!fault.empty()) return abort();
  }
}

std::string Communicator::header(const Operation& operation, int peer) const {
  return operation.name + "\n" + operation.same + "\n" + Operation::list(operation.given, peer) + "\n" +
         Operation::list(operation.taken, peer) + "\n" + std::to_string(operation.number) + "\n";
}

std::string Communicator::difference(const Operation& operation, const std::map<int, std::string>& theirs) const {
  const auto to_self = Operation::list(operation.given, rank_), from_self = Operation::list(operation.taken, rank_);
  if (to_self != from_self)
    return c10::str(
        "NCCL would hang or write over memory: in ", operation.title(), " rank ", rank_, " sends ", to_self,
        " to itself, and receives ", from_self, " from itself");
  for (const auto& [peer, header] : theirs) {
    std::istringstream lines(header);
    std::string name, same, given, taken, number;
    for (auto* line : {&name, &same, &given, &taken, &number}) std::getline(lines, *line);
    const auto own_given = Operation::list(operation.given, peer), own_taken = Operation::list(operation.taken, peer);
    const bool are_one = operation.is_message ? name == "SEND/RECV" : name == operation.name && same == operation.same;
    if (are_one && given == own_taken && taken == own_given) continue;
    auto said = [](const std::string& what) { return what.empty() ? "nothing" : what; };
    return c10::str(
        "NCCL would hang or write over memory: on communicator '", name_, "' rank ", rank_, " is in ", operation.title(),
        ", sends ", said(own_given), " to rank ", peer, " and receives ", said(own_taken), " from it, while rank ", peer,
        " is in ", name, " #", number, same.empty() ? "" : " (" + same + ")", ", sends ", said(given), " and receives ",
        said(taken));
  }
  return "";
}

std::string Communicator::carry_out(Operation& operation) {
  std::map<int, std::string> out, in;
  for (int peer : operation.peers(rank_, size_)) out[peer] = header(operation, peer);
  if (auto fault = exchange(out, in, operation); !fault.empty()) return fault;
  if (auto fault = difference(operation, in); !fault.empty()) {
    const auto deadline = Clock::now() + timeout_;
    while (does_hang && !is_aborted_ && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(kLookMs));
    return fault;
  }
  queues().finish(operation.called);
  if (is_aborted_) return "aborted";
  for (auto& [peer, bytes] : out) bytes.clear();
  size_t at = 0;
  for (const auto& each : operation.given) {
    if (each.peer == rank_)
      operation.came_from[rank_] += operation.read.substr(at, each.num_bytes);
    else
      out[each.peer] += operation.read.substr(at, each.num_bytes);
    if (each.peer != rank_) ledger().sent(operation.name, each.num_bytes);
    at += each.num_bytes;
  }
  in.clear();
  if (auto fault = exchange(out, in, operation); !fault.empty()) return fault;
  for (auto& [peer, bytes] : in) operation.came_from[peer] = std::move(bytes);
  if (operation.total) add_up(operation, rank_, size_);
  return "";
}

// A frame to each, and one from each: empty when done, else who has not come.
std::string Communicator::exchange(
    const std::map<int, std::string>& out, std::map<int, std::string>& in, const Operation& operation) {
  std::map<int, std::string> left;
  for (const auto& [peer, bytes] : out) {
    const uint64_t size = bytes.size();
    left[peer] = std::string(reinterpret_cast<const char*>(&size), sizeof size) + bytes;
  }
  const auto deadline = Clock::now() + timeout_;
  std::set<int> gone;
  while (!is_aborted_) {
    std::vector<pollfd> looks;
    std::vector<int> looked, missing;
    for (const auto& [peer, bytes] : out) {
      auto& box = inbox_[peer];
      uint64_t size = 0;
      if (box.size() >= sizeof size) std::memcpy(&size, box.data(), sizeof size);
      if (in.count(peer) == 0 && box.size() >= sizeof size && box.size() >= sizeof size + size) {
        in[peer] = box.substr(sizeof size, size);
        box.erase(0, sizeof size + size);
      }
      if (in.count(peer) == 0) missing.push_back(peer);
      if (gone.count(peer) > 0 || (in.count(peer) > 0 && left[peer].empty())) continue;
      const short events = (in.count(peer) == 0 ? POLLIN : 0) | (left[peer].empty() ? 0 : POLLOUT);
      looks.push_back({sockets_[peer], events, 0});
      looked.push_back(peer);
    }
    bool is_done = missing.empty();
    for (const auto& [peer, bytes] : left) is_done = is_done && bytes.empty();
    if (is_done) return "";
    if (Clock::now() > deadline)
      return c10::str(
          "[Rank ", rank_, "] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=", operation.number, ", OpType=",
          operation.name, ", Timeout(ms)=", timeout_.count(), ") on communicator '", name_, "': ranks ", joined(missing),
          " have not come");
    if (poll(looks.data(), looks.size(), kLookMs) <= 0) continue;
    for (size_t each = 0; each < looks.size(); ++each) {
      const int peer = looked[each];
      if (looks[each].revents & POLLOUT) {
        auto& bytes = left[peer];
        const auto count = ::send(sockets_[peer], bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count > 0) bytes.erase(0, size_t(count));
        // A process that is gone is nobody's error in NCCL: what waits for it waits on.
        else if (count < 0 && errno != EAGAIN) gone.insert(peer);
      }
      if (looks[each].revents & (POLLIN | POLLHUP | POLLERR)) {
        char buffer[1 << 16];
        const auto count = recv(sockets_[peer], buffer, sizeof buffer, MSG_DONTWAIT);
        if (count > 0) inbox_[peer].append(buffer, size_t(count));
        else if (count == 0 || errno != EAGAIN) gone.insert(peer);
      }
    }
  }
  return "aborted";
}

// Reads what is given and, where the device runs behind, poisons what is taken.
void Communicator::read(Operation& operation) {
  for (const auto& each : operation.given) operation.read.append(each.at, each.num_bytes);
  if (operation.own) operation.read.append(operation.own->at, operation.own->num_bytes);
  if (operation.is_late)
    for (const auto& each : operation.rooms()) std::memset(each.at, 0xff, each.num_bytes);
}

void Communicator::add_up(Operation& operation, int rank, int size) {
  c10::InferenceMode plain(true);
  const auto& total = *operation.total;
  const auto count = int64_t(total.num_bytes / at::elementSize(operation.dtype));
  at::Tensor sum;
  for (int each = 0; each < size; ++each) {
    auto& bytes = each == rank ? operation.sum : operation.came_from[each];
    if (each == rank) bytes = operation.read.substr(operation.read.size() - operation.own->num_bytes);
    auto term = at::from_blob(bytes.data(), {count}, at::TensorOptions(operation.dtype)).clone();
    if (!sum.defined()) sum = term;
    else switch (operation.reduction) {
      case c10d::ReduceOp::PRODUCT: sum.mul_(term); break;
      case c10d::ReduceOp::MIN: sum = at::minimum(sum, term); break;
      case c10d::ReduceOp::MAX: sum = at::maximum(sum, term); break;
      default: sum.add_(term);
    }
  }
  if (operation.reduction == c10d::ReduceOp::AVG) sum.div_(size);
  operation.sum.assign(static_cast<const char*>(sum.const_data_ptr()), total.num_bytes);
}

void Communicator::land(Operation& operation) {
  if (!operation.has_come) return;
  auto refuse = [&](const char* what) {
    ledger().add(c10::str(
        "memory that ", operation.title(), what, " while it was in flight: nobody waited for it, or the memory was freed "
        "and given to others (keep the tensor, or call record_stream)"));
  };
  if (operation.is_late) {
    queues().run_all(operation.device, operation.stream);
    size_t at = 0;
    bool is_kept = true, is_alone = true;
    auto look = [&](const Part& each) {
      is_kept = is_kept && std::memcmp(operation.read.data() + at, each.at, each.num_bytes) == 0;
      at += each.num_bytes;
    };
    for (const auto& each : operation.given) look(each);
    if (operation.own) look(*operation.own);
    for (const auto& each : operation.rooms())
      is_alone = is_alone && std::all_of(each.at, each.at + each.num_bytes, [](char byte) { return byte == char(0xff); });
    if (!is_kept) refuse(" reads was written");
    if (!is_alone) refuse(" writes was written by others");
  }
  std::map<int, size_t> begins;
  for (const auto& each : operation.taken) {
    if (each.at == nullptr) continue;
    const auto& bytes = operation.came_from[each.peer];
    std::memcpy(each.at, bytes.data() + begins[each.peer], each.num_bytes);
    begins[each.peer] += each.num_bytes;
  }
  if (operation.total) std::memcpy(operation.total->at, operation.sum.data(), operation.total->num_bytes);
  operation.came_from.clear();
  operation.read.clear();
  operation.sum.clear();
}

}  // namespace fake
