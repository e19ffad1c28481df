// The strict backend: torch.distributed between fake devices, with the conditions of NCCL's and the ways it blocks.
//
// Checks what a rank can see alone, as ProcessGroupNCCL does; `communicator.cpp` compares it with what others call.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "communicator.h"

namespace fake {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

const char* name_of(ReduceOp::RedOpType reduction) {
  static const std::map<int, const char*> all{
      {ReduceOp::SUM, "SUM"}, {ReduceOp::AVG, "AVG"}, {ReduceOp::PRODUCT, "PRODUCT"}, {ReduceOp::MIN, "MIN"},
      {ReduceOp::MAX, "MAX"}};
  const auto found = all.find(reduction);
  TORCH_CHECK_VALUE(found != all.end(), "Cannot use ReduceOp of this kind with NCCL (bitwise ones, PREMUL_SUM)");
  return found->second;
}

// Ends on the device: `wait` makes the current stream wait. It keeps no tensor: the program does until then.
class StrictWork final : public c10d::Work {
 public:
  StrictWork(int rank, OpType type, std::shared_ptr<Communicator> communicator, std::shared_ptr<Operation> operation, Tensors results)
      : Work(rank, type), communicator_(std::move(communicator)), operation_(std::move(operation)), results_(std::move(results)) {}
  bool isCompleted() override { return !operation_->fault.empty() || queues().is_passed(operation_->ended); }
  bool isSuccess() const override { return operation_->fault.empty(); }
  bool wait(std::chrono::milliseconds) override {
    communicator_->wait(operation_);
    return true;
  }
  void synchronize() override { communicator_->wait(operation_); }
  void abort() override { communicator_->abort(); }
  std::exception_ptr exception() const override {
    return operation_->fault.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(operation_->fault));
  }
  uint64_t getSequencenumber() const override { return uint64_t(operation_->number); }
  // Complete at once, behind the transfer on the current stream: who reads its tensors there needs to know no more.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    communicator_->wait(operation_);
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<Operation> operation_;
  const Tensors results_;
};

class StrictBackend final : public c10d::Backend {
 public:
  StrictBackend(
      c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout,
      std::vector<std::string> uuids)
      : Backend(rank, size), store_(std::move(store)), timeout_(timeout), uuids_(std::move(uuids)) {
    TORCH_CHECK_VALUE(!uuids_.empty(), "ProcessGroupNCCL is only supported with GPUs, no GPUs found!");
    init();
  }
  ~StrictBackend() override {
    for (auto& [name, each] : made_) each->abort();
  }

  const std::string getBackendName() const override { return "strict"; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return !is_eager_; }  // once, so that torch connects where it has a device
  void eagerConnectSingleDevice(at::Device device) override {
    is_eager_ = true;
    communicator("all", device, rank_, size_);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_calls_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto tensor = only(tensors);
    auto op = begin("BROADCAST", {tensor}, c10::str("root ", options.rootRank));
    if (options.rootRank == rank_) for (int peer : others()) op->given.push_back(Part::of(peer, tensor));
    else op->taken.push_back(Part::of(int(options.rootRank), tensor));
    return start(op, OpType::BROADCAST, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return sum(only(tensors), tensors, options.reduceOp, -1, "ALLREDUCE", OpType::ALLREDUCE);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return sum(only(tensors), tensors, options.reduceOp, int(options.rootRank), "REDUCE", OpType::REDUCE);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return each(tensors.size(), [&](size_t at) {
      Tensors one{tensors[at]};
      allreduce(one, options);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    TORCH_CHECK_VALUE(outputs.size() == 1 && int(outputs[0].size()) == size_, "Tensor list output operands size must be the size of the group");
    return gather_into(outputs[0], only(inputs), "ALLGATHER", OpType::ALLGATHER);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    TORCH_CHECK_TYPE(output.dtype() == input.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK_VALUE(
        output.numel() == input.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
    check(output);
    return gather_into(parts_of(output), input, "ALLGATHER", OpType::_ALLGATHER_BASE);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return each(inputs.size(), [&](size_t at) { _allgather_base(outputs[at], inputs[at], options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK_VALUE(inputs.size() == 1 && int(inputs[0].size()) == size_, "Tensor list input operands size must be the size of the group");
    return scatter_sum(only(outputs), inputs[0], options.reduceOp, OpType::REDUCE_SCATTER);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK_TYPE(output.dtype() == input.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK_VALUE(
        output.numel() * size_ == input.numel(), "input tensor must be the same size as output size times world size");
    check(input);
    return scatter_sum(output, parts_of(input), options.reduceOp, OpType::_REDUCE_SCATTER_BASE);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return each(inputs.size(), [&](size_t at) { _reduce_scatter_base(outputs[at], inputs[at], options); });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return exchange(outputs, inputs, OpType::ALLTOALL);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& taken, std::vector<int64_t>& given,
      const c10d::AllToAllOptions&) override {
    check(output);
    check(input);
    auto split = [&](const at::Tensor& whole, const std::vector<int64_t>& sizes) {
      TORCH_CHECK_VALUE(!sizes.empty() || whole.size(0) % size_ == 0, "Tensor's dim 0 does not divide equally across group size");
      return (sizes.empty() ? whole.chunk(size_) : whole.split_with_sizes(sizes));
    };
    return exchange(split(output, taken), split(input, given), OpType::ALLTOALL_BASE);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const auto input = only(inputs);
    const int root = int(options.rootRank);
    auto op = begin("GATHER", {input}, c10::str("root ", root));
    op->given.push_back(Part::of(root, input));
    if (rank_ == root) for (int peer = 0; peer < size_; ++peer) op->taken.push_back(Part::of(peer, checked(outputs.at(0).at(peer))));
    return start(op, OpType::GATHER, rank_ == root ? outputs[0] : inputs);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const auto output = only(outputs);
    const int root = int(options.rootRank);
    auto op = begin("SCATTER", {output}, c10::str("root ", root));
    op->taken.push_back(Part::of(root, output));
    if (rank_ == root) for (int peer = 0; peer < size_; ++peer) op->given.push_back(Part::of(peer, checked(inputs.at(0).at(peer))));
    return start(op, OpType::SCATTER, outputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    const auto device = bound_device_id_ ? *bound_device_id_ : c10::Device(kType, current_device);
    Tensors one{at::zeros({1}, at::TensorOptions(device).dtype(at::kFloat))};
    c10d::AllreduceOptions options;
    auto work = allreduce(one, options);
    work->wait();
    queues().finish(device.index(), current_streams[device.index()]);  // the host waits
    return work;
  }
  WorkPtr send(Tensors& tensors, int peer, int) override {
    auto op = message(only(tensors), peer);
    op->given.push_back(Part::of(peer, tensors[0]));
    return post(op, OpType::SEND, tensors, peer);
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override {
    auto op = message(only(tensors), peer);
    op->taken.push_back(Part::of(peer, tensors[0]));
    return post(op, OpType::RECV, tensors, peer);
  }

  void startCoalescing() override { group_.emplace(); }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(group_, "endCoalescing without startCoalescing");
    auto all = std::move(*group_);
    group_.reset();
    // Messages of a group go together, in any order of their peers: one operation.
    std::shared_ptr<Operation> messages;
    WorkPtr last;
    for (auto& [op, results] : all) {
      if (!op->is_message) continue;
      if (messages) {
        messages->given.insert(messages->given.end(), op->given.begin(), op->given.end());
        messages->taken.insert(messages->taken.end(), op->taken.begin(), op->taken.end());
      } else {
        messages = op;
      }
    }
    if (messages) last = start(messages, OpType::COALESCED, {});
    for (auto& [op, results] : all) if (!op->is_message) last = start(op, OpType::COALESCED, results);
    return last;
  }

  void abort() override {
    for (auto& [name, each] : taken_out()) each->abort();
  }
  void shutdown() override {
    for (auto& [name, each] : taken_out()) each->shutdown();
  }

 private:
  std::vector<int> others() const {
    std::vector<int> all;
    for (int peer = 0; peer < size_; ++peer) if (peer != rank_) all.push_back(peer);
    return all;
  }
  std::map<std::string, std::shared_ptr<Communicator>> taken_out() {
    std::lock_guard<std::mutex> held(lock_);
    is_ended_ = true;
    return std::exchange(made_, {});
  }

  void check(const at::Tensor& tensor) const {
    static const std::set<at::ScalarType> known{at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                                                at::kFloat, at::kDouble, at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2};
    TORCH_CHECK_VALUE(
        tensor.device().type() == kType && tensor.layout() == at::kStrided,
        "Tensors must be CUDA and dense: this one is on ", tensor.device());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "Tensors must be contiguous");
    TORCH_CHECK_TYPE(
        known.count(tensor.scalar_type()) > 0, "Input tensor data type is not supported for NCCL process group: ",
        tensor.scalar_type());
    TORCH_CHECK(
        !bound_device_id_ || *bound_device_id_ == tensor.device(), "Tensor found on device ", tensor.device(),
        " but backend constrained to ", bound_device_id_.value_or(tensor.device()));
  }
  const at::Tensor& checked(const at::Tensor& tensor) const {
    check(tensor);
    return tensor;
  }
  at::Tensor only(const Tensors& tensors) const {
    TORCH_CHECK_VALUE(tensors.size() == 1, "Expecting one tensor only but got multiple");
    return checked(tensors[0]);
  }
  Tensors parts_of(const at::Tensor& whole) const { return whole.view({size_, whole.numel() / size_}).unbind(0); }

  // same: what all ranks say, beside the tensors.
  std::shared_ptr<Operation> begin(const char* name, const Tensors& tensors, const std::string& same) {
    auto op = std::make_shared<Operation>();
    op->name = name;
    for (const auto& each : tensors) op->same += c10::str(checked(each).numel(), " x ", each.scalar_type(), ", ");
    op->same += same;
    TORCH_CHECK(
        tensors.empty() || device_ == -1 || device_ == tensors[0].device().index(), "Tensor found on ", tensors[0].device(),
        ", while this process group's communicator is on fake:", device_, ": the other ranks would never come");
    if (!tensors.empty()) device_ = tensors[0].device().index();
    op->device = device_;
    return op;
  }
  std::shared_ptr<Operation> message(const at::Tensor& tensor, int peer) {
    TORCH_CHECK_VALUE(peer >= 0 && peer < size_, "invalid rank ", peer, " of ", size_);
    auto op = begin("SEND/RECV", {tensor}, "");
    op->same.clear();
    op->is_message = true;
    return op;
  }

  WorkPtr sum(const at::Tensor& tensor, const Tensors& results, const ReduceOp& reduction, int root, const char* name, OpType type) {
    const auto real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
    auto op = begin(name, {real}, c10::str(name_of(reduction), root < 0 ? "" : c10::str(", root ", root)));
    op->reduction = reduction;
    op->dtype = real.scalar_type();
    for (int peer : others()) {
      if (root < 0 || root == peer) op->given.push_back(Part::of(peer, real));
      if (root < 0 || root == rank_) op->taken.push_back(term(peer, real));
    }
    if (root < 0 || root == rank_) op->own = op->total = Part::of(rank_, real);
    return start(op, type, results);
  }
  WorkPtr scatter_sum(const at::Tensor& output, const Tensors& inputs, const ReduceOp& reduction, OpType type) {
    auto op = begin("REDUCE_SCATTER", inputs, name_of(reduction));
    check(output);
    TORCH_CHECK_VALUE(output.numel() == inputs[rank_].numel(), "output tensor must have the size of its part of the input");
    TORCH_CHECK_TYPE(output.dtype() == inputs[rank_].dtype(), "input tensor must be the same type as the output tensor.");
    op->reduction = reduction;
    op->dtype = output.scalar_type();
    for (int peer : others()) {
      op->given.push_back(Part::of(peer, inputs[peer]));
      op->taken.push_back(term(peer, output));
    }
    op->own = Part::of(rank_, inputs[rank_]);
    op->total = Part::of(rank_, output);
    return start(op, type, {output});
  }
  static Part term(int peer, const at::Tensor& like) {
    auto part = Part::of(peer, like);
    part.at = nullptr;
    return part;
  }
  WorkPtr gather_into(const Tensors& outputs, const at::Tensor& input, const char* name, OpType type) {
    auto op = begin(name, outputs, "");
    check(input);
    TORCH_CHECK_VALUE(outputs[rank_].numel() == input.numel(), "input tensor must have the size of its part of the output");
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_ && outputs[peer].data_ptr() == input.data_ptr()) continue;
      op->given.push_back(Part::of(peer, input));
      op->taken.push_back(Part::of(peer, outputs[peer]));
    }
    return start(op, type, outputs);
  }
  WorkPtr exchange(const Tensors& outputs, const Tensors& inputs, OpType type) {
    TORCH_CHECK_VALUE(int(outputs.size()) == size_ && int(inputs.size()) == size_, "Tensor list operands size must be the size of the group");
    Tensors all = outputs;
    all.insert(all.end(), inputs.begin(), inputs.end());
    auto op = begin("ALLTOALL", all, "");
    op->same.clear();  // sizes are compared pair by pair
    for (int peer = 0; peer < size_; ++peer) {
      op->given.push_back(Part::of(peer, inputs[peer]));
      op->taken.push_back(Part::of(peer, outputs[peer]));
    }
    return start(op, type, outputs);
  }
  template <typename Call>
  WorkPtr each(size_t count, Call call) {
    startCoalescing();
    for (size_t at = 0; at < count; ++at) call(at);
    return endCoalescing();
  }

  WorkPtr start(const std::shared_ptr<Operation>& op, OpType type, const Tensors& results) {
    if (group_) {
      group_->push_back({op, results});
      return nullptr;
    }
    ++num_calls_;
    auto used = communicator("all", c10::Device(kType, op->device), rank_, size_);
    used->start(op);
    return c10::make_intrusive<StrictWork>(rank_, type, used, op, results);
  }
  // A message alone: on the communicator of the pair, or on that of all where it is there from the start.
  WorkPtr post(const std::shared_ptr<Operation>& op, OpType type, const Tensors& results, int peer) {
    if (group_ || is_eager_) return start(op, type, results);
    TORCH_CHECK_VALUE(peer != rank_, "a message of a rank to itself outside of a group would wait for ever");
    ++num_calls_;
    const auto name = c10::str(std::min(rank_, peer), ":", std::max(rank_, peer));
    for (auto* parts : {&op->given, &op->taken}) for (auto& part : *parts) part.peer = peer > rank_;
    auto used = communicator(name, c10::Device(kType, op->device), rank_ > peer, 2);
    used->start(op);
    return c10::make_intrusive<StrictWork>(rank_, type, used, op, results);
  }
  std::shared_ptr<Communicator> communicator(const std::string& name, c10::Device device, int rank, int size) {
    initialize();  // not in a fork
    std::shared_ptr<Communicator> made;
    {
      std::lock_guard<std::mutex> held(lock_);
      TORCH_CHECK(!is_ended_, "NCCL communicator was aborted on rank ", rank_, ".");
      if (made_.count(name) > 0) return made_[name];
      made = std::make_shared<Communicator>(name, rank, size, device, timeout_);
      made_[name] = made;
    }
    try {
      made->connect(store_, uuids_.at(device.index()));
    } catch (...) {
      std::lock_guard<std::mutex> held(lock_);
      made_.erase(name);
      throw;
    }
    return made;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  const std::vector<std::string> uuids_;
  std::mutex lock_;
  std::map<std::string, std::shared_ptr<Communicator>> made_;
  std::optional<std::vector<std::pair<std::shared_ptr<Operation>, Tensors>>> group_;
  bool is_eager_ = false, is_ended_ = false;
  int device_ = -1;
  std::atomic<uint64_t> num_calls_{0};
};

TORCH_LIBRARY_FRAGMENT(fake_device, library) {
  library.def(
      "set_strict_backend",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, double timeout_s, std::vector<std::string> uuids) {
        const auto timeout = std::chrono::milliseconds(int64_t(timeout_s * 1000));
        group->setBackend(
            kType, c10d::ProcessGroup::BackendType::CUSTOM,
            c10::make_intrusive<StrictBackend>(group->getStore(), group->getRank(), group->getSize(), timeout, uuids));
      });
  library.def("hang(bool on) -> ()", [](bool on) { does_hang = on; });
  library.def("take_faults() -> str[]", []() { return ledger().take(); });
  library.def("sent_names() -> str[]", []() {
    std::vector<std::string> names;
    for (const auto& [name, num_bytes] : ledger().bytes()) names.push_back(name);
    return names;
  });
  library.def("sent_bytes() -> int[]", []() {
    std::vector<int64_t> all;
    for (const auto& [name, num_bytes] : ledger().bytes()) all.push_back(num_bytes);
    return all;
  });
}

}  // namespace
}  // namespace fake
