// Making, copying and resizing device tensors: what a fallback to the CPU cannot do.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "alias.h"
#include "kernels.h"
#include "library.h"
#include "memory.h"
#include "runtime.h"

namespace sim {

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

DeviceIndex checked_index(std::optional<Device> device) {
  const DeviceIndex index = device && device->has_index() ? device->index() : current_device();
  check_device(index);
  return index;
}

c10::DispatchKeySet keys() {
  return c10::DispatchKeySet(target().key);
}

Tensor empty(
    IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice here(checked_index(device));
  return at::detail::empty_generic(size, device_allocator(), keys(), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice here(checked_index(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), keys(), c10::dtype_or_default(dtype));
}

// ---- copies

bool on_device(const Tensor& tensor) {
  return tensor.device().type() == target().type;
}

Tensor host_view(const Tensor& tensor) {
  return on_device(tensor) ? Aliases("copy").lend(tensor) : tensor;
}

void copy_now(const Tensor& source, const Tensor& destination) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  host_view(destination).copy_(host_view(source));
}

// As on real devices, only a copy between the device and pinned memory runs on its own.
bool runs_on_its_own(const Tensor& source, const Tensor& destination, bool non_blocking) {
  if (!non_blocking || on_device(source) == on_device(destination))
    return false;
  return is_pinned((on_device(source) ? destination : source).storage().data());
}

Tensor copy_from(const Tensor& source, const Tensor& destination, bool non_blocking) {
  check_fault("aten::_copy_from");
  const auto index = (on_device(source) ? source : destination).device().index();
  if (runs_on_its_own(source, destination, non_blocking)) {
    // Of their own: what becomes of the caller's tensors (`p.data = x`) must not redirect a copy that was issued.
    enqueue(index, [from = source.detach(), to = destination.detach()] { copy_now(from, to); });
    return destination;
  }
  for (const Tensor& tensor : {source, destination})
    if (on_device(tensor))
      flush_current(tensor.device().index());
  copy_now(source, destination);
  return destination;
}

// ---- storage

void set_geometry(c10::TensorImpl* impl, IntArrayRef size, IntArrayRef stride, int64_t offset) {
  const size_t needed = at::detail::computeStorageNbytes(size, stride, impl->itemsize(), offset);
  const bool holds_any = std::find(size.begin(), size.end(), 0) == size.end();
  if (holds_any && needed > impl->unsafe_storage().nbytes())
    grow(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
  impl->set_sizes_and_strides(size, stride);
  impl->set_storage_offset(offset);
}

const Tensor& resize_(const Tensor& tensor, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() != size)
    set_geometry(impl, size, c10::contiguous_strides(size), tensor.storage_offset());
  if (format && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  return tensor;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

Tensor& set_storage_part(Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  TORCH_CHECK(
      storage.device().type() == target().type, "Attempted to set the storage of a tensor on device \"",
      tensor.device(), "\" to a storage on different device \"", storage.device(), "\"");
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const bool given = !stride.empty() || size.empty();
  set_geometry(impl, size, given ? c10::DimVector(stride) : c10::contiguous_strides(size), offset);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  const auto elements = int64_t(storage.nbytes() / tensor.itemsize());
  return set_storage_part(tensor, std::move(storage), 0, {elements}, {1});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
  return set_storage_part(tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor& set_empty(Tensor& tensor) {
  c10::Storage none(
      c10::Storage::use_byte_size_t{}, 0, device_allocator()->allocate(0), device_allocator(), /*resizable=*/true);
  return set_storage_part(tensor, std::move(none), 0, {0}, {1});
}

void record_stream(Tensor&, at::Stream) {}  // memory is not reused while a queued copy holds it

}  // namespace

void grow(c10::StorageImpl* storage, size_t size) {
  OnDevice here(storage->device().index());
  flush_device(storage->device().index());  // a queued copy would miss the buffer that it was issued for
  auto buffer = device_allocator()->allocate(size);
  if (const size_t kept = std::min(size, storage->nbytes()))
    std::memcpy(host_address(buffer.get()), host_address(storage->data()), kept);
  storage->set_data_ptr_noswap(std::move(buffer));
  storage->set_nbytes(size);
}

void register_tensor_kernels() {
  auto& aten = library("aten", target().key);
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
  aten.impl("resize_", &resize_);
  aten.impl("set_", &set_empty);
  aten.impl("set_.source_Tensor", &set_tensor);
  aten.impl("set_.source_Storage", &set_storage);
  aten.impl("set_.source_Storage_storage_offset", &set_storage_part);
  aten.impl("record_stream", &record_stream);
  // The fallbacks of these keys would clone the operand, which copies it, which calls them again, for ever.
  for (auto lazy_bit : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative})
    library("aten", lazy_bit).impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace sim
