#include "alias.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "runtime.h"

namespace sim {

namespace {

void set_geometry(c10::TensorImpl* to, const at::Tensor& like) {
  to->set_sizes_and_strides(like.sizes(), like.strides());
  to->set_storage_offset(like.storage_offset());
}

// A tensor that sees in `storage` what `like` sees in its own, lazy conjugation and negation included.
at::Tensor seen_alike(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  const c10::DispatchKeySet keys(key);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  set_geometry(impl, like);
  if (like.is_conj())
    impl->_set_conj(true);
  if (like.is_neg())
    impl->_set_neg(true);
  return made;
}

bool same_geometry(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

// A device buffer with the bytes of a host one.
c10::DataPtr uploaded(const c10::StorageImpl& host) {
  auto buffer = device_allocator()->allocate(host.nbytes());
  if (host.nbytes() > 0)
    std::memcpy(host_address(buffer.get()), host.data(), host.nbytes());
  return buffer;
}

}  // namespace

at::Tensor Aliases::operand(const at::Tensor& tensor) {
  if (!tensor.defined())
    return tensor;
  if (tensor.device().type() == target().type)
    return lend(tensor);
  TORCH_CHECK(tensor.device().is_cpu(), op_, ": unexpected device ", tensor.device());
  saw_host_operand_ |= tensor.dim() > 0;
  return tensor;
}

at::Tensor Aliases::lend(const at::Tensor& tensor) {
  for (auto& lent : lent_)
    if (lent.device.is_same(tensor))
      return lent.host;
  check_device_of(tensor);
  auto host = seen_alike(lend_storage(tensor), c10::DispatchKey::CPU, tensor);
  lent_.push_back({tensor, host});
  return host;
}

c10::Storage Aliases::lend_storage(const at::Tensor& tensor) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  for (auto& [device, host] : storages_)
    if (device == impl)
      return host;
  c10::DataPtr bytes(host_address(impl->mutable_data()), c10::Device(c10::DeviceType::CPU));
  c10::Storage host(
      c10::Storage::use_byte_size_t{}, impl->nbytes(), std::move(bytes), c10::GetCPUAllocator(), /*resizable=*/true);
  storages_.emplace_back(impl, host);
  return host;
}

void Aliases::check_device_of(const at::Tensor& tensor) {
  const auto index = tensor.device().index();
  if (device_ < 0)
    device_ = index;
  TORCH_CHECK(
      device_ == index, "Expected all tensors to be on the same device, but found at least two devices, ",
      device_name(), ":", int(device_), " and ", tensor.device(), "! (", op_, ")");
}

void Aliases::refuse_mixed() const {
  TORCH_CHECK(
      lent_.empty() || !saw_host_operand_,
      "Expected all tensors to be on the same device, but found at least two devices, ", device_name(), ":",
      int(device_), " and cpu! (", op_, ")");
}

void Aliases::finish() {
  for (auto& [device, host] : lent_) {
    auto* ours = device.storage().unsafeGetStorageImpl();
    auto* theirs = host.storage().unsafeGetStorageImpl();
    if (theirs->data() != host_address(ours->data()) || theirs->nbytes() != ours->nbytes()) {
      ours->set_data_ptr_noswap(uploaded(*theirs));
      ours->set_nbytes(theirs->nbytes());
    }
    if (!same_geometry(device, host))
      set_geometry(device.unsafeGetTensorImpl(), host);
  }
}

at::Tensor Aliases::take_back(const at::Tensor& result) {
  if (!result.defined() || !result.device().is_cpu())
    return result;
  for (auto& lent : lent_)
    if (lent.host.is_same(result))
      return lent.device;  // the operand of an in-place call
  auto* impl = result.storage().unsafeGetStorageImpl();
  for (auto& lent : lent_)
    if (lent.host.storage().unsafeGetStorageImpl() == impl)
      return seen_alike(lent.device.storage(), target().key, result);  // a view of an operand
  for (auto& [host, device] : fresh_)
    if (host == impl)
      return seen_alike(device, target().key, result);
  c10::Storage made(
      c10::Storage::use_byte_size_t{}, impl->nbytes(), uploaded(*impl), device_allocator(), /*resizable=*/true);
  fresh_.emplace_back(impl, made);
  return seen_alike(made, target().key, result);
}

int64_t Aliases::largest() const {
  int64_t most = 1;
  for (auto& lent : lent_)
    most = std::max(most, lent.host.numel());
  return most;
}

std::vector<at::Tensor> host_aliases(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> found;
  for (auto& tensor : tensors) {
    TORCH_CHECK(
        tensor.device().type() == target().type, "collective: tensor on ", tensor.device(),
        ", this process group serves ", device_name());
    found.push_back(Aliases("collective").lend(tensor));
  }
  return found;
}

}  // namespace sim
