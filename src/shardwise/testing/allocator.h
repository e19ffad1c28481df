// Gives out the memory of the devices, by the rules of streams.
#pragma once

#include <set>
#include <vector>

#include "queues.h"

namespace fake {

void count_allocation(c10::DeviceIndex device);

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override { return allocate_on(num_bytes, current_device); }
  c10::DataPtr allocate_on(size_t num_bytes, c10::DeviceIndex device) {
    give_late();
    if (num_bytes > 0) count_allocation(device);
    void* at = num_bytes > 0 ? memory().take(num_bytes, device, current_streams[device]) : nullptr;
    return {at, at, &drop, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    const auto device = memory().device_of(to);
    auto* into = memory().seen(to);
    const auto* out_of = memory().seen(from);
    queues().push(device, current_streams[device], [=] { memcpy(into, out_of, num_bytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() == nullptr) return;
    std::lock_guard<std::mutex> held(lock_);
    users_[data.get()].insert({stream.device_index(), stream.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[0];
    all.current = memory().of(device).allocated();
    all.peak = memory().of(device).peak();
    stats.allocation[0].allocated = memory().of(device).num_allocations();
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { memory().of(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {kBytesOfDevice - memory().of(device).allocated(), kBytesOfDevice};
  }

 private:
  using Streams = std::set<std::pair<c10::DeviceIndex, c10::StreamId>>;

  static void drop(void* at) {
    if (at == nullptr) return;
    if (!queues().is_behind()) {
      forget(at);
      return memory().give(at);
    }
    std::vector<std::shared_ptr<Mark>> marks;
    for (const auto& [device, stream] : forget(at)) marks.push_back(queues().record(device, stream));
    if (marks.empty()) return give(at);
    std::lock_guard<std::mutex> held(lock_);
    late_.push_back({at, std::move(marks)});
  }

  // Other memory of the same stream is written there from now on: the next kernel may be one that does.
  static void give(void* at) {
    auto* seen = memory().seen(at);
    const size_t num_bytes = memory().num_bytes(at);
    queues().push(memory().device_of(at), memory().stream_of(at), [=] { memset(seen, 0xff, num_bytes); });
    memory().give(at);
  }

  static Streams forget(void* at) {
    std::lock_guard<std::mutex> held(lock_);
    auto found = users_.find(at);
    if (found == users_.end()) return {};
    auto users = std::move(found->second);
    users_.erase(found);
    users.erase({memory().device_of(at), memory().stream_of(at)});
    return users;
  }

 public:
  // Memory that other streams have used, and use no more.
  static void give_late() {
    std::vector<void*> done;
    {
      std::lock_guard<std::mutex> held(lock_);
      for (auto each = late_.begin(); each != late_.end();) {
        const auto& marks = each->second;
        if (std::all_of(marks.begin(), marks.end(), [](const auto& mark) { return mark->is_passed.load(); })) {
          done.push_back(each->first);
          each = late_.erase(each);
        } else {
          ++each;
        }
      }
    }
    for (void* at : done) give(at);
  }

 private:
  static inline std::mutex lock_;
  static inline std::map<void*, Streams> users_;
  static inline std::deque<std::pair<void*, std::vector<std::shared_ptr<Mark>>>> late_;
};


}  // namespace fake
