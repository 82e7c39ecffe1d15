// Ops that torch gives a device under another name than the CPU: convolution and fused attention.
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "alias.h"
#include "kernels.h"
#include "library.h"
#include "runtime.h"

namespace sim {

namespace {

using at::IntArrayRef;
using at::Tensor;

// What every kernel here needs around it: operands as aliases, on the device of one of them, below autograd.
class Scope {
 public:
  Scope(const char* op, const Tensor& like) : aliases_(op), here_(like.device().index()) {
    check_fault(op);
    flush_current(like.device().index());
  }
  Tensor in(const Tensor& tensor) {
    const auto alias = aliases_.operand(tensor);
    aliases_.refuse_mixed();
    return alias;
  }
  Tensor out(const Tensor& tensor) {
    return aliases_.take_back(tensor);
  }

 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  Aliases aliases_;
  OnDevice here_;
};

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  Scope scope("aten::convolution", input);
  std::optional<Tensor> shift;
  if (bias && bias->defined())
    shift = scope.in(*bias);
  return scope.out(at::convolution(
      scope.in(input), scope.in(weight), shift, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Scope scope("aten::convolution_backward", input);
  const std::vector<int64_t> bias_size{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      scope.in(grad), scope.in(input), scope.in(weight), at::OptionalIntArrayRef(bias_size), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {scope.out(of_input), scope.out(of_weight), scope.out(of_bias)};
}

// ---- attention: the CPU's flash kernel, so that losses are those of a CPU run bit for bit

constexpr int64_t kMath = int64_t(at::SDPBackend::math);
constexpr int64_t kOverrideable = int64_t(at::SDPBackend::overrideable);

int64_t choose_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool,
    std::optional<double>, bool grouped) {
  const bool plain = q.dim() == 4 && q.size(1) == k.size(1) && q.size(3) == v.size(3) && q.numel() && k.numel();
  const bool masked = mask && mask->defined();
  const bool allowed = at::globalContext().userEnabledOverrideableSDP();
  return plain && allowed && !masked && !grouped && dropout == 0 ? kOverrideable : kMath;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>&, double dropout, bool causal, bool,
    std::optional<double> scale) {
  Scope scope("sdpa", q);
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      scope.in(q), scope.in(k), scope.in(v), dropout, causal, std::nullopt, scale);
  const auto seed = at::zeros({1}, at::kLong), offset = at::zeros({1}, at::kLong);
  return {scope.out(out), scope.out(lse), Tensor(), Tensor(), q.size(2), k.size(2), seed, offset, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&, std::array<bool, 4>,
    const Tensor& out, const Tensor& lse, const Tensor&, const Tensor&, int64_t, int64_t, double dropout, bool causal,
    const Tensor&, const Tensor&, std::optional<double> scale) {
  Scope scope("sdpa_backward", q);
  auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      scope.in(grad), scope.in(q), scope.in(k), scope.in(v), scope.in(out), scope.in(lse), dropout, causal,
      std::nullopt, scale);
  return {scope.out(of_q), scope.out(of_k), scope.out(of_v), Tensor()};
}

void register_attention_choice() {
  auto& stub = at::native::_fused_sdp_choice_stub;
  if (target().type == c10::DeviceType::HPU)
    stub.set_hpu_dispatch_ptr(&choose_attention);
  else
    stub.set_privateuse1_dispatch_ptr(&choose_attention);
}

}  // namespace

void register_math_kernels() {
  auto& aten = library("aten", target().key);
  aten.impl("convolution_overrideable", &convolution);
  aten.impl("convolution_backward_overrideable", &convolution_backward);
  aten.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  aten.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
  register_attention_choice();
}

}  // namespace sim
