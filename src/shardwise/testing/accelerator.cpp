// A device for tests, of PyTorch's kind PrivateUse1. Kernels are those of the CPU, on the second mapping of its memory.
//
//     host       x + y                                            loss.item()
//     here       views of the same memory as CPU tensors;         counts one synchronisation,
//                CPU kernel; counts one launch                    reads through the second mapping
//
// Strides and bits are those of the CPU. What an accelerator refuses is refused here: operations on tensors of several
// devices, pointers in the hands of the host. What would stop the host there is counted.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "allocator.h"
#include "autocast.h"

namespace fake {

std::atomic<bool> is_present{false};    // whether torch.accelerator sees the devices
std::atomic<bool> is_recording{false};  // whether Python hears of each count
struct Counts {
  std::atomic<int64_t> syncs{0}, uploads{0}, launches{0}, allocations{0};
};
Counts counts[kDevices];
constexpr auto kInnerCalls = c10::DispatchKey::TESTING_ONLY_GenericWrapper;  // of kernels that draw
thread_local bool in_kernel = false;  // kernels of the CPU may call others: those are no launches

c10::impl::ExcludeDispatchKeyGuard without_python() {
  return c10::impl::ExcludeDispatchKeyGuard(c10::python_ks);
}

void count(std::atomic<int64_t> Counts::*kind, const char* word, c10::DeviceIndex device, const std::string& name) {
  if (in_kernel) return;
  (counts[device].*kind)++;
  if (!is_recording) return;
  auto guard = without_python();
  static auto heard = c10::Dispatcher::singleton().findSchemaOrThrow("fake_device::heard", "");
  torch::jit::Stack stack{c10::IValue(std::string(word)), c10::IValue(int64_t(device)), c10::IValue(name)};
  heard.callBoxed(&stack);
}
void count_sync(c10::DeviceIndex device, const std::string& name) { count(&Counts::syncs, "sync", device, name); }
void count_upload(c10::DeviceIndex device, const std::string& name) { count(&Counts::uploads, "upload", device, name); }
void count_launch(c10::DeviceIndex device, const std::string& name) { count(&Counts::launches, "launch", device, name); }
void count_allocation(c10::DeviceIndex device) { count(&Counts::allocations, "allocation", device, "allocate"); }

DeviceAllocator allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kType, &allocator)

c10::Device at_index(c10::DeviceIndex index) { return {kType, index < 0 ? current_device : index}; }

void set_current(c10::DeviceIndex index) {
  TORCH_CHECK(index < num_visible, "there is no device fake:", int(index), ", only fake:0 to fake:", num_visible - 1);
  if (index >= 0) current_device = index;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return at_index(current_device); }
  void setDevice(c10::Device device) const override { set_current(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_visible; }

  c10::Stream getStream(c10::Device device) const override {
    const auto at = at_index(device.index());
    return c10::Stream(c10::Stream::UNSAFE, at, current_streams[at.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, at_index(device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> num_made{0};  // there are only so many, as on CUDA
    return c10::Stream(c10::Stream::UNSAFE, at_index(device.index()), 1 + num_made++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->last = queues().record(stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr && static_cast<Event*>(event)->last)
      queues().wait(stream.device_index(), stream.id(), static_cast<Event*>(event)->last);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || !static_cast<Event*>(event)->last || queues().is_passed(static_cast<Event*>(event)->last);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto from = static_cast<Event*>(first)->last, to = static_cast<Event*>(second)->last;
    TORCH_CHECK(from && to && from->is_passed && to->is_passed, "an event that the device has not passed has no time");
    return to->ms - from->ms;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queues().is_empty(stream.device_index(), stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_sync(stream.device_index(), "synchronize");
    queues().finish(stream.device_index(), stream.id());
  }
  void synchronizeEvent(void* event) const override {
    count_sync(current_device, "synchronize");
    if (event != nullptr && static_cast<Event*>(event)->last) queues().finish(static_cast<Event*>(event)->last);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    count_sync(index, "synchronize");
    queues().finish(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator.recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Draws the CPU's numbers from a state of its own.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = at_index(index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  Generator* clone_impl() const override {
    auto* other = new Generator(device_.index());
    other->set_state(*get_state());
    return other;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return is_present; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_visible; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto old = current_device;
    set_current(index);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (int each = 0; each < kDevices; ++each) made.push_back(at::make_generator<Generator>(each));
      return made;
    }();
    return all.at(at_index(index).index());
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  c10::Device getDeviceFromPtr(void* pointer) const override { return at_index(memory().device_of(pointer)); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::holds(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto fresh = allocator.allocate_on(num_bytes, impl->device().index());
    const size_t kept = std::min(num_bytes, impl->nbytes());
    if (kept > 0) allocator.copy_data(fresh.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(num_bytes);
  }
};

// The same elements as a CPU tensor.
at::Tensor as_host(const at::Tensor& tensor) {
  const auto* begin = tensor.storage().data();
  auto bytes = at::from_blob(memory().seen(begin), {int64_t(tensor.storage().nbytes())}, at::kByte);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(bytes.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = host.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  impl->set_storage_offset(tensor.storage_offset());
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

at::Tensor on_device(c10::Storage storage, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

// Room for what a kernel of the CPU makes.
at::Tensor room_for(c10::DeviceIndex device, const at::Tensor& made) {
  const size_t num_bytes = at::detail::computeStorageNbytes(made.sizes(), made.strides(), made.dtype().itemsize());
  auto data = allocator.allocate_on(num_bytes, device);
  return on_device(c10::Storage(c10::Storage::use_byte_size_t(), num_bytes, std::move(data), &allocator, true), made);
}

// What is around a kernel, in whatever thread and under whatever modes the host is.
struct KernelScope {
  c10::InferenceMode inference{true};  // no kernel of a device records anything, or looks at versions
  // All of what the thread has is put aside: while torch works out the shapes of a fake tensor, a kernel's own calls
  // would go to the meta device, and memory would stay as it was.
  c10::impl::ForceDispatchKeyGuard plain{
      c10::default_included_set.remove(c10::DispatchKey::ADInplaceOrView),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | c10::python_ks};
  bool before = in_kernel;
  KernelScope() { in_kernel = true; }
  ~KernelScope() { in_kernel = before; }
};

bool is_generator(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::GeneratorType) return true;
  return type.kind() == c10::TypeKind::OptionalType &&
         type.expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// While it lives, what kernels of this thread draw comes from a generator of its own, which begins with a state of the
// device. Never from the CPU's default generator: all threads have that one, and a job may run in any of them while
// another one draws, or the program sets its seed.
class Drawing {
 public:
  explicit Drawing(const at::Tensor& state)
      : drawing_(at::detail::createCPUGenerator()), before_(std::exchange(current_, &drawing_)) {
    drawing_.set_state(state);
  }
  ~Drawing() { current_ = before_; }
  at::Tensor state() const { return drawing_.get_state(); }

  static void give_to(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    const size_t begin = stack->size() - arguments.size();
    for (size_t at = 0; at < arguments.size(); ++at)
      if (is_generator(*arguments[at].type())) (*stack)[begin + at] = *current_;
  }

 private:
  static inline thread_local const at::Generator* current_ = nullptr;
  at::Generator drawing_;
  const at::Generator* before_;
  c10::impl::IncludeDispatchKeyGuard sees_inner_calls_{kInnerCalls};
};

// Operators that take no generator, such as native_dropout, draw by others that take one.
void draw_from_current(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Drawing::give_to(op, stack);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInnerCalls), stack);
}
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&draw_from_current>());
}

// One call of an operator that has no kernel here.
//
//     1  sketch: the kernel runs on numbers that mean nothing, for the shapes of what it makes    only where it is behind
//     2  room for that, in memory of the device
//     3  the job: the kernel runs on views of the memory, when its stream comes to it
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), begin_(stack->size() - schema_.arguments().size()) {
    for (size_t at = 0; at < schema_.arguments().size(); ++at) look(schema_.arguments()[at], stack_[begin_ + at]);
    TORCH_CHECK(
        !has_host_ || !device_ || may_mix(), schema_.name(), ": expected all tensors to be on the same device, but found ",
        *device_, " and cpu");
  }

  void carry_out() {
    const auto device = device_ ? device_->index() : current_device;
    const auto stream = current_streams[device];
    if (stops_host()) count_sync(device, schema_.name());
    count_launch(device, schema_.name());
    at::Tensor state;
    if (draws()) {
      generator_ = generator_.defined() ? generator_ : at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
      state = generator_.get_state();
    }
    if (!queues().is_behind() || stops_host()) {
      queues().finish(device, stream);
      const auto made = run(passed([](const at::Tensor& tensor) { return as_host(tensor); }, state), state);
      grow();
      put_results(taken_back(made, device, /*with_values=*/true));
      return;
    }
    torch::jit::Stack results;
    if (draws() || makes()) {
      const auto made = run(passed(sketched, state), state);
      for (const auto& [given, host] : grown_)
        if (host.numel() > 0) given.resize_(host.sizes());
      results = taken_back(made, device, /*with_values=*/false);
    } else {
      results = taken_back(torch::jit::Stack(schema_.returns().size()), device, false);
    }
    grown_.clear();
    auto arguments = passed([](const at::Tensor& tensor) { return as_host(tensor); }, state);
    for (auto& each : arguments) keep_value(each);
    torch::jit::Stack rooms;
    for (const auto& each : results) rooms.push_back(seen_values(each));
    const auto is_written = written_returns();
    queues().push(device, stream, [op = op_, arguments, rooms, is_written, state] {
      torch::jit::Stack stack = arguments;
      run_on(op, stack, state);
      for (size_t at = 0; at < rooms.size(); ++at)
        if (!is_written[at]) copy_values(rooms[at], stack[at]);
    });
    put_results(std::move(results));
  }

 private:
  struct Passed {
    at::Tensor given, host;
  };

  void look(const c10::Argument& argument, const c10::IValue& value) {
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    auto see = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.device().type() == kType) {
        TORCH_CHECK(
            !device_ || *device_ == tensor.device(), schema_.name(), ": expected all tensors to be on the same device, but found ",
            *device_, " and ", tensor.device());
        device_ = tensor.device();
        grows_ = grows_ || (is_written && argument.kwarg_only() && tensor.numel() == 0);
      } else if (tensor.dim() > 0 || is_written) {
        has_host_ = true;  // a tensor without dimensions is a number, if it is only read
      }
      if (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte) has_mask_ = true;
    };
    if (value.isTensor()) see(value.toTensor());
    if (value.isTensorList()) for (const at::Tensor& each : value.toTensorList()) see(each);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) if (each) see(*each);
    if (value.isDevice() && value.toDevice().type() == kType) device_ = at_index(value.toDevice().index());
    if (is_generator(*argument.type())) {
      takes_generator_ = true;
      if (!value.isNone()) generator_ = value.toGenerator();
    }
  }

  // Indices may stay on the host.
  bool may_mix() const {
    static const std::set<std::string> all{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
    return all.count(schema_.name()) > 0;
  }

  // Whether the host needs to see a result: a number, or how many elements there are.
  bool stops_host() const {
    static const std::set<std::string> sized{
        "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
        "aten::repeat_interleave", "aten::bincount", "aten::histc"};
    for (const auto& each : schema_.returns()) {
      const auto kind = each.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
    }
    return sized.count(schema_.name()) > 0 || (schema_.name() == "aten::index" && has_mask_);
  }

  bool draws() const { return takes_generator_ || op_.hasTag(at::Tag::nondeterministic_seeded); }

  // Whether a result is anything else than an argument that was written.
  bool makes() const {
    const auto is_written = written_returns();
    return grows_ || std::find(is_written.begin(), is_written.end(), false) != is_written.end();
  }

  std::vector<bool> written_returns() const {
    std::vector<bool> all;
    for (const auto& each : schema_.returns()) all.push_back(each.alias_info() != nullptr && each.alias_info()->isWrite());
    return all;
  }

  static at::Tensor sketched(const at::Tensor& tensor) {
    auto sketch = at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.dtype()));
    return sketch.fill_(tensor.is_floating_point() ? 1 : 0);  // zero is an index of everything
  }

  // The arguments, with the tensors that stand for those of the device.
  template <typename View>
  torch::jit::Stack passed(View view, const at::Tensor& state) {
    passed_.clear();
    torch::jit::Stack all;
    for (size_t at = 0; at < schema_.arguments().size(); ++at) {
      const auto& argument = schema_.arguments()[at];
      const auto& value = stack_[begin_ + at];
      const bool is_output =
          argument.kwarg_only() && argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      auto stand_in = [&](const at::Tensor& tensor) {
        if (!tensor.defined() || tensor.device().type() != kType) return tensor;
        const bool grows = is_output && tensor.numel() == 0;
        auto host = grows ? at::empty({0}, at::TensorOptions(tensor.dtype())) : view(tensor);
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
        (grows ? grown_ : passed_).push_back({tensor, host});
        return host;
      };
      if (value.isTensor()) {
        all.push_back(stand_in(value.toTensor()));
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> hosts;
        for (const at::Tensor& each : value.toTensorList()) hosts.push_back(stand_in(each));
        all.push_back(std::move(hosts));
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> hosts;
        for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
          hosts.push_back(each ? std::optional(stand_in(*each)) : std::nullopt);
        all.push_back(std::move(hosts));
      } else if (value.isDevice()) {
        all.push_back(c10::Device(c10::kCPU));
      } else {
        all.push_back(value);
      }
    }
    return all;
  }

  // Runs the kernel of the CPU; what it drew counts.
  torch::jit::Stack run(torch::jit::Stack stack, const at::Tensor& state) {
    const auto after = run_on(op_, stack, state);
    if (generator_.defined() && after.defined()) generator_.set_state(after);
    return stack;
  }

  static at::Tensor run_on(const c10::OperatorHandle& op, torch::jit::Stack& stack, const at::Tensor& state) {
    KernelScope scope;
    std::optional<Drawing> drawing;
    if (state.defined()) {
      drawing.emplace(state);
      Drawing::give_to(op, &stack);
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return drawing ? drawing->state() : at::Tensor();
  }

  void grow() {
    for (const auto& [given, host] : grown_) {
      if (host.numel() == 0) continue;
      given.resize_(host.sizes());
      put_values(given, host);
    }
  }

  // Behind what the stream has for the memory until now: another thread may just have let go of it.
  static void put_values(const at::Tensor& room, const at::Tensor& values) {
    const auto device = room.device().index();
    const auto stream = current_streams[device];
    const auto put = [to = as_host(room), from = values] {
      KernelScope scope;
      to.copy_(from);
    };
    queues().push(device, stream, put, 0);
    queues().finish(device, stream);
  }

  // What was given for a result that the schema says to be an argument, which was written.
  const c10::IValue* argument_of(size_t result) const {
    const auto* alias = schema_.returns()[result].alias_info();
    if (alias == nullptr || !alias->isWrite()) return nullptr;
    for (size_t at = 0; at < schema_.arguments().size(); ++at) {
      const auto* other = schema_.arguments()[at].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) return &stack_[begin_ + at];
    }
    return nullptr;
  }

  torch::jit::Stack taken_back(const torch::jit::Stack& made, c10::DeviceIndex device, bool with_values) const {
    torch::jit::Stack all;
    for (size_t at = 0; at < made.size(); ++at) {
      const auto* argument = argument_of(at);
      auto own = [&](const at::Tensor& result) { return device_tensor(result, device, with_values); };
      if (argument != nullptr) {
        all.push_back(*argument);
      } else if (made[at].isTensor()) {
        all.push_back(own(made[at].toTensor()));
      } else if (made[at].isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& each : made[at].toTensorList()) list.push_back(own(each));
        all.push_back(std::move(list));
      } else {
        all.push_back(made[at]);
      }
    }
    return all;
  }

  at::Tensor device_tensor(const at::Tensor& result, c10::DeviceIndex device, bool with_values) const {
    if (!result.defined()) return result;
    for (const auto& [given, host] : passed_) {
      if (host.is_same(result)) return given;
      if (!result.has_storage() || result.storage().data() == nullptr || result.storage().data() != host.storage().data())
        continue;
      auto view = on_device(given.storage(), result);
      const auto offset = given.storage_offset() + result.storage_offset() - host.storage_offset();
      view.unsafeGetTensorImpl()->set_storage_offset(offset);
      return view;
    }
    auto room = room_for(device, result);
    if (with_values) put_values(room, result);
    return room;
  }

  void put_results(torch::jit::Stack results) {
    stack_.resize(begin_);
    for (auto& each : results) stack_.push_back(std::move(each));
  }

  // Numbers and indices of the host have the values that they have now.
  void keep_value(c10::IValue& value) const {
    auto kept = [&](const at::Tensor& tensor) {
      for (const auto& [given, host] : passed_) if (host.is_same(tensor)) return tensor;
      if (!tensor.defined()) return tensor;
      auto copy = tensor.detach().clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    };
    if (value.isTensor()) {
      value = kept(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorList()) all.push_back(kept(each));
      value = std::move(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
        all.push_back(each ? std::optional(kept(*each)) : std::nullopt);
      value = std::move(all);
    }
  }

  static c10::IValue seen_values(const c10::IValue& value) {
    auto seen = [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.device().type() == kType ? as_host(tensor) : tensor;
    };
    if (value.isTensor()) return seen(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> all;
    for (const at::Tensor& each : value.toTensorList()) all.push_back(seen(each));
    return all;
  }

  static void copy_values(const c10::IValue& room, const c10::IValue& made) {
    KernelScope scope;
    auto copy = [](const at::Tensor& to, const at::Tensor& from) {
      if (to.defined() && from.defined() && to.data_ptr() != from.data_ptr()) to.copy_(from);
    };
    if (room.isTensor()) return copy(room.toTensor(), made.toTensor());
    if (!room.isTensorList()) return;
    const auto rooms = room.toTensorList(), all = made.toTensorList();
    for (size_t at = 0; at < rooms.size(); ++at) copy(rooms.get(at), all.get(at));
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t begin_;
  std::optional<c10::Device> device_;
  bool has_host_ = false, has_mask_ = false, takes_generator_ = false, grows_ = false;
  std::vector<Passed> passed_, grown_;  // grown_: outputs that were empty, which the kernel gives their size
  at::Generator generator_;
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).carry_out(); }

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Copies between devices run on the stream of the source, and that of the target waits for them, as on CUDA.
void copy_between(const at::Tensor& from, const at::Tensor& to, std::function<void()> copy) {
  const auto source = from.device().index(), target = to.device().index();
  if (source != target)
    queues().wait(source, current_streams[source], queues().record(target, current_streams[target]));
  queues().push(source, current_streams[source], std::move(copy));
  if (source != target)
    queues().wait(target, current_streams[target], queues().record(source, current_streams[source]));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool begins_here = from.device().type() == kType, ends_here = to.device().type() == kType;
  const auto device = ends_here ? to.device().index() : from.device().index();
  const bool goes_alone = non_blocking && PinnedAllocator::holds((ends_here ? from : to).storage().data());
  // Values of the host that is not told to leave them alone are taken now.
  const bool takes_now = ends_here && !begins_here && !goes_alone && queues().is_behind();
  auto job = [into = ends_here ? as_host(to) : to,
              out_of = begins_here ? as_host(from) : takes_now ? from.detach().clone() : from] {
    KernelScope scope;
    into.copy_(out_of);
  };
  if (begins_here && ends_here) {
    count_launch(device, "aten::copy_");
    copy_between(from, to, job);
  } else if (ends_here) {
    count_upload(device, "aten::copy_");
    queues().push(device, current_streams[device], job);
  } else {
    if (from.numel() > 0 && !goes_alone) count_sync(device, "aten::copy_");
    queues().push(device, current_streams[device], job);
    if (!goes_alone) queues().finish(device, current_streams[device]);
  }
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar(const at::Tensor& self) {
  const auto device = self.device().index();
  count_sync(device, "aten::item");
  queues().finish(device, current_streams[device]);
  return at::native::_local_scalar_dense_cpu(as_host(self));
}

// What only looks at the same memory in another way.
at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  // On one device one kernel for all, as on accelerators; else a copy for each.
  bool is_there = to.size() > 0;
  for (size_t at = 0; at < to.size(); ++at)
    is_there = is_there && to[at].device() == to[0].device() && from[at].device() == to[0].device();
  if (is_there) count_launch(to[0].device().index(), "aten::_foreach_copy_");
  for (size_t at = 0; at < to.size(); ++at) {
    if (is_there) {
      copy_between(from[at], to[at], [into = as_host(to[at]), out_of = as_host(from[at])] {
        KernelScope scope;
        into.copy_(out_of);
      });
    } else {
      to[at].copy_(from[at], non_blocking);
    }
  }
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) { return at::native::set_tensor_(self, other); }
at::Tensor& set_storage(at::Tensor& self, at::Storage storage) { return at::native::set_(self, storage); }
at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}
void record_stream(at::Tensor& self, c10::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

// `parameter.data = on_device`, and with it `module.to`, which keeps ties: torch allows it for the kinds that it knows.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_plain = [](const at::Tensor& each) {
    return each.layout() == c10::kStrided && (each.device().type() == kType || each.device().is_cpu());
  };
  return is_plain(self) && is_plain(from);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// Every operator for which the CPU has a kernel is one kernel here, and a few that it composes of others. Without this,
// torch would compose many of them in another way for a device that it does not know, with other bits and more launches.
bool is_one_kernel(const c10::OperatorName& name) {
  if (name.name.rfind("aten::", 0) != 0) return false;
  if (name.name.rfind("aten::_foreach_", 0) == 0) return true;
  if (name.name == "aten::convolution" || name.name == "aten::convolution_backward") return name.overload_name.empty();
  const auto op = c10::Dispatcher::singleton().findOp(name);
  return op && op->hasSchema() && op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  std::set<std::string> own;
  auto add = [&](const char* name, auto* kernel) {
    own.insert("aten::" + std::string(name));
    library.impl(name, kernel);
  };
  add("empty.memory_format", empty);
  add("empty_strided", empty_strided);
  add("as_strided", as_strided);
  add("view", view);
  add("_reshape_alias", reshape_alias);
  add("_copy_from", copy_from);
  add("_copy_from_and_resize", copy_from_and_resize);
  add("_foreach_copy_", foreach_copy_);
  add("_local_scalar_dense", local_scalar);
  add("resize_", resize_);
  add("set_.source_Tensor", set_tensor);
  add("set_.source_Storage", set_storage);
  add("set_.source_Storage_storage_offset", set_storage_at);
  add("record_stream", record_stream);
  add("_has_compatible_shallow_copy_type", has_compatible_type);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string whole = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (own.count(whole) > 0 || !is_one_kernel(name)) continue;
    library.impl(whole.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

// What Python asks for, as operators: this file needs no header of Python.
TORCH_LIBRARY(fake_device, library) {
  library.def("heard(str kind, int device, str name) -> ()");
  library.def("show(bool present) -> ()", [](bool present) { is_present = present; });
  library.def("is_shown() -> bool", []() -> bool { return is_present; });
  library.def("record(bool on) -> ()", [](bool on) { is_recording = on; });
  library.def("run_behind(int seed) -> ()", [](int64_t seed) { queues().start(seed); });
  library.def("num_late() -> int", []() -> int64_t { return queues().num_late(); });
  library.def("device_count() -> int", []() -> int64_t { return num_visible; });
  library.def("see(int count) -> ()", [](int64_t count) { num_visible = int(count); });
  library.def("is_initialized() -> bool", []() -> bool { return first_process != 0; });
  library.def("is_in_bad_fork() -> bool", []() -> bool { return is_in_bad_fork(); });
  library.def("current_device() -> int", []() -> int64_t { return current_device; });
  library.def("set_device(int index) -> ()", [](int64_t index) { set_current(c10::DeviceIndex(index)); });
  library.def("default_generator(int index) -> Generator?", [](int64_t index) -> std::optional<at::Generator> {
    return at::detail::getPrivateUse1Hooks().getDefaultGenerator(c10::DeviceIndex(index));
  });
  library.def("counts(int index) -> int[]", [](int64_t index) {
    const auto& of = counts[index];
    return std::vector<int64_t>{of.syncs, of.uploads, of.launches, of.allocations};
  });
}

struct Registration {
  Registration() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} registration;

}  // namespace fake
