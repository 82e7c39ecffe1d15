// What runs on the device: every op of torch, by the CPU's kernel for it.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>

namespace sim {

void register_fallback();       // the boxed kernel that serves every op without one of its own
void register_tensor_kernels();  // making, copying and resizing tensors
void register_math_kernels();    // ops that torch sends to devices under a name of their own
void register_autocast();

void boxed_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void grow(c10::StorageImpl* storage, size_t size);

}  // namespace sim
