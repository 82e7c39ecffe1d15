// Autocast: torch's own lists of ops, registered for the device's autocast key.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "kernels.h"
#include "library.h"
#include "runtime.h"

namespace sim {

namespace {

// torch's macros, used below, name these without their namespace.
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

#define LOWER_PRECISION(...) KERNEL(TYPE, __VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL(TYPE, __VA_ARGS__, fp32)
#define FULL_PRECISION_OUTPUT(...) KERNEL(TYPE, __VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTED(...) KERNEL(TYPE, __VA_ARGS__, promote)
#define OTHER_SIGNATURE(a, b, c, d, e) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE(TYPE, a, b, c, d, e)

template <c10::DeviceType TYPE>
void register_lists() {
  library("_", target().autocast).fallback(torch::CppFunction::makeFallthrough());
  auto& m = library("aten", target().autocast);  // the name that KERNEL uses
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_PRECISION_OUTPUT)
  AT_FORALL_PROMOTE(PROMOTED)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(OTHER_SIGNATURE)
}

}  // namespace

void register_autocast() {
  if (target().type == c10::DeviceType::HPU)
    register_lists<c10::DeviceType::HPU>();
  else
    register_lists<c10::DeviceType::PrivateUse1>();
}

}  // namespace sim
