#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>

#include "runtime.h"

namespace sim {

namespace {

// Address space only: the system commits pages as they are written.
constexpr size_t kDeviceArena = size_t(1) << 36;
constexpr size_t kPinnedArena = size_t(1) << 34;
constexpr size_t kDeviceAlign = 512, kPinnedAlign = 64;
constexpr int kPoison = 0xff;  // makes a NaN of every floating-point type, and -1 of integers

std::mutex heap_mutex;  // guards heaps and statistics

char* reserve(size_t size, int protection) {
  void* start = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(start != MAP_FAILED, "sim: cannot reserve ", size, " bytes of address space; is `ulimit -v` set?");
  return static_cast<char*>(start);
}

// A device pointer lies in `device`, which nobody may touch: a host that does gets SIGSEGV. Its bytes lie at the
// same offset in `shadow`.
struct Arena {
  char* device = reserve(kDeviceArena, PROT_NONE);
  char* shadow = reserve(kDeviceArena, PROT_READ | PROT_WRITE);
  char* pinned = reserve(kPinnedArena, PROT_READ | PROT_WRITE);
};

Arena& arena() {
  static Arena the;
  return the;
}

// First fit, neighbours joined.
class Heap {
 public:
  explicit Heap(size_t limit) : limit_(limit) {}

  size_t take(size_t size) {
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      auto [offset, found] = *it;
      if (found < size)
        continue;
      free_.erase(it);
      if (found > size)
        free_[offset + size] = found - size;
      return offset;
    }
    TORCH_CHECK(top_ + size <= limit_, "sim: address space used up");
    top_ += size;
    return top_ - size;
  }

  void give(size_t offset, size_t size) {
    auto it = free_.emplace(offset, size).first;
    if (auto next = std::next(it); next != free_.end() && it->first + it->second == next->first) {
      it->second += next->second;
      free_.erase(next);
    }
    if (it == free_.begin())
      return;
    if (auto before = std::prev(it); before->first + before->second == it->first) {
      before->second += it->second;
      free_.erase(it);
    }
  }

 private:
  size_t limit_, top_ = 0;
  std::map<size_t, size_t> free_;  // offset -> size
};

// Never destroyed, as the allocators below: tensors may outlive statics.
Heap& device_heap() {
  static auto& the = *new Heap(kDeviceArena);
  return the;
}

Heap& pinned_heap() {
  static auto& the = *new Heap(kPinnedArena);
  return the;
}

struct Count {
  size_t now = 0, peak = 0, taken = 0, freed = 0;

  void take(size_t n) {
    now += n;
    taken += n;
    peak = std::max(peak, now);
  }
  void give(size_t n) {
    now -= n;
    freed += n;
  }
};

struct Statistics {
  Count bytes, blocks;
  int64_t refusals = 0;
};
std::array<Statistics, kMaxDevices> statistics;

struct Block {
  size_t offset, size;
  c10::DeviceIndex device;
};

size_t rounded(size_t size, size_t align) {
  return (size + align - 1) / align * align;
}

void poison(size_t offset, size_t size) {
  std::memset(arena().shadow + offset, kPoison, size);
}

void free_device_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::lock_guard lock(heap_mutex);
  poison(block->offset, block->size);  // a use after free reads NaN
  auto& stats = statistics[block->device];
  stats.bytes.give(block->size);
  stats.blocks.give(1);
  device_heap().give(block->offset, block->size);
}

void free_pinned_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::lock_guard lock(heap_mutex);
  pinned_heap().give(block->offset, block->size);
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const c10::DeviceIndex index = current_device();
    const c10::Device device(target().type, index);
    if (size == 0)
      return {nullptr, nullptr, [](void*) {}, device};
    check_fault("alloc");
    const size_t whole = rounded(size, kDeviceAlign);
    std::lock_guard lock(heap_mutex);
    auto& stats = statistics[index];
    check_capacity(stats, whole, size, index);
    const size_t offset = device_heap().take(whole);
    poison(offset, whole);  // an uninitialised read is a NaN
    stats.bytes.take(whole);
    stats.blocks.take(1);
    return {arena().device + offset, new Block{offset, whole, index}, &free_device_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(host_address(to), host_address(from), size);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // queued copies own their tensors

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard lock(heap_mutex);
    const auto& ours = statistics.at(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* theirs : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      report(*theirs, ours.bytes);
    for (auto* theirs : {&stats.allocation, &stats.active})
      report(*theirs, ours.blocks);
    stats.num_ooms = ours.refusals;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard lock(heap_mutex);
    auto& stats = statistics.at(index);
    for (auto* count : {&stats.bytes, &stats.blocks})
      count->taken = count->freed = 0;
    stats.refusals = 0;
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard lock(heap_mutex);
    auto& stats = statistics.at(index);
    for (auto* count : {&stats.bytes, &stats.blocks})
      count->peak = count->now;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard lock(heap_mutex);
    const size_t capacity = settings().capacity, used = statistics.at(index).bytes.now;
    return {capacity - std::min(used, capacity), capacity};
  }

 private:
  static void check_capacity(Statistics& stats, size_t whole, size_t asked, c10::DeviceIndex index) {
    const size_t capacity = settings().capacity, used = stats.bytes.now;
    if (used + whole <= capacity)
      return;
    stats.refusals++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, device_name(), " out of memory. Tried to allocate ", asked, " bytes. Device ",
        int(index), " has a total capacity of ", capacity, " bytes of which ", capacity - std::min(used, capacity),
        " is free.");
  }

  template <class Stats>
  static void report(Stats& stats, const Count& count) {
    auto& all = stats[size_t(c10::CachingAllocator::StatType::AGGREGATE)];
    all.current = count.now;
    all.peak = count.peak;
    all.allocated = count.taken;
    all.freed = count.freed;
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const c10::Device host(c10::DeviceType::CPU);
    if (size == 0)
      return {nullptr, nullptr, [](void*) {}, host};
    const size_t whole = rounded(size, kPinnedAlign);
    std::lock_guard lock(heap_mutex);
    const size_t offset = pinned_heap().take(whole);
    return {arena().pinned + offset, new Block{offset, whole, 0}, &free_pinned_block, host};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

}  // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* the = new DeviceMemory();
  return the;
}

c10::Allocator* pinned_allocator() {
  static auto* the = new PinnedMemory();
  return the;
}

void* host_address(const void* device_pointer) {
  if (device_pointer == nullptr)
    return nullptr;
  return arena().shadow + (static_cast<const char*>(device_pointer) - arena().device);
}

bool is_pinned(const void* pointer) {
  auto* p = static_cast<const char*>(pointer);
  return p >= arena().pinned && p < arena().pinned + kPinnedArena;
}

}  // namespace sim
