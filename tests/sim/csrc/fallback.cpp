// The boxed kernel: operands are lent to the CPU's kernel, results taken back.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <mutex>
#include <set>

#include "alias.h"
#include "device.h"
#include "kernels.h"
#include "library.h"
#include "runtime.h"

namespace sim {

namespace {

using c10::IValue;
using torch::jit::Stack;

// torch itself lets host indices select from device tensors.
bool takes_host_operands(const std::string& name) {
  static const std::set<std::string> names{"aten::index",      "aten::index_put",          "aten::index_put_",
                                           "aten::_unsafe_index", "aten::_index_put_impl_", "aten::_unsafe_index_put"};
  return names.count(name) > 0;
}

// One call on its way to the CPU.
struct Call {
  Call(const std::string& name) : aliases(name) {}

  Aliases aliases;
  c10::DeviceIndex asked_device = -1;  // of a factory function
  std::optional<at::Generator> generator;

  IValue lower(const IValue& value);
  IValue lower_generator(const at::Generator& theirs);
  c10::DeviceIndex device() const;
};

IValue Call::lower(const IValue& value) {
  if (value.isTensor())
    return aliases.operand(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(aliases.operand(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::make_optional(aliases.operand(*tensor)) : tensor);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == target().type) {
    asked_device = value.toDevice().index();
    return c10::Device(c10::DeviceType::CPU);
  }
  if (value.isGenerator())
    return lower_generator(value.toGenerator());
  return value;
}

IValue Call::lower_generator(const at::Generator& theirs) {
  const auto engine = at::detail::createCPUGenerator(as_device_generator(theirs).mixed());
  generator = theirs;
  return engine;
}

c10::DeviceIndex Call::device() const {
  if (aliases.device() >= 0)
    return aliases.device();
  return asked_device >= 0 ? asked_device : current_device();
}

IValue take_back(Aliases& aliases, IValue value) {
  if (value.isTensor())
    return aliases.take_back(value.toTensor());
  if (!value.isTensorList())
    return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector())
    list.push_back(aliases.take_back(tensor));
  return list;
}

// Lets the CPU's default generator draw what the device's would, and puts it back untouched. One op at a time; what
// other threads of the host draw from it meanwhile is beyond our reach, since kernels take the engine's lock themselves.
class BorrowedEngine {
 public:
  explicit BorrowedEngine(uint64_t seed)
      : one_op_(borrowing), engine_(at::detail::getDefaultCPUGenerator()), before_(engine_.get_state()) {
    engine_.set_current_seed(seed);
  }
  ~BorrowedEngine() {
    engine_.set_state(before_);
  }
  BorrowedEngine(const BorrowedEngine&) = delete;
  BorrowedEngine& operator=(const BorrowedEngine&) = delete;

 private:
  static inline std::mutex borrowing;
  std::lock_guard<std::mutex> one_op_;
  at::Generator engine_;
  at::Tensor before_;
};

void run_on_host(const c10::OperatorHandle& op, Stack* stack, Call& call) {
  std::optional<BorrowedEngine> borrowed;
  if (!call.generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
    call.generator = default_generator(call.device());
    borrowed.emplace(as_device_generator(*call.generator).mixed());
  }
  op.callBoxed(stack);
  if (call.generator)
    as_device_generator(*call.generator).advance(call.aliases.largest());
}

void check_callable(const c10::FunctionSchema& schema) {
  const auto& name = schema.name();
  check_fault(name);
  TORCH_CHECK_NOT_IMPLEMENTED(name.rfind("c10d::", 0) != 0, "sim: no kernel for ", schema.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      !denied(name), "Could not run '", schema.operator_name(), "' with arguments from the '", target().key,
      "' backend (sim: denied)");
}

}  // namespace

void boxed_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  check_callable(schema);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Call call(schema.name());
  Stack lowered;
  for (const IValue& value : torch::jit::last(*stack, schema.arguments().size()))
    lowered.push_back(call.lower(value));
  if (!takes_host_operands(schema.name()))
    call.aliases.refuse_mixed();
  OnDevice here(call.device());
  flush_current(call.device());
  run_on_host(op, &lowered, call);
  call.aliases.finish();
  torch::jit::drop(*stack, schema.arguments().size());
  for (IValue& value : lowered)
    torch::jit::push(*stack, take_back(call.aliases, std::move(value)));
}

namespace {

bool has_composite_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

// A composite kernel wins over a fallback. Where the CPU has a kernel besides it, the device must use that one too,
// or results differ in their last bits.
void prefer_cpu_kernels() {
  auto& aten = library("aten", target().key);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || name.name == "aten::copy_")
      continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || !has_composite_kernel(*op))
      continue;
    if (op->hasKernelForDispatchKey(target().key))
      continue;
    const auto overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    aten.impl((name.name.substr(6) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed_kernel>());
  }
}

}  // namespace

void register_fallback() {
  library("_", target().key).fallback(torch::CppFunction::makeFromBoxedFunction<&boxed_kernel>());
  prefer_cpu_kernels();
}

}  // namespace sim
