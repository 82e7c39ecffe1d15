#include "runtime.h"

#include <c10/util/Exception.h>

#include <array>
#include <deque>
#include <vector>

namespace sim {

namespace {

std::mutex mutex;  // guards all of the following but what is thread-local

struct Queued {
  std::function<void()> copy;
  uint64_t number;
};
struct StreamQueue {
  std::deque<Queued> waiting;
  uint64_t last = 0;
};
std::map<std::pair<c10::DeviceIndex, int64_t>, StreamQueue> queues;
int64_t streams_made = 0;
std::vector<std::function<void()>> sync_hooks;

struct Fault {
  std::string op, message;
  int left = 0;
  bool sticky = false, lost = false;
};
Fault fault;
std::string hang;
std::set<std::string> denied_ops;
std::map<std::string, int64_t> counts;

thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<int64_t, kMaxDevices> stream_now{};

}  // namespace

Target& target() {
  static Target the;
  return the;
}

Settings& settings() {
  static Settings the;
  return the;
}

const char* device_name() {
  static const std::string name = c10::DeviceTypeName(target().type, /*lower_case=*/true);
  return name.c_str();
}

c10::DeviceIndex current_device() {
  return device_now;
}

void set_current_device(c10::DeviceIndex index) {
  device_now = index;
}

void check_device(c10::DeviceIndex index) {
  const int count = settings().count;
  TORCH_CHECK(index >= 0 && index < count, "sim: invalid device ordinal ", int(index), "; there are ", count);
}

int64_t current_stream(c10::DeviceIndex device) {
  return stream_now.at(device);
}

void set_current_stream(c10::DeviceIndex device, int64_t stream) {
  stream_now.at(device) = stream;
}

int64_t new_stream() {
  std::lock_guard lock(mutex);
  return ++streams_made;  // 0 is the default stream
}

// ---- lazy streams

void enqueue(c10::DeviceIndex device, std::function<void()> copy) {
  std::lock_guard lock(mutex);
  auto& queue = queues[{device, current_stream(device)}];
  queue.waiting.push_back({std::move(copy), ++queue.last});
}

void flush_stream(c10::DeviceIndex device, int64_t stream, uint64_t up_to) {
  while (true) {
    std::function<void()> copy;
    {
      std::lock_guard lock(mutex);
      auto& waiting = queues[{device, stream}].waiting;
      if (waiting.empty() || waiting.front().number > up_to)
        return;
      copy = std::move(waiting.front().copy);
      waiting.pop_front();
    }
    copy();  // without the lock: it calls torch
  }
}

void flush_current(c10::DeviceIndex device) {
  flush_stream(device, current_stream(device));
}

void flush_device(c10::DeviceIndex device) {
  std::vector<int64_t> streams;
  {
    std::lock_guard lock(mutex);
    for (auto& [where, queue] : queues)
      if (where.first == device)
        streams.push_back(where.second);
  }
  for (auto stream : streams)
    flush_stream(device, stream);
}

uint64_t last_queued(c10::DeviceIndex device, int64_t stream) {
  std::lock_guard lock(mutex);
  return queues[{device, stream}].last;
}

bool reached(c10::DeviceIndex device, int64_t stream, uint64_t up_to) {
  std::lock_guard lock(mutex);
  auto& waiting = queues[{device, stream}].waiting;
  return waiting.empty() || waiting.front().number > up_to;
}

size_t pending(c10::DeviceIndex device) {
  std::lock_guard lock(mutex);
  size_t found = 0;
  for (auto& [where, queue] : queues)
    if (where.first == device)
      found += queue.waiting.size();
  return found;
}

void on_device_sync(std::function<void()> hook) {
  sync_hooks.push_back(std::move(hook));
}

void run_device_sync_hooks() {
  for (auto& hook : sync_hooks)
    hook();
}

// ---- faults

void check_fault(const std::string& op) {
  std::string message;
  {
    std::lock_guard lock(mutex);
    counts[op]++;
    if (fault.lost) {
      message = fault.message;
    } else if (fault.op == op && --fault.left == 0) {
      message = fault.message;
      fault.lost = fault.sticky;
      if (!fault.sticky)
        fault = Fault();
    } else {
      return;
    }
  }
  TORCH_CHECK(false, message);
}

bool hangs(const std::string& op) {
  std::lock_guard lock(mutex);
  return hang == op;
}

bool denied(const std::string& op) {
  std::lock_guard lock(mutex);
  return denied_ops.count(op) > 0;
}

void set_fault(const std::string& op, int nth, const std::string& message, bool sticky) {
  std::lock_guard lock(mutex);
  fault = Fault{op, message, nth, sticky, false};
}

void clear_faults() {
  std::lock_guard lock(mutex);
  fault = Fault();
  hang.clear();
  denied_ops.clear();
}

void set_hang(const std::string& op) {
  std::lock_guard lock(mutex);
  hang = op;
}

void set_denied(std::set<std::string> ops) {
  std::lock_guard lock(mutex);
  denied_ops = std::move(ops);
}

int64_t calls(const std::string& op) {
  std::lock_guard lock(mutex);
  return counts[op];
}

}  // namespace sim
