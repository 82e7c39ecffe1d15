// Device and pinned memory: an address space of its own that the host cannot read, with a capacity.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>

namespace sim {

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

void* host_address(const void* device_pointer);  // where the bytes behind a device pointer really are
bool is_pinned(const void* pointer);

}  // namespace sim
