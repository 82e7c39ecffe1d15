// Settings, injected faults and lazy streams of the simulated accelerator: all that needs no tensor.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace sim {

constexpr int kMaxDevices = 64;

// The one device type that a process simulates; torch cannot unregister it, so it is set once.
struct Target {
  c10::DeviceType type = c10::DeviceType::PrivateUse1;
  c10::DispatchKey key = c10::DispatchKey::PrivateUse1;
  c10::DispatchKey autocast = c10::DispatchKey::AutocastPrivateUse1;
};

struct Settings {
  std::atomic<int> count{2};              // devices
  std::atomic<size_t> capacity{size_t(8) << 30};  // bytes of each
};

Target& target();
Settings& settings();
const char* device_name();  // "hpu"; the new name where PrivateUse1 was renamed

// ---- the current device and stream of this thread

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
void check_device(c10::DeviceIndex index);
int64_t current_stream(c10::DeviceIndex device);
void set_current_stream(c10::DeviceIndex device, int64_t stream);
int64_t new_stream();

// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex index) : before_(current_device()) {
    set_current_device(index);
  }
  ~OnDevice() {
    set_current_device(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

// ---- lazy streams
//
// Kernels run when they are called. An asynchronous copy is only queued, and done once something orders it: a
// kernel, copy or sync on its stream, a wait for an event recorded after it, or a sync of its device. This is the
// worst schedule that the rules allow, so that code which breaks them is wrong every time and not now and then.
// A flush returns once the copies are done, also those that another thread is at.

void enqueue(c10::DeviceIndex device, std::function<void()> copy);  // on the current stream
void flush_stream(c10::DeviceIndex device, int64_t stream, uint64_t up_to = UINT64_MAX);
void flush_current(c10::DeviceIndex device);
void flush_device(c10::DeviceIndex device);
uint64_t last_queued(c10::DeviceIndex device, int64_t stream);
bool reached(c10::DeviceIndex device, int64_t stream, uint64_t up_to);  // all up to there is done
size_t pending(c10::DeviceIndex device);

void on_device_sync(std::function<void()> hook);  // what else a sync of a device completes: collectives
void run_device_sync_hooks();

// ---- faults

// Raises where a fault is armed for `op`, or where the device was lost. Everything the device does passes here.
void check_fault(const std::string& op);
bool hangs(const std::string& op);
bool denied(const std::string& op);

// `op` raises `message` at its `nth` call from now (the next is 1), once; `sticky`: the device is lost from then on.
void set_fault(const std::string& op, int nth, const std::string& message, bool sticky);
void clear_faults();
void set_hang(const std::string& op);
void set_denied(std::set<std::string> ops);
int64_t calls(const std::string& op);

}  // namespace sim
