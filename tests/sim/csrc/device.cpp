#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "runtime.h"

namespace sim {

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Event {
  DeviceIndex device;
  int64_t stream;
  uint64_t position;  // the last copy that was queued before it
  double milliseconds;
};

double now() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return target().type;
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(type(), current_device());
  }
  void setDevice(Device device) const override {
    if (!device.has_index())
      return;
    check_device(device.index());
    set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index())
      set_current_device(device.index());
  }
  DeviceIndex deviceCount() const noexcept override {
    return DeviceIndex(settings().count.load());
  }
  c10::DeviceCapability getDeviceCapability(Device) const override {
    return {};
  }

  // ---- streams

  Stream getStream(Device device) const override {
    return stream(device, current_stream(index_of(device)));
  }
  Stream getDefaultStream(Device device) const override {
    return stream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    check_device(index_of(device));
    return stream(device, new_stream());
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream next) const override {
    const Stream before = getStream(next.device());
    set_current_stream(next.device_index(), next.id());
    return before;
  }
  bool queryStream(const Stream& s) const override {
    return reached(s.device_index(), s.id(), UINT64_MAX);
  }
  void synchronizeStream(const Stream& s) const override {
    check_fault("sync");
    flush_stream(s.device_index(), s.id());
  }
  void synchronizeDevice(DeviceIndex index) const override {
    check_fault("sync");
    flush_device(index);
    run_device_sync_hooks();
  }

  // ---- events

  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr)
      *event = new Event();
    *static_cast<Event*>(*event) = Event{s.device_index(), s.id(), last_queued(s.device_index(), s.id()), now()};
  }
  void block(void* event, const Stream&) const override {
    if (auto* e = static_cast<Event*>(event))
      flush_stream(e->device, e->stream, e->position);
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    return e == nullptr || reached(e->device, e->stream, e->position);
  }
  void synchronizeEvent(void* event) const override {
    check_fault("sync");
    block(event, getStream(getDevice()));
  }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "sim: an event was not recorded");
    return static_cast<Event*>(end)->milliseconds - static_cast<Event*>(start)->milliseconds;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static DeviceIndex index_of(Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  Stream stream(Device device, int64_t id) const {
    return Stream(Stream::UNSAFE, Device(type(), index_of(device)), id);
  }
};

at::Generator new_generator(DeviceIndex index) {
  if (index < 0)
    index = current_device();
  check_device(index);
  return at::make_generator<DeviceGenerator>(index);
}

// The two hooks interfaces share what matters but no base that has it.
template <class Interface>
struct Hooks : Interface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return settings().count > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  void init() const override {}
  DeviceIndex deviceCount() const override {
    return DeviceIndex(settings().count.load());
  }
  void setCurrentDevice(DeviceIndex index) const override {
    check_device(index);
    set_current_device(index);
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = current_device();
    setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index = -1) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index = -1) const override {
    return new_generator(index);
  }
};

struct PrivateUse1Hooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    grow(storage.unsafeGetStorageImpl(), size);
  }
};

bool on_hpu_key() {
  return target().type == c10::DeviceType::HPU;
}

// torch makes these hooks from a registry, as soon as this library is loaded; they wake up with the device.
struct HpuHooks final : Hooks<at::HPUHooksInterface> {
  explicit HpuHooks(at::HPUHooksArgs) {}
  bool isBuilt() const override {
    return on_hpu_key();
  }
  bool isAvailable() const override {
    return on_hpu_key() && settings().count > 0;
  }
  bool hasHPU() const override {
    return on_hpu_key();
  }
};

}  // namespace

// ---- generators

DeviceGenerator::DeviceGenerator(DeviceIndex index)
    : GeneratorImpl(Device(target().type, index), c10::DispatchKeySet(c10::DispatchKey::CPU)) {}

void DeviceGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void DeviceGenerator::set_offset(uint64_t offset) {
  offset_ = offset;
}

uint64_t DeviceGenerator::get_offset() const {
  return offset_;
}

uint64_t DeviceGenerator::current_seed() const {
  return seed_;
}

uint64_t DeviceGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void DeviceGenerator::set_state(const c10::TensorImpl& state) {
  const bool bytes = state.dtype() == caffe2::TypeMeta::Make<uint8_t>();
  TORCH_CHECK(state.numel() == 16 && bytes, "RNG state is wrong size");
  auto* from = static_cast<const uint8_t*>(state.data());
  std::memcpy(&seed_, from, 8);
  std::memcpy(&offset_, from + 8, 8);
}

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  auto state = at::detail::empty_cpu({16}, at::kByte);
  auto* to = static_cast<uint8_t*>(state.unsafeGetTensorImpl()->mutable_data());
  std::memcpy(to, &seed_, 8);
  std::memcpy(to + 8, &offset_, 8);
  return state.getIntrusivePtr();
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto* copy = new DeviceGenerator(device_.index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

uint64_t DeviceGenerator::mixed() const {
  // Any mixer of 64 bits will do: neighbouring seeds and offsets must give unrelated engines.
  uint64_t z = (seed_ * 0x9E3779B97F4A7C15ull) ^ ((offset_ + 0xD1B54A32D192ED03ull) * 0xBF58476D1CE4E5B9ull);
  z ^= z >> 31;
  z *= 0x94D049BB133111EBull;
  return z ^ (z >> 29);
}

void DeviceGenerator::advance(int64_t elements) {
  offset_ += uint64_t(elements + 3) / 4 * 4;  // DTensor wants multiples of 4
}

DeviceGenerator& as_device_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == target().type, "Expected a '", device_name(),
      "' device type for generator but found '", generator.device().type(), "'");
  return *static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
}

const at::Generator& default_generator(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; i++)
      made->push_back(at::make_generator<DeviceGenerator>(DeviceIndex(i)));
    return made;
  }();
  return all->at(index < 0 ? current_device() : index);
}

// ---- registration

void register_device() {
  static Guard guard;
  c10::SetAllocator(target().type, device_allocator());
  c10::impl::registerDeviceGuard(target().type, &guard);
  if (on_hpu_key())
    return check_hooks();
  static auto* hooks = new PrivateUse1Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
}

void check_hooks() {
  TORCH_CHECK(
      at::detail::getHPUHooks().hasHPU(),
      "sim: torch made its own HPU hooks before this library was loaded; install the device before anything asks "
      "torch.accelerator for one");
}

}  // namespace sim

namespace at {
using HpuHooks = ::sim::HpuHooks;
C10_REGISTER_TYPED_CLASS(HPUHooksRegistry, "HPUHooks", HpuHooks)
}  // namespace at
