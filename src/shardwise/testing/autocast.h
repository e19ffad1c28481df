// torch.autocast on the device: its dispatch key stands before the kernels, and casts what they are given.
//
//     linear(x, w)    both float32    -> bfloat16, the cast of w kept to the end of the region    torch's own lists say
//     mse_loss(y, t)  y bfloat16      -> float32                                                  which operator does
//     dot(a, b)       one float32     -> float32, else the narrow dtype                           what; others cast
//     x + y                                                                                       nothing
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <vector>

namespace fake {

enum class CastTo { narrow, float32, widest };

inline bool is_cast(const at::Tensor& tensor) {
  return at::autocast::is_eligible(tensor, c10::DeviceType::PrivateUse1) && tensor.scalar_type() != at::kDouble;
}

template <typename Act>
void for_tensors(c10::IValue& value, Act act) {
  if (value.isTensor()) {
    at::Tensor tensor = value.toTensor();
    if (tensor.defined() && is_cast(tensor)) value = act(tensor);
  } else if (value.isTensorList()) {
    auto list = value.toTensorList().copy();
    for (size_t at = 0; at < list.size(); ++at)
      if (const at::Tensor tensor = list.get(at); tensor.defined() && is_cast(tensor)) list.set(at, act(tensor));
    value = list;
  }
}

template <CastTo kTo>
void cast_and_go_on(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto narrow = at::autocast::get_autocast_dtype(c10::DeviceType::PrivateUse1);
  auto dtype = kTo == CastTo::float32 ? at::kFloat : narrow;
  const size_t begin = stack->size() - op.schema().arguments().size();
  if (kTo == CastTo::widest)
    for (size_t at = begin; at < stack->size(); ++at)
      for_tensors((*stack)[at], [&](const at::Tensor& tensor) {
        if (tensor.scalar_type() == at::kFloat) dtype = at::kFloat;
        return tensor;
      });
  for (size_t at = begin; at < stack->size(); ++at)
    for_tensors((*stack)[at], [&](const at::Tensor& tensor) {
      return at::autocast::cached_cast(dtype, tensor, c10::DeviceType::PrivateUse1);
    });
  op.callBoxed(stack);
}

template <CastTo kTo>
void cast_for(torch::Library& library, const std::vector<std::string>& names) {
  for (auto name : names) {
    // The lists of torch have "pow, Tensor_Scalar".
    if (const auto comma = name.find(", "); comma != std::string::npos) name.replace(comma, 2, ".");
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&cast_and_go_on<kTo>>());
  }
}

#define FAKE_NAME(...) #__VA_ARGS__,

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  cast_for<CastTo::narrow>(library, {AT_FORALL_LOWER_PRECISION_FP(FAKE_NAME)});
  cast_for<CastTo::float32>(library, {AT_FORALL_FP32(FAKE_NAME) AT_FORALL_FP32_SET_OPT_DTYPE(FAKE_NAME)});
  cast_for<CastTo::float32>(library, {"norm.Scalar", "norm.ScalarOpt_dim"});
  cast_for<CastTo::widest>(library, {AT_FORALL_PROMOTE(FAKE_NAME) "cat", "stack"});
}

#undef FAKE_NAME

}  // namespace fake
