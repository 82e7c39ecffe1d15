// Device tensors seen from the host: CPU tensors over the same bytes, for the length of one call.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace sim {

// Lends a call CPU aliases of its device operands, and brings what it did to them back.
//
// An alias shares the bytes, not the tensor: geometry that an in-place call changed, storage that it replaced and
// tensors that it made are carried over by `finish` and `take_back`.
class Aliases {
 public:
  explicit Aliases(std::string op) : op_(std::move(op)) {}

  at::Tensor lend(const at::Tensor& tensor);       // a device tensor
  at::Tensor operand(const at::Tensor& tensor);    // a device tensor, or a host tensor as it is
  at::Tensor take_back(const at::Tensor& result);  // call finish() first
  void finish();

  // Raises where operands were on the device and on the host; a host scalar may be mixed with anything.
  void refuse_mixed() const;
  c10::DeviceIndex device() const {  // of the operands; -1: there was none
    return device_;
  }
  int64_t largest() const;  // elements of the largest operand

 private:
  struct Lent {
    at::Tensor device, host;
  };

  c10::Storage lend_storage(const at::Tensor& tensor);
  void check_device_of(const at::Tensor& tensor);

  std::string op_;
  std::vector<Lent> lent_;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages_;  // device storage -> its alias
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> fresh_;     // storage that the call made -> device copy
  c10::DeviceIndex device_ = -1;
  bool saw_host_operand_ = false;
};

// Aliases that outlive the call, for collectives; raises for a tensor that is not on the device.
std::vector<at::Tensor> host_aliases(const std::vector<at::Tensor>& tensors);

}  // namespace sim
