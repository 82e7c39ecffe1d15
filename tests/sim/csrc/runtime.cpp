#include "runtime.h"

#include <c10/util/Exception.h>

#include <array>
#include <deque>
#include <vector>

namespace sim {

namespace {

// What holds tensors or is read while they are freed is never destroyed: tensors may outlive statics.

std::mutex state_mutex;  // guards all of the following but what is thread-local
std::mutex copying;      // held while queued copies run, so that a flush also waits for those of other threads

struct Queued {
  std::function<void()> copy;
  uint64_t number;
};
struct StreamQueue {
  std::deque<Queued> waiting;
  uint64_t last = 0;
};
auto& queues = *new std::map<std::pair<c10::DeviceIndex, int64_t>, StreamQueue>();
int64_t streams_made = 0;
std::vector<std::function<void()>> sync_hooks;

struct Fault {
  std::string op, message;
  int left = 0;
  bool sticky = false, lost = false;
};
auto& fault = *new Fault();
auto& hang = *new std::string();
auto& denied_ops = *new std::set<std::string>();
auto& counts = *new std::map<std::string, int64_t>();

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
  std::lock_guard lock(state_mutex);
  return ++streams_made;  // 0 is the default stream
}

// ---- lazy streams

void enqueue(c10::DeviceIndex device, std::function<void()> copy) {
  std::lock_guard lock(state_mutex);
  auto& queue = queues[{device, current_stream(device)}];
  queue.waiting.push_back({std::move(copy), ++queue.last});
}

namespace {

// The first copy of a stream up to `up_to`, or none. It stays queued while it runs: until then it is not reached.
std::function<void()> next_copy(c10::DeviceIndex device, int64_t stream, uint64_t up_to) {
  std::lock_guard lock(state_mutex);
  auto& waiting = queues[{device, stream}].waiting;
  if (waiting.empty() || waiting.front().number > up_to)
    return {};
  return std::move(waiting.front().copy);
}

void forget_copy(c10::DeviceIndex device, int64_t stream) {
  std::lock_guard lock(state_mutex);
  queues[{device, stream}].waiting.pop_front();
}

}  // namespace

void flush_stream(c10::DeviceIndex device, int64_t stream, uint64_t up_to) {
  if (reached(device, stream, up_to))
    return;
  // Tensors are freed after the lock is: freeing one can take Python's lock, whose holder may be waiting for ours.
  std::vector<std::function<void()>> done;
  std::lock_guard lock(copying);
  while (auto copy = next_copy(device, stream, up_to)) {
    done.push_back(std::move(copy));
    try {
      done.back()();
    } catch (...) {
      forget_copy(device, stream);
      throw;
    }
    forget_copy(device, stream);
  }
}

void flush_current(c10::DeviceIndex device) {
  flush_stream(device, current_stream(device));
}

void flush_device(c10::DeviceIndex device) {
  std::vector<int64_t> streams;
  {
    std::lock_guard lock(state_mutex);
    for (auto& [where, queue] : queues)
      if (where.first == device)
        streams.push_back(where.second);
  }
  for (auto stream : streams)
    flush_stream(device, stream);
}

uint64_t last_queued(c10::DeviceIndex device, int64_t stream) {
  std::lock_guard lock(state_mutex);
  return queues[{device, stream}].last;
}

bool reached(c10::DeviceIndex device, int64_t stream, uint64_t up_to) {
  std::lock_guard lock(state_mutex);
  auto& waiting = queues[{device, stream}].waiting;
  return waiting.empty() || waiting.front().number > up_to;
}

size_t pending(c10::DeviceIndex device) {
  std::lock_guard lock(state_mutex);
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
    std::lock_guard lock(state_mutex);
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
  std::lock_guard lock(state_mutex);
  return hang == op;
}

bool denied(const std::string& op) {
  std::lock_guard lock(state_mutex);
  return denied_ops.count(op) > 0;
}

void set_fault(const std::string& op, int nth, const std::string& message, bool sticky) {
  TORCH_CHECK_VALUE(nth >= 1, "sim: a fault at call ", nth, " of ", op, " would never come; the next call is 1");
  std::lock_guard lock(state_mutex);
  fault = Fault{op, message, nth, sticky, false};
}

void clear_faults() {
  std::lock_guard lock(state_mutex);
  fault = Fault();
  hang.clear();
  denied_ops.clear();
}

void set_hang(const std::string& op) {
  std::lock_guard lock(state_mutex);
  hang = op;
}

void set_denied(std::set<std::string> ops) {
  std::lock_guard lock(state_mutex);
  denied_ops = std::move(ops);
}

int64_t calls(const std::string& op) {
  std::lock_guard lock(state_mutex);
  return counts[op];
}

}  // namespace sim
