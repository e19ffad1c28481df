// The memory of the devices: one file in memory, mapped twice, in equal parts for each device.
//
//     given out    | fake:0, stream 0 .. | fake:0, stream 1 .. | ...    no right to read or write: SIGSEGV
//                     ^ data_ptr()
//     for kernels  | the same pages ..... | ................... | ...    a fixed distance away
//
// What the host reads or writes by a pointer that it took from a tensor ends the process there and then. Memory belongs
// to the stream that was the current one when it was taken, and is given to others of that stream as soon as the host
// lets go of it, unless another stream was named that still uses it: the rules of CUDA's allocator.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace fake {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 8;
constexpr int kStreams = 8;                         // of a device, the default one first
constexpr size_t kBytesOfStream = size_t(1) << 31;  // addresses, which become memory when they are touched
constexpr size_t kBytesOfDevice = kStreams * kBytesOfStream;
constexpr size_t kAlignment = 512;                  // as CUDA's allocator has it

inline thread_local c10::DeviceIndex current_device = 0;
inline std::atomic<int> num_visible{kDevices};
inline std::atomic<pid_t> first_process{0};  // the one that initialised the devices, and in whose children they are lost

inline bool is_in_bad_fork() { return first_process != 0 && first_process != getpid(); }

inline void initialize() {
  TORCH_CHECK(
      !is_in_bad_fork(),
      "Cannot re-initialize the fake device in forked subprocess. To use the fake device with multiprocessing, you must "
      "use the 'spawn' start method");
  first_process = getpid();
}

class DeviceMemory {
 public:
  DeviceMemory() {
    for (int stream = 0; stream < kStreams; ++stream) free_[stream][stream * kBytesOfStream] = kBytesOfStream;
  }

  size_t take(size_t num_bytes, int64_t stream) {
    const size_t needed = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    std::lock_guard<std::mutex> held(lock_);
    auto& blocks = free_[stream];
    for (auto block = blocks.begin(); block != blocks.end(); ++block) {
      if (block->second < needed) continue;
      const size_t at = block->first, rest = block->second - needed;
      blocks.erase(block);
      if (rest > 0) blocks[at + needed] = rest;
      used_[at] = {num_bytes, needed};
      allocated_ += num_bytes;
      peak_ = std::max(peak_, allocated_);
      ++num_allocations_;
      return at;
    }
    TORCH_CHECK(false, "the fake device is out of memory: ", num_bytes, " bytes were asked for, ", allocated_, " are in use");
  }

  size_t num_bytes(size_t at) {
    std::lock_guard<std::mutex> held(lock_);
    return used_.at(at).first;
  }

  void give(size_t at) {
    std::lock_guard<std::mutex> held(lock_);
    const auto [num_bytes, taken] = used_.at(at);
    used_.erase(at);
    allocated_ -= num_bytes;
    size_t size = taken;
    auto& blocks = free_[at / kBytesOfStream];
    auto next = blocks.lower_bound(at);
    if (next != blocks.end() && at + size == next->first) {
      size += next->second;
      next = blocks.erase(next);
    }
    if (next != blocks.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += size;
        return;
      }
    }
    blocks[at] = size;
  }

  int64_t allocated() { return read(allocated_); }
  int64_t peak() { return read(peak_); }
  int64_t num_allocations() { return read(num_allocations_); }
  void reset_peak() {
    std::lock_guard<std::mutex> held(lock_);
    peak_ = allocated_;
  }

 private:
  int64_t read(const int64_t& value) {
    std::lock_guard<std::mutex> held(lock_);
    return value;
  }

  std::mutex lock_;
  std::map<size_t, size_t> free_[kStreams];           // offset -> size
  std::map<size_t, std::pair<size_t, size_t>> used_;  // offset -> bytes asked for, bytes taken
  int64_t allocated_ = 0, peak_ = 0, num_allocations_ = 0;
};

class Memory {
 public:
  Memory() {
    const int file = memfd_create("fake_device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "no file in memory for the fake device");
    given_ = map(PROT_NONE, file);
    seen_ = map(PROT_READ | PROT_WRITE, file);
    close(file);
  }

  DeviceMemory& of(c10::DeviceIndex device) { return devices_[device]; }
  void* take(size_t num_bytes, c10::DeviceIndex device, int64_t stream) {
    initialize();
    return given_ + device * kBytesOfDevice + devices_[device].take(num_bytes, stream);
  }
  size_t num_bytes(const void* pointer) { return devices_[device_of(pointer)].num_bytes(offset(pointer) % kBytesOfDevice); }
  int64_t stream_of(const void* pointer) const { return int64_t(offset(pointer) % kBytesOfDevice / kBytesOfStream); }
  void give(void* pointer) { devices_[device_of(pointer)].give(offset(pointer) % kBytesOfDevice); }
  c10::DeviceIndex device_of(const void* pointer) const { return c10::DeviceIndex(offset(pointer) / kBytesOfDevice); }

  // Where kernels find what a pointer of a tensor stands for, and the way back.
  void* seen(const void* pointer) const { return pointer == nullptr ? nullptr : seen_ + offset(pointer); }
  void* given(const void* pointer) const { return given_ + (static_cast<const char*>(pointer) - seen_); }
  bool is_seen(const void* pointer) const {
    const auto* at = static_cast<const char*>(pointer);
    return at >= seen_ && at < seen_ + kBytes;
  }

 private:
  static constexpr size_t kBytes = kDevices * kBytesOfDevice;

  static char* map(int rights, int file) {
    void* at = mmap(nullptr, kBytes, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "no addresses for the memory of the fake device");
    return static_cast<char*>(at);
  }
  size_t offset(const void* pointer) const { return static_cast<const char*>(pointer) - given_; }

  char *given_, *seen_;
  DeviceMemory devices_[kDevices];
};

inline Memory& memory() {
  static Memory* all = new Memory;  // tensors may be freed after everything static
  return *all;
}

// Memory of the host that copies without stopping it may read and write.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* at = nullptr;
    if (num_bytes > 0) {
      TORCH_CHECK(posix_memalign(&at, 64, num_bytes) == 0, "no pinned memory");
      std::lock_guard<std::mutex> held(lock_);
      ranges_[static_cast<char*>(at)] = num_bytes;
    }
    return {at, at, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { memcpy(to, from, num_bytes); }

  static bool holds(const void* pointer) {
    const auto* at = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> held(lock_);
    auto next = ranges_.upper_bound(const_cast<char*>(at));
    return next != ranges_.begin() && at < std::prev(next)->first + std::prev(next)->second;
  }

 private:
  static void drop(void* at) {
    if (at == nullptr) return;
    {
      std::lock_guard<std::mutex> held(lock_);
      ranges_.erase(static_cast<char*>(at));
    }
    free(at);
  }
  static inline std::mutex lock_;
  static inline std::map<char*, size_t> ranges_;
};

}  // namespace fake
